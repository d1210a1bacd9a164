"""When a trainer may go on after it has reported its gradients: the rules to choose from."""

from __future__ import annotations

from dataclasses import dataclass

from telegrad.errors import UsageError


@dataclass(frozen=True)
class Sync:
    """Rounds: the servers step once with the mean of all gradients, when every live trainer has reported.

    With `quorum`, a round is complete when so many have reported; who comes later gets the new parameters, and what it
    brought is dropped.

    >>> Sync(quorum=3)
    Sync(quorum=3)
    """

    quorum: int | None = None

    def __post_init__(self) -> None:
        if self.quorum is not None and self.quorum < 1:
            raise UsageError(f"a quorum is at least 1 trainer, not {self.quorum}")


@dataclass(frozen=True)
class Async:
    """The servers step with each trainer's gradients as they come, and nobody waits for anybody."""


@dataclass(frozen=True)
class Stale:
    """Like `Async`, but a trainer that is `ahead` steps ahead of the slowest waits for it.

    >>> Stale(4)
    Stale(ahead=4)
    """

    ahead: int

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise UsageError(
                f"a trainer may be at least 1 step ahead of the others, not {self.ahead}"
            )


Consistency = Sync | Async | Stale


def waits_for_quorum(rule: Consistency) -> bool:
    """Return whether steps wait for some of the trainers, but not for all."""
    return isinstance(rule, Sync) and rule.quorum is not None and rule.quorum > 1

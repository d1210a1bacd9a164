"""The consistency rules: when a trainer may continue after it has sent its gradients."""

from __future__ import annotations

from dataclasses import dataclass

from telegrad.errors import UsageError


@dataclass(frozen=True)
class Sync:
    """Synchronous rounds: one step with the mean gradient of all live trainers.

    With `quorum`, a round is complete when so many trainers have sent their gradients. Gradients
    that arrive later are dropped, and their trainer gets the new parameters.

    >>> Sync(quorum=3)
    Sync(quorum=3)
    """

    quorum: int | None = None

    def __post_init__(self) -> None:
        if self.quorum is not None and (not isinstance(self.quorum, int) or self.quorum < 1):
            raise UsageError(f"a quorum is at least 1 trainer, not {self.quorum!r}")


@dataclass(frozen=True)
class Async:
    """One step for the gradients of each trainer, as they arrive. No trainer waits for others."""


@dataclass(frozen=True)
class Stale:
    """Like `Async`, but a trainer that is `ahead` steps ahead of the slowest one waits for it.

    >>> Stale(4)
    Stale(ahead=4)
    """

    ahead: int

    def __post_init__(self) -> None:
        if not isinstance(self.ahead, int) or self.ahead < 1:
            raise UsageError(
                f"a trainer may be at least 1 step ahead of the others, not {self.ahead!r}"
            )


Consistency = Sync | Async | Stale


def waits_for_quorum(rule: Consistency) -> bool:
    """Return whether steps wait for several trainers, but not for all."""
    return isinstance(rule, Sync) and rule.quorum is not None and rule.quorum > 1

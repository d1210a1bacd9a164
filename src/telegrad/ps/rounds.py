"""Who of the trainers waits for whom. No tensors, threads or clock here; the shard that uses it holds its lock.

`Rounds` (for `Sync`): round n turns version n of the parameters into version n + 1. `members` says in which round each
trainer starts to count, `reported` who has reported in this one. A round is complete when everybody who counts has
reported, or a quorum. `expected` are trainers that a restarted server knows from its checkpoint: no round is complete
before each of them has come back or is known to be dead.

`Clocks` (for `Async` and `Stale`): `steps` counts what each trainer has had applied.
"""

from __future__ import annotations

from collections.abc import Iterable


class Rounds:
    def __init__(self, quorum: int | None, number: int = 0, expected: Iterable[str] = ()) -> None:
        self.number = number
        self.members: dict[str, int] = {}
        self.reported: dict[str, int] = {}  # trainer: the version its gradients were computed with
        self.expected = set(expected)
        self._quorum = quorum

    def __repr__(self) -> str:
        return f"<Rounds: {len(self.reported)} of {self.due} have reported in round {self.number}>"

    @property
    def due(self) -> list[str]:
        """Who counts in this round."""
        return [trainer for trainer, first in self.members.items() if first <= self.number]

    def join(self, trainer: str) -> int:
        """The first round that a new trainer may take part in: this one, unless somebody has reported already."""
        if trainer not in self.members:
            back = trainer in self.expected
            self.expected.discard(trainer)
            self.members[trainer] = self.number + 1 if self.reported and not back else self.number
        return self.members[trainer]

    def start(self, trainer: str, first: int) -> None:
        """Let a trainer count from round `first` on. Where it is alone, the rounds go on from there."""
        self.members[trainer] = first
        if len(self.members) == 1 and not self.expected:
            self.number = max(self.number, first)

    def leave(self, trainer: str) -> None:
        self.members.pop(trainer, None)
        self.reported.pop(trainer, None)
        self.expected.discard(trainer)

    def report(self, trainer: str, version: int) -> bool:
        """False if the round is over that these gradients were for."""
        if version < self.number:
            return False
        self.reported[trainer] = version
        return True

    def complete(self) -> bool:
        if not self.reported or self.expected:
            return False
        due = self.due
        if self._quorum is not None:
            return len(self.reported) >= min(self._quorum, len(due))
        return all(trainer in self.reported for trainer in due)

    def advance(self) -> None:
        """The next round begins."""
        self.reported = {}
        self.number += 1


class Clocks:
    def __init__(self, ahead: int | None) -> None:
        self.steps: dict[str, int] = {}
        self._ahead = ahead

    def __repr__(self) -> str:
        return f"<Clocks {self.steps}>"

    def join(self, trainer: str) -> None:
        """A new trainer starts with the slowest."""
        self.steps.setdefault(trainer, min(self.steps.values(), default=0))

    def leave(self, trainer: str) -> None:
        self.steps.pop(trainer, None)

    def advance(self, trainer: str) -> None:
        self.steps[trainer] += 1

    def may_go(self, trainer: str) -> bool:
        """Is this trainer not too far ahead of the slowest? One that has left may go."""
        if self._ahead is None or trainer not in self.steps:
            return True
        return self.steps[trainer] - min(self.steps.values()) < self._ahead or len(self.steps) == 1

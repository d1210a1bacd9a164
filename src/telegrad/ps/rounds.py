"""Who of the trainers waits for whom. No tensors, threads or clock here; whoever uses it holds a lock.

`Rounds` (for `Sync`): round n turns version n of the parameters into version n + 1. `members` says in which round each
trainer starts to count, `reported` who has reported in this one. A round is complete when everybody who counts has
reported, or a quorum. `expected` are trainers that a restarted server knows from its checkpoint: no round is complete
before each of them has come back or is known to be dead.

Of several servers, the first decides whose reports make up a round, so that it is the same everywhere: it waits until
all of them are complete, and takes the trainers that all of them have reports of. `_votes` is what its followers have
said of themselves. A follower that has told it what it holds has `promised` to keep that until it hears the decision,
whoever of the trainers dies meanwhile.

`Clocks` (for `Async` and `Stale`): `steps` counts what each trainer has had applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Vote(NamedTuple):
    """A server is in round `number` and has what these trainers reported in it."""

    server: str  # its incarnation
    number: int
    held: frozenset[str]


class Rounds:
    def __init__(self, quorum: int | None, followers: Sequence[str] = ()) -> None:
        self.number = 0
        self.members: dict[str, int] = {}
        self.reported: dict[str, int] = {}  # trainer: the version its gradients were computed with
        self.expected: set[str] = set()
        self.promised = False
        self._quorum = quorum
        self._votes: dict[str, Vote | None] = dict.fromkeys(followers)

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
        """Let a trainer count from round `first` on."""
        self.members[trainer] = first
        self._pass_by()

    def leave(self, trainer: str) -> None:
        self.members.pop(trainer, None)
        self.expected.discard(trainer)
        if not self.promised:
            self.reported.pop(trainer, None)
        self._pass_by()

    def _pass_by(self) -> None:
        """If there is nobody in this round, go on with the next that somebody is in."""
        if self.members and not (self.due or self.expected or self.reported):
            self.number = min(self.members.values())

    def report(self, trainer: str, version: int) -> bool:
        """False if the round is over that these gradients were for."""
        if version < self.number:
            return False
        self.reported[trainer] = version
        return True

    def hear(self, name: str, vote: Vote) -> None:
        """What a follower says of itself. It may say it in pieces, and they may come in any order."""
        before = self._votes.get(name)
        if before is not None and before[:2] == vote[:2]:
            vote = vote._replace(held=vote.held | before.held)
        self._votes[name] = vote

    def forget(self, server: str) -> None:
        """A follower is dead, by its incarnation; what it held is gone."""
        for name, vote in self._votes.items():
            if vote is not None and vote.server == server:
                self._votes[name] = None

    def complete(self) -> list[str]:
        """The trainers whose reports make up this round; nobody while it is not complete."""
        held = [trainer for trainer in self.reported if all(self._has(vote, trainer) for vote in self._votes.values())]
        if not held or self.expected:
            return []
        due = self.due
        if self._quorum is not None:
            return held if len(held) >= min(self._quorum, len(due)) else []
        return held if set(due).issubset(held) else []

    def _has(self, vote: Vote | None, trainer: str) -> bool:
        """A follower that is ahead, because this server was restarted, has made its step."""
        if vote is None or vote.number < self.number:
            return False
        return vote.number > self.number or trainer in vote.held

    def go_on(self, number: int) -> None:
        """All rounds before this one are over."""
        self.number = number
        self.promised = False


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

"""`Attendance`: who trains with a server, what they have reported, and who is answered when.

It knows nothing of what is trained, which is its owner's business (`Owner`). All of this is used under the lock of the
owner. Methods return *actions* that the owner takes when it has released the lock: most complete a future.

State: `version`, the number of steps made; `members`; `applied`, the last step of each trainer that is part of the
version; what waits for an answer: `_reports` and `_entering` of trainers, `_asks` of servers that follow this one.
With `ask`, this server follows another: a round that is complete here is put before it (`_asked`), and what comes of
it is `decide`d there.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from telegrad.errors import StaleReference
from telegrad.futures import Future
from telegrad.ps.consistency import Consistency, Stale, Sync
from telegrad.ps.messages import Answer, Steps, worker_of
from telegrad.ps.rounds import Clocks, Rounds, Vote


class Report(NamedTuple):
    """What a trainer brings: its step, and the version that it was computed with."""

    trainer: str
    step: int
    version: int
    content: Any
    future: Future[Answer]
    staleness: int = 0


class _Entering(NamedTuple):
    trainer: str
    first: int
    future: Future[Any]


class _Ask(NamedTuple):
    number: int
    future: Future[Steps]


class Owner(Protocol):
    """What is trained."""

    def apply(self, reports: list[Report]) -> None:
        """Make a step of the reports of a round, which may be none, or, without rounds, of one."""

    def stepped(self) -> None:
        """The step has been counted."""

    def answer(self, report: Report) -> Answer:
        """What a trainer learns that has reported."""

    def welcome(self, trainer: str) -> Any:
        """What a trainer learns that enters."""


Action = Callable[[], None]


class Attendance:
    def __init__(
        self,
        consistency: Consistency,
        trainers: int,
        owner: Owner,
        followers: Sequence[str] = (),
        ask: Callable[[int, Steps], None] | None = None,
    ) -> None:
        self.version = 0
        self.members: set[str] = set()
        self.applied: dict[str, int] = {}
        self._trainers = trainers  # that must have come before anybody starts
        self._owner = owner
        self._quorum = isinstance(consistency, Sync) and consistency.quorum is not None
        self._rounds = Rounds(consistency.quorum, followers) if isinstance(consistency, Sync) else None
        self._clocks = Clocks(consistency.ahead if isinstance(consistency, Stale) else None)
        self._ask = ask
        self._asked: tuple[int, Steps] | None = None
        self._asks: list[_Ask] = []
        self._joined: set[str] = set()
        self._reports: dict[str, Report] = {}
        self._entering: list[_Entering] = []
        self._restored = False  # and no round finished since

    def __repr__(self) -> str:
        who = self._rounds if self._rounds is not None else self._clocks
        return f"<Attendance: {len(self.members)} trainers, version {self.version}, {who!r}>"

    @property
    def in_rounds(self) -> bool:
        return self._rounds is not None

    @property
    def unsure(self) -> bool:
        """Was this server restarted, and may others have finished a round since that it does not know of?"""
        return self._restored and bool(self.known)

    @property
    def known(self) -> set[str]:
        """Everybody who takes part or is waited for."""
        rounds = self._rounds
        return self.members | (set() if rounds is None else {*rounds.members, *rounds.expected})

    @property
    def waiting(self) -> list[str]:
        """Who has reported and is not answered."""
        return list(self._reports)

    # Who takes part

    def announce(self, trainer: str) -> int:
        """A trainer is coming: from which round on it is waited for."""
        return self._rounds.join(trainer) if self._rounds is not None else 0

    def enter(self, trainer: str, first: int, future: Future[Any]) -> list[Action]:
        """A trainer is here; `future` is answered when it may start, which is in round `first`."""
        self._add(trainer)
        if self._rounds is not None:
            self._rounds.start(trainer, first)
        self._entering.append(_Entering(trainer, first, future))
        return self._advance()

    def resume(self, trainer: str, acknowledged: int, version: int) -> list[Action]:
        """A trainer comes back to a server that was restarted. If it has seen later versions, they count."""
        over: list[Action] = []
        self._add(trainer)
        self.applied[trainer] = max(self.applied.get(trainer, 0), acknowledged)
        if self._rounds is not None:
            self._rounds.join(trainer)
        if version > self.version:
            self.version = version
            if self._rounds is not None:
                self._rounds.go_on(version)
                over = self._end_earlier(self._rounds, dropped=False)
        return over + self._advance()

    def leave(self, trainer: str) -> list[Action]:
        """A trainer has left or is lost: what it reported in an unfinished round goes with it, unless promised."""
        self.members.discard(trainer)
        self._entering = [each for each in self._entering if each.trainer != trainer]
        self._clocks.leave(trainer)
        if self._rounds is not None:
            self._rounds.leave(trainer)
        if self._rounds is None or trainer not in self._rounds.reported:
            self._reports.pop(trainer, None)
        return self._advance()

    def of(self, worker: str) -> list[str]:
        """The trainers of a worker, by its incarnation."""
        return [trainer for trainer in self.known if worker_of(trainer) == worker]

    def restore(self, version: int, applied: Steps, expected: Iterable[str]) -> None:
        """Begin with a version of a checkpoint. Trainers that are expected are waited for."""
        self.version = version
        self.applied = dict(applied)
        if self._rounds is not None:
            self._rounds.go_on(version)
            self._rounds.expected = set(expected)
            self._restored = True

    def _add(self, trainer: str) -> None:
        self.members.add(trainer)
        self._joined.add(trainer)
        self._clocks.join(trainer)

    # What they bring

    def check(self, trainer: str) -> None:
        if trainer not in self.members:
            raise StaleReference("this server does not know the trainer")

    def take(self, report: Report) -> list[Action]:
        """The same step may be reported again: it counts once."""
        self.check(report.trainer)
        if report.step <= self.applied.get(report.trainer, 0):  # it comes again; the answer was lost
            return [self._answering(report)]
        if self._rounds is None:
            return self._apply_one(report)
        if not self._rounds.report(report.trainer, report.version):
            return [self._answering(report, late=True, dropped=self._quorum)]
        before = self._reports.get(report.trainer)
        self._reports[report.trainer] = report
        superseded = [] if before is None else [_failing(before.future, StaleReference("it was pushed again"))]
        return superseded + self._advance()

    def _apply_one(self, report: Report) -> list[Action]:
        staleness = self.version - report.version
        error = self._step([report])
        if error is not None:
            return [_failing(report.future, error)]
        self._clocks.advance(report.trainer)
        self._reports[report.trainer] = report._replace(staleness=staleness)
        return self._advance()

    def _step(self, reports: list[Report]) -> Exception | None:
        """What went wrong, if something did: with the step, which then does not count, or after it."""
        try:
            self._owner.apply(reports)
            self.version += 1
            for report in reports:
                self.applied[report.trainer] = report.step
            self._owner.stepped()
        except Exception as error:
            return error
        return None

    # What servers say to each other

    def hear(self, name: str, server: str, number: int, held: Steps, future: Future[Steps]) -> list[Action]:
        """A follower, with this incarnation, has these reports in its round, and asks which of them count."""
        if self._rounds is None:
            raise StaleReference("there are no rounds here")
        if number >= self._rounds.number:
            self._rounds.hear(name, Vote(server, number, frozenset(held)))
        self._asks.append(_Ask(number, future))
        return self._advance()

    def hear_of(self, name: str, server: str, number: int) -> list[Action]:
        """A follower is in this round. That matters if it has left this server behind."""
        if self._rounds is None or number <= self._rounds.number:
            return []
        self._rounds.hear(name, Vote(server, number, frozenset()))
        return self._advance()

    def forget(self, server: str) -> None:
        """A follower is dead, by its incarnation."""
        if self._rounds is not None:
            self._rounds.forget(server)

    def is_open(self, number: int) -> bool:
        """Is this the round that goes on here?"""
        return self._rounds is not None and self._rounds.number == number

    def decide(self, number: int, steps: Steps) -> list[Action]:
        """The server that leads has said which steps of trainers are in the version that a round makes."""
        if self._rounds is None or not self.is_open(number):
            return []
        counted = [each for each in self._rounds.reported if self._reports[each].step <= steps.get(each, 0)]
        return self._finish_round(self._rounds, counted)

    # Inside

    def _advance(self) -> list[Action]:
        """Answer everybody who waits for something that is now the case."""
        if self._rounds is not None:
            self.version = self._rounds.number
            return self._advance_round(self._rounds) + self._let_in()
        free = [report for report in self._reports.values() if self._clocks.may_go(report.trainer)]
        for report in free:
            del self._reports[report.trainer]
        return [*map(self._answering, free), *self._let_in()]

    def _advance_round(self, rounds: Rounds) -> list[Action]:
        members = rounds.complete()
        if not members:
            self._answer_asks(rounds, None)
            return []
        if self._ask is None:
            self._answer_asks(rounds, members)  # now, so that all servers make their step at the same time
            return self._finish_round(rounds, members)
        held = {trainer: self._reports[trainer].step for trainer in members}
        if self._asked == (rounds.number, held):
            return []
        rounds.promised = True
        self._asked = rounds.number, held
        return [partial(self._ask, rounds.number, held)]

    def _answer_asks(self, rounds: Rounds, members: Iterable[str] | None) -> None:
        """Tell followers who is part of this round, if that is decided, and of rounds that are over."""
        asks, self._asks = self._asks, []
        for ask in asks:
            if ask.number < rounds.number:
                ask.future.set_result(dict(self.applied))
            elif ask.number == rounds.number and members is not None:
                ask.future.set_result({trainer: self._reports[trainer].step for trainer in members})
            else:
                self._asks.append(ask)

    def _finish_round(self, rounds: Rounds, members: list[str]) -> list[Action]:
        reports = [self._reports.pop(trainer) for trainer in members]
        error = self._step(reports)
        self._restored, self._asked = False, None
        if error is not None and self.version == rounds.number:  # nothing came of this round
            reports += self._reports.values()
            self._reports.clear()
        for report in reports:
            del rounds.reported[report.trainer]
        rounds.go_on(self.version)
        answers = [self._answering(each) if error is None else _failing(each.future, error) for each in reports]
        return answers + self._end_earlier(rounds, dropped=self._quorum) + self._advance()

    def _end_earlier(self, rounds: Rounds, dropped: bool) -> list[Action]:
        """Rounds before this one are over; who reported in them is answered."""
        over = [report for report in self._reports.values() if report.version < rounds.number]
        for report in over:
            del self._reports[report.trainer]
            rounds.reported.pop(report.trainer, None)
        return [self._answering(report, late=dropped, dropped=dropped) for report in over]

    def _let_in(self) -> list[Action]:
        if len(self._joined) < self._trainers:
            return []
        ready = [each for each in self._entering if self._rounds is None or self.version >= each.first]
        self._entering = [each for each in self._entering if each not in ready]
        return [partial(each.future.set_result, self._owner.welcome(each.trainer)) for each in ready]

    def _answering(self, report: Report, late: bool = False, dropped: bool = False) -> Action:
        if late:
            report = report._replace(staleness=self.version - report.version)
        answer = self._owner.answer(report)
        return partial(report.future.set_result, answer._replace(dropped=True) if dropped else answer)


def act(actions: list[Action]) -> None:
    """Not under a lock."""
    for action in actions:
        action()


def _failing(future: Future[Answer], error: Exception) -> Action:
    traceback.clear_frames(error.__traceback__)  # a future is no place to keep gradients alive
    return partial(future.set_exception, error)

"""`Attendance`: who trains with a server, what they have reported, and who is answered when.

It knows nothing of what is trained: `apply` makes a step of the reports of a round (or, without rounds, of one), and
`stepped` is called when that has been counted. All of this is used under the lock of the shard that owns it. Methods
return *outcomes*, futures and their values, which the shard completes when it has released the lock.

State: `version`, the number of steps made; `members`; `applied`, the last step of each trainer that is part of the
version; what waits for an answer (`_reports`, `_entering`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from telegrad.errors import StaleReference
from telegrad.futures import Future
from telegrad.ps.consistency import Consistency, Stale, Sync
from telegrad.ps.messages import Answer, worker_of
from telegrad.ps.rounds import Clocks, Rounds


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
    future: Future[Answer]


Outcome = tuple[Future[Answer], Answer | Exception]


class Attendance:
    def __init__(
        self,
        consistency: Consistency,
        trainers: int,
        apply: Callable[[list[Report]], None],
        stepped: Callable[[], None],
    ) -> None:
        self.version = 0
        self.members: set[str] = set()
        self.applied: dict[str, int] = {}
        self._trainers = trainers  # that must have come before anybody starts
        self._apply = apply
        self._stepped = stepped
        self._quorum = isinstance(consistency, Sync) and consistency.quorum is not None
        self._rounds = Rounds(consistency.quorum) if isinstance(consistency, Sync) else None
        self._clocks = Clocks(consistency.ahead if isinstance(consistency, Stale) else None)
        self._joined: set[str] = set()
        self._reports: dict[str, Report] = {}
        self._entering: list[_Entering] = []

    def __repr__(self) -> str:
        who = self._rounds if self._rounds is not None else self._clocks
        return f"<Attendance: {len(self.members)} trainers, version {self.version}, {who!r}>"

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

    def enter(self, trainer: str, first: int, future: Future[Answer]) -> list[Outcome]:
        """A trainer is here; `future` is answered when it may start, which is in round `first`."""
        self._add(trainer)
        if self._rounds is not None:
            self._rounds.start(trainer, first)
            if not self._rounds.due and not self._rounds.expected:  # other servers are ahead: nobody is in this round
                self._rounds.number = min(self._rounds.members.values())
            self.version = self._rounds.number
        self._entering.append(_Entering(trainer, first, future))
        return self._advance()

    def resume(self, trainer: str, acknowledged: int, version: int) -> list[Outcome]:
        """A trainer comes back to a server that was restarted. If it has seen later versions, they count."""
        outcomes: list[Outcome] = []
        self._add(trainer)
        self.applied[trainer] = max(self.applied.get(trainer, 0), acknowledged)
        if self._rounds is not None:
            self._rounds.join(trainer)
        if version > self.version:
            self.version = version
            outcomes = self._skip_to(version)
        return outcomes + self._advance()

    def leave(self, trainer: str) -> list[Outcome]:
        """A trainer has left or is lost: what it reported in an unfinished round goes with it."""
        self.members.discard(trainer)
        self._reports.pop(trainer, None)
        self._entering = [each for each in self._entering if each.trainer != trainer]
        if self._rounds is not None:
            self._rounds.leave(trainer)
        self._clocks.leave(trainer)
        return self._advance()

    def of(self, worker: str) -> list[str]:
        """The trainers of a worker, by its incarnation."""
        return [trainer for trainer in self.known if worker_of(trainer) == worker]

    def restore(self, version: int, applied: dict[str, int], expected: Iterable[str]) -> None:
        """Begin with a version of a checkpoint. Trainers that are expected are waited for."""
        self.version = version
        self.applied = dict(applied)
        if self._rounds is not None:
            self._rounds.number = version
            self._rounds.expected = set(expected)

    def _add(self, trainer: str) -> None:
        self.members.add(trainer)
        self._joined.add(trainer)
        self._clocks.join(trainer)

    # What they bring

    def take(self, report: Report) -> list[Outcome]:
        """The same step may be reported again: it counts once."""
        if report.trainer not in self.members:
            raise StaleReference("this server does not know the trainer")
        if report.step <= self.applied.get(report.trainer, 0):  # it comes again; the answer was lost
            return [(report.future, self._answer(report))]
        if self._rounds is None:
            return self._apply_one(report)
        if not self._rounds.report(report.trainer, report.version):
            late = report._replace(staleness=self.version - report.version)
            return [(report.future, self._answer(late)._replace(dropped=self._quorum))]
        before = self._reports.get(report.trainer)
        self._reports[report.trainer] = report
        superseded: list[Outcome] = [] if before is None else [(before.future, StaleReference("it was pushed again"))]
        return superseded + self._advance()

    def _apply_one(self, report: Report) -> list[Outcome]:
        staleness = self.version - report.version
        error = self._step([report])
        if error is not None:
            return [(report.future, error)]
        self._clocks.advance(report.trainer)
        self._reports[report.trainer] = report._replace(staleness=staleness)
        return self._advance()

    def _step(self, reports: list[Report]) -> Exception | None:
        """What went wrong, if something did: with the step, which then does not count, or after it."""
        try:
            self._apply(reports)
            self.version += 1
            for report in reports:
                self.applied[report.trainer] = report.step
            self._stepped()
        except Exception as error:
            return error
        return None

    def _advance(self) -> list[Outcome]:
        """Answer everybody who waits for something that is now the case."""
        outcomes: list[Outcome] = []
        if self._rounds is not None and self._rounds.complete():
            outcomes += self._finish_round(self._rounds)
        if self._rounds is None:
            free = [report for report in self._reports.values() if self._clocks.may_go(report.trainer)]
            for report in free:
                del self._reports[report.trainer]
                outcomes.append((report.future, self._answer(report)))
        return outcomes + self._let_in()

    def _finish_round(self, rounds: Rounds) -> list[Outcome]:
        reports = [self._reports.pop(trainer) for trainer in rounds.reported]
        error = self._step(reports)
        if self.version > rounds.number:
            rounds.advance()
        else:
            rounds.reported.clear()
        return [(report.future, error or self._answer(report)) for report in reports]

    def _let_in(self) -> list[Outcome]:
        if len(self._joined) < self._trainers:
            return []
        ready = [each for each in self._entering if self._rounds is None or self.version >= each.first]
        self._entering = [each for each in self._entering if each not in ready]
        return [(each.future, Answer(self.version)) for each in ready]

    def _skip_to(self, version: int) -> list[Outcome]:
        """Rounds before this version are over; who reported in them is answered."""
        if self._rounds is None:
            return []
        self._rounds.number = version
        over = [report for report in self._reports.values() if report.version < version]
        for report in over:
            del self._reports[report.trainer]
            self._rounds.reported.pop(report.trainer, None)
        return [(report.future, self._answer(report)) for report in over]

    def _answer(self, report: Report) -> Answer:
        return Answer(self.version, report.staleness)


def complete(outcomes: list[Outcome]) -> None:
    """Answer; not under a lock."""
    for future, value in outcomes:
        if isinstance(value, Exception):
            traceback.clear_frames(value.__traceback__)  # a future is no place to keep gradients alive
            future.set_exception(value)
        else:
            future.set_result(value)

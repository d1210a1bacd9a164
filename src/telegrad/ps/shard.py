"""`Shard`: what one server holds of a parameter server: its range of the parameters, their optimizer, and the trainers.

State, all of it under `_lock`: the values and the solver; `version`, the number of steps made; who takes part
(`_members`) and what waits for an answer (`_reports`, `_entering`). Futures are completed after the lock is released.

What trainers read is never half updated. With `Sync()` the values themselves are shared: they change only when every
trainer has reported again, and it does that after it has read. With the other rules each version is copied into one of
two places by turns. The counter of the segment says which version is being written; a trainer that finds, after it has
copied, that it was overtaken fetches the values by a call.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from telegrad.errors import StaleReference, UsageError
from telegrad.futures import Future
from telegrad.ps import compression, segments
from telegrad.ps.buckets import Staging
from telegrad.ps.checkpoint import Archive, Snapshot
from telegrad.ps.consistency import Stale, Sync
from telegrad.ps.layout import Share
from telegrad.ps.messages import Answer, Gradients, Plan, Welcome, worker_of
from telegrad.ps.rounds import Clocks, Rounds
from telegrad.ps.segments import Handle, Mapping
from telegrad.ps.solver import Options, Solver, State, works_by_element


class _Report(NamedTuple):
    trainer: str
    step: int
    version: int
    changes: dict[int, Options]
    gradients: Tensor
    by_value: bool
    missing: frozenset[int]
    future: Future[Answer]
    staleness: int = 0


class _Entering(NamedTuple):
    trainer: str
    first: int
    future: Future[Welcome]


Outcome = tuple[Future[Any], Any]


class Shard:
    """`run` names the group of workers; a snapshot of the same run brings back the trainers that took part."""

    def __init__(
        self, plan: Plan, values: Tensor, sharing: bool, run: str = "", archive: Archive | None = None
    ) -> None:
        self.plan = plan
        self.version = 0
        self._run = run
        self._archive = archive
        self._lock = threading.Lock()
        self._strict = isinstance(plan.consistency, Sync) and plan.consistency.quorum is None
        self._places = 1 if self._strict else 2
        sharing = sharing and values.is_cpu
        self._memory = segments.make(self._places * plan.share.nbytes) if sharing else None
        if self._memory is not None and self._strict:
            self._values = self._memory.contents
        else:
            self._values = segments.private(plan.share.nbytes, values.device)
        self._values.copy_(values)
        self._solver = Solver(plan.make, plan.groups, plan.share, self._values, works_by_element(plan.optimizer))
        self._rounds = Rounds(plan.consistency.quorum) if isinstance(plan.consistency, Sync) else None
        self._clocks = Clocks(plan.consistency.ahead if isinstance(plan.consistency, Stale) else None)
        self._members: dict[str, Mapping | None] = {}  # with their gradients, if they share them
        self._joined: set[str] = set()
        self._applied: dict[str, int] = {}  # the last step of each trainer that is in the values
        self._reports: dict[str, _Report] = {}
        self._stagings: dict[str, Staging] = {}  # of trainers whose gradients come piece by piece
        self._entering: list[_Entering] = []
        self._saved = -1  # the last version that was given to the archive

    def __repr__(self) -> str:
        who = self._rounds if self._rounds is not None else self._clocks
        return f"<Shard of {self.plan.name!r}: {self.plan.share.nbytes} bytes, version {self.version}, {who!r}>"

    # Who takes part

    def announce(self, trainer: str, plan: Plan) -> int:
        """A trainer is coming: from which round on this server waits for it."""
        if (plan.share, plan.consistency) != (self.plan.share, self.plan.consistency):
            raise UsageError(
                f"the trainers of parameter server {self.plan.name!r} disagree: "
                f"{plan.consistency} with {_described(plan.share)}, but it has "
                f"{self.plan.consistency} with {_described(self.plan.share)}"
            )
        with self._lock:
            return self._rounds.join(trainer) if self._rounds is not None else 0

    def enter(self, trainer: str, first: int, gradients: Handle | None) -> Future[Welcome]:
        """A trainer is here; the answer comes when it may start, which is in round `first`."""
        mapped = segments.find(gradients) if gradients is not None and self._memory is not None else None
        with self._lock:
            self._add(trainer, mapped)
            if self._rounds is not None:
                self._rounds.start(trainer, first)
                self.version = self._rounds.number
            self._publish()
            entering = _Entering(trainer, first, Future())
            self._entering.append(entering)
            outcomes = self._advance()
        _complete(outcomes)
        return entering.future

    def resume(
        self,
        trainer: str,
        acknowledged: int,
        version: int,
        values: Tensor,
        gradients: Handle | None,
        applied: dict[str, int],
    ) -> Welcome:
        """A trainer comes back to a server that was restarted. If it holds a newer version, the server takes that.

        `applied` says whose steps are in that version: they may be pushed again, and must not count twice.
        """
        mapped = segments.find(gradients) if gradients is not None and self._memory is not None else None
        outcomes: list[Outcome] = []
        with self._lock:
            self._add(trainer, mapped)
            self._applied[trainer] = max(self._applied.get(trainer, 0), acknowledged)
            if self._rounds is not None:
                self._rounds.join(trainer)
            if version > self.version:
                self._values.copy_(values)
                self.version = version
                for each, step in applied.items():
                    self._applied[each] = max(self._applied.get(each, 0), step)
                outcomes = self._skip_to(version)
            self._publish()
            welcome = Welcome(Answer(self.version), mapped is not None, self._handle)
            outcomes += self._advance()
        _complete(outcomes)
        return welcome

    def leave(self, trainer: str) -> None:
        """A trainer has left or is lost: what it reported in an unfinished round goes with it."""
        with self._lock:
            known = self._members.pop(trainer, self)
            self._reports.pop(trainer, None)
            self._stagings.pop(trainer, None)
            self._entering = [each for each in self._entering if each.trainer != trainer]
            if self._rounds is not None:
                self._rounds.leave(trainer)
            self._clocks.leave(trainer)
            outcomes = self._advance()
            if known is not self:
                self._note_members()
        _complete(outcomes)

    def lose(self, worker: str) -> None:
        """A worker is gone, by its incarnation, and with it every trainer there."""
        with self._lock:
            rounds = self._rounds
            known = {*self._members, *(() if rounds is None else (*rounds.members, *rounds.expected))}
        for trainer in known:
            if worker_of(trainer) == worker:
                self.leave(trainer)

    # What they bring

    def bring(self, trainer: str, step: int, pieces: dict[int, Tensor]) -> None:
        """Some of the gradients that a trainer is going to push."""
        self._staging(trainer).bring(step, pieces)

    def _staging(self, trainer: str) -> Staging:
        with self._lock:
            if trainer not in self._members:
                raise StaleReference(f"parameter server {self.plan.name!r} does not know this trainer")
            if trainer not in self._stagings:
                self._stagings[trainer] = Staging(self.plan.share)
            return self._stagings[trainer]

    def push(
        self,
        trainer: str,
        step: int,
        version: int,
        changes: dict[int, Options],
        gradients: Gradients | None,
        by_value: bool,
        missing: frozenset[int] = frozenset(),
    ) -> Future[Answer]:
        """Gradients that were computed with `version`. The same step may be pushed again: it counts once.

        `missing` are the numbers of parameters that have no gradient; zeros stand in their place.
        """
        if isinstance(gradients, list):
            gradients = compression.unpack(self.plan.share, gradients)
        elif isinstance(gradients, dict):
            gradients = self._staging(trainer).complete(step, gradients)
        with self._lock:
            if trainer not in self._members:
                raise StaleReference(f"parameter server {self.plan.name!r} does not know this trainer")
            if gradients is None:
                mapped = self._members[trainer]
                if mapped is None:
                    raise UsageError("a push without gradients from a trainer that does not share them")
                gradients = mapped.contents[self.plan.share.start : self.plan.share.stop]
            gradients = gradients.to(self._values.device)
            report = _Report(trainer, step, version, changes, gradients, by_value, missing, Future())
            outcomes = self._take(report)
        _complete(outcomes)
        return report.future

    def pull(self) -> Answer:
        """The values now, by value."""
        with self._lock:
            return Answer(self.version, values=self._values.clone(), applied=self._told)

    def state(self) -> list[State]:
        with self._lock:
            return self._solver.state()

    def load(self, states: dict[int, State], changes: dict[int, Options]) -> None:
        """Take the optimizer's state of whole parameters, by number."""
        with self._lock:
            self._solver.change(changes)
            parts = self.plan.share.parts
            self._solver.load([self._solver.cut(part, states.get(part.slot.number, {})) for part in parts])

    # Checkpoints

    def restore(self, snapshot: Snapshot, expected: Iterable[str]) -> None:
        """Begin where a snapshot ends. Of the same run, the trainers that took part are waited for."""
        if snapshot.values.keys() != {part.label for part in self.plan.share.parts}:
            raise UsageError(
                f"the checkpoint of parameter server {self.plan.name!r} is of other parameters, or of another number "
                f"of servers: it has {', '.join(sorted(snapshot.values))}"
            )
        with self._lock:
            for part in self.plan.share.parts:
                part.of(self._values).copy_(snapshot.values[part.label])
            self._solver.change(dict(enumerate(snapshot.groups)))
            self._solver.load(snapshot.states)
            self.version = self._saved = snapshot.version
            same = snapshot.run == self._run
            self._applied = dict(snapshot.applied) if same else {}
            if self._rounds is not None:
                self._rounds.number = snapshot.version
                self._rounds.expected = set(expected) if same else set()
            self._publish()

    def save(self) -> None:
        """Put what is here now into the archive."""
        with self._lock:
            self._save()

    def close(self) -> None:
        """The worker leaves: save what it has, and wait until that is on disk."""
        if self._archive is not None:
            self.save()
            self._archive.finish()

    # Inside, under the lock

    def _add(self, trainer: str, mapped: Mapping | None) -> None:
        self._members[trainer] = mapped
        self._joined.add(trainer)
        self._clocks.join(trainer)
        self._note_members()

    def _note_members(self) -> None:
        if self._archive is not None:
            self._archive.note_members(self._members)
            if not self._members:
                self._save()

    def _save(self) -> None:
        if self._archive is None or self.version == self._saved:
            return
        values = {part.label: part.of(self._values).clone() for part in self.plan.share.parts}
        states, groups = self._solver.state(), self._solver.options()
        self._archive.save(Snapshot(self.version, self._run, values, states, groups, dict(self._applied)))
        self._saved = self.version

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

    def _take(self, report: _Report) -> list[Outcome]:
        if report.step <= self._applied.get(report.trainer, 0):  # it comes again; the answer was lost
            return [(report.future, self._answer(report))]
        if self._rounds is None:
            return self._apply_one(report)
        if not self._rounds.report(report.trainer, report.version):
            late = report._replace(staleness=self.version - report.version)
            return [(report.future, self._answer(late)._replace(dropped=not self._strict))]
        before = self._reports.get(report.trainer)
        self._reports[report.trainer] = report
        superseded: list[Outcome] = [] if before is None else [(before.future, StaleReference("it was pushed again"))]
        return superseded + self._advance()

    def _apply_one(self, report: _Report) -> list[Outcome]:
        staleness = self.version - report.version
        try:
            self._apply([report])
            self._clocks.advance(report.trainer)
            self._save_if_due()
        except Exception as error:
            return [(report.future, error)]
        self._reports[report.trainer] = report._replace(staleness=staleness)
        return self._advance()

    def _advance(self) -> list[Outcome]:
        """Answer everybody who waits for something that is now the case."""
        outcomes: list[Outcome] = []
        if self._rounds is not None and self._rounds.complete():
            reports = [self._reports.pop(trainer) for trainer in self._rounds.reported]
            try:
                self._apply(reports)
                self._rounds.advance()
                self._save_if_due()
                outcomes += [(report.future, self._answer(report)) for report in reports]
            except Exception as error:
                self._rounds.reported.clear()
                outcomes += [(report.future, error) for report in reports]
        if self._rounds is None:
            free = [report for report in self._reports.values() if self._clocks.may_go(report.trainer)]
            for report in free:
                del self._reports[report.trainer]
                outcomes.append((report.future, self._answer(report)))
        return outcomes + self._let_in()

    def _let_in(self) -> list[Outcome]:
        if len(self._joined) < self.plan.trainers:
            return []
        ready = [each for each in self._entering if self._rounds is None or self.version >= each.first]
        self._entering = [each for each in self._entering if each not in ready]
        return [
            (
                each.future,
                Welcome(Answer(self.version, values=self._values.clone(), applied=self._told), shared, self._handle),
            )
            for each in ready
            for shared in [self._members[each.trainer] is not None]
        ]

    def _apply(self, reports: list[_Report]) -> None:
        for report in reports:
            self._solver.change(report.changes)
        if self._memory is not None and self._strict:
            self._memory.counter = self.version + 1
        missing = frozenset.intersection(*(report.missing for report in reports))
        self._solver.step([report.gradients for report in reports], missing)
        self.version += 1
        for report in reports:
            self._applied[report.trainer] = report.step
        self._publish()

    def _save_if_due(self) -> None:
        if self._archive is not None and self.version % self._archive.rule.every == 0:
            self._save()

    @property
    def _handle(self) -> Handle | None:
        return None if self._memory is None else self._memory.handle

    def _publish(self) -> None:
        if self._memory is None:
            return
        self._memory.counter = self.version
        if self._strict or not any(self._members.values()):
            return
        place = self.version % self._places * self.plan.share.nbytes
        self._memory.contents[place : place + self.plan.share.nbytes].copy_(self._values)

    @property
    def _told(self) -> dict[str, int] | None:
        """What trainers must know to bring back a version. In rounds, its number says it all."""
        return dict(self._applied) if self._archive is not None and self._rounds is None else None

    def _answer(self, report: _Report) -> Answer:
        if not report.by_value:
            return Answer(self.version, report.staleness, applied=self._told)
        values = self._values if self._strict else self._values.clone()
        return Answer(self.version, report.staleness, values=values, applied=self._told)


def _complete(outcomes: list[Outcome]) -> None:
    for future, value in outcomes:
        if isinstance(value, Exception):
            traceback.clear_frames(value.__traceback__)  # a future is no place to keep gradients alive
            future.set_exception(value)
        else:
            future.set_result(value)


def _described(share: Share) -> str:
    return f"{len(share.parts)} parameters in {share.nbytes} bytes"

"""`ParameterShard`: what one server holds of a parameter server: its range of the parameters, and their optimizer.

State, all of it under the lock of a `BaseShard`: the values and the solver; of the trainers, what they share
(`_gradients`) or bring piece by piece (`_stagings`).

What trainers read is never half updated. With `Sync()` the values themselves are shared: they change only when every
trainer has reported again, and it does that after it has read. With the other rules each version is copied into one of
two places by turns. The counter of the segment says which version is being written; a trainer that finds, after it has
copied, that it was overtaken fetches the values by a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from telegrad.errors import UsageError
from telegrad.futures import Future
from telegrad.ps import compression, flat_memory
from telegrad.ps.consistency import Sync
from telegrad.ps.flat_memory import MappedMemory, SegmentHandle
from telegrad.ps.messages import Gradients, JoinReply, PushReply, ShardSpec, Steps
from telegrad.ps.server.base_shard import SINGLE_SERVER, BaseShard, ServerRole, run_actions
from telegrad.ps.server.checkpoint import CheckpointArchive, ShardSnapshot
from telegrad.ps.server.decisions import StepReport
from telegrad.ps.server.shard_optimizer import Options, ShardOptimizer, State, works_by_element
from telegrad.ps.trainer.overlap import GradientBuffer


class _PushedContent(NamedTuple):
    """Of a report."""

    changes: dict[int, Options]
    gradients: Tensor | None  # None if the step is to be skipped
    by_value: bool
    missing: frozenset[int]
    written: dict[int, Tensor]  # parts of the range that the trainer has written to, by position


class ParameterShard(BaseShard):
    def __init__(
        self,
        plan: ShardSpec,
        values: Tensor,
        sharing: bool,
        run: str = "",
        archive: CheckpointArchive | None = None,
        role: ServerRole = SINGLE_SERVER,
    ) -> None:
        super().__init__(plan.consistency, plan.trainers, run, archive, role)
        self.plan = plan
        self._strict = plan.consistency == Sync()
        self._places = 1 if self._strict else 2
        sharing = sharing and values.is_cpu
        self._memory = flat_memory.allocate(self._places * plan.share.nbytes) if sharing else None
        if self._memory is not None and self._strict:
            self._values = self._memory.contents
        else:
            self._values = flat_memory.allocate_private(plan.share.nbytes, values.device)
        self._values.copy_(values)
        self._solver = ShardOptimizer(
            plan.make, plan.groups, plan.share, self._values, works_by_element(plan.optimizer)
        )
        self._skipped = False  # the last round made no step
        self._gradients: dict[str, MappedMemory] = {}  # of the trainers that share them
        # of trainers whose gradients come piece by piece
        self._stagings: dict[str, GradientBuffer] = {}

    def __repr__(self) -> str:
        return f"<ParameterShard of {self.plan.name!r}: {self.plan.share.nbytes} bytes, {self._coordinator!r}>"

    # Who takes part

    def announce(self, trainer: str, plan: ShardSpec) -> int:
        """A trainer is coming: from which round on this server waits for it."""
        if _terms(plan) != _terms(self.plan):
            raise UsageError(
                f"the trainers of parameter server {self.plan.name!r} disagree: {_described(plan)}, "
                f"but it has {_described(self.plan)}"
            )
        with self._lock:
            return self._coordinator.announce(trainer)

    def enter(self, trainer: str, first: int, gradients: SegmentHandle | None) -> Future[JoinReply]:
        """A trainer is here; the answer comes when it may start, which is in round `first`."""
        future: Future[JoinReply] = Future()
        mapped = self._mapped(gradients)
        with self._lock:
            self._share(trainer, mapped)
            actions = self._enter(trainer, first, future)
        run_actions(actions)
        return future

    def resume(
        self,
        trainer: str,
        first: int,
        acknowledged: int,
        version: int,
        values: Tensor,
        gradients: SegmentHandle | None,
        applied: Steps,
    ) -> JoinReply:
        """A trainer comes back to a server that was restarted. If it holds a newer version, the server takes that.

        `applied` says whose steps are in that version: they may be pushed again, and must not count twice.
        """
        mapped = self._mapped(gradients)
        with self._lock:
            self._share(trainer, mapped)
            if version > self.version:
                self._values.copy_(values)
            else:
                applied = {}
            actions = self._resume(trainer, first, acknowledged, version, applied)
            welcome = JoinReply(PushReply(self.version), mapped is not None, self._handle)
        run_actions(actions)
        return welcome

    def _mapped(self, gradients: SegmentHandle | None) -> MappedMemory | None:
        return (
            flat_memory.find_shared(gradients)
            if gradients is not None and self._memory is not None
            else None
        )

    def _share(self, trainer: str, mapped: MappedMemory | None) -> None:
        self._gradients.pop(trainer, None)
        if mapped is not None:
            self._gradients[trainer] = mapped

    def _forget_trainer(self, trainer: str) -> None:
        self._gradients.pop(trainer, None)
        self._stagings.pop(trainer, None)

    # What they bring

    def bring(self, trainer: str, step: int, pieces: dict[int, Tensor]) -> None:
        """Some of the gradients that a trainer is going to push."""
        self._staging(trainer).bring(step, pieces)

    def _staging(self, trainer: str) -> GradientBuffer:
        with self._lock:
            self._coordinator.require_member(trainer)
            if trainer not in self._stagings:
                self._stagings[trainer] = GradientBuffer(self.plan.share)
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
        skip: bool = False,
        written: dict[int, Tensor] | None = None,
    ) -> Future[PushReply]:
        """Gradients that were computed with `version`. The same step may be pushed again: it counts once.

        `missing` are the numbers of parameters that have no gradient; zeros stand in their place. `skip` says that
        the gradients are not finite: the round that they are part of makes no step. `written` are values that the
        trainer has written into parameters; the step begins with them.
        """
        future: Future[PushReply] = Future()
        if isinstance(gradients, list):
            gradients = compression.unpack(self.plan.share, gradients)
        elif isinstance(gradients, dict):
            gradients = self._staging(trainer).complete(step, gradients)
        with self._lock:
            self._coordinator.require_member(trainer)
            if gradients is None and not skip:
                if trainer not in self._gradients:
                    raise UsageError(
                        "a push without gradients from a trainer that does not share them"
                    )
                gradients = self._gradients[trainer].contents[
                    self.plan.share.start : self.plan.share.stop
                ]
            if gradients is not None:
                gradients = gradients.to(self._values.device)
            content = _PushedContent(
                changes, None if skip else gradients, by_value, missing, written or {}
            )
            report = StepReport(trainer, step, version, content, future)
            actions = self._carry_out(self._coordinator.report(report))
        run_actions(actions)
        return future

    def pull(self) -> PushReply:
        """The values now, by value."""
        with self._lock:
            return self._current()

    def state(self) -> list[State]:
        with self._lock:
            return self._solver.state()

    def load(self, states: dict[int, State], changes: dict[int, Options]) -> None:
        """Take the optimizer's state of whole parameters, by number."""
        with self._lock:
            self._solver.change(changes)
            parts = self.plan.share.parts
            self._solver.load(
                [self._solver.cut(part, states.get(part.slot.number, {})) for part in parts]
            )

    # Checkpoints

    def restore(
        self, snapshot: ShardSnapshot, expected: Sequence[str] = (), started: bool = False
    ) -> None:
        """Begin where a snapshot ends. Of the same run, the trainers that took part are waited for."""
        if snapshot.values.keys() != {part.label for part in self.plan.share.parts}:
            raise UsageError(
                f"the checkpoint of parameter server {self.plan.name!r} is of other parameters, or of another number "
                f"of servers: it has {', '.join(sorted(snapshot.values))}"
            )
        with self._lock:
            self._load(snapshot)
            self._restore(snapshot, expected, started)
            self._publish()

    def _load(self, snapshot: ShardSnapshot) -> None:
        for part in self.plan.share.parts:
            part.of(self._values).copy_(snapshot.values[part.label])
        self._solver.change(dict(enumerate(snapshot.groups)))
        self._solver.load(snapshot.states)
        self._skipped = snapshot.skipped

    def _snapshot(self) -> ShardSnapshot:
        values = {part.label: part.of(self._values).clone() for part in self.plan.share.parts}
        states, groups = self._solver.state(), self._solver.options()
        applied = dict(self._coordinator.applied)
        return ShardSnapshot(
            self.version,
            self._run,
            values,
            states,
            groups,
            applied,
            self._last_round,
            self._skipped,
        )

    # What is trained, under the lock

    def apply(self, reports: list[StepReport]) -> None:
        contents: list[_PushedContent] = [report.content for report in reports]
        for content in contents:
            self._solver.change(content.changes)
        if self._memory is not None and self._strict:
            self._memory.counter = self.version + 1
        for content in contents:
            for position, values in content.written.items():
                self.plan.share.parts[position].of(self._values).copy_(values)
        gradients = [content.gradients for content in contents if content.gradients is not None]
        self._skipped = len(gradients) < len(contents)
        if gradients and not self._skipped:
            missing = frozenset.intersection(*(content.missing for content in contents))
            self._solver.step(gradients, missing)

    def reply_to_report(self, report: StepReport) -> PushReply:
        in_rounds = isinstance(self.plan.consistency, Sync)
        skipped = report.content.gradients is None or (in_rounds and self._skipped)
        values = None
        if report.content.by_value:
            values = self._values if self._strict else self._values.clone()
        return PushReply(
            self.version, report.staleness, values=values, skipped=skipped, applied=self._told
        )

    def reply_to_join(self, trainer: str) -> JoinReply:
        return JoinReply(self._current(), trainer in self._gradients, self._handle)

    def _current(self) -> PushReply:
        return PushReply(self.version, values=self._values.clone(), applied=self._told)

    @property
    def _told(self) -> Steps | None:
        """What trainers must know to bring back a version. With `Sync()`, its number says it all."""
        known = self._archive is not None and not self._strict
        return dict(self._coordinator.applied) if known else None

    @property
    def _handle(self) -> SegmentHandle | None:
        return None if self._memory is None else self._memory.handle

    def _publish(self) -> None:
        if self._memory is None:
            return
        self._memory.counter = self.version
        if self._strict or not self._gradients:
            return
        place = self.version % self._places * self.plan.share.nbytes
        self._memory.contents[place : place + self.plan.share.nbytes].copy_(self._values)


def _terms(plan: ShardSpec) -> tuple[object, ...]:
    """What all trainers must say alike."""
    return plan.share, plan.consistency, plan.servers


def _described(plan: ShardSpec) -> str:
    size = f"{len(plan.share.parts)} parameters in {plan.share.nbytes} bytes"
    return f"{plan.consistency} with {size} here, on {', '.join(plan.servers)}"

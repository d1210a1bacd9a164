"""`ParameterShard`: one server's range of the parameters of a model, and their optimizer.

State, all of it under the lock of `BaseShard`: the values and their optimizer; and, of each
trainer, the memory with gradients that it shares (`_shared_gradients`) or the buffer for gradients
that arrive in pieces (`_gradient_buffers`).

Trainers on the same host read values from a shared segment, and never see a version that is half
updated:

- With `Sync()`, the segment holds the values themselves. They change only when every trainer has
  reported again, which it does after it has read.
- With other rules, the segment holds two copies, and versions are written to them in turn. The
  counter of the segment is the version that is being written. A trainer that finds, after it has
  copied, that its copy was overwritten fetches the values by a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from telegrad import plurals
from telegrad.errors import UsageError
from telegrad.futures import Future
from telegrad.param_groups import Options
from telegrad.ps import compression
from telegrad.ps.consistency import Sync
from telegrad.ps.messages import Gradients, JoinReply, PushReply, ShardSpec, Steps
from telegrad.ps.optimizer_types import State, works_by_element
from telegrad.ps.server.base_shard import SINGLE_SERVER, BaseShard, ServerRole, run_actions
from telegrad.ps.server.checkpoint import CheckpointArchive, ShardSnapshot
from telegrad.ps.server.coordinator import StepReport
from telegrad.ps.server.gradient_buffer import GradientBuffer
from telegrad.ps.server.shard_optimizer import ShardOptimizer
from telegrad.transport import flat_memory
from telegrad.transport.flat_memory import MappedMemory, SegmentHandle


class _PushPayload(NamedTuple):
    """The payload of a `StepReport`."""

    changes: dict[int, Options]  # options of parameter groups that have changed
    gradients: Tensor | None  # None: the step is skipped
    by_value: bool  # the reply must carry the values
    missing: frozenset[int]  # numbers of the parameters that have no gradient
    written: dict[int, Tensor]  # values that the trainer has written, by part of the range


class ParameterShard(BaseShard):
    """Values and optimizer of one range. `sharing`: trainers on this host may map the values."""

    def __init__(
        self,
        spec: ShardSpec,
        values: Tensor,
        sharing: bool,
        run: str = "",
        archive: CheckpointArchive | None = None,
        role: ServerRole = SINGLE_SERVER,
    ) -> None:
        super().__init__(spec.consistency, spec.trainers, run, archive, role)
        self.spec = spec
        self._range = spec.server_range
        # Every trainer reports in every round, so values in shared memory need no second copy.
        self._all_report = spec.consistency == Sync()
        self._copies = 1 if self._all_report else 2
        sharing = sharing and values.is_cpu
        self._memory = (
            flat_memory.allocate_shared(self._copies * self._range.nbytes) if sharing else None
        )
        if self._memory is not None and self._all_report:
            self._values = self._memory.contents
        else:
            self._values = flat_memory.allocate_private(self._range.nbytes, values.device)
        self._values.copy_(values)
        by_element = works_by_element(spec.optimizer)
        self._optimizer = ShardOptimizer(
            spec.make_optimizer, spec.groups, self._range, self._values, by_element
        )
        self._skipped = False  # the last round made no step
        self._shared_gradients: dict[str, MappedMemory] = {}  # by trainer
        self._gradient_buffers: dict[str, GradientBuffer] = {}  # by trainer

    def __repr__(self) -> str:
        return (
            f"<ParameterShard of {self.spec.name!r}: {self._range.nbytes} bytes, "
            f"{self._coordinator!r}>"
        )

    # Members

    def announce(self, trainer: str, spec: ShardSpec) -> int:
        """Record that a trainer will join. Return the first round that waits for it."""
        for here, there in zip(_agreement(spec), _agreement(self.spec), strict=False):
            if here != there:
                raise UsageError(
                    f"the trainers of parameter server {self.spec.name!r} disagree: this one has "
                    f"{here}, and those before it have {there}"
                )
        with self._lock:
            return self._coordinator.announce(trainer)

    def join(self, trainer: str, first: int, gradients: SegmentHandle | None) -> Future[JoinReply]:
        """Let a trainer join. The future is completed when it may start, in round `first`."""
        future: Future[JoinReply] = Future()
        mapped = self._map_gradients(gradients)
        with self._lock:
            self._set_shared_gradients(trainer, mapped)
            actions = self._join(trainer, first, future)
        run_actions(actions)
        return future

    def rejoin(
        self,
        trainer: str,
        first: int,
        acknowledged: int,
        version: int,
        values: Tensor,
        gradients: SegmentHandle | None,
        applied: Steps,
    ) -> JoinReply:
        """Let a trainer return after this server was restarted. Copy its values if they are newer.

        `applied` lists the steps in these values. They may be reported again and count once.
        """
        mapped = self._map_gradients(gradients)
        with self._lock:
            self._set_shared_gradients(trainer, mapped)
            if version > self.version:
                self._values.copy_(values)
            else:
                applied = {}
            actions = self._rejoin(trainer, first, acknowledged, version, applied)
            reply = JoinReply(PushReply(self.version), mapped is not None, self._handle)
        run_actions(actions)
        return reply

    def _map_gradients(self, gradients: SegmentHandle | None) -> MappedMemory | None:
        if gradients is None or self._memory is None:
            return None
        return flat_memory.open_shared(gradients)

    def _set_shared_gradients(self, trainer: str, mapped: MappedMemory | None) -> None:
        self._shared_gradients.pop(trainer, None)
        if mapped is not None:
            self._shared_gradients[trainer] = mapped

    def _forget_trainer(self, trainer: str) -> None:
        self._shared_gradients.pop(trainer, None)
        self._gradient_buffers.pop(trainer, None)

    # Gradients

    def stage_gradients(self, trainer: str, step: int, pieces: dict[int, Tensor]) -> None:
        """Store some of the gradients of a step before the trainer reports the step."""
        self._gradient_buffer(trainer).add(step, pieces)

    def _gradient_buffer(self, trainer: str) -> GradientBuffer:
        with self._lock:
            self._coordinator.require_member(trainer)
            if trainer not in self._gradient_buffers:
                self._gradient_buffers[trainer] = GradientBuffer(self._range)
            return self._gradient_buffers[trainer]

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
        """Receive the gradients of a step, computed with `version`. A repeated step counts once.

        `missing` are the numbers of the parameters without gradient; their gradients are zeros.
        `skip`: the gradients are not finite, so the round makes no step. `written` are values that
        the trainer has written into parameters; the step starts from them.
        """
        future: Future[PushReply] = Future()
        if isinstance(gradients, list):
            gradients = compression.unpack(self._range, gradients)
        elif isinstance(gradients, dict):
            gradients = self._gradient_buffer(trainer).complete(step, gradients)
        with self._lock:
            if gradients is None and not skip:
                if trainer not in self._shared_gradients:
                    self._coordinator.require_member(trainer)
                    raise UsageError(
                        f"parameter server {self.spec.name!r} got a push without gradients from a "
                        "trainer whose memory it does not share"
                    )
                contents = self._shared_gradients[trainer].contents
                gradients = contents[self._range.start : self._range.stop]
            if gradients is not None:
                gradients = gradients.to(self._values.device)
            payload = _PushPayload(
                changes, None if skip else gradients, by_value, missing, written or {}
            )
            report = StepReport(trainer, step, version, payload, future)
            actions = self._carry_out(self._coordinator.report(report))
        run_actions(actions)
        return future

    def pull(self) -> PushReply:
        """Return the current values."""
        with self._lock:
            return self._current()

    def state(self) -> list[State]:
        """Return the optimizer state of each part of the range."""
        with self._lock:
            return self._optimizer.state()

    def load(self, states: dict[int, State], changes: dict[int, Options]) -> None:
        """Set the optimizer state, given that of whole parameters by index."""
        with self._lock:
            self._optimizer.change(changes)
            self._optimizer.load(
                [
                    self._optimizer.part_state(part, states.get(part.slot.index, {}))
                    for part in self._range.parts
                ]
            )

    # Checkpoints

    def restore(
        self, snapshot: ShardSnapshot, expected: Sequence[str] = (), started: bool = False
    ) -> None:
        """Start from a snapshot. Trainers are expected only if it is of the same run."""
        if snapshot.values.keys() != {part.label for part in self._range.parts}:
            raise UsageError(
                f"the checkpoint of parameter server {self.spec.name!r} is of other parameters, or "
                f"of another number of servers: it has {', '.join(sorted(snapshot.values))}"
            )
        with self._lock:
            self._load(snapshot)
            self._restore(snapshot, expected, started)
            self._publish()

    def _load(self, snapshot: ShardSnapshot) -> None:
        for part in self._range.parts:
            part.of(self._values).copy_(snapshot.values[part.label])
        self._optimizer.change(dict(enumerate(snapshot.groups)))
        self._optimizer.load(snapshot.states)
        self._skipped = snapshot.skipped

    def _snapshot(self) -> ShardSnapshot:
        values = {part.label: part.of(self._values).clone() for part in self._range.parts}
        return ShardSnapshot(
            self.version,
            self._run,
            values,
            self._optimizer.state(),
            self._optimizer.options(),
            dict(self._coordinator.applied),
            self._unconfirmed_reports,
            self._skipped,
        )

    # Decisions of the coordinator, under the lock

    def apply(self, reports: list[StepReport]) -> None:
        payloads: list[_PushPayload] = [report.payload for report in reports]
        for payload in payloads:
            self._optimizer.change(payload.changes)
        if self._memory is not None and self._all_report:
            self._memory.counter[0] = self.version + 1
        for payload in payloads:
            for position, values in payload.written.items():
                self._range.parts[position].of(self._values).copy_(values)
        gradients = [payload.gradients for payload in payloads if payload.gradients is not None]
        self._skipped = len(gradients) < len(payloads)
        if gradients and not self._skipped:
            missing = frozenset.intersection(*(payload.missing for payload in payloads))
            self._optimizer.step(gradients, missing)

    def reply_to_report(self, report: StepReport) -> PushReply:
        payload: _PushPayload = report.payload
        in_rounds = isinstance(self.spec.consistency, Sync)
        skipped = payload.gradients is None or (in_rounds and self._skipped)
        values = None
        if payload.by_value:
            # With `Sync()` the values do not change before this trainer has read them.
            values = self._values if self._all_report else self._values.clone()
        return PushReply(
            self.version,
            report.staleness,
            values=values,
            skipped=skipped,
            applied=self._applied_for_trainers,
        )

    def reply_to_join(self, trainer: str) -> JoinReply:
        return JoinReply(self._current(), trainer in self._shared_gradients, self._handle)

    def _current(self) -> PushReply:
        return PushReply(
            self.version, values=self._values.clone(), applied=self._applied_for_trainers
        )

    @property
    def _applied_for_trainers(self) -> Steps | None:
        """The applied steps, which trainers need to restore a version on a restarted server.

        With `Sync()`, they follow from the number of the version.
        """
        if self._archive is None or self._all_report:
            return None
        return dict(self._coordinator.applied)

    @property
    def _handle(self) -> SegmentHandle | None:
        return None if self._memory is None else self._memory.handle

    def _publish(self) -> None:
        if self._memory is None:
            return
        self._memory.counter[0] = self.version
        if self._all_report or not self._shared_gradients:
            return
        nbytes = self._range.nbytes
        offset = self.version % self._copies * nbytes
        self._memory.contents[offset : offset + nbytes].copy_(self._values)


def _agreement(spec: ShardSpec) -> Iterator[str]:
    """Describe what must be the same for all trainers, item by item."""
    yield f"consistency {spec.consistency}"
    yield f"the servers {', '.join(spec.servers)}"
    made = spec.optimizer
    yield f"the optimizer {made.__name__}" if isinstance(made, type) else "a function as optimizer"
    yield plurals.count(len(spec.server_range.parts), "parameter")
    for part in spec.server_range.parts:
        slot = part.slot
        yield f"the parameter {slot.name!r} of {slot.dtype} with shape {slot.shape}"
    yield f"the layout {spec.server_range}"

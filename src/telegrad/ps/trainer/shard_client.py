"""`ShardClient`: a trainer's side of one server.

State: `version`, what of this server's range the model holds; `patience`, how many seconds a dead server is waited for;
`_memory`, where the server publishes its values; `_shares`, whether it reads gradients where they are; if it does not,
`_early`, what has left before its step. Used by the thread that steps the optimizer, except `ready`, which backward
calls.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import CallTimeout, StaleReference
from telegrad.futures import Future
from telegrad.ps import flat_memory
from telegrad.ps.compression import Compressor
from telegrad.ps.flat_memory import MappedMemory, SegmentHandle
from telegrad.ps.gradient_buckets import GradientBucket
from telegrad.ps.messages import Gradients, JoinReply, PushReply, SavedVersions, ShardSpec
from telegrad.ps.server import service
from telegrad.ps.server.shard_optimizer import Options, State
from telegrad.ps.trainer.flat_parameters import FlatParameters
from telegrad.ps.trainer.joining import LOSS_ERRORS, LocalTrainers, retry_until_answered, settled
from telegrad.ps.trainer.overlap import OverlappedPush

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class PushRequest(NamedTuple):
    """What a trainer reports to a server in one step, besides its gradients."""

    step: int
    version: int  # that the gradients were computed with
    changes: dict[int, Options]
    skip: bool = False  # the gradients are not finite
    # the numbers of parameters that the model's owner has written to
    written: frozenset[int] = frozenset()


class ShardClient:
    def __init__(
        self,
        agent: AgentRuntime,
        trainer: str,
        server: str,
        plan: ShardSpec,
        flat: FlatParameters,
        compression: torch.dtype | None,
        overlap: bool,
    ) -> None:
        self.server = server
        self.plan = plan
        self.version = 0
        self.patience = 300.0
        self.step_limit: Callable[[], float | None] = lambda: None  # seconds
        self._agent = agent
        self._flat = flat
        self._me = trainer
        self._memory: MappedMemory | None = None
        self._shares = False
        self._compressor = (
            None if compression is None else Compressor(plan.share, compression, flat.device)
        )
        self._overlap = overlap
        self._early: OverlappedPush | None = None
        self._step = 0  # the last that was pushed
        self._applied: dict[str, int] = {}  # whose steps are in that version
        self._busy = True  # it joins, or is in the middle of a step
        self._change = threading.Lock()  # of `_busy`
        self._first = 0  # the round, or clock, that this trainer has started with
        self._taken: PushReply | None = None  # the last
        # of what is published, by its start in the memory
        self._views: dict[int, list[Tensor]] = {}

    def __repr__(self) -> str:
        how = "shared memory" if self._memory is not None and self._shares else "calls"
        early = "" if self._early is None else f", {self._early!r}"
        size = f"{self.plan.share.nbytes} bytes"
        return f"<ShardClient to {self.server!r}: {size}, version {self.version}, by {how}{early}>"

    # Coming and going

    def may_found(self) -> bool | None:
        """Return whether this trainer may make the shards; None if they are there already."""
        may: bool | None = self._agent.invoke(
            self.server, service.find_shard, (self.plan.name, self._me)
        )
        return may

    def saved(self) -> SavedVersions:
        found: SavedVersions = self._agent.invoke(self.server, service.saved, (self.plan,))
        return found

    def create(self, version: int | None) -> None:
        """Make the shard there: with a version that was saved or, if that is None, with the values of this model."""
        values = self._flat.range_of_values(self.plan.share)
        self._agent.invoke(self.server, service.create, (self.plan, values, version))

    def recreate(self) -> None:
        """Let a server that was restarted make its shard again."""
        self._agent.invoke(self.server, service.recreate, (self.plan,))

    def announce(self) -> int:
        self._agent.service(LocalTrainers).sides[self._me, self.server] = self
        return int(self._agent.invoke(self.server, service.announce, (self.plan, self._me)))

    def enter(self, first: int, timeout: float) -> Future[JoinReply]:
        self._first = first
        arguments = (self.plan.name, self._me, first, self._handle)
        return self._agent.start(self.server, service.enter, arguments, None, timeout)

    def entered(self, welcome: JoinReply) -> None:
        self._map(welcome)
        self.take(welcome.answer)

    def _come_back(self, acknowledged: int, version: int | None = None) -> None:
        """Enter again; what the model holds of this server's range goes along, in case the server has lost it."""
        values = self._flat.range_of_values(self.plan.share)
        arguments = (
            self.plan,
            self._me,
            self._first,
            acknowledged,
            self.version if version is None else version,
            values,
            self._handle,
            self._applied,
        )
        self._map(self._agent.invoke(self.server, service.resume, arguments))

    def _map(self, welcome: JoinReply) -> None:
        self._shares = welcome.shared
        if self._overlap and not self._shares and self._early is None:
            self._early = OverlappedPush(
                self.plan.share, self._copy, self._bring, self._agent.threads.start
            )
            self._flat.listen(self.ready)
        memory = welcome.memory if self._flat.segment is not None else None
        self._memory = None if memory is None else flat_memory.find_shared(memory)
        self._views.clear()

    @property
    def _handle(self) -> SegmentHandle | None:
        return None if self._flat.segment is None else self._flat.segment.handle

    def is_member(self) -> bool:
        """Return whether the server knows this trainer."""
        return bool(self._agent.invoke(self.server, service.has_member, (self.plan.name, self._me)))

    def come_back_if_idle(self) -> None:
        """Come back to a server that was restarted, unless there is a step under way, which does that itself."""
        with self._change:
            if self._busy or self.plan.checkpoint is None:
                return
            try:
                self._come_back(self._step)
            except (CallTimeout, *LOSS_ERRORS):
                return  # it was restarted again

    def stay(self, step: int, answer: PushReply) -> None:
        """Make sure that a server that has answered this step still has this trainer, which other servers may need."""
        try:
            if self.is_member():
                return
        except CallTimeout:
            return  # it is there, and busy
        except LOSS_ERRORS:
            if self.plan.checkpoint is None:
                raise
        try:
            self.take(answer)
            with self._change:
                self._come_back(step)
        except (CallTimeout, *LOSS_ERRORS):
            return  # it is tried again as long as another server has not answered

    def leave(self) -> Future[None]:
        self._agent.service(LocalTrainers).sides.pop((self._me, self.server), None)
        return self._start(service.leave, self.plan.name, self._me)

    # Steps

    def ready(self, slot: int) -> None:
        """The gradient of a parameter is in the flat memory."""
        early = self._early
        if early is not None:
            early.ready(slot)

    def _copy(self, bucket: GradientBucket) -> Tensor:
        gradients = self._range(self._flat.gradients)
        if self._compressor is not None:
            return self._compressor.preview(bucket, gradients)
        return bucket.of(self._runs(gradients)).clone()

    def _bring(self, number: int, piece: Tensor) -> None:
        arguments = (self.plan.name, self._me, self._step + 1, {number: piece})
        self._agent.invoke(self.server, service.bring, arguments, None, None)

    def push(self, pushed: PushRequest) -> PushReply:
        """Report the gradients that are in the flat memory and wait for the answer."""
        arguments = self._arguments(pushed)
        answer: PushReply = self._agent.invoke(
            self.server, service.push, arguments, None, self.step_limit()
        )
        return answer

    def start_push(self, pushed: PushRequest) -> Future[PushReply]:
        arguments = self._arguments(pushed)
        return self._agent.start(self.server, service.push, arguments, None, self.step_limit())

    def push_again(self, pushed: PushRequest, error: Exception) -> Future[PushReply]:
        """Wait until a server that is gone has come back, and push what it has not answered."""
        if self.plan.checkpoint is None:
            raise error

        def attempt(reached: Callable[[], None]) -> Future[PushReply]:
            self._come_back(pushed.step - 1)
            reached()
            return settled(self.start_push(pushed))

        return retry_until_answered(attempt, self.patience)

    def _arguments(self, pushed: PushRequest) -> tuple[Any, ...]:
        """Return the arguments of a push, without those at the end that are as usual."""
        with self._change:
            self._busy = True
        step, version, changes, skip, written = pushed
        gradients = self._travelling(step, skip)
        self._step = step
        values = self._flat.values(self.plan.share, written) if written else None
        usual = (self.plan.name, self._me, step, version, changes, gradients, self._memory is None)
        if skip or values:
            return (*usual, self._flat.missing, skip, values)
        return (*usual, self._flat.missing) if self._flat.missing else usual

    def _travelling(self, step: int, skip: bool) -> Gradients | None:
        """The gradients of this step, less what is there already; None if the server can read them."""
        if self._early is not None:
            self._early.stop()
        if skip:
            if self._early is not None:
                self._early.forget()
            return None
        gradients = self._range(self._flat.current)
        if self._shares:
            return None if self._flat.in_place else gradients
        packed = None
        if self._compressor is not None:
            packed = self._compressor.pack(step, gradients, self._flat.missing)
        if self._early is not None:
            runs = self._runs(gradients) if packed is None else packed
            missing = self._early.missing(runs)
            if len(missing) < len(self._early.buckets):
                return {bucket.number: bucket.of(runs) for bucket in missing}
        return gradients if packed is None else packed

    def _range(self, flat: Tensor) -> Tensor:
        return flat[self.plan.share.start : self.plan.share.stop]

    def _runs(self, gradients: Tensor) -> list[Tensor]:
        return [run.of(gradients) for run in self.plan.share.runs]

    def take(self, answer: PushReply) -> None:
        """Copy what the server answered into the parameters; the step is over then."""
        if answer is self._taken:
            return
        given = answer
        if self._compressor is not None and not (answer.dropped or answer.skipped or self._shares):
            self._compressor.applied()
        if answer.values is not None:
            self._take(answer.values)
        elif not self._read(answer.version):
            answer = self._pull()
            assert answer.values is not None
            self._take(answer.values)
        self.version = answer.version
        self._applied = answer.applied or {}
        self._taken = given
        with self._change:
            self._busy = False
        if given.problem is not None:
            warnings.warn(
                f"parameter server {self.plan.name!r} on {self.server!r}: {given.problem}",
                stacklevel=4,
            )

    def _pull(self) -> PushReply:
        """Fetch the values by a call, from a server that may be restarted meanwhile."""

        def attempt(_: Callable[[], None]) -> PushReply:
            try:
                answer: PushReply = self._agent.invoke(self.server, service.pull, (self.plan.name,))
            # the parameters are half overwritten: the server must not take it
            except StaleReference:
                self._come_back(self._step, version=-1)
                raise
            return answer

        return retry_until_answered(attempt, 0.0 if self.plan.checkpoint is None else self.patience)

    def _take(self, values: Tensor) -> None:
        self._flat.take(self.plan.share, self._flat.views(self.plan.share, values))

    def _read(self, version: int) -> bool:
        """Copy a published version. False if the server began to write over it meanwhile."""
        assert self._memory is not None
        nbytes = self.plan.share.nbytes
        places = self._memory.contents.numel() // nbytes
        start = version % places * nbytes
        if start not in self._views:
            published = self._memory.contents[start : start + nbytes]
            self._views[start] = self._flat.views(self.plan.share, published)
        self._flat.take(self.plan.share, self._views[start])
        return self._memory.counter < version + places

    # The optimizer's state

    def state(self) -> Future[list[State]]:
        return self._start(service.state, self.plan.name)

    def load(self, states: dict[int, State], changes: dict[int, Options]) -> Future[None]:
        return self._start(service.load, self.plan.name, states, changes)

    def _start(self, function: Any, *args: Any) -> Future[Any]:
        return self._agent.start(self.server, function, args, None, None)

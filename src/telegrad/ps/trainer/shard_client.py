"""`ShardClient`: a trainer's client for the server that holds one shard of its parameters.

A step sends gradients and receives the new values of the server's range. On the same host both go
through shared memory: the server reads gradients from the trainer's segment, and publishes values
in its own. Otherwise they are arguments and results of calls, and buckets of gradients may be sent
while backward is running (`OverlappedPush`).

State besides that of `ServerClient`: `_server_memory`, the segment in which the server publishes
values, or None; `_shares_gradients`, whether the server reads gradients from shared memory;
`_overlapped`, the buckets that were sent before their step, or None; `_last_reply`, the last reply
that was applied. Used by the thread that steps the optimizer, except `_on_gradient_ready`, which
backward calls, and `rejoin_if_idle`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import StaleReference
from telegrad.futures import Future
from telegrad.param_groups import Options
from telegrad.ps.compression import Compressor
from telegrad.ps.gradient_buckets import GradientBucket
from telegrad.ps.messages import Gradients, JoinReply, PushReply, SavedVersions, ShardSpec
from telegrad.ps.optimizer_types import State
from telegrad.ps.server import service
from telegrad.ps.trainer.flat_parameters import FlatParameters
from telegrad.ps.trainer.overlap import OverlappedPush
from telegrad.ps.trainer.server_client import ServerClient, retry_while_lost
from telegrad.ps.trainer.trainer_registry import TrainerRegistration
from telegrad.transport import flat_memory
from telegrad.transport.flat_memory import MappedMemory, SegmentHandle

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class PushRequest(NamedTuple):
    """What a trainer sends to a server in one step, besides its gradients."""

    step: int
    version: int  # with which the gradients were computed
    changes: dict[int, Options]  # changed options, by parameter group
    skip: bool = False  # the gradients are not finite
    # indices of parameters that the program has written to since the last step
    written: frozenset[int] = frozenset()


class ShardClient(ServerClient[ShardSpec]):
    def __init__(
        self,
        runtime: AgentRuntime,
        trainer: str,
        server: str,
        spec: ShardSpec,
        flat: FlatParameters,
        registration: TrainerRegistration,
        compression: torch.dtype | None,
        overlap: bool,
        patience: float,
    ) -> None:
        super().__init__(runtime, trainer, server, spec, service, registration, patience)
        self._flat = flat
        self._server_memory: MappedMemory | None = None
        self._shares_gradients = False
        self._compressor: Compressor | None = None
        if compression is not None:
            self._compressor = Compressor(spec.server_range, compression, flat.device)
        self._overlap = overlap
        self._overlapped: OverlappedPush | None = None
        self._last_step = 0  # the last step that was pushed
        # the last step of each trainer that `version` contains
        self._applied: dict[str, int] = {}
        self._last_reply: PushReply | None = None
        # views of the published values, by their offset in the server's memory
        self._published: dict[int, list[Tensor]] = {}

    def __repr__(self) -> str:
        is_shared = self._server_memory is not None and self._shares_gradients
        medium = "shared memory" if is_shared else "calls"
        overlapped = "" if self._overlapped is None else f", {self._overlapped!r}"
        return (
            f"<ShardClient to {self.server!r}: {self.spec.server_range.nbytes} bytes, "
            f"version {self.version}, by {medium}{overlapped}>"
        )

    # Creating the shard

    def claim_creation(self) -> bool | None:
        """Return whether this trainer may create the shards. None: they exist already."""
        may_create: bool | None = self._runtime.invoke(
            self.server, service.claim_creation, (self.spec.name, self._trainer)
        )
        return may_create

    def saved_versions(self) -> SavedVersions:
        """Return what the server has of this shard, in memory and in checkpoints."""
        versions: SavedVersions = self._runtime.invoke(
            self.server, service.saved_versions, (self.spec,)
        )
        return versions

    def create(self, version: int | None) -> None:
        """Create the shard with a saved version; None: with the values of this model."""
        values = self._flat.copy_range(self.spec.server_range)
        self._runtime.invoke(self.server, service.create, (self.spec, values, version))

    def recreate(self) -> None:
        """Let a server that was restarted create its shard from its checkpoint."""
        self._runtime.invoke(self.server, service.recreate, (self.spec,))

    # Joining

    def start_join(self, first_round: int, timeout: float) -> Future[JoinReply]:
        self._first_round = first_round
        arguments = (self.spec.name, self._trainer, first_round, self._gradient_handle)
        return self._runtime.start(self.server, service.join, arguments, None, timeout)

    def finish_join(self, reply: JoinReply) -> None:
        self._open_memory(reply)
        self.apply_reply(reply.reply)

    def _rejoin(self, acknowledged: int, version: int | None = None) -> None:
        """Rejoin a server that was restarted.

        Send it the model's values of its range, in case its checkpoint is older. `acknowledged` is
        the last step that the server has replied to; `version` is that of the values.
        """
        arguments = (
            self.spec,
            self._trainer,
            self._first_round,
            acknowledged,
            self.version if version is None else version,
            self._flat.copy_range(self.spec.server_range),
            self._gradient_handle,
            self._applied,
        )
        self._open_memory(self._runtime.invoke(self.server, service.rejoin, arguments))

    def _rejoin_between_steps(self) -> None:
        self._rejoin(self._last_step)

    def ensure_member(self, step: int, reply: PushReply) -> None:
        """Rejoin the server if it was restarted after its reply to this step."""

        def rejoin() -> None:
            self.apply_reply(reply)
            with self._busy_lock:
                self._rejoin(step)

        self._ensure_member(rejoin)

    def _open_memory(self, reply: JoinReply) -> None:
        """Map the memory of the server, and prepare for overlapped pushes if it shares none."""
        self._shares_gradients = reply.reads_shared_memory
        if self._overlap and not self._shares_gradients and self._overlapped is None:
            self._overlapped = OverlappedPush(
                self.spec.server_range,
                self._copy_bucket,
                self._send_bucket,
                self._runtime.threads.start,
            )
            self._flat.on_gradient_ready(self._on_gradient_ready)
        handle = reply.memory if self._flat.segment is not None else None
        self._server_memory = None if handle is None else flat_memory.open_shared(handle)
        self._published.clear()

    @property
    def _gradient_handle(self) -> SegmentHandle | None:
        return None if self._flat.segment is None else self._flat.segment.handle

    # Overlapped pushes

    def _on_gradient_ready(self, parameter: int) -> None:
        """Handle that the gradient of a parameter is in the flat memory."""
        assert self._overlapped is not None
        self._overlapped.on_gradient_ready(parameter)

    def _copy_bucket(self, bucket: GradientBucket) -> Tensor:
        gradients = self._range_of(self._flat.gradients)
        if self._compressor is not None:
            return self._compressor.preview(bucket, gradients)
        return bucket.of(self._dtype_ranges_of(gradients)).clone()

    def _send_bucket(self, index: int, contents: Tensor) -> None:
        arguments = (self.spec.name, self._trainer, self._last_step + 1, {index: contents})
        self._runtime.invoke(self.server, service.stage_gradients, arguments, None, None)

    # Steps

    def push(self, request: PushRequest) -> PushReply:
        """Send the gradients that are in the flat memory, and return the reply."""
        arguments = self._push_arguments(request)
        reply: PushReply = self._runtime.invoke(
            self.server, service.push, arguments, None, self._registration.step_timeout
        )
        return reply

    def start_push(self, request: PushRequest) -> Future[PushReply]:
        """Send the gradients that are in the flat memory, and return a future of the reply."""
        arguments = self._push_arguments(request)
        return self._runtime.start(
            self.server, service.push, arguments, None, self._registration.step_timeout
        )

    def retry_push(self, request: PushRequest, error: Exception) -> Future[PushReply]:
        """Wait for a lost server, rejoin it, and repeat a push that failed with `error`."""
        rejoin = partial(self._rejoin, request.step - 1)
        return self._rejoin_and_retry(rejoin, partial(self.start_push, request), error)

    def _push_arguments(self, request: PushRequest) -> tuple[Any, ...]:
        """Return the arguments of a push, without trailing arguments that have their defaults."""
        with self._busy_lock:
            self._busy = True
        step, version, changes, skip, written = request
        gradients = self._gradients_to_send(step, skip)
        self._last_step = step
        values = self._flat.copy_values(self.spec.server_range, written) if written else None
        by_value = self._server_memory is None
        usual = (self.spec.name, self._trainer, step, version, changes, gradients, by_value)
        if skip or values:
            return (*usual, self._flat.missing, skip, values)
        return (*usual, self._flat.missing) if self._flat.missing else usual

    def _gradients_to_send(self, step: int, skip: bool) -> Gradients | None:
        """Return the gradients that the server does not have yet; None if it needs none.

        It needs none if it reads them from shared memory, or if the step is skipped.
        """
        if self._overlapped is not None:
            self._overlapped.stop_sending()
        if skip:
            if self._overlapped is not None:
                self._overlapped.discard()
            return None
        gradients = self._range_of(self._flat.collected_gradients)
        if self._shares_gradients:
            return None if self._flat.in_place else gradients
        compressed = None
        if self._compressor is not None:
            compressed = self._compressor.pack(step, gradients, self._flat.missing)
        if self._overlapped is not None:
            to_send = self._dtype_ranges_of(gradients) if compressed is None else compressed
            unsent = self._overlapped.take_unsent(to_send)
            if len(unsent) < len(self._overlapped.buckets):
                return {bucket.bucket_index: bucket.of(to_send) for bucket in unsent}
        return gradients if compressed is None else compressed

    def _range_of(self, flat: Tensor) -> Tensor:
        return flat[self.spec.server_range.start : self.spec.server_range.stop]

    def _dtype_ranges_of(self, gradients: Tensor) -> list[Tensor]:
        return [each.of(gradients) for each in self.spec.server_range.dtype_ranges]

    def apply_reply(self, reply: PushReply) -> None:
        """Copy the values of a reply into the parameters. This completes the step."""
        if reply is self._last_reply:  # `ensure_member` has applied it already
            return
        is_applied = not (reply.dropped or reply.skipped or self._shares_gradients)
        if self._compressor is not None and is_applied:
            self._compressor.commit()
        source = reply
        if source.values is None and not self._read_published(reply.version):
            source = self._pull()
        if source.values is not None:
            self._write_values(source.values)
        self.version = source.version
        self._applied = source.applied or {}
        self._last_reply = reply
        with self._busy_lock:
            self._busy = False
        if reply.problem is not None:
            warnings.warn(
                f"parameter server {self.spec.name!r} on {self.server!r}: {reply.problem}",
                stacklevel=4,
            )

    def _pull(self) -> PushReply:
        """Fetch the values by a call. The server may be restarted meanwhile."""

        def attempt(_: Callable[[], None]) -> PushReply:
            try:
                reply: PushReply = self._runtime.invoke(
                    self.server, service.pull, (self.spec.name,)
                )
            except StaleReference:
                # the parameters are partly overwritten, so the server must not take them over
                self._rejoin(self._last_step, version=-1)
                raise
            return reply

        return retry_while_lost(attempt, 0.0 if self.spec.checkpoint is None else self._patience)

    def _write_values(self, values: Tensor) -> None:
        self._flat.write_values(
            self.spec.server_range, self._flat.part_views(self.spec.server_range, values)
        )

    def _read_published(self, version: int) -> bool:
        """Copy a published version. Return False if the server has begun to overwrite it."""
        assert self._server_memory is not None
        nbytes = self.spec.server_range.nbytes
        # the server writes each version into the next one of these copies
        copies = self._server_memory.contents.numel() // nbytes
        start = version % copies * nbytes
        if start not in self._published:
            published = self._server_memory.contents[start : start + nbytes]
            self._published[start] = self._flat.part_views(self.spec.server_range, published)
        self._flat.write_values(self.spec.server_range, self._published[start])
        return self._server_memory.counter[0] < version + copies

    # The optimizer's state

    def state(self) -> Future[list[State]]:
        """Fetch the optimizer's state, one entry for each part of the range."""
        return self._start(service.state)

    def load(self, states: dict[int, State], changes: dict[int, Options]) -> Future[None]:
        """Replace the optimizer's state, by parameter index, and change options of groups."""
        return self._start(service.load, states, changes)

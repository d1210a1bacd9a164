"""`CudaTransfers`: decide how each CUDA tensor travels, and keep the leases of device memory.

The receiver maps memory of the sender (`cuda/ipc.py`) and copies it on its current stream into
memory of its own. In most cases the sender makes a *snapshot* first, in the order of its stream, so
later writes to the tensor do not change what was sent. A large *exclusive* tensor is not copied:
an argument of a caller that waits for the reply, which the callee sends when it has copied, or a
result that nothing else refers to. Up to 64 KB that are ready are sent inside the message
(`cuda/small_copies.py`). If the processes cannot map each other's memory (other hosts, other
containers), tensors are sent through host memory (`cuda/staging.py`).

Memory that is sent is *leased* to the receiver. The lease ends when the receiver reports that its
copies have completed, with its next message or from the clock, or when the reply to a call with
exclusive tensors arrives. The sender asks for old leases, because their message may be lost.

State of `CudaTransfers`, changed under `_lock`: `_leases` (memory that receivers may still copy, by
lease id), `_receives` (copies of this worker that were not reported, oldest first) and `_revoked`
(leases that their sender has ended; a message that arrives later with such a lease is refused).
`_peers` is written once for each incarnation of a peer.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from telegrad.cuda import ipc, staging
from telegrad.cuda.exclusive import MIN_LEASE_BYTES
from telegrad.cuda.receive import CudaReceive, receive_inline_tensor, receive_tensor
from telegrad.cuda.send import CudaSend
from telegrad.cuda.small_copies import MAX_SMALL_COPY_BYTES, small_copies
from telegrad.current import find_runtime
from telegrad.errors import InternalError, SerializationError, TelegradError, UsageError
from telegrad.messages.packing import MessageContext, current_message, message_resource
from telegrad.server.functions import internal
from telegrad.wire import tensors
from telegrad.wire.tensors import Reduced

if TYPE_CHECKING:
    from telegrad.config import Config
    from telegrad.futures import Future
    from telegrad.group.membership import Directory, Member
    from telegrad.scheduling.clock import Clock
    from telegrad.scheduling.threads import ThreadPool
    from telegrad.wire.function_table import Function

# Completed copies of more bytes are reported at once instead of on the next tick of the clock.
_REPORT_AT_BYTES = 256 << 20
_OLD_LEASE = 60.0  # seconds after which a sender asks whether the receiver still needs a lease
_QUERY_INTERVAL = 15.0  # seconds between such questions
_QUERY_TIMEOUT = 120.0  # seconds; the peer may have to initialize CUDA first
_MAX_REVOKED = 10_000
# Seconds to wait for a small copy: two switches of the GPU between processes.
_SMALL_COPY_TIMEOUT = 0.0003
_CPU = torch.device("cpu")


class TransferRuntime(Protocol):
    """The part of the agent's runtime that `CudaTransfers` uses."""

    name: str
    config: Config
    closing: bool
    clock: Clock
    threads: ThreadPool
    directory: Directory
    local_member: Member

    def on_loss(self, listener: Callable[[str, str], None]) -> None: ...
    def on_close(self, listener: Callable[[], None]) -> None: ...
    def add_statistics(self, counters: Callable[[], dict[str, int]]) -> None: ...
    def is_lost(self, incarnation: str) -> bool: ...
    def start(
        self,
        to: str,
        function: Function,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
        internal: bool,
    ) -> Future[Any]: ...


class PeerDevices(NamedTuple):
    """What a peer reported about its GPUs."""

    gpu_count: int
    can_map: bool  # it can map memory of this worker


class _Lease(NamedTuple):
    """Memory that the worker with this incarnation may copy."""

    incarnation: str
    memory: list[object]
    granted_at: float


class CudaTransfers:
    """The transfers of CUDA tensors between one agent and its peers."""

    def __init__(self, runtime: Any) -> None:
        self.lease_ids: Iterator[int] = itertools.count(1)
        self._runtime: TransferRuntime = runtime
        self._lock = threading.Lock()
        self._peers: dict[str, PeerDevices] = {}
        self._leases: dict[int, _Lease] = {}
        self._receives: list[CudaReceive] = []
        self._revoked: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._last_query = 0.0
        self._is_watching = False
        runtime.on_loss(self._peer_lost)
        runtime.on_close(lambda: ipc.mappings.close_unused(0.0))
        runtime.add_statistics(self._statistics)

    def __repr__(self) -> str:
        return (
            f"<CudaTransfers of {self._runtime.name!r}: {len(self._leases)} leases, "
            f"{len(self._receives)} copies in progress>"
        )

    def _statistics(self) -> dict[str, int]:
        return {
            "cuda_tensors_lent": len(self._leases),
            "cuda_copies_under_way": len(self._receives),
            "cuda_allocations_mapped": len(ipc.mappings),
        }

    # Packing

    def reduce_tensor(self, context: MessageContext, tensor: Tensor, code: int) -> Reduced:
        """Return the constructor and arguments with which the receiver unpickles a tensor.

        The tensor must be a contiguous CUDA tensor.
        """
        device, route = tensor.device, context.route
        target = route.target(device)
        if target is None:
            raise UsageError(_unmapped_message(context, device))
        if target.type == "cpu":
            return tensors.reduce_as_it_is(staging.to_host(tensor, context.exclusive))
        peer = self._peers.get(context.incarnation) or self._query_peer(context, device.index)
        if target.index >= peer.gpu_count:
            if route.falls_back_to_cpu(device):
                return tensors.reduce_as_it_is(staging.to_host(tensor, context.exclusive))
            raise UsageError(
                f"a tensor on {device} would arrive on {target}, but worker {context.peer!r} has "
                f"{peer.gpu_count} CUDA devices: set its target device with set_device_map (or "
                f"Config.device_maps), for example {{{device.index}: 'cpu'}}, or send tensor.cpu()"
            )
        if not tensor.numel():
            return tensors.empty, (code, tuple(tensor.shape), str(target))
        size = tensor.numel() * tensor.itemsize
        if size <= MAX_SMALL_COPY_BYTES:
            data = small_copies(device.index).copy_to_host(tensor, size, _SMALL_COPY_TIMEOUT)
            if data is not None:
                return receive_inline_tensor, (data, target.index, code, tuple(tensor.shape))
        if peer.can_map:
            # An exclusive tensor whose own memory cannot be mapped is sent as a snapshot.
            for exclusive in (
                (True, False) if context.exclusive and size >= MIN_LEASE_BYTES else (False,)
            ):
                make_send = functools.partial(CudaSend, self, context, device.index, exclusive)
                try:
                    send = message_resource(("device", device.index, exclusive), make_send)
                    location = send.add(tensor, target.index)
                # no memory for a snapshot, or memory that cannot be mapped
                except (torch.OutOfMemoryError, ipc.CudaError):
                    continue
                return receive_tensor, (send, *location, target.index, code, tuple(tensor.shape))
        return staging.from_host, (
            *tensors.reduce_as_it_is(staging.to_host(tensor, context.exclusive)),
            target.index,
        )

    def add_lease(self, lease_id: int, incarnation: str, memory: list[object]) -> None:
        """Keep memory until the worker with this incarnation has copied it."""
        with self._lock:
            self._leases[lease_id] = _Lease(incarnation, memory, time.monotonic())
        self._watch_clock()
        if self._runtime.is_lost(incarnation):  # `_peer_lost` may have run before
            self.end_leases([lease_id])

    def end_leases(self, lease_ids: list[int]) -> None:
        """Drop the memory of leases that their receivers have copied."""
        with self._lock:
            for lease_id in lease_ids:
                self._leases.pop(lease_id, None)

    def cancel_leases(self, incarnation: str, lease_ids: list[int]) -> None:
        """Revoke the leases of a call that failed here, unless the callee has begun to copy."""
        self._runtime.threads.start(lambda: self._request_revocation({incarnation: lease_ids}))

    def completed_leases(self, incarnation: str) -> list[int]:
        """Return the leases of a peer whose copies have completed, each of them once."""
        if not self._receives:
            return []
        with self._lock:
            completed = [
                each
                for each in self._receives
                if each.incarnation == incarnation and each.is_copied()
            ]
            self._remove(completed)
        return [each.lease_id for each in completed if not each.is_settled]

    def _remove(self, receives: list[CudaReceive]) -> None:
        """Forget receives whose copies have completed. The lock is held."""
        if receives:
            self._receives = [each for each in self._receives if each not in receives]
            for receive in receives:
                receive.release_mappings()

    # Unpacking

    def open_receive(
        self,
        context: MessageContext,
        lease_id: int,
        uuid: str,
        event: bytes | None,
        completed: list[int],
        sender_device: int | None,
    ) -> CudaReceive:
        """Return the receiving side of a `CudaSend`, and end the leases that its sender completed.

        Raise `SerializationError` if the sender has revoked the lease.
        """
        self.end_leases(completed)
        index = ipc.device_uuids().index(uuid)
        receive = CudaReceive(self, context, lease_id, index, event, sender_device)
        with self._lock:
            if (context.incarnation, lease_id) in self._revoked:
                raise SerializationError(
                    f"worker {context.peer!r} has revoked the CUDA tensors of this message, which "
                    "arrived too late: its call failed or timed out before"
                )
            self._receives.append(receive)
        return message_resource(("receive", lease_id), lambda: receive)

    def copies_started(self) -> None:
        """Note that all copies of a message are enqueued."""
        self._watch_clock()
        if sum(each.size for each in self._receives if each.is_copied()) > _REPORT_AT_BYTES:
            self._runtime.threads.start(self._report_completed)

    def revoke_leases(self, incarnation: str, lease_ids: list[int]) -> list[int]:
        """Refuse leases of a peer from now on and return them, except those being copied."""
        with self._lock:
            busy = {each.lease_id for each in self._receives if each.incarnation == incarnation}
            unused = [lease_id for lease_id in lease_ids if lease_id not in busy]
            for lease_id in unused:
                self._revoked[incarnation, lease_id] = None
            while len(self._revoked) > _MAX_REVOKED:
                self._revoked.popitem(last=False)
        return unused

    def describe_devices(self, uuid: str, handle: bytes | None) -> tuple[int, bool]:
        """Return how many GPUs this worker has and whether it can map the memory of `handle`."""
        uuids = ipc.device_uuids()
        if handle is None or uuid not in uuids or not self._runtime.config.cuda_ipc:
            return len(uuids), False
        try:
            ipc.mappings.acquire(handle, uuids.index(uuid))
        except ipc.CudaError:
            return len(uuids), False
        ipc.mappings.release([handle])
        self._watch_clock()
        return len(uuids), True

    # Maintenance

    def tick(self) -> bool:
        """Start what is due: reports, queries and unmapping. The clock calls this."""
        if ipc.mappings.has_unused():
            self._runtime.threads.start(ipc.mappings.close_unused)
        if self._receives:
            if any(each.is_copied() for each in self._receives):
                self._runtime.threads.start(self._report_completed)
            return True
        if self._leases and time.monotonic() - self._last_query > _QUERY_INTERVAL:
            self._last_query = time.monotonic()
            self._runtime.threads.start(self._query_old_leases)
        return bool(self._leases) or len(ipc.mappings) > 0

    def _watch_clock(self) -> None:
        """Make sure that the clock calls `tick`."""
        clock = self._runtime.clock
        if not self._is_watching:
            self._is_watching = True
            clock.watch(self)
        if not clock.awake:
            clock.wake()

    def _report_completed(self) -> None:
        """Tell the senders which leases were copied."""
        with self._lock:
            incarnations = {each.incarnation for each in self._receives}
        for incarnation in incarnations:
            completed = self.completed_leases(incarnation)
            if completed and not self._runtime.closing and not self._runtime.is_lost(incarnation):
                try:
                    self._runtime.start(
                        self._name_of(incarnation),
                        _end_leases,
                        (completed,),
                        None,
                        None,
                        internal=True,
                    )
                except TelegradError:
                    continue  # it cannot be reached now; if it is not lost, it asks later

    def _query_old_leases(self) -> None:
        """Revoke old leases. Their message may be lost, as when its caller timed out."""
        old: dict[str, list[int]] = {}
        with self._lock:
            for lease_id, lease in self._leases.items():
                if time.monotonic() - lease.granted_at > _OLD_LEASE:
                    old.setdefault(lease.incarnation, []).append(lease_id)
        self._request_revocation(old)

    def _request_revocation(self, leases: dict[str, list[int]]) -> None:
        """Ask receivers to revoke leases, given by incarnation, and end those that they revoked."""
        for incarnation, lease_ids in leases.items():
            if self._runtime.closing or self._runtime.is_lost(incarnation):
                continue  # `_peer_lost` ends the leases
            reply = self._runtime.start(
                self._name_of(incarnation),
                _revoke_leases,
                (self._runtime.local_member.incarnation, lease_ids),
                None,
                _OLD_LEASE,
                internal=True,
            )
            try:
                self.end_leases(reply.wait())
            except TelegradError:
                continue  # if it is lost, `_peer_lost` ends the leases; if not, it is asked again

    def _query_peer(self, context: MessageContext, index: int) -> PeerDevices:
        """Ask a peer about its GPUs, and whether it can map memory of device `index`."""
        handle: bytes | None = None
        if self._runtime.config.cuda_ipc:
            try:
                handle = ipc.exports(index).slab_location.handle
            except ipc.CudaError:
                # Memory cannot be exported with the allocator setting `expandable_segments`.
                handle = None
        reply = self._runtime.start(
            context.peer,
            _describe_devices,
            (ipc.device_uuids()[index], handle),
            None,
            _QUERY_TIMEOUT,
            internal=True,
        )
        peer = self._peers[context.incarnation] = PeerDevices(*reply.wait())
        return peer

    def _name_of(self, incarnation: str) -> str:
        return self._runtime.directory.name_of(incarnation)

    def _peer_lost(self, name: str, incarnation: str) -> None:
        """End the leases of a lost peer."""
        with self._lock:
            for lease_id in [
                lease_id
                for lease_id, lease in self._leases.items()
                if lease.incarnation == incarnation
            ]:
                del self._leases[lease_id]
        self._peers.pop(incarnation, None)


class CudaCarrier:
    """Let the codec ask the agent whose message is being packed how a tensor travels."""

    def leaving(self, tensor: Tensor, code: int) -> Reduced | None:
        """Return how a CUDA tensor travels; None if the codec should decide."""
        context = current_message()
        if context is None or not tensor.is_cuda:
            return None
        return context.agent.devices.reduce_tensor(context, tensor, code)

    def leaving_host(self, tensor: Tensor) -> str | None:
        """Return the device on which a CPU tensor arrives; None if it is the CPU."""
        context = current_message()
        target = None if context is None else context.route.target(_CPU)
        return None if target is None or target == _CPU else str(target)


tensors.set_device_carrier(CudaCarrier())


def _unmapped_message(context: MessageContext, device: torch.device) -> str:
    """Return an error message in torch's wording."""
    if context.route.is_reply:
        return (
            f"Response device mapping is not available for worker {context.peer!r}: the result has "
            f"tensors on {device}, which the device map of that worker does not contain"
        )
    return (
        "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to "
        f"CPU before sending them to worker {context.peer!r}, or call `set_device_map` on "
        f"`TensorPipeRpcBackendOptions` to set the device on which those on {device} arrive"
    )


def _current_transfers() -> CudaTransfers:
    """Return the transfers of the agent that serves the current call."""
    runtime = find_runtime()
    if runtime is None:
        raise InternalError("a call about CUDA memory arrived without an agent")
    transfers: CudaTransfers = runtime.devices
    return transfers


@internal
def _describe_devices(uuid: str, handle: bytes | None) -> tuple[int, bool]:
    return _current_transfers().describe_devices(uuid, handle)


@internal
def _end_leases(lease_ids: list[int]) -> None:
    _current_transfers().end_leases(lease_ids)


@internal
def _revoke_leases(incarnation: str, lease_ids: list[int]) -> list[int]:
    return _current_transfers().revoke_leases(incarnation, lease_ids)

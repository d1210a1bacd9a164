"""CUDA tensors on their way between workers: which device they arrive on, and how they get there.

The receiver maps memory of the sender (`cuda/ipc.py`) and copies what it was told to copy, on its
current stream, into memory of its own. As a rule the sender makes a *snapshot* first, in the order
of its stream, so whoever writes to the tensor after the call was sent changes nothing that was
sent. A large tensor *at rest* is lent as it is: one whose caller waits for the answer, which the
callee gives when it has copied, and a result that nobody else refers to. A few bytes that are ready
go inside the message (`cuda/small_copies.py`). Where processes cannot map each other's memory
(other hosts, other containers), tensors go through page-locked host memory.

State of `CudaTransfers`, under `_lock`: `_leases` (what receivers have not given back, by number),
`_receives` (copies that this worker has begun, oldest first) and `_revoked` (numbers that the
sender was told to take back: a message that still comes with one is refused). What is known of a
peer is written once per incarnation.
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

# bytes that are given back at once when they are copied, instead of on the next tick
_REPORT_AT_BYTES = 256 << 20
_OLD_LEASE = 60.0  # seconds after which a sender asks what became of a snapshot
_QUERY_INTERVAL = 15.0
_QUERY_TIMEOUT = 120.0  # seconds that a peer may take to start CUDA
_MAX_REVOKED = 10_000
# seconds that few bytes may be waited for: two switches of the GPU between processes
_SMALL_COPY_TIMEOUT = 0.0003
_CPU = torch.device("cpu")


class TransferRuntime(Protocol):
    """What `CudaTransfers` needs of the runtime of its agent."""

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
    """What another worker said of its GPUs."""

    gpu_count: int
    can_map: bool  # can it map memory of ours?


class _Lease(NamedTuple):
    incarnation: str
    memory: list[object]
    granted_at: float


class CudaTransfers:
    """The GPUs of one agent and of its peers."""

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
        return f"<CudaTransfers of {self._runtime.name!r}: {len(self._leases)} lent, {len(self._receives)} taken>"

    def _statistics(self) -> dict[str, int]:
        return {
            "cuda_tensors_lent": len(self._leases),
            "cuda_copies_under_way": len(self._receives),
            "cuda_allocations_mapped": len(ipc.mappings),
        }

    # Packing

    def reduce_tensor(self, context: MessageContext, tensor: Tensor, code: int) -> Reduced:
        """How a contiguous CUDA tensor travels."""
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
                f"a tensor on {device} would arrive on {target}, but worker {context.peer!r} has {peer.gpu_count} CUDA "
                f"devices: say where it should arrive with set_device_map (or Config.device_maps), for example "
                f"{{{device.index}: 'cpu'}}, or send tensor.cpu()"
            )
        if not tensor.numel():
            return tensors.empty, (code, tuple(tensor.shape), str(target))
        size = tensor.numel() * tensor.itemsize
        if size <= MAX_SMALL_COPY_BYTES:
            data = small_copies(device.index).copy_to_host(tensor, size, _SMALL_COPY_TIMEOUT)
            if data is not None:
                return receive_inline_tensor, (data, target.index, code, tuple(tensor.shape))
        if peer.can_map:
            for exclusive in (
                (True, False) if context.exclusive and size >= MIN_LEASE_BYTES else (False,)
            ):
                make_send = functools.partial(CudaSend, self, context, device.index, exclusive)
                try:
                    send = message_resource(("device", device.index, exclusive), make_send)
                    location = send.add(tensor, target.index)
                # no room for a snapshot; memory that cannot be mapped
                except (torch.OutOfMemoryError, ipc.CudaError):
                    continue
                return receive_tensor, (send, *location, target.index, code, tuple(tensor.shape))
        return staging.from_host, (
            *tensors.reduce_as_it_is(staging.to_host(tensor, context.exclusive)),
            target.index,
        )

    def add_lease(self, lease_id: int, incarnation: str, memory: list[object]) -> None:
        with self._lock:
            self._leases[lease_id] = _Lease(incarnation, memory, time.monotonic())
        self._watch_clock()
        if self._runtime.is_lost(incarnation):
            self.end_leases([lease_id])

    def end_leases(self, lease_ids: list[int]) -> None:
        """Receivers have copied these."""
        with self._lock:
            for lease_id in lease_ids:
                self._leases.pop(lease_id, None)

    def cancel_leases(self, incarnation: str, lease_ids: list[int]) -> None:
        """A call with tensors at rest has failed here: if the callee has not begun to copy them, it must not."""
        self._runtime.threads.start(lambda: self._request_revocation({incarnation: lease_ids}))

    def completed_leases(self, incarnation: str) -> list[int]:
        """Numbers of what a peer has lent and was copied, each said once."""
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
        self.end_leases(completed)
        index = ipc.device_uuids().index(uuid)
        receive = CudaReceive(self, context, lease_id, index, event, sender_device)
        with self._lock:
            if (context.incarnation, lease_id) in self._revoked:
                raise SerializationError(
                    f"a message of worker {context.peer!r} came so late that its CUDA tensors had been taken back"
                )
            self._receives.append(receive)
        return message_resource(("receive", lease_id), lambda: receive)

    def copies_started(self) -> None:
        """All copies that a message asked for are under way."""
        self._watch_clock()
        if sum(each.size for each in self._receives if each.is_copied()) > _REPORT_AT_BYTES:
            self._runtime.threads.start(self._report_completed)

    def revoke_leases(self, incarnation: str, lease_ids: list[int]) -> list[int]:
        """Which of what a peer has lent is not in use here; messages that bring it later are refused."""
        with self._lock:
            busy = {each.lease_id for each in self._receives if each.incarnation == incarnation}
            unused = [lease_id for lease_id in lease_ids if lease_id not in busy]
            for lease_id in unused:
                self._revoked[incarnation, lease_id] = None
            while len(self._revoked) > _MAX_REVOKED:
                self._revoked.popitem(last=False)
        return unused

    def describe_devices(self, uuid: str, handle: bytes | None) -> tuple[int, bool]:
        """A peer asks what it may send here: how many GPUs there are, and whether its memory can be mapped."""
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

    # Upkeep

    def tick(self) -> bool:
        """On the clock: give back what has been copied, and what has not been used for long."""
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
        clock = self._runtime.clock
        if not self._is_watching:
            self._is_watching = True
            clock.watch(self)
        if not clock.awake:
            clock.wake()

    def _report_completed(self) -> None:
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
                    continue  # it cannot be reached now; if it is not lost, it will ask

    def _query_old_leases(self) -> None:
        """Messages can be lost between packing and unpacking (a caller that timed out): what became of them?"""
        old: dict[str, list[int]] = {}
        with self._lock:
            for lease_id, lease in self._leases.items():
                if time.monotonic() - lease.granted_at > _OLD_LEASE:
                    old.setdefault(lease.incarnation, []).append(lease_id)
        self._request_revocation(old)

    def _request_revocation(self, leases: dict[str, list[int]]) -> None:
        for incarnation, lease_ids in leases.items():
            if self._runtime.closing or self._runtime.is_lost(incarnation):
                continue  # `_peer_lost` is told
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
                continue  # if it is lost, `_peer_lost` is told; if not, it is asked again

    def _query_peer(self, context: MessageContext, index: int) -> PeerDevices:
        handle: bytes | None = None
        if self._runtime.config.cuda_ipc:
            try:
                handle = ipc.exports(index).slab_location.handle
            except ipc.CudaError:
                # such memory as `expandable_segments` has cannot be mapped by others
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
        with self._lock:
            for lease_id in [
                lease_id
                for lease_id, lease in self._leases.items()
                if lease.incarnation == incarnation
            ]:
                del self._leases[lease_id]
        self._peers.pop(incarnation, None)


class CudaCarrier:
    """Lets the codec ask the agent whose message it is packing."""

    def leaving(self, tensor: Tensor, code: int) -> Reduced | None:
        context = current_message()
        if context is None or not tensor.is_cuda:
            return None
        return context.agent.devices.reduce_tensor(context, tensor, code)

    def leaving_host(self, tensor: Tensor) -> str | None:
        context = current_message()
        target = None if context is None else context.route.target(_CPU)
        return None if target is None or target == _CPU else str(target)


tensors.set_device_carrier(CudaCarrier())


def _unmapped_message(context: MessageContext, device: torch.device) -> str:
    if context.route.is_reply:
        return (
            f"Response device mapping is not available for worker {context.peer!r}: the result has tensors on "
            f"{device}, and that worker's device map says nothing about them"
        )
    return (
        f"TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before sending "
        f"them to worker {context.peer!r}, or call `set_device_map` on `TensorPipeRpcBackendOptions` to say where "
        f"those on {device} should arrive"
    )


def _current_transfers() -> CudaTransfers:
    runtime = find_runtime()
    if runtime is None:
        raise InternalError("CUDA tensors need an agent")
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

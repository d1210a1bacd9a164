"""`CudaTransfers`: keep the leases of device memory between one agent and its peers.

Device memory that a message refers to is *leased* to the receiver (`cuda/packing.py` says which
tensors are sent so). The lease ends when the receiver reports that its copies have completed, with
its next message or from the clock, or when the reply to a call with exclusive tensors arrives. The
sender asks about old leases, because their message may be lost.

State of `CudaTransfers`, changed under `_lock`: `_leases` (memory that receivers may still copy, by
lease id), `_receives` (copies of this worker that were not reported, oldest first) and `_revoked`
(leases that their sender has ended; a message that arrives later with such a lease is refused).
`peers` is written once for each incarnation of a peer.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from telegrad.cuda import driver, ipc
from telegrad.cuda.packing import CudaReducer, PeerDevices
from telegrad.cuda.receive import CudaReceive
from telegrad.current import find_runtime
from telegrad.errors import InternalError, SerializationError, TelegradError
from telegrad.messages.packing import MessageContext, message_resource
from telegrad.messages.remote_functions import internal
from telegrad.wire import tensors
from telegrad.wire.handshake import Incarnation

if TYPE_CHECKING:
    from telegrad.config import Config
    from telegrad.futures import Future
    from telegrad.group.membership import Directory, Member
    from telegrad.messages.remote_functions import Function
    from telegrad.scheduling.clock import Clock
    from telegrad.scheduling.executor import ThreadPool

# Completed copies of more bytes are reported at once instead of on the next tick of the clock.
_REPORT_AT_BYTES = 256 << 20
_OLD_LEASE = 60.0  # seconds after which a sender asks whether the receiver still needs a lease
_QUERY_INTERVAL = 15.0  # seconds between such questions
_QUERY_TIMEOUT = 120.0  # seconds; the peer may have to initialize CUDA first
_MAX_REVOKED = 10_000


class TransferRuntime(Protocol):
    """The part of the agent's runtime that `CudaTransfers` uses."""

    name: str
    config: Config
    closing: bool
    clock: Clock
    threads: ThreadPool
    directory: Directory
    local_member: Member

    def on_loss(self, listener: Callable[[str, Incarnation], None]) -> None: ...
    def on_close(self, listener: Callable[[], None]) -> None: ...
    def add_statistics(self, counters: Callable[[], dict[str, int]]) -> None: ...
    def is_lost(self, incarnation: Incarnation) -> bool: ...
    def start(
        self,
        to: str,
        function: Function,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
        internal: bool,
    ) -> Future[Any]: ...


class _Lease(NamedTuple):
    """Memory that the worker with this incarnation may copy."""

    incarnation: Incarnation
    memory: list[object]
    granted_at: float

    @property
    def nbytes(self) -> int:
        """The size of the lent tensors; not of small snapshots, which are in a slab."""
        return sum(each.nbytes for each in self.memory if isinstance(each, Tensor))


class CudaTransfers:
    """The transfers of CUDA tensors between one agent and its peers."""

    def __init__(self, runtime: TransferRuntime) -> None:
        self.lease_ids: Iterator[int] = itertools.count(1)
        self._runtime = runtime
        self._lock = threading.Lock()
        self.peers: dict[Incarnation, PeerDevices] = {}
        self._leases: dict[int, _Lease] = {}
        self._receives: list[CudaReceive] = []
        self._revoked: OrderedDict[tuple[Incarnation, int], None] = OrderedDict()
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
            "cuda_bytes_lent": sum(lease.nbytes for lease in list(self._leases.values())),
            "cuda_copies_under_way": len(self._receives),
            "cuda_allocations_mapped": len(ipc.mappings),
        }

    # Leases of this worker's memory

    def add_lease(self, lease_id: int, incarnation: Incarnation, memory: list[object]) -> None:
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

    def cancel_leases(self, incarnation: Incarnation, lease_ids: list[int]) -> None:
        """Revoke the leases of a call that failed here, unless the callee has begun to copy."""
        self._runtime.threads.start(lambda: self._request_revocation({incarnation: lease_ids}))

    def completed_leases(self, incarnation: Incarnation) -> list[int]:
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
        return [each.lease_id for each in completed if not each.ended_by_reply]

    def _remove(self, receives: list[CudaReceive]) -> None:
        """Forget receives whose copies have completed. The lock is held."""
        if receives:
            self._receives = [each for each in self._receives if each not in receives]
            for receive in receives:
                receive.release_mappings()

    # Leases of the memory of peers

    def open_receive(
        self,
        context: MessageContext,
        lease_id: int,
        uuid: str,
        event: bytes | None,
        completed: list[int],
        sender_device: int | None,
    ) -> CudaReceive:
        """Return the receiving side of a `CudaSend`, and end the leases that it reports.

        Raise `SerializationError` if the sender has revoked the lease.
        """
        self.end_leases(completed)
        index = driver.device_uuids().index(uuid)
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

    def revoke_leases(self, incarnation: Incarnation, lease_ids: list[int]) -> list[int]:
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
        uuids = driver.device_uuids()
        if handle is None or uuid not in uuids or not self._runtime.config.cuda_ipc:
            return len(uuids), False
        try:
            ipc.mappings.acquire(handle, uuids.index(uuid))
        except driver.CudaError:
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
            clock.add_listener(self)
        if not clock.is_ticking:
            clock.start_ticking()

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
        old: dict[Incarnation, list[int]] = {}
        with self._lock:
            for lease_id, lease in self._leases.items():
                if time.monotonic() - lease.granted_at > _OLD_LEASE:
                    old.setdefault(lease.incarnation, []).append(lease_id)
        self._request_revocation(old)

    def _request_revocation(self, leases: dict[Incarnation, list[int]]) -> None:
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

    def query_peer(self, context: MessageContext, index: int) -> PeerDevices:
        """Ask a peer about its GPUs, and whether it can map memory of device `index`."""
        handle: bytes | None = None
        if self._runtime.config.cuda_ipc:
            try:
                handle = ipc.exports(index).slab_location.handle
            except driver.CudaError:
                # Memory cannot be exported with the allocator setting `expandable_segments`.
                handle = None
        reply = self._runtime.start(
            context.peer,
            _describe_devices,
            (driver.device_uuids()[index], handle),
            None,
            _QUERY_TIMEOUT,
            internal=True,
        )
        peer = self.peers[context.incarnation] = PeerDevices(*reply.wait())
        return peer

    def _name_of(self, incarnation: Incarnation) -> str:
        return self._runtime.directory.name_of(incarnation)

    def _peer_lost(self, name: str, incarnation: Incarnation) -> None:
        """End the leases of a lost peer."""
        with self._lock:
            for lease_id, lease in list(self._leases.items()):
                if lease.incarnation == incarnation:
                    del self._leases[lease_id]
        self.peers.pop(incarnation, None)


tensors.set_device_reducer(CudaReducer())


def _current_transfers() -> CudaTransfers:
    """Return the transfers of the agent that serves the current call."""
    runtime = find_runtime()
    if runtime is None:
        raise InternalError("a call about CUDA memory arrived without an agent")
    transfers: CudaTransfers = runtime.cuda_transfers
    return transfers


@internal
def _describe_devices(uuid: str, handle: bytes | None) -> tuple[int, bool]:
    return _current_transfers().describe_devices(uuid, handle)


@internal
def _end_leases(lease_ids: list[int]) -> None:
    _current_transfers().end_leases(lease_ids)


@internal
def _revoke_leases(incarnation: Incarnation, lease_ids: list[int]) -> list[int]:
    return _current_transfers().revoke_leases(incarnation, lease_ids)

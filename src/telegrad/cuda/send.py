"""`CudaSend`: the CUDA memory of one device that one message refers to, on the sending side.

A message has at most one `CudaSend` for snapshots and one for exclusive tensors of each device. It
is pickled with the message as a lease id and an event, and unpickled as a `CudaReceive`.

State: a `CudaSend` is used only by the thread that packs its message. When the message is packed,
`CudaTransfers` keeps the memory until the receiver has copied it.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from telegrad.cuda import driver, ipc
from telegrad.errors import InternalError
from telegrad.messages.packing import (
    LentResource,
    MessageContext,
    current_message,
    keep_until_answered,
)
from telegrad.wire.handshake import Incarnation
from telegrad.wire.tensors import EXTENSION_CODE


class LeaseLedger(Protocol):
    """The part of `CudaTransfers` that `CudaSend` uses."""

    lease_ids: Iterator[int]

    def add_lease(self, lease_id: int, incarnation: Incarnation, memory: list[object]) -> None: ...
    def end_leases(self, lease_ids: list[int]) -> None: ...
    def cancel_leases(self, incarnation: Incarnation, lease_ids: list[int]) -> None: ...
    def completed_leases(self, incarnation: Incarnation) -> list[int]: ...


class CudaSend(LentResource):
    """The snapshots, or the exclusive tensors, that one message sends from one device."""

    def __init__(
        self, transfers: LeaseLedger, context: MessageContext, index: int, exclusive: bool
    ) -> None:
        self._transfers = transfers
        self._exclusive = exclusive
        self._incarnation = context.incarnation
        self._exports = ipc.exports(index)
        self._stream = torch.cuda.current_stream(index)
        # An exclusive tensor on an idle stream is complete: the receiver needs no event.
        self._event = (
            None if exclusive and self._stream.query() else self._exports.event(self._stream)
        )
        self._uuid = driver.device_uuids()[index]
        self._lease_id = next(transfers.lease_ids)
        self._completed_leases: list[int] | None = None
        self._index = index
        self._targets: set[int] = set()
        self._leased_memory: list[object] = []

    def __reduce__(self) -> tuple[Any, ...]:
        event = None if self._event is None else self._event.handle
        # Packing may start again, but each completed lease is reported only once.
        if self._completed_leases is None:
            self._completed_leases = self._transfers.completed_leases(self._incarnation)
        return _open_receive, (
            self._lease_id,
            self._uuid,
            event,
            self._completed_leases,
            self._index if self._exclusive else None,
        )

    def add(self, tensor: Tensor, target: int) -> ipc.MemoryLocation:
        """Add a tensor for the receiver's device `target` and return the location of its bytes."""
        if self._exclusive:
            location = self._exports.export(tensor)
            tensor.record_stream(self._stream)
            self._leased_memory.append(tensor)
        else:
            location, snapshot = self._exports.snapshot(tensor, self._stream)
            self._leased_memory.append(snapshot)
        self._targets.add(target)
        return location

    def orders_after(self, stream: torch.cuda.Stream, target: int) -> bool:
        """Return whether the receiver's device `target` waits for the work enqueued on `stream`."""
        return stream == self._stream and target in self._targets

    def finish(self) -> None:
        """Record the event and start the lease, when the message is packed."""
        if not self._leased_memory:  # no tensor could be added; they are sent in another way
            return
        if self._event is not None:
            self._event.event.record(self._stream)
        self._transfers.add_lease(self._lease_id, self._incarnation, self._leased_memory)
        if self._exclusive:
            keep_until_answered(self)

    def on_call_ended(self, answered: bool) -> None:
        """End the lease when the call is over; if it failed here, tell the callee not to copy."""
        if answered:
            self._transfers.end_leases([self._lease_id])
        else:
            self._transfers.cancel_leases(self._incarnation, [self._lease_id])


def _open_receive(
    lease_id: int,
    uuid: str,
    event: bytes | None,
    completed_leases: list[int],
    sender_device: int | None,
) -> object:
    """Return the `CudaReceive` that a pickled `CudaSend` becomes."""
    context = current_message()
    if context is None:
        raise InternalError("a CUDA tensor was unpickled outside of a message")
    return context.runtime.cuda_transfers.open_receive(
        context, lease_id, uuid, event, completed_leases, sender_device
    )


copyreg.add_extension(__name__, _open_receive.__name__, EXTENSION_CODE + 18)

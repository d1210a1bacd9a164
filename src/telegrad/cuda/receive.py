"""`CudaReceive`: the CUDA memory of one sending device that one message refers to, on the receiver.

A `CudaReceive` enqueues the copies of its tensors on the streams that are current when the message
is unpacked. `InlineReceive` does the same for small tensors whose bytes are inside the message.

State: both are used by the thread that unpacks the message, then by the thread that runs the call
(`join`, `prepare_reply`). `CudaTransfers` keeps a `CudaReceive` until its copies have completed.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from telegrad.cuda import driver, ipc
from telegrad.cuda.send import CudaSend
from telegrad.cuda.small_copies import small_copies
from telegrad.messages.packing import MessageContext, message_resource
from telegrad.wire.tensors import EXTENSION_CODE, build_empty


class ReceiveListener(Protocol):
    """The part of `CudaTransfers` that `CudaReceive` uses."""

    def copies_started(self) -> None: ...


class CudaReceive:
    """The tensors that one message brings from one device of its sender."""

    def __init__(
        self,
        transfers: ReceiveListener,
        context: MessageContext,
        lease_id: int,
        index: int,
        event: bytes | None,
        sender_device: int | None,
    ) -> None:
        self.lease_id = lease_id
        self.incarnation = context.incarnation
        self.size = 0
        self.ended_by_reply = False  # the reply ends the lease, so no report is needed
        self._transfers = transfers
        self._index = index
        self._event = None if event is None else ipc.mappings.event(event, index)
        # For exclusive tensors, the sender's index of its device; None for snapshots.
        self._sender_device = sender_device
        self._bases: dict[bytes, int] = {}
        self._tensors: list[Tensor] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._events: list[Any] | None = None  # of torch.cuda.Event

    def copy(
        self, location: ipc.MemoryLocation, index: int, code: int, shape: tuple[int, ...]
    ) -> Tensor:
        """Return a new tensor on device `index` and enqueue the copy of its bytes."""
        tensor = build_empty(code, shape, f"cuda:{index}")
        size = tensor.numel() * tensor.itemsize
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = torch.cuda.current_stream(index)
            if self._event is not None:
                stream.wait_event(self._event)
        base = self._bases.get(location.handle)
        if base is None:
            base = self._bases[location.handle] = ipc.mappings.acquire(location.handle, self._index)
        driver.copy_async(tensor.data_ptr(), base + location.offset, size, stream)
        self._tensors.append(tensor)
        self.size += size
        return tensor

    def finish(self) -> None:
        """Record the end of the copies, when the message is unpacked."""
        self._events = [stream.record_event() for stream in self._streams.values()]
        self._transfers.copies_started()

    def is_copied(self) -> bool:
        """Return whether all copies have completed."""
        return self._events is not None and all(event.query() for event in self._events)

    def release_mappings(self) -> None:
        """Release the mapped memory, when the copies have completed."""
        ipc.mappings.release(self._bases)

    def forget(self) -> None:
        """Drop the tensors that are kept for `wait_on_current_stream`, which will not be called."""
        self._tensors.clear()

    def prepare_reply(self, reply_resources: Collection[object] = ()) -> None:
        """Order the copies before the reply, which ends the lease of the sender.

        If the reply contains tensors that are sent from the stream of the copies, the stream of
        the sender waits for them and therefore for the copies. Otherwise block until the copies
        have completed.
        """
        if self._sender_device is None or self.ended_by_reply:
            return
        self.ended_by_reply = True
        sends = [each for each in reply_resources if isinstance(each, CudaSend)]
        for stream, event in zip(self._streams.values(), self._events or (), strict=True):
            if not any(each.orders_after(stream, self._sender_device) for each in sends):
                event.synchronize()

    def wait_on_current_stream(self) -> None:
        """Make the streams of this thread wait for the copies, if others enqueued them."""
        for (index, stream), event in zip(self._streams.items(), self._events or (), strict=True):
            current = torch.cuda.current_stream(index)
            if current != stream:
                current.wait_event(event)
                for tensor in self._tensors:
                    if tensor.device.index == index:
                        tensor.record_stream(current)


class InlineReceive:
    """The tensors for one device whose bytes are inside the message."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._stream = driver.current_raw_stream(index)
        self._tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        """Add a tensor whose copy to the device is enqueued."""
        self._tensors.append(tensor)

    def finish(self) -> None:
        """Do nothing: there is no lease."""

    def prepare_reply(self, reply_resources: Collection[object] = ()) -> None:
        """Do nothing: there is no lease."""

    def forget(self) -> None:
        """Drop the tensors that are kept for `wait_on_current_stream`, which will not be called."""
        self._tensors.clear()

    def wait_on_current_stream(self) -> None:
        """Make the current stream wait for the copies, if another stream has them."""
        if driver.current_raw_stream(self._index) != self._stream:
            current = torch.cuda.current_stream(self._index)
            current.wait_stream(_torch_stream(self._stream, self._index))
            for tensor in self._tensors:
                tensor.record_stream(current)


def _torch_stream(stream: int, index: int) -> torch.cuda.Stream:
    """Return the torch stream of a stream handle of the driver."""
    if not stream:
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(stream, device=index)  # type: ignore[no-untyped-call]


def receive_tensor(
    receive: CudaReceive, handle: bytes, offset: int, index: int, code: int, shape: tuple[int, ...]
) -> Tensor:
    """Unpickle a tensor that its sender leases."""
    return receive.copy(ipc.MemoryLocation(handle, offset), index, code, shape)


def receive_inline_tensor(data: bytes, index: int, code: int, shape: tuple[int, ...]) -> Tensor:
    """Unpickle a tensor whose bytes are inside the message."""
    tensor = small_copies(index).copy_to_device(data, code, shape)
    message_resource(("receive_inline_tensor", index), functools.partial(InlineReceive, index)).add(
        tensor
    )
    return tensor


copyreg.add_extension(__name__, receive_tensor.__name__, EXTENSION_CODE + 16)
copyreg.add_extension(__name__, receive_inline_tensor.__name__, EXTENSION_CODE + 17)

"""`CudaReceive`: what one message brought from one device, where it is unpacked.

An arrival belongs to the thread that unpacks its message; `CudaTransfers` holds it from then on until it is copied.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Collection
from typing import Any, Protocol

import torch
from torch import Tensor

from telegrad.cuda import ipc
from telegrad.cuda.send import CudaSend
from telegrad.cuda.small_copies import small_copies
from telegrad.messages.packing import MessageContext, message_resource
from telegrad.wire import tensors


class ReceiveListener(Protocol):
    """What a `CudaReceive` needs of `CudaTransfers`."""

    def copies_started(self) -> None: ...


class CudaReceive:
    """What one message brought from one device of its sender."""

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
        self.is_settled = False  # the sender need not be told
        self._transfers = transfers
        self._index = index
        self._event = None if event is None else ipc.mappings.event(event, index)
        self._sender_device = (
            sender_device  # where it is at rest: what the sender calls that device
        )
        self._bases: dict[bytes, int] = {}
        self._tensors: list[Tensor] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._events: list[Any] | None = None  # of torch.cuda.Event

    def copy(
        self, location: ipc.MemoryLocation, index: int, code: int, shape: tuple[int, ...]
    ) -> Tensor:
        tensor = tensors.empty(code, shape, f"cuda:{index}")
        size = tensor.numel() * tensor.itemsize
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = torch.cuda.current_stream(index)
            if self._event is not None:
                stream.wait_event(self._event)
        base = self._bases.get(location.handle)
        if base is None:
            base = self._bases[location.handle] = ipc.mappings.acquire(location.handle, self._index)
        ipc.copy_async(tensor.data_ptr(), base + location.offset, size, stream)
        self._tensors.append(tensor)
        self.size += size
        return tensor

    def finish(self) -> None:
        """The message is unpacked."""
        self._events = [stream.record_event() for stream in self._streams.values()]
        self._transfers.copies_started()

    def is_copied(self) -> bool:
        return self._events is not None and all(event.query() for event in self._events)

    def release_mappings(self) -> None:
        """It is copied, and its sender knows or is told now."""
        ipc.mappings.release(self._bases)

    def forget(self) -> None:
        """Nobody will call `join`."""
        self._tensors.clear()

    def settle(self, reply_resources: Collection[object] = ()) -> None:
        """The call that brought this is about to be answered: its sender takes back what it lent.

        If tensors that go back with the answer are made on the stream that copies, the sender waits for them, and so
        for the copies. If not, this waits.
        """
        if self._sender_device is None or self.is_settled:
            return
        self.is_settled = True
        sends = [each for each in reply_resources if isinstance(each, CudaSend)]
        for stream, event in zip(self._streams.values(), self._events or (), strict=True):
            if not any(each.orders_after(stream, self._sender_device) for each in sends):
                event.synchronize()

    def join(self) -> None:
        """The thread that uses the tensors may be on other streams than the one that unpacked them."""
        for (index, stream), event in zip(self._streams.items(), self._events or (), strict=True):
            current = torch.cuda.current_stream(index)
            if current != stream:
                current.wait_event(event)
                for tensor in self._tensors:
                    if tensor.device.index == index:
                        tensor.record_stream(current)


class InlineReceive:
    """The tensors for one device that came inside of a message."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._stream = ipc.current_raw_stream(index)
        self._tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        self._tensors.append(tensor)

    def finish(self) -> None:
        return  # the sender lends nothing

    def settle(self, reply_resources: Collection[object] = ()) -> None:
        return

    def forget(self) -> None:
        """Nobody will call `join`."""
        self._tensors.clear()

    def join(self) -> None:
        """The thread that uses the tensors may be on another stream than the one that unpacked them."""
        if ipc.current_raw_stream(self._index) != self._stream:
            current = torch.cuda.current_stream(self._index)
            current.wait_stream(_torch_stream(self._stream, self._index))
            for tensor in self._tensors:
                tensor.record_stream(current)


def _torch_stream(stream: int, index: int) -> torch.cuda.Stream:
    """What torch calls a stream of the driver's."""
    if not stream:
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(stream, device=index)  # type: ignore[no-untyped-call]


def receive_tensor(
    receive: CudaReceive, handle: bytes, offset: int, index: int, code: int, shape: tuple[int, ...]
) -> Tensor:
    """A tensor that came with an arrival; what travels instead of it."""
    return receive.copy(ipc.MemoryLocation(handle, offset), index, code, shape)


def receive_inline_tensor(data: bytes, index: int, code: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor that came inside of a message; what travels instead of it."""
    tensor = small_copies(index).copy_to_device(data, code, shape)
    message_resource(("receive_inline_tensor", index), functools.partial(InlineReceive, index)).add(
        tensor
    )
    return tensor


copyreg.add_extension(__name__, receive_tensor.__name__, tensors.EXTENSION_CODE + 16)
copyreg.add_extension(__name__, receive_inline_tensor.__name__, tensors.EXTENSION_CODE + 17)

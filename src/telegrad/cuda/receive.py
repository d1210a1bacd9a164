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

    def taken(self) -> None: ...


class CudaReceive:
    """What one message brought from one device of its sender."""

    def __init__(
        self,
        devices: ReceiveListener,
        envelope: MessageContext,
        number: int,
        index: int,
        event: bytes | None,
        origin: int | None,
    ) -> None:
        self.number = number
        self.incarnation = envelope.incarnation
        self.size = 0
        self.is_settled = False  # the sender need not be told
        self._devices = devices
        self._index = index
        self._event = None if event is None else ipc.mappings.event(event, index)
        self._origin = origin  # where it is at rest: what the sender calls that device
        self._bases: dict[bytes, int] = {}
        self._tensors: list[Tensor] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._events: list[Any] | None = None  # of torch.cuda.Event

    def copy(self, place: ipc.Place, index: int, code: int, shape: tuple[int, ...]) -> Tensor:
        tensor = tensors.empty(code, shape, f"cuda:{index}")
        size = tensor.numel() * tensor.itemsize
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = torch.cuda.current_stream(index)
            if self._event is not None:
                stream.wait_event(self._event)
        base = self._bases.get(place.segment)
        if base is None:
            base = self._bases[place.segment] = ipc.mappings.borrow(place.segment, self._index)
        ipc.copy(tensor.data_ptr(), base + place.offset, size, stream)
        self._tensors.append(tensor)
        self.size += size
        return tensor

    def finish(self) -> None:
        """The message is unpacked."""
        self._events = [stream.record_event() for stream in self._streams.values()]
        self._devices.taken()

    def is_copied(self) -> bool:
        return self._events is not None and all(event.query() for event in self._events)

    def let_go(self) -> None:
        """It is copied, and its sender knows or is told now."""
        ipc.mappings.give_back(self._bases)

    def forget(self) -> None:
        """Nobody will call `join`."""
        self._tensors.clear()

    def settle(self, companions: Collection[object] = ()) -> None:
        """The call that brought this is about to be answered: its sender takes back what it lent.

        If tensors that go back with the answer are made on the stream that copies, the sender waits for them, and so
        for the copies. If not, this waits.
        """
        if self._origin is None or self.is_settled:
            return
        self.is_settled = True
        back = [each for each in companions if isinstance(each, CudaSend)]
        for stream, event in zip(self._streams.values(), self._events or (), strict=True):
            if not any(each.orders(stream, self._origin) for each in back):
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
        self._stream = ipc.stream(index)
        self._tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        self._tensors.append(tensor)

    def finish(self) -> None:
        return  # the sender lends nothing

    def settle(self, companions: Collection[object] = ()) -> None:
        return

    def forget(self) -> None:
        """Nobody will call `join`."""
        self._tensors.clear()

    def join(self) -> None:
        """The thread that uses the tensors may be on another stream than the one that unpacked them."""
        if ipc.stream(self._index) != self._stream:
            current = torch.cuda.current_stream(self._index)
            current.wait_stream(_torchs(self._stream, self._index))
            for tensor in self._tensors:
                tensor.record_stream(current)


def _torchs(stream: int, index: int) -> torch.cuda.Stream:
    """What torch calls a stream of the driver's."""
    if not stream:
        return torch.cuda.default_stream(index)
    return torch.cuda.ExternalStream(stream, device=index)  # type: ignore[no-untyped-call]


def receive_tensor(
    arrival: CudaReceive, segment: bytes, offset: int, index: int, code: int, shape: tuple[int, ...]
) -> Tensor:
    """A tensor that came with an arrival; what travels instead of it."""
    return arrival.copy(ipc.Place(segment, offset), index, code, shape)


def receive_inline_tensor(data: bytes, index: int, code: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor that came inside of a message; what travels instead of it."""
    tensor = small_copies(index).put(data, code, shape)
    message_resource(("receive_inline_tensor", index), functools.partial(InlineReceive, index)).add(
        tensor
    )
    return tensor


copyreg.add_extension(__name__, receive_tensor.__name__, tensors.EXTENSION_CODE + 16)
copyreg.add_extension(__name__, receive_inline_tensor.__name__, tensors.EXTENSION_CODE + 17)

"""`CudaSend`: what one message takes along from one device, where it is packed.

A shipment belongs to the thread that packs its message; `CudaTransfers` holds it from then on until the receiver has
copied.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from telegrad.cuda import ipc
from telegrad.errors import InternalError
from telegrad.messages.packing import (
    LentResource,
    MessageContext,
    current_message,
    keep_until_answered,
)
from telegrad.wire import tensors


class LeaseLedger(Protocol):
    """What a `CudaSend` needs of `CudaTransfers`."""

    numbers: Iterator[int]

    def lend(self, number: int, incarnation: str, memory: list[object]) -> None: ...
    def give_back(self, numbers: list[int]) -> None: ...
    def retract(self, incarnation: str, numbers: list[int]) -> None: ...
    def done_with(self, incarnation: str) -> list[int]: ...


class CudaSend(LentResource):
    """What one message takes along from one device: snapshots, or tensors at rest. Travels as a number and an event."""

    def __init__(
        self, devices: LeaseLedger, envelope: MessageContext, index: int, exclusive: bool
    ) -> None:
        self._devices = devices
        self._at_rest = exclusive
        self._incarnation = envelope.incarnation
        self._exports = ipc.exports(index)
        self._stream = torch.cuda.current_stream(index)
        self._event = (
            None if exclusive and self._stream.query() else self._exports.event(self._stream)
        )
        self._uuid = ipc.devices()[index]
        self._number = next(devices.numbers)
        self._done: list[int] | None = None
        self._index = index
        self._targets: set[int] = set()
        self._kept: list[object] = []

    def __reduce__(self) -> tuple[Any, ...]:
        event = None if self._event is None else self._event.handle
        if self._done is None:  # once, for packing may start again
            self._done = self._devices.done_with(self._incarnation)
        return _open_shipment, (
            self._number,
            self._uuid,
            event,
            self._done,
            self._index if self._at_rest else None,
        )

    def take(self, tensor: Tensor, target: int) -> ipc.Place:
        """A tensor that goes to the receiver's device `target`."""
        if self._at_rest:
            place = self._exports.place(tensor)
            tensor.record_stream(self._stream)
            self._kept.append(tensor)
        else:
            place, snapshot = self._exports.snapshot(tensor, self._stream)
            self._kept.append(snapshot)
        self._targets.add(target)
        return place

    def orders(self, stream: torch.cuda.Stream, target: int) -> bool:
        """Does the receiver, on its device `target`, wait for what this stream was given to do so far?"""
        return stream == self._stream and target in self._targets

    def finish(self) -> None:
        """The message is packed."""
        if not self._kept:  # they could not be taken, and went another way
            return
        if self._event is not None:
            self._event.event.record(self._stream)
        self._devices.lend(self._number, self._incarnation, self._kept)
        if self._at_rest:
            keep_until_answered(self)

    def returned(self, answered: bool) -> None:
        if answered:
            self._devices.give_back([self._number])
        else:
            self._devices.retract(self._incarnation, [self._number])


def _open_shipment(
    number: int, uuid: str, event: bytes | None, done: list[int], origin: int | None
) -> object:
    envelope = current_message()
    if envelope is None:
        raise InternalError("CUDA tensors outside of a message")
    return envelope.agent.devices.arrival(envelope, number, uuid, event, done, origin)


copyreg.add_extension(__name__, _open_shipment.__name__, tensors.EXTENSION_CODE + 18)

"""CUDA tensors on their way between workers: which device they arrive on, and how they get there.

A tensor leaves as a *snapshot*: the sender copies it, in the order of its stream, into memory that the receiver may map
(`transport/cuda.py`), so whoever writes to the tensor after the call was sent changes nothing that was sent. The
receiver copies the snapshot into memory of its own, on its current stream, and gives it back when that copy is done.
Nobody's host waits for a device. A few bytes that are ready go inside the message instead. Where processes cannot map
each other's memory (other hosts, other containers), tensors go through page-locked host memory.

State of `Devices`, under `_lock`: `_lent` (snapshots that receivers have not given back, by number), `_taken` (copies
that this worker has begun, oldest first) and `_void` (numbers that the sender was told to take back: a message that
still comes with one is refused). What is known of a peer is written once per incarnation.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from telegrad.agent.current import active_agent
from telegrad.agent.packing import Envelope, accompany, current_envelope
from telegrad.agent.targets import internal
from telegrad.errors import InternalError, SerializationError, TelegradError, UsageError
from telegrad.transport import cuda, staging
from telegrad.wire import tensors
from telegrad.wire.tensors import Reduced

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent

_GIVE_BACK_AT = 256 << 20  # bytes of snapshots that are given back at once instead of on the next tick
_FORGOTTEN = 60.0  # seconds after which a sender asks what became of a snapshot
_ASK_EVERY = 15.0
_INTRODUCTION = 120.0  # seconds that a peer may take to start CUDA
_REMEMBERED = 10_000
_TINY = 4096  # bytes: so few are quicker through the host, if nothing is to be waited for
_LOOKS = 20
_CPU = torch.device("cpu")


class Peer(NamedTuple):
    """What another worker said of its GPUs."""

    gpus: int
    maps: bool  # can it map memory of ours?


class _Lent(NamedTuple):
    incarnation: str
    snapshots: list[object]
    since: float


class _Shipment:
    """What one message takes along from one device. Travels as a number and an event."""

    def __init__(self, devices: Devices, envelope: Envelope, index: int) -> None:
        self._devices = devices
        self._incarnation = envelope.incarnation
        self._exports = cuda.exports(index)
        self._stream = torch.cuda.current_stream(index)
        self._event = self._exports.event(self._stream)
        self._uuid = cuda.devices()[index]
        self.number = next(devices.numbers)
        self._kept: list[object] = []

    def __reduce__(self) -> tuple[Any, ...]:
        done = self._devices.done_with(self._incarnation)
        return _open_shipment, (self.number, self._uuid, self._event.handle, done)

    def take(self, tensor: Tensor) -> cuda.Place:
        place, snapshot = self._exports.snapshot(tensor, self._stream.cuda_stream)
        self._kept.append(snapshot)
        return place

    def finish(self) -> None:
        """The message is packed."""
        self._event.event.record(self._stream)
        self._devices.lend(self.number, self._incarnation, self._kept)


class Arrival:
    """What one message brought from one device of its sender."""

    def __init__(self, devices: Devices, envelope: Envelope, number: int, index: int, event: bytes) -> None:
        self.number = number
        self.incarnation = envelope.incarnation
        self.size = 0
        self._devices = devices
        self._index = index
        self._event = cuda.event(event, index)
        self._tensors: list[Tensor] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._events: list[torch.cuda.Event] = []

    def copy(self, place: cuda.Place, index: int, code: int, shape: tuple[int, ...]) -> Tensor:
        tensor = tensors.empty(code, shape, f"cuda:{index}")
        size = tensor.numel() * tensor.itemsize
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams[index] = torch.cuda.current_stream(index)
            stream.wait_event(self._event)
        source = cuda.address(place.segment, self._index) + place.offset
        cuda.enter(index)
        cuda.driver().copy(tensor.data_ptr(), source, size, stream.cuda_stream)
        self._devices.mapped(self.incarnation, place.segment)
        self._tensors.append(tensor)
        self.size += size
        return tensor

    def finish(self) -> None:
        """The message is unpacked."""
        for stream in self._streams.values():
            self._events.append(stream.record_event())
        self._devices.take(self)

    def is_copied(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def join(self) -> None:
        """The thread that uses the tensors may be on other streams than the one that unpacked them."""
        for (index, stream), event in zip(self._streams.items(), self._events, strict=True):
            current = torch.cuda.current_stream(index)
            if current != stream:
                current.wait_event(event)
                for tensor in self._tensors:
                    if tensor.device.index == index:
                        tensor.record_stream(current)


class Devices:
    """The GPUs of one agent and of its peers."""

    def __init__(self, agent: Agent) -> None:
        self.numbers = itertools.count(1)
        self._agent = agent
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._lent: dict[int, _Lent] = {}
        self._taken: list[Arrival] = []
        self._void: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._handles: dict[str, set[bytes]] = {}
        self._asked = 0.0
        self._in_use = False
        agent.on_loss(self._lost)
        agent.add_figures(self._figures)

    def __repr__(self) -> str:
        return f"<Devices of {self._agent.name!r}: {len(self._lent)} lent, {len(self._taken)} taken>"

    def _figures(self) -> dict[str, int]:
        return {"CUDA snapshots lent": len(self._lent), "CUDA copies under way": len(self._taken)}

    # Packing

    def leave(self, envelope: Envelope, tensor: Tensor, code: int) -> Reduced:
        """How a contiguous CUDA tensor travels."""
        device, route = tensor.device, envelope.route
        target = route.target(device)
        if target is None:
            raise UsageError(_unmapped(envelope, device))
        if target.type == "cpu":
            return tensors.reduce_as_it_is(staging.to_host(tensor))
        peer = self._peers.get(envelope.incarnation) or self._introduce(envelope, device.index)
        if target.index >= peer.gpus:
            if route.falls_back_to_cpu(device):
                return tensors.reduce_as_it_is(staging.to_host(tensor))
            raise UsageError(
                f"a tensor on {device} would arrive on {target}, but worker {envelope.peer!r} has {peer.gpus} CUDA "
                f"devices: say where it should arrive with set_device_map (or Config.device_maps), for example "
                f"{{{device.index}: 'cpu'}}, or send tensor.cpu()"
            )
        if not tensor.numel():
            return tensors.empty, (code, tuple(tensor.shape), str(target))
        size = tensor.numel() * tensor.itemsize
        if size <= _TINY and _is_idle(torch.cuda.current_stream(device)):
            return tensors.reduce_for(tensor.cpu(), str(target))
        if not peer.maps:
            return staging.from_host, (*tensors.reduce_as_it_is(staging.to_host(tensor)), target.index)
        shipment = accompany(("device", device.index), lambda: _Shipment(self, envelope, device.index))
        try:
            place = shipment.take(tensor)
        except torch.OutOfMemoryError:  # there is no room for a snapshot
            return staging.from_host, (*tensors.reduce_as_it_is(staging.to_host(tensor)), target.index)
        return _copy, (shipment, *place, target.index, code, tuple(tensor.shape))

    def lend(self, number: int, incarnation: str, snapshots: list[object]) -> None:
        with self._lock:
            self._lent[number] = _Lent(incarnation, snapshots, time.monotonic())
        self._start()
        if self._agent.is_lost(incarnation):
            self.give_back([number])

    def give_back(self, numbers: list[int]) -> None:
        """Receivers have copied these."""
        with self._lock:
            for number in numbers:
                self._lent.pop(number, None)

    def done_with(self, incarnation: str) -> list[int]:
        """Numbers of a peer's snapshots that were copied, each said once."""
        if not self._taken:
            return []
        with self._lock:
            done = [each for each in self._taken if each.incarnation == incarnation and each.is_copied()]
            if done:
                self._taken = [each for each in self._taken if each not in done]
        return [each.number for each in done]

    # Unpacking

    def arrival(self, envelope: Envelope, number: int, uuid: str, event: bytes, done: list[int]) -> Arrival:
        self.give_back(done)
        if (envelope.incarnation, number) in self._void:
            raise SerializationError(
                f"a message of worker {envelope.peer!r} was delayed for so long that its CUDA tensors were taken back"
            )
        index = cuda.devices().index(uuid)
        return accompany(("arrival", number), lambda: Arrival(self, envelope, number, index, event))

    def take(self, arrival: Arrival) -> None:
        with self._lock:
            self._taken.append(arrival)
            waiting = sum(each.size for each in self._taken)
        self._start()
        if waiting > _GIVE_BACK_AT:
            self._agent.threads.start(self._tell_all)

    def mapped(self, incarnation: str, segment: bytes) -> None:
        """Remember whose memory this is, to unmap it when its owner is gone."""
        self._handles.setdefault(incarnation, set()).add(segment)

    def void(self, incarnation: str, numbers: list[int]) -> list[int]:
        """Which of a peer's snapshots this worker has no use for; messages that bring them later are refused."""
        with self._lock:
            busy = {each.number for each in self._taken if each.incarnation == incarnation}
            unused = [number for number in numbers if number not in busy]
            for number in unused:
                self._void[incarnation, number] = None
            while len(self._void) > _REMEMBERED:
                self._void.popitem(last=False)
        return unused

    def introduce(self, uuid: str, segment: bytes | None) -> tuple[int, bool]:
        """A peer asks what it may send here: how many GPUs there are, and whether its memory can be mapped."""
        mine = cuda.devices()
        if segment is None or uuid not in mine or not self._agent.config.cuda_ipc:
            return len(mine), False
        try:
            cuda.address(segment, mine.index(uuid))
        except cuda.CudaError:
            return len(mine), False
        return len(mine), True

    # Upkeep

    def tick(self) -> bool:
        """On the clock: give back what has been copied."""
        if self._taken:
            if any(each.is_copied() for each in self._taken):
                self._agent.threads.start(self._tell_all)
            return True
        if self._lent and time.monotonic() - self._asked > _ASK_EVERY:
            self._asked = time.monotonic()
            self._agent.threads.start(self._ask)
        return bool(self._lent)

    def _start(self) -> None:
        clock = self._agent.clock
        if not self._in_use:
            self._in_use = True
            clock.watch(self)
        if not clock.awake:
            clock.wake()

    def _tell_all(self) -> None:
        with self._lock:
            incarnations = {each.incarnation for each in self._taken}
        for incarnation in incarnations:
            done = self.done_with(incarnation)
            if done and not self._agent.closing:
                try:
                    self._agent.start(self._name(incarnation), _given_back, (done,), None, None, internal=True)
                except TelegradError:
                    continue  # it cannot be reached now; if it is not lost, it will ask

    def _ask(self) -> None:
        """Messages can be lost between packing and unpacking (a caller that timed out): what became of them?"""
        old: dict[str, list[int]] = {}
        with self._lock:
            for number, lent in self._lent.items():
                if time.monotonic() - lent.since > _FORGOTTEN:
                    old.setdefault(lent.incarnation, []).append(number)
        for incarnation, numbers in old.items():
            question = self._agent.start(
                self._name(incarnation), _void, (self._agent.me.incarnation, numbers), None, _FORGOTTEN, internal=True
            )
            try:
                self.give_back(question.wait())
            except TelegradError:
                continue  # if it is lost, `_lost` is told; if not, it is asked again

    def _introduce(self, envelope: Envelope, index: int) -> Peer:
        segment: bytes | None = None
        if self._agent.config.cuda_ipc:
            try:
                exports = cuda.exports(index)
                segment = exports.place(exports.empty(1)).segment
            except cuda.CudaError:
                segment = None  # such memory as `expandable_segments` has cannot be mapped by others
        question = self._agent.start(
            envelope.peer, _introduce, (cuda.devices()[index], segment), None, _INTRODUCTION, internal=True
        )
        peer = self._peers[envelope.incarnation] = Peer(*question.wait())
        return peer

    def _name(self, incarnation: str) -> str:
        return self._agent.directory.name_of(incarnation)

    def _lost(self, name: str, incarnation: str) -> None:
        with self._lock:
            for number in [number for number, lent in self._lent.items() if lent.incarnation == incarnation]:
                del self._lent[number]
            taken = [each for each in self._taken if each.incarnation == incarnation]
            self._taken = [each for each in self._taken if each.incarnation != incarnation]
            handles = self._handles.pop(incarnation, set())
        self._peers.pop(incarnation, None)
        if handles:
            self._agent.threads.start(lambda: _unmap(taken, handles))


def _unmap(taken: list[Arrival], handles: set[bytes]) -> None:
    for arrival in taken:
        arrival.wait()
    cuda.close(handles)


class Carrier:
    """Lets the codec ask the agent whose message it is packing."""

    def leaving(self, tensor: Tensor, code: int) -> Reduced | None:
        envelope = current_envelope()
        if envelope is None or not tensor.is_cuda:
            return None
        return envelope.agent.devices.leave(envelope, tensor, code)

    def leaving_host(self, tensor: Tensor) -> str | None:
        envelope = current_envelope()
        target = None if envelope is None else envelope.route.target(_CPU)
        return None if target is None or target == _CPU else str(target)


tensors.carry(Carrier())


def _unmapped(envelope: Envelope, device: torch.device) -> str:
    if envelope.route.is_reply:
        return (
            f"Response device mapping is not available for worker {envelope.peer!r}: the result has tensors on "
            f"{device}, and that worker's device map says nothing about them"
        )
    return (
        f"TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before sending "
        f"them to worker {envelope.peer!r}, or call `set_device_map` on `TensorPipeRpcBackendOptions` to say where "
        f"those on {device} should arrive"
    )


def _is_idle(stream: torch.cuda.Stream) -> bool:
    """Is there nothing to wait for on a stream, or not for long?"""
    return any(stream.query() for _ in range(_LOOKS))


def _devices() -> Devices:
    agent = active_agent()
    if agent is None:
        raise InternalError("CUDA tensors need an agent")
    return agent.devices


def _open_shipment(number: int, uuid: str, event: bytes, done: list[int]) -> Arrival:
    envelope = current_envelope()
    if envelope is None:
        raise InternalError("CUDA tensors outside of a message")
    return envelope.agent.devices.arrival(envelope, number, uuid, event, done)


def _copy(arrival: Arrival, segment: bytes, offset: int, index: int, code: int, shape: tuple[int, ...]) -> Tensor:
    return arrival.copy(cuda.Place(segment, offset), index, code, shape)


@internal
def _introduce(uuid: str, segment: bytes | None) -> tuple[int, bool]:
    return _devices().introduce(uuid, segment)


@internal
def _given_back(numbers: list[int]) -> None:
    _devices().give_back(numbers)


@internal
def _void(incarnation: str, numbers: list[int]) -> list[int]:
    return _devices().void(incarnation, numbers)

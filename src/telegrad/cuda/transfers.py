"""CUDA tensors on their way between workers: which device they arrive on, and how they get there.

The receiver maps memory of the sender (`cuda/ipc.py`) and copies what it was told to copy, on its current stream,
into memory of its own. As a rule the sender makes a *snapshot* first, in the order of its stream, so whoever writes to
the tensor after the call was sent changes nothing that was sent. A large tensor *at rest* is lent as it is: one whose
caller waits for the answer, which the callee gives when it has copied, and a result that nobody else refers to. A few
bytes that are ready go inside the message (`cuda/small_copies.py`). Where processes cannot map each other's memory
(other hosts, other containers), tensors go through page-locked host memory.

State of `CudaTransfers`, under `_lock`: `_lent` (what receivers have not given back, by number), `_taken` (copies that
this worker has begun, oldest first) and `_void` (numbers that the sender was told to take back: a message that still
comes with one is refused). What is known of a peer is written once per incarnation.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from telegrad.config import Config
from telegrad.cuda import ipc, staging
from telegrad.cuda.exclusive import WORTH_LENDING
from telegrad.cuda.receive import CudaReceive, receive_inline_tensor, receive_tensor
from telegrad.cuda.send import CudaSend
from telegrad.cuda.small_copies import LARGEST, small_copies
from telegrad.current import find_runtime
from telegrad.errors import InternalError, SerializationError, TelegradError, UsageError
from telegrad.futures import Future
from telegrad.group.membership import Directory, Member
from telegrad.messages.packing import MessageContext, current_message, message_resource
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.threads import ThreadPool
from telegrad.server.functions import internal
from telegrad.wire import tensors
from telegrad.wire.function_table import Function
from telegrad.wire.tensors import Reduced

# bytes that are given back at once when they are copied, instead of on the next tick
_GIVE_BACK_AT = 256 << 20
_FORGOTTEN = 60.0  # seconds after which a sender asks what became of a snapshot
_ASK_EVERY = 15.0
_INTRODUCTION = 120.0  # seconds that a peer may take to start CUDA
_REMEMBERED = 10_000
# seconds that few bytes may be waited for: two switches of the GPU between processes
_SHORTLY = 0.0003
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
    def add_statistics(self, figures: Callable[[], dict[str, int]]) -> None: ...
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

    gpus: int
    maps: bool  # can it map memory of ours?


class _LentMemory(NamedTuple):
    incarnation: str
    memory: list[object]
    since: float


class CudaTransfers:
    """The GPUs of one agent and of its peers."""

    def __init__(self, agent: Any) -> None:
        self.numbers: Iterator[int] = itertools.count(1)
        self._agent: TransferRuntime = agent
        self._lock = threading.Lock()
        self._peers: dict[str, PeerDevices] = {}
        self._lent: dict[int, _LentMemory] = {}
        self._taken: list[CudaReceive] = []
        self._void: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._asked = 0.0
        self._in_use = False
        agent.on_loss(self._lost)
        agent.on_close(lambda: ipc.mappings.close_unused(0.0))
        agent.add_statistics(self._figures)

    def __repr__(self) -> str:
        return f"<CudaTransfers of {self._agent.name!r}: {len(self._lent)} lent, {len(self._taken)} taken>"

    def _figures(self) -> dict[str, int]:
        return {
            "cuda_tensors_lent": len(self._lent),
            "cuda_copies_under_way": len(self._taken),
            "cuda_allocations_mapped": len(ipc.mappings),
        }

    # Packing

    def leave(self, envelope: MessageContext, tensor: Tensor, code: int) -> Reduced:
        """How a contiguous CUDA tensor travels."""
        device, route = tensor.device, envelope.route
        target = route.target(device)
        if target is None:
            raise UsageError(_unmapped(envelope, device))
        if target.type == "cpu":
            return tensors.reduce_as_it_is(staging.to_host(tensor, envelope.exclusive))
        peer = self._peers.get(envelope.incarnation) or self._introduce(envelope, device.index)
        if target.index >= peer.gpus:
            if route.falls_back_to_cpu(device):
                return tensors.reduce_as_it_is(staging.to_host(tensor, envelope.exclusive))
            raise UsageError(
                f"a tensor on {device} would arrive on {target}, but worker {envelope.peer!r} has {peer.gpus} CUDA "
                f"devices: say where it should arrive with set_device_map (or Config.device_maps), for example "
                f"{{{device.index}: 'cpu'}}, or send tensor.cpu()"
            )
        if not tensor.numel():
            return tensors.empty, (code, tuple(tensor.shape), str(target))
        size = tensor.numel() * tensor.itemsize
        if size <= LARGEST:
            data = small_copies(device.index).fetch(tensor, size, _SHORTLY)
            if data is not None:
                return receive_inline_tensor, (data, target.index, code, tuple(tensor.shape))
        if peer.maps:
            for exclusive in (
                (True, False) if envelope.exclusive and size >= WORTH_LENDING else (False,)
            ):
                make = functools.partial(CudaSend, self, envelope, device.index, exclusive)
                try:
                    shipment = message_resource(("device", device.index, exclusive), make)
                    place = shipment.take(tensor, target.index)
                # no room for a snapshot; memory that cannot be mapped
                except (torch.OutOfMemoryError, ipc.CudaError):
                    continue
                return receive_tensor, (shipment, *place, target.index, code, tuple(tensor.shape))
        return staging.from_host, (
            *tensors.reduce_as_it_is(staging.to_host(tensor, envelope.exclusive)),
            target.index,
        )

    def lend(self, number: int, incarnation: str, memory: list[object]) -> None:
        with self._lock:
            self._lent[number] = _LentMemory(incarnation, memory, time.monotonic())
        self._start()
        if self._agent.is_lost(incarnation):
            self.give_back([number])

    def give_back(self, numbers: list[int]) -> None:
        """Receivers have copied these."""
        with self._lock:
            for number in numbers:
                self._lent.pop(number, None)

    def retract(self, incarnation: str, numbers: list[int]) -> None:
        """A call with tensors at rest has failed here: if the callee has not begun to copy them, it must not."""
        self._agent.threads.start(lambda: self._take_back({incarnation: numbers}))

    def done_with(self, incarnation: str) -> list[int]:
        """Numbers of what a peer has lent and was copied, each said once."""
        if not self._taken:
            return []
        with self._lock:
            done = [
                each for each in self._taken if each.incarnation == incarnation and each.is_copied()
            ]
            self._remove(done)
        return [each.number for each in done if not each.is_settled]

    def _remove(self, arrivals: list[CudaReceive]) -> None:
        if arrivals:
            self._taken = [each for each in self._taken if each not in arrivals]
            for arrival in arrivals:
                arrival.let_go()

    # Unpacking

    def arrival(
        self,
        envelope: MessageContext,
        number: int,
        uuid: str,
        event: bytes | None,
        done: list[int],
        origin: int | None,
    ) -> CudaReceive:
        self.give_back(done)
        index = ipc.devices().index(uuid)
        arrival = CudaReceive(self, envelope, number, index, event, origin)
        with self._lock:
            if (envelope.incarnation, number) in self._void:
                raise SerializationError(
                    f"a message of worker {envelope.peer!r} came so late that its CUDA tensors had been taken back"
                )
            self._taken.append(arrival)
        return message_resource(("arrival", number), lambda: arrival)

    def taken(self) -> None:
        """All copies that a message asked for are under way."""
        self._start()
        if sum(each.size for each in self._taken if each.is_copied()) > _GIVE_BACK_AT:
            self._agent.threads.start(self._tell_all)

    def void(self, incarnation: str, numbers: list[int]) -> list[int]:
        """Which of what a peer has lent is not in use here; messages that bring it later are refused."""
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
        mine = ipc.devices()
        if segment is None or uuid not in mine or not self._agent.config.cuda_ipc:
            return len(mine), False
        try:
            ipc.mappings.borrow(segment, mine.index(uuid))
        except ipc.CudaError:
            return len(mine), False
        ipc.mappings.give_back([segment])
        self._start()
        return len(mine), True

    # Upkeep

    def tick(self) -> bool:
        """On the clock: give back what has been copied, and what has not been used for long."""
        if ipc.mappings.has_unused():
            self._agent.threads.start(ipc.mappings.close_unused)
        if self._taken:
            if any(each.is_copied() for each in self._taken):
                self._agent.threads.start(self._tell_all)
            return True
        if self._lent and time.monotonic() - self._asked > _ASK_EVERY:
            self._asked = time.monotonic()
            self._agent.threads.start(self._ask)
        return bool(self._lent) or len(ipc.mappings) > 0

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
            if done and not self._agent.closing and not self._agent.is_lost(incarnation):
                try:
                    self._agent.start(
                        self._name(incarnation), _given_back, (done,), None, None, internal=True
                    )
                except TelegradError:
                    continue  # it cannot be reached now; if it is not lost, it will ask

    def _ask(self) -> None:
        """Messages can be lost between packing and unpacking (a caller that timed out): what became of them?"""
        old: dict[str, list[int]] = {}
        with self._lock:
            for number, lent in self._lent.items():
                if time.monotonic() - lent.since > _FORGOTTEN:
                    old.setdefault(lent.incarnation, []).append(number)
        self._take_back(old)

    def _take_back(self, lent: dict[str, list[int]]) -> None:
        for incarnation, numbers in lent.items():
            if self._agent.closing or self._agent.is_lost(incarnation):
                continue  # `_lost` is told
            question = self._agent.start(
                self._name(incarnation),
                _void,
                (self._agent.local_member.incarnation, numbers),
                None,
                _FORGOTTEN,
                internal=True,
            )
            try:
                self.give_back(question.wait())
            except TelegradError:
                continue  # if it is lost, `_lost` is told; if not, it is asked again

    def _introduce(self, envelope: MessageContext, index: int) -> PeerDevices:
        segment: bytes | None = None
        if self._agent.config.cuda_ipc:
            try:
                segment = ipc.exports(index).slab.segment
            except ipc.CudaError:
                # such memory as `expandable_segments` has cannot be mapped by others
                segment = None
        question = self._agent.start(
            envelope.peer,
            _introduce,
            (ipc.devices()[index], segment),
            None,
            _INTRODUCTION,
            internal=True,
        )
        peer = self._peers[envelope.incarnation] = PeerDevices(*question.wait())
        return peer

    def _name(self, incarnation: str) -> str:
        return self._agent.directory.name_of(incarnation)

    def _lost(self, name: str, incarnation: str) -> None:
        with self._lock:
            for number in [
                number for number, lent in self._lent.items() if lent.incarnation == incarnation
            ]:
                del self._lent[number]
        self._peers.pop(incarnation, None)


class CudaCarrier:
    """Lets the codec ask the agent whose message it is packing."""

    def leaving(self, tensor: Tensor, code: int) -> Reduced | None:
        envelope = current_message()
        if envelope is None or not tensor.is_cuda:
            return None
        return envelope.agent.devices.leave(envelope, tensor, code)

    def leaving_host(self, tensor: Tensor) -> str | None:
        envelope = current_message()
        target = None if envelope is None else envelope.route.target(_CPU)
        return None if target is None or target == _CPU else str(target)


tensors.set_device_carrier(CudaCarrier())


def _unmapped(envelope: MessageContext, device: torch.device) -> str:
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


def _devices() -> CudaTransfers:
    agent = find_runtime()
    if agent is None:
        raise InternalError("CUDA tensors need an agent")
    devices: CudaTransfers = agent.devices
    return devices


@internal
def _introduce(uuid: str, segment: bytes | None) -> tuple[int, bool]:
    return _devices().introduce(uuid, segment)


@internal
def _given_back(numbers: list[int]) -> None:
    _devices().give_back(numbers)


@internal
def _void(incarnation: str, numbers: list[int]) -> list[int]:
    return _devices().void(incarnation, numbers)

"""Large buffers between hosts, beside the control stream: the receiver pulls them.

The sender registers the buffers of a frame. The buffer table of the frame names the registration.
The receiver reserves memory, pulls the bytes into it, and tells the sender that it is *done*. The
sender's `send` returns then, so that no copy is made, the caller may change its tensors afterwards,
and an interrupted transfer can be pulled again. Small frames overtake a frame that is being pulled.

A frame that uses the id of a function never overtakes the frame that defines it. Callers use an id
when `send` of its definition has returned, and the receiver makes a frame available to its reader
before it tells the sender that it is done.

`BulkEngine` moves the bytes; `striped_tcp` is the default one. `BulkTransfer` is the part of one
channel.

State of a `BulkTransfer`: `_registrations` (by id) and `_pulls`, changed by single operations;
`_closed` is set once. Who adds to one of them checks `_closed` afterwards, and `close` sets it
before it reads them.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from telegrad import thread_roles
from telegrad.errors import ProtocolError
from telegrad.transport.channel import ChannelClosed, SendTimeout
from telegrad.transport.host_image import find_image
from telegrad.wire.frames import BULK_SEGMENT, BufferLocation, Frame, bulk_location
from telegrad.wire.handshake import Incarnation

# Smaller buffers stay in the stream: a request for each would cost more than it gains.
_MIN_BUFFER = 1 << 18
_CHECK_INTERVAL = 0.25  # seconds between two checks that the receiver of a registration is there

OnPulled = Callable[[BaseException | None], object]


class BulkPeer(NamedTuple):
    """A worker at the other end of bulk transfers."""

    name: str
    incarnation: Incarnation
    address: str  # where it serves its registrations


class Reader(Protocol):
    """What sends a chunk of a registration."""

    def shut(self) -> None:
        """Wake the thread that sends."""


class Registration:
    """Buffers that one peer may pull until they are withdrawn.

    State: `ended` is set once, by the thread that sets `error`. `readers` (stripes on which a
    chunk is being sent) and `withdrawn` are changed by single operations: a reader adds itself
    before it checks `withdrawn`, which is set before `readers` is checked.
    """

    __slots__ = (
        "buffers",
        "created",
        "ended",
        "error",
        "peer",
        "readers",
        "registration_id",
        "unread",
        "withdrawn",
    )

    def __init__(self, peer: BulkPeer, buffers: Sequence[memoryview]) -> None:
        # not guessable: an id is all that a request of the peer must know
        self.registration_id = int.from_bytes(os.urandom(8), "little")
        self.peer = peer
        self.created = time.monotonic()
        self.buffers = [buffer.cast("B") for buffer in buffers]
        self.ended = thread_roles.OneShotEvent()  # the peer has pulled them, or never will
        self.error: BaseException | None = None
        self.readers: set[Reader] = set()
        self.withdrawn = False
        self.unread = thread_roles.OneShotEvent()  # no reader is left after `withdrawn`

    def __repr__(self) -> str:
        state = "withdrawn" if self.withdrawn else "pulled" if self.ended.is_set else "waiting"
        return f"<Registration for {self.peer.name!r}: {len(self.buffers)} buffers, {state}>"

    def end(self, error: BaseException | None) -> None:
        """Wake the thread that waits for the peer, which has pulled everything or never will."""
        if not self.ended.is_set:
            self.error = error
            self.ended.set()


class Pull(Protocol):
    """The buffers of one frame that are being received."""

    def cancel(self, error: BaseException) -> None:
        """End with this error, if it has not ended."""


class BulkEngine(ABC):
    """Move registered buffers from one worker to another."""

    @abstractmethod
    def register(self, peer: BulkPeer, buffers: Sequence[memoryview]) -> Registration:
        """Let a peer pull these buffers."""

    @abstractmethod
    def withdraw(self, registration: Registration) -> None:
        """End a registration. The memory is not read any more when this returns."""

    def describe(self, registration: Registration) -> list[BufferLocation]:
        """Return the entries of a buffer table that name the buffers of a registration."""
        return [
            bulk_location(buffer.nbytes, registration.registration_id, index, _target_of(buffer))
            for index, buffer in enumerate(registration.buffers)
        ]

    @abstractmethod
    def check_reachable(self, registration: Registration) -> None:
        """Raise `SerializationError` if the peer was not here for too long to pull anything."""

    @abstractmethod
    def pull(
        self, peer: BulkPeer, bulk: Sequence[tuple[BufferLocation, memoryview]], on_pulled: OnPulled
    ) -> Pull:
        """Receive registered buffers. Call `on_pulled(error)` once, then tell the peer."""

    @abstractmethod
    def done(self, peer: BulkPeer, registration_id: int) -> None:
        """Tell a peer that its registration is not needed any more."""

    @abstractmethod
    def forget_peer(self, incarnation: Incarnation) -> None:
        """End all transfers with a lost peer."""

    @abstractmethod
    def close(self) -> None:
        """End all transfers."""


def _target_of(buffer: memoryview) -> int | None:
    """Return the index of the receiver's device that a buffer is for; None: host memory."""
    image = find_image(buffer)
    return None if image is None else image.target


class BulkTransfer:
    """The bulk buffers of one channel."""

    def __init__(self, engine: BulkEngine, peer: BulkPeer, min_bytes: int) -> None:
        """Large buffers are pulled if a message has at least `min_bytes` bytes of them."""
        self._engine = engine
        self._peer = peer
        self._min_bytes = min_bytes
        self._min_buffer = min(min_bytes, _MIN_BUFFER)
        self._registrations: dict[int, Registration] = {}
        self._pulls: set[Pull] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<BulkTransfer {len(self._registrations)} out, {len(self._pulls)} in>"

    # The sender

    def place(
        self, buffers: Sequence[memoryview], places: list[BufferLocation]
    ) -> list[memoryview]:
        """Register the large buffers. Return the others, which stay in the stream.

        `places[i]` becomes the description of `buffers[i]`. Pass `places` to `wait_until_pulled`,
        or to `withdraw` if that is not reached or raises.
        """
        smallest = self._min_buffer
        large = [index for index, buffer in enumerate(buffers) if buffer.nbytes >= smallest]
        if sum(buffers[index].nbytes for index in large) < self._min_bytes:
            return list(buffers)
        registration = self._engine.register(self._peer, [buffers[index] for index in large])
        self._registrations[registration.registration_id] = registration
        for index, place in zip(large, self._engine.describe(registration), strict=True):
            places[index] = place
        if self._closed:
            registration.end(ChannelClosed("the channel was shut"))
        return [buffer for buffer in buffers if buffer.nbytes < smallest]

    def wait_until_pulled(
        self,
        places: Sequence[BufferLocation],
        deadline: float,
        check_open: Callable[[], None],
    ) -> None:
        """Wait until the peer has pulled the buffers of a frame that was sent.

        `check_open` raises `ChannelClosed` if the channel has ended.
        """
        registration = self._find(places)
        if registration is None:
            return
        role = thread_roles.pause()
        try:
            while not registration.ended.wait(min(deadline - time.monotonic(), _CHECK_INTERVAL)):
                check_open()
                self._engine.check_reachable(registration)
                if time.monotonic() >= deadline:
                    raise SendTimeout(begun=True)
        finally:
            thread_roles.resume(role)
        if registration.error is not None:
            raise registration.error
        self.withdraw(places)

    def withdraw(self, places: Sequence[BufferLocation]) -> None:
        """Free the registration of a frame. The memory is not read any more when this returns."""
        registration = self._find(places)
        if registration is not None:
            self._engine.withdraw(registration)
            self._registrations.pop(registration.registration_id, None)

    def _find(self, places: Sequence[BufferLocation]) -> Registration | None:
        for place in places:
            if place.segment == BULK_SEGMENT:
                return self._registrations.get(place.offset)
        return None

    # The receiver

    def start_pull(self, frame: Frame, on_complete: Callable[[Frame], None]) -> None:
        """Pull the bulk buffers of a frame, then call `on_complete` with the complete frame.

        If they cannot be pulled, the frame says so (`Frame.receive_error`).
        """
        registration_id = frame.bulk[0][0].offset
        if any(place.offset != registration_id for place, _ in frame.bulk):
            raise ProtocolError("a frame has buffers of several registrations")
        if frame.receive_error is not None:  # there was no memory
            on_complete(frame.replaced(bulk=()))
            self._engine.done(self._peer, registration_id)
            return
        started = time.monotonic()
        pulls: list[Pull] = []
        errors: list[BaseException | None] = []

        def on_pulled(error: BaseException | None) -> None:
            errors.append(error)
            self._pulls.difference_update(pulls)
            timeout_ms = frame.timeout_ms
            if timeout_ms:  # the time that the pull has taken belongs to it
                timeout_ms = max(timeout_ms - int((time.monotonic() - started) * 1000), 1)
            complete = frame.replaced(bulk=(), timeout_ms=timeout_ms)
            if error is not None:
                complete = complete.replaced(buffers=[], receive_error=error)
            on_complete(complete)

        pull = self._engine.pull(self._peer, frame.bulk, on_pulled)
        self._pulls.add(pull)
        pulls.append(pull)
        if errors:  # it ended before it was added
            self._pulls.discard(pull)
        if self._closed:
            pull.cancel(ChannelClosed("the channel was shut"))

    # Both

    def close(self) -> None:
        """End the transfers of this channel, which was shut. It may be called again."""
        self._closed = True
        error = ChannelClosed("the channel was shut")
        for registration in list(self._registrations.values()):
            registration.end(error)
        for pull in list(self._pulls):
            pull.cancel(error)

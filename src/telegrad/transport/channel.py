"""`Channel`: what every transport offers. A channel carries frames in both directions, in order.

Rules for all implementations (one test suite checks them all):

- `send` may be called from any thread. A frame is sent completely or not at all, even if a signal
  handler raises inside `send`, or the channel is closed. `send` returns once the transport or the
  receiver has its own copy of the bytes and buffers, so the caller may change its tensors.
- `recv` is called by one thread at a time. After `TimeoutError` the channel is still usable;
  `ChannelClosed` is final.
- `shutdown` may be called from any thread: it wakes the threads inside `recv` and `send`. `close`
  frees the resources of the channel. It is called by the reading thread, or when no thread reads.
- `cork` may collect small frames. The next `send` or `flush_nowait` sends them, in order.
- A thread that reads many channels calls `receive` and `next_frame` instead of `recv`.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from telegrad.errors import SerializationError
from telegrad.thread_roles import DelayedPause
from telegrad.transport.shared_memory import SharedCopies
from telegrad.wire.frames import Frame, Kind

_log = logging.getLogger(__name__)


class ChannelClosed(Exception):
    """The channel was closed by this side or by the peer."""


class SendTimeout(TimeoutError):
    """The peer received no data for too long.

    `begun`: a part of the frame was sent. The rest will be sent before the next frame.
    """

    def __init__(self, begun: bool) -> None:
        super().__init__("the peer receives no data")
        self.begun = begun


class SenderTimedOut(SerializationError):
    """The buffers of a frame were not received, because its sender's deadline passed."""


class PeerClosed(ChannelClosed):
    """The peer left, or has declared this worker lost (`expelled`). `reason` is what it said."""

    def __init__(self, frame: Frame) -> None:
        self.expelled = frame.kind == Kind.EXPEL
        what = "has declared this worker lost" if self.expelled else "has left"
        super().__init__(f"the peer {what}")
        self.reason = text_of_frame(frame)


def text_of_frame(frame: Frame) -> str:
    """Return the text of a LEAVE, EXPEL or CLOSE frame."""
    return bytes(frame.body).decode("utf-8", "replace")


class Channel(ABC):
    """A connection to one peer."""

    kind: str  # the transport: "unix", "tcp" or "memory"
    # called by another thread when `next_frame` has a frame that epoll does not show
    on_frame: Callable[[], None] | None = None
    # called when the peer did not receive all of the corked frames
    on_send_blocked: Callable[[], None] | None = None
    # called when `fileno` has changed, or when the channel has ended and none is left
    on_descriptor_changed: Callable[[], None] | None = None
    # while it is held, `fileno` does not change and its descriptor is not closed
    descriptor_lock: AbstractContextManager[Any] = contextlib.nullcontext()
    # seconds of silence that are no reason to give the peer up
    silence_limit = 0.0
    # Set whenever bytes arrive, cleared by the heartbeat. So a long frame is a sign of life, too.
    received_since_heartbeat = False

    @abstractmethod
    def send(
        self,
        kind: int,
        call: int,
        body: bytes,
        buffers: Sequence[memoryview] = (),
        function: int = 0,
        timeout_ms: int = 0,
        flags: int = 0,
        timeout: float | None = None,
        copies: SharedCopies | None = None,
    ) -> None:
        """Send one frame. Raise `SendTimeout` if it is not sent within `timeout` seconds.

        Messages with the same `copies` have the same buffers, which may be copied once for all
        receivers.
        """

    def copy_to_shared_block(
        self, copies: SharedCopies, index: int, buffer: memoryview
    ) -> memoryview | None:
        """Copy buffer `index` to memory that all receivers of `copies` can use, and return that.

        Return None if this channel has no such memory.
        """
        return None

    @abstractmethod
    def try_send(self, kind: int) -> None:
        """Send an empty frame without blocking.

        It may be delayed, or omitted if another thread is sending.
        """

    @abstractmethod
    def cork(self, kind: int, call: int, body: bytes) -> None:
        """Queue a small frame for the next `send` or `flush_nowait`."""

    def cork_deferred(self, kind: int, call: int, body: bytes) -> None:
        """Queue a small frame for the next `flush_deferred`."""
        self.send_nowait(kind, call, body)

    def flush_deferred(self) -> None:
        """Send the frames that `cork_deferred` and `cork` queued, without blocking."""
        self.flush_nowait()

    @abstractmethod
    def flush_nowait(self) -> bool:
        """Send corked frames without blocking.

        Return True if all were sent, or if the thread that is sending now will send them. If some
        are left, call `on_send_blocked` and return False.
        """

    def send_nowait(self, kind: int, call: int, body: bytes) -> bool:
        """Send a small frame without blocking, or queue it; see `flush_nowait`."""
        self.cork(kind, call, body)
        return self.flush_nowait()

    @abstractmethod
    def recv(self, timeout: float | None = None) -> Frame:
        """Wait for the next frame. Raise `TimeoutError` after `timeout` seconds."""

    def recv_or_pause(self, timeout: float | None, delayed: DelayedPause) -> Frame:
        """Do what `recv` does, and call `delayed.pause` when its descriptor becomes readable."""
        delayed.pause()
        return self.recv(timeout)

    def fileno(self) -> int | None:
        """Return the descriptor for epoll; None if `on_frame` is called instead."""
        return None

    def receive(self) -> bool:
        """Receive available bytes without blocking. Return False if there were none.

        Channels without `fileno` always return False: `next_frame` has all that arrived.
        """
        return False

    def poll(self, attempts: int) -> bool:
        """Call `receive` up to `attempts` times, until bytes arrive."""
        return self.receive()

    @abstractmethod
    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None; without a system call."""

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes of a frame that has begun are missing, as far as known."""
        return 0

    @abstractmethod
    def has_frame(self) -> bool:
        """Return whether `next_frame` would return a frame."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the connection and wake all threads that use the channel."""

    @abstractmethod
    def close(self) -> None:
        """End the connection and free the resources of the channel."""

    @abstractmethod
    def close_after_fork(self) -> None:
        """Close this process's descriptor without ending the connection; in the child of a fork."""


def send_leave(channel: Channel, reason: str | None) -> None:
    """Tell the peer that this side leaves, and why. None: do not send anything."""
    if reason is not None:
        try:
            channel.send(Kind.LEAVE, 0, reason.encode(), timeout=1.0)
        except (ChannelClosed, TimeoutError) as error:
            _log.debug("the LEAVE frame was not sent, the channel is closed: %s", error)


def close_with_reason(channel: Channel, reason: str | None, kind: Kind = Kind.LEAVE) -> None:
    """Shut a channel. Tell the peer why if it can be sent without blocking.

    `Kind.LEAVE` and `Kind.EXPEL` end all connections with the peer, `Kind.CLOSE` only this one.
    """
    if reason is not None:
        try:
            channel.send_nowait(kind, 0, reason.encode())
        except ChannelClosed as error:
            _log.debug("the reason was not sent, the channel is closed: %s", error)
    channel.shutdown()

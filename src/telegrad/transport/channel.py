"""What every transport offers: a `Channel` carries frames both ways between two peers, in order.

Rules for all implementations (one test suite checks them all):
- `send` may be called from any thread. A frame goes out whole or not at all, also if a signal handler raises inside
  `send`, or the channel is closed. It returns once the bytes and buffers belong to the transport, so the caller may
  change its tensors.
- `recv` is called by one thread at a time. `TimeoutError` leaves the channel usable; `ChannelClosed` is final.
- `shut` may be called from any thread: it wakes whoever is inside `recv` or `send`. `close` frees what the channel
  holds and is called by the thread that reads, or when nobody does.
- `cork` may gather small frames; the next `send` or `flush_nowait` takes them along, in order.
- `receive` and `next_frame` are what a thread calls that reads many channels, in place of `recv`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from telegrad.transport.shared_copies import SharedCopies
from telegrad.wire.frames import Frame, Kind

_log = logging.getLogger(__name__)


class ChannelClosed(Exception):
    """The channel is closed, by this side or the other."""


class SendTimeout(TimeoutError):
    """The peer took no data for too long. `begun`: part of the frame has left, and the rest will before the next."""

    def __init__(self, begun: bool) -> None:
        super().__init__("the peer takes no data")
        self.begun = begun


class PeerClosed(ChannelClosed):
    """The peer left on its own account. `words` is what it said."""

    def __init__(self, frame: Frame) -> None:
        super().__init__("the peer said good-bye")
        self.words = text_of_frame(frame)


def text_of_frame(frame: Frame) -> str:
    """Return the text of a BYE or an END."""
    return bytes(frame.body).decode("utf-8", "replace")


class Channel(ABC):
    """A connection to one peer."""

    kind: str
    # called when a frame arrives, by channels that have no `fileno`
    on_frame: Callable[[], None] | None = None
    # called when the peer took only a part of what was corked
    on_send_blocked: Callable[[], None] | None = None
    # set whenever bytes arrive, cleared by the heartbeat: a long frame is a sign of life, too
    heard = False

    @abstractmethod
    def send(
        self,
        kind: int,
        call: int,
        body: bytes,
        buffers: Sequence[memoryview] = (),
        function: int = 0,
        left_ms: int = 0,
        flags: int = 0,
        timeout: float | None = None,
        copies: SharedCopies | None = None,
    ) -> None:
        """Send one frame. Raises `SendTimeout` if the peer takes nothing for `timeout` seconds.

        Messages with the same `copies` have the same buffers: they may be copied once for all receivers.
        """

    def copy_to_shared_block(
        self, copies: SharedCopies, number: int, buffer: memoryview
    ) -> memoryview | None:
        """Copy the buffer with this number to where receivers of `copies` find it. None: there is no such place."""
        return None

    @abstractmethod
    def try_send(self, kind: int) -> None:
        """Send an empty frame without ever blocking; it may be delayed or, if somebody else is sending, left out."""

    @abstractmethod
    def cork(self, kind: int, call: int, body: bytes) -> None:
        """Queue a small frame."""

    def cork_deferred(self, kind: int, call: int, body: bytes) -> None:
        """Queue a small frame that only `flush_deferred` sends."""
        self.offer(kind, call, body)

    def flush_deferred(self) -> None:
        """Send what `cork_deferred` queued, and all else, without waiting."""
        self.flush_nowait()

    @abstractmethod
    def flush_nowait(self) -> bool:
        """Send what `cork` queued as far as the peer takes it at once. If some is left, call

        `on_send_blocked`: False.
        """

    def offer(self, kind: int, call: int, body: bytes) -> bool:
        """Send a small frame as far as the peer takes it at once; see `flush_nowait`."""
        self.cork(kind, call, body)
        return self.flush_nowait()

    @abstractmethod
    def recv(self, timeout: float | None = None) -> Frame:
        """Wait for the next frame."""

    def fileno(self) -> int | None:
        """What the system can wait for, together with other channels; None: `on_frame` tells when a frame arrives."""
        return None

    def receive(self) -> bool:
        """Take what has arrived, without waiting. False: there was nothing, or it is known already."""
        return False

    def poll(self, attempts: int) -> bool:
        """Like `receive`, but look so many times before giving up."""
        return self.receive()

    @abstractmethod
    def next_frame(self) -> Frame | None:
        """The next frame if it is here, without asking the system."""

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to come of a frame that has begun, as far as that is known."""
        return 0

    @abstractmethod
    def has_frame(self) -> bool:
        """Would `next_frame` return a frame?"""

    @abstractmethod
    def shut(self) -> None:
        """End the conversation; wakes everybody who uses the channel."""

    @abstractmethod
    def close(self) -> None:
        """Shut and free the channel."""

    @abstractmethod
    def drop(self) -> None:
        """Free this process's copy of the channel without ending the conversation: for the child of a fork."""


def send_goodbye(channel: Channel, last_words: str | None) -> None:
    """Tell the peer that this side leaves, and why; None: leave without a word."""
    if last_words is not None:
        try:
            channel.send(Kind.BYE, 0, last_words.encode(), timeout=1.0)
        except (ChannelClosed, TimeoutError) as error:
            _log.debug("nobody is left to hear the good-bye: %s", error)


def close_with_reason(channel: Channel, last_words: str | None, kind: Kind = Kind.BYE) -> None:
    """Shut a channel; tell the peer why if it takes that at once. `Kind.END`: other connections with it go on."""
    if last_words is not None:
        try:
            channel.offer(kind, 0, last_words.encode())
        except ChannelClosed as error:
            _log.debug("nobody is left to hear the good-bye: %s", error)
    channel.shut()

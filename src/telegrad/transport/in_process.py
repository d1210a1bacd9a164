"""A channel between two agents of one process: queues of frames. Buffers are copied once.

State: each end has an inbox, a queue of frames in which None marks the end. The two ends share a
`_ChannelState`, whose lock guards `closed`. Nothing is put into an inbox after None.
"""

from __future__ import annotations

import collections
import itertools
import queue
from collections.abc import Sequence

from telegrad.locks import new_lock
from telegrad.transport.buffer_pool import BufferPool
from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.transport.host_image import fill_images
from telegrad.transport.shared_memory import SharedCopies
from telegrad.wire.frames import Frame

Inbox = queue.SimpleQueue[Frame | None]
_popleft = collections.deque.popleft


class _ChannelState:
    """The state that the two ends of a channel share."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.closed = False
        self.ends: tuple[MemoryChannel, ...] = ()


class MemoryChannel(Channel):
    """One end of a channel between two agents of this process."""

    kind = "memory"

    def __init__(self, inbox: Inbox, outbox: Inbox, pool: BufferPool, state: _ChannelState) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._pool = pool
        self._state = state
        self._corked: collections.deque[Frame] = collections.deque()  # any thread appends
        # `extend` runs an iterator in one C call
        self._discard: collections.deque[None] = collections.deque(maxlen=0)

    def __repr__(self) -> str:
        shut = " shut" if self._state.closed else ""
        return f"<MemoryChannel {self._inbox.qsize()} frames waiting{shut}>"

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
        fill_images(buffers)
        copied = [self._copy(buffer) for buffer in buffers]
        frame = Frame.of(kind, flags, call, function, timeout_ms, body, copied)
        with self._state.lock:
            self._flush()
            self._outbox.put(frame)
        self._notify_peer()

    def try_send(self, kind: int) -> None:
        self.send(kind, 0, b"")

    def cork(self, kind: int, call: int, body: bytes) -> None:
        self._corked.append(Frame.of(kind, 0, call, 0, 0, body, ()))

    def flush_nowait(self) -> bool:
        if self._corked:
            with self._state.lock:
                self._flush()
            self._notify_peer()
        return True

    def _notify_peer(self) -> None:
        """Tell the event loop of the other end, if one reads it, that frames have arrived."""
        on_frame = self._peer_end().on_frame
        if on_frame is not None:
            on_frame()

    def _peer_end(self) -> MemoryChannel:
        left, right = self._state.ends
        return right if left is self else left

    def _flush(self) -> None:
        """Under the lock: move the corked frames to the outbox."""
        if self._state.closed:
            raise ChannelClosed("the channel is shut")
        frames = map(_popleft, itertools.repeat(self._corked, len(self._corked)))
        # one C call, so that no signal handler can interrupt it and lose a frame
        self._discard.extend(map(self._outbox.put, frames))

    def recv(self, timeout: float | None = None) -> Frame:
        try:
            frame = self._inbox.get(timeout=None if timeout is None else max(timeout, 0.0))
        except queue.Empty:
            raise TimeoutError("nothing arrived in time") from None
        if frame is None:
            self._inbox.put(None)  # later readers must see the end, too
            raise ChannelClosed("the peer closed the connection")
        self.received_since_heartbeat = True
        return frame

    def next_frame(self) -> Frame | None:
        return None if self._inbox.empty() else self.recv(0.0)

    def has_frame(self) -> bool:
        return not self._inbox.empty()

    def shutdown(self) -> None:
        with self._state.lock:
            if self._state.closed:
                return
            self._state.closed = True
            self._inbox.put(None)
            self._outbox.put(None)
        for each in self._state.ends:
            if each.on_frame is not None:
                each.on_frame()

    def close(self) -> None:
        self.shutdown()

    def close_after_fork(self) -> None:
        return  # there is no descriptor to close

    def _copy(self, buffer: memoryview) -> memoryview:
        copy = self._pool.reserve(buffer.nbytes)
        copy[:] = buffer
        return copy


def create_pair(pool: BufferPool) -> tuple[MemoryChannel, MemoryChannel]:
    """Return the two ends of a new channel."""
    left: Inbox = queue.SimpleQueue()
    right: Inbox = queue.SimpleQueue()
    state = _ChannelState()
    near, far = MemoryChannel(left, right, pool, state), MemoryChannel(right, left, pool, state)
    state.ends = near, far
    return near, far

"""`StreamChannel`: a channel over a unix socket. `SocketChannel`: what it shares with TCP.

Large buffers may go through shared memory instead of the stream (`shared_memory`).

Timeouts are those of the kernel (SO_RCVTIMEO, SO_SNDTIMEO): they cost nothing on the fast path,
where `settimeout` would add a poll to every call.

A frame is sent completely or not at all. A timeout, or an exception of a signal handler, may end
a send at any moment. Then the rest of a frame that has begun is copied to `_unsent` and is sent
before the next frame; a frame that has not begun is discarded. For that, a send is described by a
`PendingSend` before its first byte is sent, and the number of sent bytes is recorded in the same C
call that sends them (`sent_counts.extend(map(send, ...))`). Signal handlers run between two calls
of Python code, so the number is never lost.

A thread whose last message arrived soon polls for the next one before it sleeps in the kernel
(`telegrad.spinning`).

State: `_send_lock` guards the sending side: `_unsent`, `_pending`, `_frame_begun`, and removing
from `_queue`. Any thread appends to `_queue` and `_deferred`. A thread that finds the lock taken
leaves its corked frames to the thread that has it, which checks `_queue` again after releasing it.
The decoder, `_receive_timeout` and `_should_spin` belong to the reading thread.
"""

from __future__ import annotations

import collections
import enum
import itertools
import math
import select
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence

from telegrad import thread_roles
from telegrad.errors import ProtocolError, SerializationError
from telegrad.free_threading import snapshot
from telegrad.locks import new_lock
from telegrad.spinning import SPIN_SECONDS, spinning, yield_core
from telegrad.timeouts import LONGEST_POLL
from telegrad.transport.buffer_pool import BufferPool
from telegrad.transport.channel import Channel, ChannelClosed, SendTimeout
from telegrad.transport.host_image import fill_images
from telegrad.transport.shared_memory import SharedCopies, SharedMemoryTransfer
from telegrad.wire.frames import HEADER, BufferLocation, Frame, FrameDecoder, encode_header

_IOV_MAX = 1000  # buffers per `sendmsg`; the kernel permits 1024
# Smaller frames are joined into one buffer: a system call with several buffers costs more.
_JOIN_BELOW = 1 << 15
_POLLS_PER_CLOCK_READ = 8  # polls of the socket between two readings of the clock
_SEND_TIMEOUT = 0.25  # seconds after which a blocked `send` compares the time with its deadline
_pack = HEADER.pack
_popleft = collections.deque.popleft
_thread_id = threading.get_ident
_main_thread = threading.main_thread().ident  # signal handlers run on this thread only
_DONTWAIT = int(socket.MSG_DONTWAIT)


class PendingSend:
    """Bytes to send: the rest of earlier frames, then corked frames, then one frame of the caller.

    Used under the send lock of its channel.
    """

    __slots__ = ("bytes_before_frame", "corked_count", "popped_frames", "sent_counts", "views")

    def __init__(
        self, views: list[memoryview], bytes_before_frame: int = 0, corked_count: int = 0
    ) -> None:
        self.views = views  # not sent yet, as far as `sent_counts` was processed
        # unsent bytes before the caller's frame; negative once that frame has begun
        self.bytes_before_frame = bytes_before_frame
        self.corked_count = corked_count  # frames of the channel's queue that are included
        self.popped_frames: list[bytes] = []  # those that were removed from the queue
        self.sent_counts: list[int] = []  # bytes sent since the last `advance`

    def advance(self) -> None:
        """Remove the bytes that `sent_counts` records from `views`."""
        sent = sum(self.sent_counts)
        views = self.views
        bytes_before_frame = self.bytes_before_frame - sent
        index = 0
        while index < len(views) and sent >= views[index].nbytes:
            sent -= views[index].nbytes
            index += 1
        views = views[index:]
        if sent:
            views[0] = views[0][sent:]
        # no call between these stores, so no signal handler runs between them
        self.views, self.bytes_before_frame, self.sent_counts = views, bytes_before_frame, []

    def unsent_bytes(self) -> bytes:
        """Return the bytes that must be sent later: the caller's frame only if it has begun."""
        if self.bytes_before_frame < 0:
            return b"".join(self.views)
        parts, left = [], self.bytes_before_frame
        for view in self.views:
            if left <= 0:
                break
            parts.append(view[:left])
            left -= view.nbytes
        return b"".join(parts)


class ConnectionState(enum.Enum):
    """Whether frames can be sent and received now."""

    OPEN = "open"
    INTERRUPTED = "interrupted"
    CLOSED = "shut"


OPEN, INTERRUPTED, CLOSED = ConnectionState


class SocketChannel(Channel):
    """A channel over a socket: the part that unix sockets and TCP share.

    Frames wait in `_queue` until a thread that has `_send_lock` sends them.
    """

    _decoder: FrameDecoder

    def __init__(self, peer_max_frame: int) -> None:
        self._peer_max_frame = peer_max_frame
        self._send_lock = new_lock()
        self._queue: collections.deque[bytes] = collections.deque()  # encoded frames
        # encoded frames that only `flush_deferred` sends
        self._deferred: collections.deque[bytes] = collections.deque()
        self._unsent: bytes | memoryview = b""  # rest of earlier frames, sent before anything else
        self._state = OPEN  # only that of a TCP channel changes
        self._acknowledge = False  # send a HEARTBEAT with the next frames; TCP only
        self._receive_timeout: float | None = None
        self._should_spin = False  # the last frame arrived soon, so `recv` polls before it sleeps

    def _on_flush_not_open(self) -> None:
        """Frames cannot be sent now. Raise `ChannelClosed` if they will never be."""

    @abstractmethod
    def _send_queued(self) -> bool:
        """Under the send lock: send without blocking what is left of earlier frames, and `_queue`.

        Return False if some are left.
        """

    def _too_large(self, size: int) -> SerializationError:
        """Return the error for a message that the peer does not accept."""
        return SerializationError(
            f"a message of {size} bytes exceeds the limit of {self._peer_max_frame} bytes "
            "that its receiver accepts; raise Config.max_frame there"
        )

    def cork(self, kind: int, call: int, body: bytes) -> None:
        self._queue.append(_pack(len(body), call, 0, 0, 0, kind, 0, 0) + body)

    def cork_deferred(self, kind: int, call: int, body: bytes) -> None:
        self._deferred.append(_pack(len(body), call, 0, 0, 0, kind, 0, 0) + body)

    def flush_deferred(self) -> None:
        try:
            while True:
                self._queue.append(self._deferred.popleft())
        except IndexError:  # empty; two threads may run this loop
            self.flush_nowait()

    def flush_nowait(self) -> bool:
        while self._queue or self._unsent or self._acknowledge:
            if self._state is not OPEN:
                self._on_flush_not_open()
                return True  # they are sent when the channel is open again
            acquired: list[bool] = []
            try:
                # one C call: no signal handler runs between acquiring the lock and recording it
                acquired.extend(map(self._send_lock.acquire, (False,)))
                if not acquired[0]:
                    return True  # the thread that has the lock sends the frames
                complete = self._send_queued()
            finally:
                if acquired and acquired[0]:
                    self._send_lock.release()
            if not complete:
                if self.on_send_blocked is not None:
                    self.on_send_blocked()
                return False
        return True

    def _spin(self, started: float, poller: select.poll | None = None) -> bool:
        """Poll for bytes for a moment without sleeping. Return True if some arrived.

        Return at once if another thread of this process does so already or has lost its core, and
        as soon as `poller` finds that a descriptor is readable.
        """
        if started < spinning.rest_until:
            return False
        acquired: list[bool] = []
        try:
            # one C call: no signal handler runs between acquiring the lock and recording it
            acquired.extend(map(spinning.permit.acquire, (False,)))
            if not acquired[0]:
                return False
            now = started
            while not self.poll(_POLLS_PER_CLOCK_READ):
                before, now = now, time.monotonic()
                if spinning.lost_core(before, now) or now > started + SPIN_SECONDS:
                    self._should_spin = False
                    return False
                if poller is not None and poller.poll(0):
                    return False
            return True
        finally:
            if acquired and acquired[0]:
                spinning.permit.release()

    def receive(self) -> bool:
        return self.poll(1)

    @property
    def missing_bytes(self) -> int:
        return self._decoder.missing_bytes


class StreamChannel(SocketChannel):
    """A channel over a connected stream socket."""

    kind = "unix"

    def __init__(
        self,
        sock: socket.socket,
        pool: BufferPool,
        max_frame: int,
        sharing: SharedMemoryTransfer | None = None,
        peer_max_frame: int | None = None,
    ) -> None:
        super().__init__(max_frame if peer_max_frame is None else peer_max_frame)
        self._sock = sock
        self._sharing = sharing
        locate = sharing.locate if sharing is not None else no_segments
        self._decoder = FrameDecoder(pool.reserve, locate, max_frame)
        # an instance attribute instead of the method: one call fewer per frame
        self.next_frame = self._decoder.next_frame  # type: ignore[method-assign]
        self._pending: PendingSend | None = None  # a send that is running or was interrupted
        self._frame_begun = False  # whether the caller's frame of the last send has begun
        self._is_shut = False
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(_SEND_TIMEOUT))

    def __repr__(self) -> str:
        shut = " shut" if self._is_shut else ""
        return f"<StreamChannel {self.kind} fd={self._sock.fileno()}{shut} {self._decoder!r}>"

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
        size = len(body)
        if not buffers and size < _JOIN_BELOW:
            data = _pack(size, call, function, timeout_ms, 0, kind, flags, 0) + body
            with self._send_lock:
                # the fast path: nothing is to be sent before this frame
                if not self._unsent and not self._queue and self._pending is None:
                    pending = self._pending = PendingSend([memoryview(data)])
                    try:
                        pending.sent_counts.extend(map(self._sock.send, (data,), (_DONTWAIT,)))
                    except BlockingIOError:
                        pass
                    except OSError as error:
                        raise ChannelClosed(str(error)) from None
                    if pending.sent_counts and pending.sent_counts[0] == len(data):
                        self._pending = None
                    else:
                        self._send_pending(pending, timeout)
                else:
                    self._send_all([memoryview(data)], timeout)
            if self._queue:  # corked by a thread that found the lock taken
                self.flush_nowait()
            return
        total = size + sum(buffer.nbytes for buffer in buffers)
        if total > self._peer_max_frame:
            raise self._too_large(total)
        fill_images(buffers)
        places = [BufferLocation(buffer.nbytes) for buffer in buffers]
        in_stream = list(buffers)
        begun = False
        deadline = 0.0 if timeout is None else time.monotonic() + timeout
        try:
            if self._sharing is not None:
                in_stream = self._sharing.place(buffers, places, timeout, copies)
            start = encode_header(
                kind,
                call,
                body,
                function=function,
                timeout_ms=timeout_ms,
                flags=flags,
                places=places,
            )
            with self._send_lock:
                try:
                    left = None if timeout is None else max(deadline - time.monotonic(), 0.0)
                    self._send_all([memoryview(start), memoryview(body), *in_stream], left)
                finally:
                    begun = self._frame_begun
            if self._queue:
                self.flush_nowait()
        except BaseException:
            if self._sharing is not None and not begun:
                self._sharing.release(places)  # no frame names these blocks
            raise

    def copy_to_shared_block(
        self, copies: SharedCopies, index: int, buffer: memoryview
    ) -> memoryview | None:
        if self._sharing is None:
            return None
        return self._sharing.copy_to_shared_block(copies, index, buffer)

    def try_send(self, kind: int) -> None:
        if not self._send_lock.acquire(blocking=False):
            return
        try:
            if not self._unsent:  # else the unsent bytes are a sign of life themselves
                self._queue.append(_pack(0, 0, 0, 0, 0, kind, 0, 0))
            complete = self._send_all([], 0.0, wait=False)
        finally:
            self._send_lock.release()
        if not complete and self.on_send_blocked is not None:
            self.on_send_blocked()
        if complete and self._queue:  # corked by a thread that found the lock taken
            self.flush_nowait()

    def _send_queued(self) -> bool:
        if self._unsent or self._pending is not None or _thread_id() == _main_thread:
            return self._send_all([], None, wait=False)
        # No signal handler runs on this thread, so no `PendingSend` is needed.
        queue = self._queue
        if len(queue) == 1:
            data = queue.popleft()
        else:
            data = b"".join([queue.popleft() for _ in range(len(queue))])
        sent = 0
        try:
            sent = self._sock.send(data, _DONTWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            self.shutdown()  # these replies are lost, so the peer must not wait for them
            raise ChannelClosed(str(error)) from None
        finally:
            self._unsent = data[sent:]
        return not self._unsent

    def _send_all(self, frame: list[memoryview], timeout: float | None, wait: bool = True) -> bool:
        """Under the lock: send unsent bytes, corked frames, then `frame`.

        Return False if some are left, which happens only without `wait`.
        """
        if self._pending is not None:
            self._finish_send(self._pending)  # a signal handler interrupted that send
        corked = snapshot(self._queue) if self._queue else []
        earlier = [memoryview(data) for data in (self._unsent, *corked) if data]
        earlier_bytes = sum(view.nbytes for view in earlier)
        own = [view for view in frame if view.nbytes]
        pending = PendingSend([*earlier, *own], earlier_bytes, len(corked))
        self._frame_begun = bool(frame)  # assumed until `_finish_send` knows
        self._pending = pending
        return self._send_pending(pending, timeout, wait)

    def _send_pending(self, pending: PendingSend, timeout: float | None, wait: bool = True) -> bool:
        """Under the lock: send all bytes of `pending`. `wait`, result: see `_send_all`."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        flags = _DONTWAIT
        role = None
        try:
            pending.advance()
            while pending.views:
                try:
                    pending.sent_counts.extend(
                        map(self._sock.sendmsg, (pending.views[:_IOV_MAX],), ((),), (flags,))
                    )
                except BlockingIOError:
                    if self._is_shut:
                        raise ChannelClosed("the channel was shut") from None
                    if not wait:
                        return False
                    if time.monotonic() >= deadline:
                        raise SendTimeout(begun=pending.bytes_before_frame < 0) from None
                    if flags:
                        # block in the kernel from now on, and let another thread read meanwhile
                        flags, role = 0, thread_roles.pause()
                except OSError as error:
                    raise ChannelClosed(str(error)) from None
                pending.advance()
            return True
        finally:
            self._finish_send(pending)
            thread_roles.resume(role)

    def _finish_send(self, pending: PendingSend) -> None:
        """Under the lock: keep the bytes that a send has left. It may be called again.

        A signal handler may interrupt this method; the next send repeats it.
        """
        pending.advance()
        left = pending.corked_count - len(pending.popped_frames)
        pending.popped_frames.extend(map(_popleft, itertools.repeat(self._queue, left)))
        self._unsent = pending.unsent_bytes() if pending.views else b""
        self._frame_begun = pending.bytes_before_frame < 0
        self._pending = None

    def recv(self, timeout: float | None = None) -> Frame:
        decoder = self._decoder
        frame = decoder.next_frame()
        if frame is not None:
            return frame
        if timeout != self._receive_timeout:
            self._set_receive_timeout(timeout)
        started = time.monotonic()
        receive = self._sock.recv_into
        if self._should_spin and self._spin(started):
            frame = decoder.next_frame()
            if frame is not None:
                return frame
        while True:
            try:
                count = receive(decoder.get_buffer())
            except BlockingIOError:
                raise TimeoutError("nothing arrived in time") from None
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not count:
                raise ChannelClosed("the peer closed the connection")
            decoder.buffer_updated(count)
            self.received_since_heartbeat = True
            frame = decoder.next_frame()
            if frame is not None:
                self._should_spin = spinning.is_worthwhile(started)
                return frame
            if timeout is not None:
                left = timeout - (time.monotonic() - started)
                if left <= 0:
                    raise TimeoutError("nothing arrived in time")
                self._set_receive_timeout(left)

    def recv_or_pause(self, timeout: float | None, delayed: thread_roles.DelayedPause) -> Frame:
        frame = self._decoder.next_frame()
        if frame is not None:
            return frame
        started = time.monotonic()
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.register(delayed, select.POLLIN)
        if not self._should_spin or not self._spin(started, poller):
            # At the end of an earlier poll, `recv` below waits for the rest of the time.
            ready = poller.poll(None if timeout is None else min(timeout, LONGEST_POLL) * 1000)
            if any(fd == self._sock.fileno() for fd, _ in ready):
                self.poll(1)
        frame = self._decoder.next_frame()
        if frame is None:
            delayed.pause()  # something else arrived first, or only a part of the reply
            if timeout is not None:
                timeout = max(timeout - (time.monotonic() - started), 0.0)
            frame = self.recv(timeout)
        self._should_spin = spinning.is_worthwhile(started)
        return frame

    def fileno(self) -> int | None:
        return self._sock.fileno()

    def poll(self, attempts: int) -> bool:
        receive, space = self._sock.recv_into, self._decoder.get_buffer()
        while True:
            try:
                count = receive(space, 0, _DONTWAIT)
                break
            except BlockingIOError:
                attempts -= 1
                if not attempts or not yield_core():
                    return False
            except OSError as error:
                raise ChannelClosed(str(error)) from None
        if not count:
            raise ChannelClosed("the peer closed the connection")
        self._decoder.buffer_updated(count)
        self.received_since_heartbeat = True
        return True

    def next_frame(self) -> Frame | None:
        return self._decoder.next_frame()

    def has_frame(self) -> bool:
        return self._decoder.has_frame()

    def shutdown(self) -> None:
        self._is_shut = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already disconnected

    def close(self) -> None:
        try:
            self.shutdown()
        finally:
            self._sock.close()
            if self._sharing is not None:
                self._sharing.close()

    def close_after_fork(self) -> None:
        self._sock.close()

    def _set_receive_timeout(self, seconds: float | None) -> None:
        self._receive_timeout = seconds
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(seconds))
        except OSError as error:
            raise ChannelClosed(str(error)) from None


def timeval(seconds: float | None) -> bytes:
    """Encode a timeout for `setsockopt`: at least 1 ms, because 0 means no timeout."""
    if seconds is None:
        return struct.pack("ll", 0, 0)
    whole = int(seconds)
    return struct.pack("ll", whole, max(int((seconds - whole) * 1e6), 0 if whole else 1000))


def no_segments(place: BufferLocation) -> memoryview:
    """Refuse a buffer in shared memory: what a channel that uses none passes to its decoder."""
    raise ProtocolError("a buffer is in shared memory, but this connection does not use any")

"""A channel over a stream socket, unix or TCP. Large buffers may go through shared memory instead (see `shared`).

State: `_send_lock` guards the sending side (`_unsent`, `_pending`, and taking from `_corked`); the decoder belongs to
the reading thread. Time limits are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): they cost nothing on the fast path, where
settimeout would add a poll to every call.

A frame goes out whole or not at all. A time limit, or an exception that a signal handler raises, may end a send at any
moment; what is left of a frame that has begun is copied to `_unsent` and goes out before the next frame, and a frame
that has not begun is dropped. For that, a send is described by a `PendingSend` before its first byte leaves, and the
number of bytes that left is stored in the same C call that sends them (`sent_counts.extend(map(send, ...))`): signal
handlers run between two calls that Python code makes, so the number is never lost.
"""

from __future__ import annotations

import collections
import itertools
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

from telegrad import blocking
from telegrad.errors import ProtocolError, SerializationError
from telegrad.interpreter import snapshot
from telegrad.transport.channel import Channel, ChannelClosed, SendTimeout
from telegrad.transport.pending_send import PendingSend
from telegrad.transport.shared_copies import SharedCopies
from telegrad.transport.shared_memory import SharedMemoryTransfer
from telegrad.transport.spinning import CONTENDED_SECONDS, CORES, SPIN_SECONDS, spin_permit
from telegrad.wire.buffer_pool import BufferPool
from telegrad.wire.frames import HEADER, BufferPlace, Frame, FrameDecoder, head

_IOV_MAX = 1000
# smaller frames are joined into one buffer; a system call with many parts costs more
_JOIN_BELOW = 1 << 15
_POLLS_PER_CLOCK_READ = 8  # for bytes, for each look at the clock
_SEND_TIMEOUT = 0.25  # seconds after which a blocked sender looks at its deadline

_pack = HEADER.pack
_popleft = collections.deque.popleft
_yield = os.sched_yield
_thread_id = threading.get_ident
_main_thread = threading.main_thread().ident  # the one that signal handlers run on
_DONTWAIT = int(socket.MSG_DONTWAIT)


class StreamChannel(Channel):
    def __init__(
        self,
        sock: socket.socket,
        pool: BufferPool,
        max_frame: int,
        sharing: SharedMemoryTransfer | None = None,
        peer_max_frame: int | None = None,
    ) -> None:
        self.kind = "unix" if sock.family == socket.AF_UNIX else "tcp"
        self._sock = sock
        self._sharing = sharing
        self._peer_max_frame = max_frame if peer_max_frame is None else peer_max_frame
        locate = sharing.locate if sharing is not None else _no_segments
        self._decoder = FrameDecoder(pool.reserve, locate, max_frame)
        self.next_frame = self._decoder.next  # type: ignore[method-assign]  # without a call in between
        self._send_lock = threading.Lock()
        self._corked: collections.deque[bytes] = collections.deque()  # added to by anybody
        # as `_corked`, but for `flush_deferred` only
        self._deferred: collections.deque[bytes] = collections.deque()
        self._unsent = b""  # what must go out before anything else
        self._pending: PendingSend | None = None
        self._frame_begun = False  # did the own frame of the last flight begin?
        self._receive_timeout: float | None = None
        self._is_shut = False
        self._should_spin = False  # the last frame came so fast that the next is awaited awake
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_TIMEOUT))
        if self.kind == "tcp":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

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
        left_ms: int = 0,
        flags: int = 0,
        timeout: float | None = None,
        copies: SharedCopies | None = None,
    ) -> None:
        size = len(body)
        if not buffers and size < _JOIN_BELOW:
            data = _pack(size, call, function, left_ms, 0, kind, flags, 0) + body
            with self._send_lock:
                if not self._unsent and not self._corked and self._pending is None:
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
            if self._corked:
                self.flush_nowait()
            return
        total = size + sum(buffer.nbytes for buffer in buffers)
        if total > self._peer_max_frame:
            raise SerializationError(
                f"a message of {total} bytes exceeds the limit of {self._peer_max_frame} that its receiver accepts; "
                "raise Config.max_frame there"
            )
        places = [BufferPlace(buffer.nbytes) for buffer in buffers]
        in_stream = list(buffers)
        begun = False
        deadline = 0.0 if timeout is None else time.monotonic() + timeout
        try:
            if self._sharing is not None:
                in_stream = self._sharing.place(buffers, places, timeout, copies)
            start = head(
                kind, call, body, function=function, left_ms=left_ms, flags=flags, places=places
            )
            with self._send_lock:
                try:
                    left = None if timeout is None else max(deadline - time.monotonic(), 0.0)
                    self._send_all([memoryview(start), memoryview(body), *in_stream], left)
                finally:
                    begun = self._frame_begun
            if self._corked:
                self.flush_nowait()
        except BaseException:
            if self._sharing is not None and not begun:
                self._sharing.release(places)  # the peer will never hear of them
            raise

    def copy_to_shared_block(
        self, copies: SharedCopies, number: int, buffer: memoryview
    ) -> memoryview | None:
        return (
            None
            if self._sharing is None
            else self._sharing.copy_to_shared_block(copies, number, buffer)
        )

    def try_send(self, kind: int) -> None:
        if not self._send_lock.acquire(blocking=False):
            return
        try:
            if not self._unsent:  # what is owed is a sign of life, too
                self._corked.append(_pack(0, 0, 0, 0, 0, kind, 0, 0))
            complete = self._send_all([], 0.0, wait=False)
        finally:
            self._send_lock.release()
        if not complete and self.on_send_blocked is not None:
            self.on_send_blocked()
        if complete and self._corked:  # whoever corked these found the lock taken
            self.flush_nowait()

    def cork(self, kind: int, call: int, body: bytes) -> None:
        self._corked.append(_pack(len(body), call, 0, 0, 0, kind, 0, 0) + body)

    def cork_deferred(self, kind: int, call: int, body: bytes) -> None:
        self._deferred.append(_pack(len(body), call, 0, 0, 0, kind, 0, 0) + body)

    def flush_deferred(self) -> None:
        try:
            while True:
                self._corked.append(self._deferred.popleft())
        except IndexError:  # empty; two threads may be here
            self.flush_nowait()

    def flush_nowait(self) -> bool:
        while self._corked or self._unsent:
            held: list[bool] = []
            try:
                # one call: no signal handler runs in between
                held.extend(map(self._send_lock.acquire, (False,)))
                if not held[0]:
                    return True  # whoever holds it looks again when it is done
                complete = self._send_corked()
            finally:
                if held and held[0]:
                    self._send_lock.release()
            if not complete:
                if self.on_send_blocked is not None:
                    self.on_send_blocked()
                return False
        return True

    def _send_corked(self) -> bool:
        """Under the lock: send what is owed and corked, without waiting. False: not all of it."""
        if self._unsent or self._pending is not None or _thread_id() == _main_thread:
            return self._send_all([], None, wait=False)
        # No signal handler runs on this thread, so nothing can come in between.
        corked = self._corked
        data = (
            corked.popleft()
            if len(corked) == 1
            else b"".join([corked.popleft() for _ in range(len(corked))])
        )
        sent = 0
        try:
            sent = self._sock.send(data, _DONTWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            self.shut()  # whatever it was: the answers that are lost with it must not be waited for
            raise ChannelClosed(str(error)) from None
        finally:
            self._unsent = data[sent:]
        return not self._unsent

    def _send_all(self, frame: list[memoryview], timeout: float | None, wait: bool = True) -> bool:
        """Under the lock: send what is owed and corked, then `frame`. False: not all of it (only without `wait`)."""
        if self._pending is not None:
            self._finish_send(self._pending)  # a send was interrupted
        corked = snapshot(self._corked)
        unsent = [memoryview(data) for data in (self._unsent, *corked) if data]
        before = sum(view.nbytes for view in unsent)
        pending = PendingSend(
            [*unsent, *(view for view in frame if view.nbytes)], before, len(corked)
        )
        self._frame_begun = bool(frame)  # until it is known better
        self._pending = pending
        return self._send_pending(pending, timeout, wait)

    def _send_pending(self, pending: PendingSend, timeout: float | None, wait: bool = True) -> bool:
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
                        flags, role = 0, blocking.pause()
                except OSError as error:
                    raise ChannelClosed(str(error)) from None
                pending.advance()
            return True
        finally:
            self._finish_send(pending)
            blocking.resume(role)

    def _finish_send(self, pending: PendingSend) -> None:
        """Under the lock: a send is over, or was interrupted; keep what must still go out. May be repeated."""
        pending.advance()
        left = pending.corked_count - len(pending.popped_frames)
        pending.popped_frames.extend(map(_popleft, itertools.repeat(self._corked, left)))
        self._unsent = pending.unsent_bytes() if pending.views else b""
        self._frame_begun = pending.bytes_before_frame < 0
        self._pending = None

    def recv(self, timeout: float | None = None) -> Frame:
        decoder = self._decoder
        frame = decoder.next()
        if frame is not None:
            return frame
        if timeout != self._receive_timeout:
            self._set_receive_timeout(timeout)
        started = time.monotonic()
        receive = self._sock.recv_into
        if self._should_spin and self._spin(started):
            frame = decoder.next()
            if frame is not None:
                return frame
        while True:
            try:
                count = receive(decoder.space())
            except BlockingIOError:
                raise TimeoutError("nothing arrived in time") from None
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not count:
                raise ChannelClosed("the peer closed the connection")
            decoder.fill(count)
            self.heard = True
            frame = decoder.next()
            if frame is not None:
                self._should_spin = CORES > 1 and time.monotonic() - started < SPIN_SECONDS
                return frame
            if timeout is not None:
                left = timeout - (time.monotonic() - started)
                if left <= 0:
                    raise TimeoutError("nothing arrived in time")
                self._set_receive_timeout(left)

    def _spin(self, started: float) -> bool:
        """Look for bytes for a moment without sleeping; True if some came.

        Waking a core that went to sleep takes longer than a short call. So where the last answer came fast, the next
        is awaited awake; where it did not, or another thread of this process does so already, we sleep at once.
        """
        held: list[bool] = []
        try:
            # one call: no signal handler runs in between
            held.extend(map(spin_permit.acquire, (False,)))
            if not held[0]:
                return False
            now = started
            while not self.poll(_POLLS_PER_CLOCK_READ):
                before, now = now, time.monotonic()
                if now > started + SPIN_SECONDS or now > before + CONTENDED_SECONDS:
                    self._should_spin = False
                    return False
            return True
        finally:
            if held and held[0]:
                spin_permit.release()

    def fileno(self) -> int | None:
        return self._sock.fileno()

    def receive(self) -> bool:
        return self.poll(1)

    def poll(self, attempts: int) -> bool:
        receive, space = self._sock.recv_into, self._decoder.space()
        while True:
            try:
                count = receive(space, 0, _DONTWAIT)
                break
            except BlockingIOError:
                attempts -= 1
                if not attempts:
                    return False
                _yield()
            except OSError as error:
                raise ChannelClosed(str(error)) from None
        if not count:
            raise ChannelClosed("the peer closed the connection")
        self._decoder.fill(count)
        self.heard = True
        return True

    def next_frame(self) -> Frame | None:
        return self._decoder.next()

    @property
    def missing_bytes(self) -> int:
        return self._decoder.expected

    def has_frame(self) -> bool:
        return self._decoder.has_frame()

    def shut(self) -> None:
        self._is_shut = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already disconnected

    def close(self) -> None:
        try:
            self.shut()
        finally:
            self._sock.close()
            if self._sharing is not None:
                self._sharing.close()

    def drop(self) -> None:
        self._sock.close()

    def _set_receive_timeout(self, seconds: float | None) -> None:
        self._receive_timeout = seconds
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
        except OSError as error:
            raise ChannelClosed(str(error)) from None


def _timeval(seconds: float | None) -> bytes:
    if seconds is None:
        return struct.pack("ll", 0, 0)
    whole = int(seconds)
    return struct.pack("ll", whole, max(int((seconds - whole) * 1e6), 0 if whole else 1000))


def _no_segments(place: BufferPlace) -> memoryview:
    raise ProtocolError("a buffer in shared memory on a connection that has none")

"""A channel over a stream socket, unix or TCP. Large buffers may go through shared memory instead (see `shared`).

State: `_send_lock` guards the sending side (`_owed`, and taking from `_corked`); the decoder belongs to the reading
thread. Time limits are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO): they cost nothing on the fast path, where settimeout
would add a poll to every call.

A frame that is cut short by a time limit must not break the stream: what is left of it is copied to `_owed` and goes
out before the next frame.
"""

from __future__ import annotations

import collections
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

from telegrad.errors import ProtocolError, SerializationError
from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.transport.shared import Sharing
from telegrad.wire.frames import HEADER, Frame, FrameDecoder, Place, head
from telegrad.wire.memory import Pool

_IOV_MAX = 1000
_JOIN_BELOW = 1 << 15  # smaller frames are joined into one buffer; a system call with many parts costs more
_CORES = len(os.sched_getaffinity(0))
_SPIN = 0.001 if _CORES >= 8 else 0.0003  # seconds; where cores are few, somebody else needs them
_SEND_SLICE = 1.0  # seconds after which a blocked sender looks at its deadline

_pack = HEADER.pack
_spinning = threading.Lock()  # held by the one thread of this process that waits awake


class StreamChannel(Channel):
    def __init__(
        self,
        sock: socket.socket,
        pool: Pool,
        max_frame: int,
        sharing: Sharing | None = None,
        peer_max_frame: int | None = None,
    ) -> None:
        self.kind = "unix" if sock.family == socket.AF_UNIX else "tcp"
        self._sock = sock
        self._sharing = sharing
        self._peer_max_frame = max_frame if peer_max_frame is None else peer_max_frame
        locate = sharing.locate if sharing is not None else _no_segments
        self._decoder = FrameDecoder(pool.reserve, locate, max_frame)
        self._send_lock = threading.Lock()
        self._corked: collections.deque[bytes] = collections.deque()  # added to by anybody
        self._owed = b""
        self._patience: float | None = None
        self._shut = False
        self._spins = False  # the last frame came so fast that the next is awaited awake
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_SLICE))
        if self.kind == "tcp":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __repr__(self) -> str:
        return f"<StreamChannel {self.kind} fd={self._sock.fileno()}{' shut' if self._shut else ''} {self._decoder!r}>"

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
    ) -> None:
        size = len(body)
        if not buffers and size < _JOIN_BELOW:
            data = _pack(size, call, function, left_ms, 0, kind, flags, 0) + body
            with self._send_lock:
                if self._corked:
                    data = self._uncork() + data
                if not self._owed:
                    try:
                        sent = self._sock.send(data)
                    except BlockingIOError:
                        sent = 0
                    except OSError as error:
                        raise ChannelClosed(str(error)) from None
                    if sent == len(data):
                        return
                    data = data[sent:]
                self._write([memoryview(data)], timeout, started=True)
            return
        total = size + sum(buffer.nbytes for buffer in buffers)
        if total > self._peer_max_frame:
            raise SerializationError(
                f"a message of {total} bytes exceeds the limit of {self._peer_max_frame} that its receiver accepts; "
                "raise Config.max_frame there"
            )
        if self._sharing is None:
            places, inside = [Place(buffer.nbytes) for buffer in buffers], list(buffers)
        else:
            places, inside = self._sharing.place(buffers)
        start = head(kind, call, body, function=function, left_ms=left_ms, flags=flags, places=places)
        with self._send_lock:
            corked = self._uncork()
            try:
                self._write([memoryview(corked + start), memoryview(body), *inside], timeout, started=bool(corked))
            except TimeoutError:
                if self._sharing is not None and not self._owed:  # nothing of it went out, and nothing will
                    self._sharing.take_back(places)
                raise

    def try_send(self, kind: int) -> None:
        if not self._send_lock.acquire(blocking=False):
            return
        try:
            data = self._owed + self._uncork() + _pack(0, 0, 0, 0, 0, kind, 0, 0)
            try:
                sent = self._sock.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            self._owed = data[sent:]
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        finally:
            self._send_lock.release()

    def cork(self, kind: int, call: int, body: bytes) -> None:
        self._corked.append(_pack(len(body), call, 0, 0, 0, kind, 0, 0) + body)

    def flush(self) -> None:
        if self._corked:
            self.finish()

    def finish(self) -> None:
        with self._send_lock:
            self._write([memoryview(self._uncork())], None, started=True)

    def _uncork(self) -> bytes:
        data = []
        while self._corked:
            data.append(self._corked.popleft())
        return b"".join(data)

    def offer(self, kind: int, call: int, body: bytes) -> bool:
        data = _pack(len(body), call, 0, 0, 0, kind, 0, 0) + body
        if not self._send_lock.acquire(blocking=False):
            self._corked.append(data)
            return False
        try:
            if self._owed or self._corked:
                self._corked.append(data)
                return False
            try:
                sent = self._sock.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            self._owed = data[sent:]
            return not self._owed
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        finally:
            self._send_lock.release()

    def _write(self, views: list[memoryview], timeout: float | None, started: bool) -> None:
        """Send everything. With `started`, part of it is already on its way, so it must be finished one day."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        if self._owed:
            views.insert(0, memoryview(self._owed))
            self._owed = b""
            started = True
        views = [view for view in views if view.nbytes]
        while views:
            try:
                sent = self._sock.sendmsg(views[:_IOV_MAX])
            except BlockingIOError:
                if self._shut:
                    raise ChannelClosed("the channel was shut") from None
                if time.monotonic() < until:
                    continue
                if started:
                    self._owed = b"".join(views)
                raise TimeoutError("the peer takes no data") from None
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            started = True
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def recv(self, timeout: float | None = None) -> Frame:
        decoder = self._decoder
        frame = decoder.next()
        if frame is not None:
            return frame
        if timeout != self._patience:
            self._set_patience(timeout)
        started = time.monotonic()
        receive = self._sock.recv_into
        if self._spins and self._spin(started):
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
            frame = decoder.next()
            if frame is not None:
                self._spins = _CORES > 1 and time.monotonic() - started < _SPIN
                return frame
            if timeout is not None:
                left = timeout - (time.monotonic() - started)
                if left <= 0:
                    raise TimeoutError("nothing arrived in time")
                self._set_patience(left)

    def _spin(self, started: float) -> bool:
        """Look for bytes for a moment without sleeping; True if some came.

        Waking a core that went to sleep takes longer than a short call. So where the last answer came fast, the next
        is awaited awake; where it did not, or another thread of this process does so already, we sleep at once.
        """
        if not _spinning.acquire(blocking=False):
            return False
        try:
            receive, space, until = self._sock.recv_into, self._decoder.space(), started + _SPIN
            while True:
                try:
                    count = receive(space, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    if time.monotonic() > until:
                        self._spins = False
                        return False
                    os.sched_yield()
                    continue
                if not count:
                    raise ChannelClosed("the peer closed the connection")
                self._decoder.fill(count)
                return True
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        finally:
            _spinning.release()

    def fileno(self) -> int | None:
        return self._sock.fileno()

    def poll(self) -> Frame | None:
        decoder = self._decoder
        frame = decoder.next()
        if frame is None:
            try:
                count = self._sock.recv_into(decoder.space(), 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not count:
                raise ChannelClosed("the peer closed the connection")
            decoder.fill(count)
            frame = decoder.next()
        return frame

    def has_frame(self) -> bool:
        return self._decoder.has_frame()

    def shut(self) -> None:
        self._shut = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already disconnected

    def close(self) -> None:
        self.shut()
        self._sock.close()
        if self._sharing is not None:
            self._sharing.ended()

    def drop(self) -> None:
        self._sock.close()

    def _set_patience(self, seconds: float | None) -> None:
        self._patience = seconds
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
        except OSError as error:
            raise ChannelClosed(str(error)) from None


def _timeval(seconds: float | None) -> bytes:
    if seconds is None:
        return struct.pack("ll", 0, 0)
    whole = int(seconds)
    return struct.pack("ll", whole, max(int((seconds - whole) * 1e6), 0 if whole else 1000))


def _no_segments(place: Place) -> memoryview:
    raise ProtocolError("a buffer in shared memory on a connection that has none")

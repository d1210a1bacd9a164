"""`TcpSender`: the sending side of a `TcpChannel`, and the end of its connection.

A frame waits in `_queue` until it is sent, and in `_unacknowledged` until the peer has received it.
`interrupt` gives the connection up. `TcpChannel`, which receives, resumes it with another one.

State:

- `_lock` guards `_state`, `_socket`, `_records`, `_generation` (counts the interruptions and the
  resumptions; bytes of an earlier generation are discarded), `_error` and `_pulling`. `_changed`
  is its condition.
- `_send_lock` guards `_unsent` (encoded bytes that the socket did not take yet), `_partial` (the
  rest of a large frame), `_taken`, `_sent` and taking frames from `_queue` (not sent yet).
- `_received`, `_acknowledged` and taking frames from `_unacknowledged` (sent, but perhaps not
  received) belong to the receiving side.

A signal handler may raise between two operations of Python code on the main thread. So a frame is
moved from `_queue` to `_unacknowledged` in one C call, and locks are entered by `with` on the lock
itself: the `__enter__` of a condition is Python code and could be left with the lock taken. A send
that was left in the middle is found by `_aborted`, and its frames are sent again.
"""

from __future__ import annotations

import collections
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from telegrad import thread_roles
from telegrad.locks import new_reentrant_lock
from telegrad.transport.bulk import BulkTransfer
from telegrad.transport.channel import ChannelClosed, SendTimeout
from telegrad.transport.host_image import fill_images
from telegrad.transport.records import Records
from telegrad.transport.shared_memory import SharedCopies
from telegrad.transport.stream import CLOSED, INTERRUPTED, OPEN, SocketChannel
from telegrad.wire.frames import HEADER, BufferLocation, Kind, encode_header

_BATCH = 1 << 16  # bytes of frames that are encoded together
_MAX_QUEUED = 1 << 20  # bytes that the event loop sends later; with more, `send` waits
_MAX_QUEUED_INTERRUPTED = 1 << 26
_WAIT = 0.25  # seconds after which a blocked `send` compares the time with its deadline
_pack = HEADER.pack
_popleft = collections.deque.popleft
_HEARTBEAT = int(Kind.HEARTBEAT)
_DONTWAIT = int(socket.MSG_DONTWAIT)


class TcpSender(SocketChannel):
    """Send frames over a connection that another one may replace."""

    def __init__(
        self,
        sock: socket.socket,
        records: Records,
        peer_max_frame: int,
        on_interrupted: Callable[[Any, BaseException], None],
        bulk: BulkTransfer | None,
    ) -> None:
        super().__init__(peer_max_frame)
        self._on_interrupted = on_interrupted
        self._bulk = bulk
        self._lock = self.descriptor_lock = new_reentrant_lock()
        self._changed = threading.Condition(self._lock)
        self._generation = 0
        self._error = "the channel was shut"
        self._socket = sock
        self._records = records
        self._unacknowledged: collections.deque[bytes] = collections.deque()
        self._partial = memoryview(b"")
        self._aborted = False  # a signal handler has raised inside the last `_send_queued`
        self._interruption: BaseException | None = None  # one that was not announced
        self._received = 0  # frames of the peer
        self._acknowledged = 0  # our frames that the peer has received
        self._taken = 0  # our frames up to the last one of `_unacknowledged`
        self._sent = 0  # our frames that were sent at least once
        self._told = 0  # the value of `_received` that was sent last

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
        total = len(body) + sum(buffer.nbytes for buffer in buffers)
        if total > self._peer_max_frame:
            raise self._too_large(total)
        if not buffers:
            data = _pack(len(body), call, function, timeout_ms, 0, kind, flags, 0) + body
            self._send_data(data, timeout)
            return
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        places = [BufferLocation(buffer.nbytes) for buffer in buffers]
        in_stream = list(buffers)
        try:
            if self._bulk is not None:
                in_stream = self._bulk.place(buffers, places)
            header = encode_header(
                kind,
                call,
                body,
                function=function,
                timeout_ms=timeout_ms,
                flags=flags,
                places=places,
            )
            fill_images(in_stream)
            self._send_data(b"".join((header, body, *in_stream)), timeout)
            if self._bulk is not None:
                self._bulk.wait_until_pulled(places, deadline, self._check_open)
        except BaseException:
            if self._bulk is not None:
                self._bulk.withdraw(places)
            raise

    def _send_data(self, data: bytes, timeout: float | None) -> None:
        """Send an encoded frame."""
        if self._state is CLOSED:
            raise ChannelClosed(self._error)
        self._queue.append(data)
        with self._send_lock:
            complete = self._send_queued()
        if complete:
            if self._queue and self._state is OPEN:  # queued by a thread that found the lock taken
                self.flush_nowait()
            if self._state is OPEN:
                return
        self._wait_until_sent(timeout)

    def _check_open(self) -> None:
        """Raise `ChannelClosed` if the channel has ended. Called while `send` waits.

        If no event loop reads the channel, this finds out that the connection has ended.
        """
        with self._lock:
            if self._state is CLOSED:
                raise ChannelClosed(self._error)
            fd, generation = self._socket.fileno(), self._generation
            if self._state is INTERRUPTED or self.on_frame is not None or fd < 0:
                return
            poller = select.poll()
            poller.register(fd, select.POLLRDHUP)
            ended = bool(poller.poll(0))
        if ended:
            self.interrupt(ChannelClosed("the connection was closed"), generation)

    def _wait_until_sent(self, timeout: float | None) -> None:
        """Wait until the socket has taken the frames, or the event loop may send the rest."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        role = None
        try:
            while True:
                state = self._state
                if state is CLOSED:
                    raise ChannelClosed(self._error)
                queued = sum(map(len, self._queue.copy())) + len(self._partial) + len(self._unsent)
                limit = _MAX_QUEUED if state is OPEN else _MAX_QUEUED_INTERRUPTED
                if queued <= limit and (state is not OPEN or self.on_send_blocked is not None):
                    if self.on_send_blocked is not None and state is OPEN:
                        self.on_send_blocked()
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SendTimeout(begun=True)  # what is queued will be sent
                role = role or thread_roles.pause()  # let another thread read meanwhile
                self._wait_for_space(min(left, _WAIT))
                with self._send_lock:
                    complete = self._send_queued()
                if complete and self._state is OPEN:
                    return
        finally:
            thread_roles.resume(role)

    def _wait_for_space(self, timeout: float) -> None:
        """Wait until the socket may take bytes or the state has changed."""
        with self._lock:
            if self._state is INTERRUPTED:
                self._changed.wait(timeout)
                return
            fd = self._socket.fileno()
        if fd >= 0:
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            poller.poll(timeout * 1000)

    def _send_queued(self) -> bool:
        """Send queued frames without blocking; see `SocketChannel`.

        Nothing is left to do while the channel is interrupted: `resume` sends what is queued.
        """
        with self._lock:
            if self._state is not OPEN:
                return True
            sock, records, generation = self._socket, self._records, self._generation
        if self._aborted:
            self.interrupt(ChannelClosed("a send was interrupted by a signal"), generation)
            self._aborted = False
            return True
        self._aborted = True  # unless this ends in an orderly way
        try:
            while True:
                while self._unsent:
                    self._unsent = self._unsent[sock.send(self._unsent, _DONTWAIT) :]
                data = self._next_data()
                if not data:
                    break
                self._unsent = memoryview(records.encode(data))
        except BlockingIOError:
            self._aborted = False
            return False
        except OSError as error:  # also errors of `ssl`
            self._aborted = False
            self.interrupt(error, generation)
            return True
        except BaseException as error:
            # A signal handler raised. Bytes may be lost, so the frames are sent again. If it raises
            # once more here, the next send finds `_aborted`.
            self.interrupt(error, generation)
            self._aborted = False
            raise
        self._aborted = False
        if records.needs_new_keys:
            self.interrupt(ChannelClosed("the connection needs new keys"), generation)
        return True

    def _next_data(self) -> bytes | memoryview:
        """Under the send lock: take frames to encode together; empty if there are none."""
        if self._partial:
            data, self._partial = self._partial[:_BATCH], self._partial[_BATCH:]
            return data
        frames: list[bytes] = []
        size = 0
        if self._acknowledge:
            self._acknowledge = False
            self._told = self._received
            frames.append(_pack(0, self._told, 0, 0, 0, _HEARTBEAT, 0, 0))
        while size < _BATCH and self._queue:
            frame = self._queue[0]  # read here: the receiver removes from `_unacknowledged`
            # one C call: the frame is never in neither queue
            self._unacknowledged.extend(map(_popleft, (self._queue,)))
            self._taken += 1
            self._sent = max(self._sent, self._taken)
            if len(frame) > _BATCH:
                self._partial = memoryview(frame)
                break
            frames.append(frame)
            size += len(frame)
        if not frames and self._partial:
            return self._next_data()
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def try_send(self, kind: int) -> None:
        if kind != _HEARTBEAT:
            raise ValueError("only heartbeats may be omitted")
        self._acknowledge = True
        self.flush_nowait()

    def _on_flush_not_open(self) -> None:
        if self._state is CLOSED:
            raise ChannelClosed(self._error)
        self._announce_interruption()

    def interrupt(self, error: BaseException, generation: int | None = None) -> None:
        """Give the present connection up; the channel waits for another one.

        Nothing happens if `generation` is not that of the present connection.
        """
        with self._lock:
            if self._state is not OPEN or generation not in (None, self._generation):
                return
            self._interruption = error  # until it is announced
            self._state = INTERRUPTED
            self._generation += 1
            shut(self._socket)
        self._announce_interruption()

    def _announce_interruption(self) -> None:
        """Tell the event loop and the owner of an interruption, if nobody has done so.

        A signal handler may raise while `interrupt` runs. Then the next thread that uses the
        channel, which is a heartbeat at the latest, does this. It may be done twice.
        """
        error = self._interruption
        if error is not None:
            self._notify_loop()
            self._on_interrupted(self, error)
            self._interruption = None

    def _notify_loop(self) -> None:
        if self.on_descriptor_changed is not None:
            self.on_descriptor_changed()


def shut(sock: socket.socket) -> None:
    """End a connection; its descriptor stays open."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already disconnected

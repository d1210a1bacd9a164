"""`TcpChannel`: a channel over TCP that survives the end of its connection.

Frames travel in records (`records`), encrypted or authenticated. A connection may end although both
workers live: a link was cut, a router forgot it, a record was changed on its way. Then the channel
is *interrupted*. The side that opened it connects again and names the channel by its session id,
both sides tell how many frames they have received, and each sends again what the other has not
received. So every frame arrives once and in order, and no call notices. The channel ends if the
peer closes it, if it cannot be resumed within `Config.resume_timeout`, or if the peer is declared
lost.

Large buffers do not travel in this stream: the receiver pulls them (`bulk`). A frame is available
when its buffers are there, and later frames may overtake it.

HEARTBEAT frames carry the number of frames that their sender has received, and whether it ends the
channel. They are neither counted nor sent again.

State:

- That of the sending side, with `_lock` and `_send_lock`, is in `tcp_sender`.
- `_receive_lock` guards the decoder, `_frames` (complete frames that were not taken), `_received`
  (how many frames have arrived) and taking frames from `_unacknowledged` (sent, but perhaps not
  received).
- `_read_lock` is held while a thread receives from the socket. A socket is closed under it:
  otherwise its number could be given to another one, from which that thread would then receive.
- The memory that is received into (`Records.get_buffer`), `Records.received` and `_should_spin`
  belong to the reading thread. A signal handler may raise between two operations of Python code. So
  one C call receives bytes and stores their number; the next reader accepts them if that was not
  done.

If several locks are taken, then in the order send, receive, `_lock`, read.
"""

from __future__ import annotations

import collections
import math
import socket
import threading
import time
from collections.abc import Callable

from telegrad.errors import ProtocolError
from telegrad.locks import new_lock
from telegrad.spinning import spinning, yield_core
from telegrad.transport.buffer_pool import BufferPool
from telegrad.transport.bulk import BulkTransfer
from telegrad.transport.channel import ChannelClosed
from telegrad.transport.host_image import image_for
from telegrad.transport.records import RecordError, Records
from telegrad.transport.stream import CLOSED, INTERRUPTED, OPEN, no_segments, timeval
from telegrad.transport.tcp_sender import TcpSender, shut
from telegrad.wire.frames import HEADER, PARTING, BufferLocation, Frame, FrameDecoder, Kind
from telegrad.wire.handshake import Incarnation

_FRAMES_PER_ACKNOWLEDGEMENT = 64
_BYTES_PER_ACKNOWLEDGEMENT = 1 << 20
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 3),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 10_000),
)

_pack = HEADER.pack
_HEARTBEAT = int(Kind.HEARTBEAT)
_DONTWAIT = int(socket.MSG_DONTWAIT)
_ENDS = 1  # flag of a HEARTBEAT: its sender ends the channel and will not resume it


class TcpChannel(TcpSender):
    """A channel over TCP; see the module's docstring.

    `on_interrupted(channel, error)` is called once per interruption, by any thread. It must arrange
    that `resume` or `fail` is called.
    """

    kind = "tcp"

    def __init__(
        self,
        sock: socket.socket,
        records: Records,
        session: str,
        incarnation: Incarnation,
        pool: BufferPool,
        max_frame: int,
        peer_max_frame: int,
        silence_limit: float,
        on_interrupted: Callable[[TcpChannel, BaseException], None],
        bulk: BulkTransfer | None = None,
    ) -> None:
        super().__init__(sock, records, peer_max_frame, on_interrupted, bulk)
        self.session = session
        self.incarnation = incarnation  # of the peer
        self.silence_limit = silence_limit
        self._pulling = 0  # frames whose buffers are being pulled
        self._pool = pool
        self._max_frame = max_frame
        self._receive_lock = new_lock()
        self._read_lock = new_lock()
        self._decoder = self._new_decoder()
        self._frames: collections.deque[Frame] = collections.deque()
        self._untold_bytes = 0
        self._peer_closed = False  # it will not resume the channel
        _set_options(sock)
        self._decode(records, 0)

    def __repr__(self) -> str:
        return (
            f"<TcpChannel {self._state.value}, {self._received} frames received, "
            f"{len(self._unacknowledged)} unacknowledged, {len(self._queue)} queued, "
            f"{self._decoder!r}>"
        )

    def _new_decoder(self) -> FrameDecoder:
        return FrameDecoder(
            self._pool.reserve,
            no_segments,
            self._max_frame,
            None if self._bulk is None else self._reserve_bulk,
        )

    def _reserve_bulk(self, place: BufferLocation) -> memoryview:
        if place.device is None:
            return self._pool.reserve(place.nbytes)
        return memoryview(image_for(place.nbytes, place.device))

    # Receiving

    def recv(self, timeout: float | None = None) -> Frame:
        frames = self._frames
        if frames:
            return frames.popleft()
        started = time.monotonic()
        deadline = math.inf if timeout is None else started + timeout
        if self._should_spin and not self._pulling and self._spin(started) and frames:
            return frames.popleft()
        left = timeout
        while True:
            sock, records, generation = self._wait_until_readable(deadline)
            if frames:
                return frames.popleft()
            try:
                with self._read_lock:
                    if left != self._receive_timeout:
                        self._set_receive_timeout(sock, left)
                    if not records.received:
                        records.received.extend(map(sock.recv_into, (records.get_buffer(),)))
            except BlockingIOError:
                raise TimeoutError("nothing arrived in time") from None
            except OSError as error:
                self._connection_ended(error, generation)
                continue
            if not records.received[0]:
                self._connection_ended(None, generation)
                continue
            self._decode(records, generation)
            if frames:
                self._should_spin = spinning.is_worthwhile(started)
                return frames.popleft()
            left = self._time_left(deadline)

    @staticmethod
    def _time_left(deadline: float) -> float | None:
        """Return the seconds until `deadline`; None: no limit. Raise `TimeoutError` after it."""
        if deadline == math.inf:
            return None
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("nothing arrived in time")
        return left

    def _wait_until_readable(self, deadline: float) -> tuple[socket.socket, Records, int]:
        """Wait until the channel is open and no frame is missing its buffers only."""
        self._announce_interruption()
        with self._lock:
            while not self._frames and (
                self._state is INTERRUPTED
                or (self._state is OPEN and self._pulling and not self.missing_bytes)
            ):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the connection is interrupted")
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            if self._state is CLOSED and not self._frames:
                raise ChannelClosed(self._error)
            return self._socket, self._records, self._generation

    def poll(self, attempts: int) -> bool:
        self._announce_interruption()
        with self._lock:
            if self._state is CLOSED:
                raise ChannelClosed(self._error)
            if self._state is INTERRUPTED:
                return False
            sock, records, generation = self._socket, self._records, self._generation
        received = records.received
        space = memoryview(b"") if received else records.get_buffer()
        while not received:
            try:
                with self._read_lock:
                    received.extend(map(sock.recv_into, (space,), (0,), (_DONTWAIT,)))
            except BlockingIOError:
                attempts -= 1
                if not attempts or not yield_core():
                    return False
            except OSError as error:
                self._connection_ended(error, generation)
                return False
        if not received[0]:
            self._connection_ended(None, generation)
            return False
        self._decode(records, generation)
        return True

    def _connection_ended(self, error: OSError | None, generation: int) -> None:
        """Interrupt the channel, or end it if the peer has closed it. The latter raises."""
        if self._peer_closed:
            self.fail("the peer closed the connection")
            raise ChannelClosed("the peer closed the connection")
        self.interrupt(error or ChannelClosed("the connection was closed"), generation)

    def _decode(self, records: Records, generation: int) -> None:
        """Accept received bytes and decode them to frames. `ProtocolError` ends the channel."""
        self.received_since_heartbeat = True
        try:
            with self._receive_lock:
                if generation != self._generation:
                    return  # they will be sent again
                if records.received:
                    records.buffer_updated(records.received.pop())
                self._decode_records()
        except RecordError as error:
            self.interrupt(error, generation)
        except ProtocolError:
            raise
        except BaseException as error:
            # A signal handler raised. Bytes may be lost, so the peer must send them again.
            self.interrupt(error, generation)
            raise
        if self._acknowledge:
            self.flush_nowait()

    def _decode_records(self) -> None:
        """Under the receive lock: decode the bytes that `_records` has."""
        records, decoder = self._records, self._decoder
        while size := records.read_into(decoder.get_buffer()):
            decoder.buffer_updated(size)
            self._untold_bytes += size
            while (frame := decoder.next_frame()) is not None:
                self._accept(frame)
        untold = self._received - self._told
        if untold >= _FRAMES_PER_ACKNOWLEDGEMENT or (
            untold and self._untold_bytes >= _BYTES_PER_ACKNOWLEDGEMENT
        ):
            self._untold_bytes = 0
            self._acknowledge = True

    def _try_decode_records(self) -> RecordError | None:
        """Under the receive lock: do what `_decode_records` does, and return its error."""
        try:
            self._decode_records()
        except RecordError as error:
            return error
        return None

    def _accept(self, frame: Frame) -> None:
        """Under the receive lock: take a frame that has arrived completely."""
        if frame.kind == _HEARTBEAT:
            self._forget_acknowledged(frame.call_id)
            self._peer_closed |= bool(frame.flags & _ENDS)
            return
        self._peer_closed |= frame.kind in PARTING
        self._received += 1
        if frame.bulk:
            self._pull(frame)
        else:
            self._frames.append(frame)

    def _pull(self, frame: Frame) -> None:
        """Take a frame when its large buffers have been pulled; later frames may overtake it."""
        assert self._bulk is not None

        def on_complete(complete: Frame) -> None:
            with self._lock:
                self._pulling -= 1
                if self._state is not CLOSED:
                    self._frames.append(complete)
                self._changed.notify_all()
            self.received_since_heartbeat = True
            if self.on_frame is not None:
                self.on_frame()

        with self._lock:
            self._pulling += 1
        self._bulk.start_pull(frame, on_complete)

    def _forget_acknowledged(self, received: int) -> None:
        """Under the receive lock: forget the frames that the peer has received."""
        self._check_acknowledged(received, self._acknowledged + len(self._unacknowledged))
        while self._acknowledged < received:
            self._unacknowledged.popleft()
            self._acknowledged += 1

    def _check_acknowledged(self, received: int, sent: int) -> None:
        if not self._acknowledged <= received <= sent:
            raise ProtocolError(
                f"the peer says that it has received {received} frames, {sent} were sent"
            )

    def next_frame(self) -> Frame | None:
        if self._frames:
            return self._frames.popleft()
        if self._state is CLOSED:
            raise ChannelClosed(self._error)
        return None

    def has_frame(self) -> bool:
        return bool(self._frames)

    def fileno(self) -> int | None:
        return self._socket.fileno() if self._state is OPEN else None

    # Interruption and resumption

    @property
    def interruptions(self) -> int:
        """A number that differs for each interruption."""
        return self._generation

    @property
    def is_interrupted(self) -> bool:
        """Whether the channel waits for a new connection."""
        return self._state is INTERRUPTED

    def prepare_resume(self) -> tuple[int, int]:
        """Return how many frames have arrived, and the number of this interruption.

        No frame arrives from now on until `resume`.
        """
        self.interrupt(ChannelClosed("the peer opened another connection"))
        with self._receive_lock:
            return self._received, self._generation

    def resume(
        self, sock: socket.socket, records: Records, peer_received: int, interruption: int
    ) -> None:
        """Go on over a new connection. The peer has received `peer_received` frames.

        `interruption` is what `prepare_resume` returned for this connection. Raise `ChannelClosed`
        if the channel was closed or resumed meanwhile: then the numbers of frames are not true.
        """
        _set_options(sock)
        self._notify_loop()  # it must not watch the old descriptor when that is closed
        with self._send_lock:
            with self._receive_lock:
                with self._lock:
                    if self._state is not INTERRUPTED or self._generation != interruption:
                        raise ChannelClosed(self._error)
                    self._check_acknowledged(peer_received, self._sent)
                    with self._read_lock:  # its reader returns soon, because it was shut
                        self._socket.close()
                    # An earlier attempt may have sent only a part of these again, so the peer may
                    # have received frames that are in the queue.
                    self._queue.extendleft(reversed(self._unacknowledged))
                    self._unacknowledged.clear()
                    while self._acknowledged < peer_received:
                        self._queue.popleft()
                        self._acknowledged += 1
                    self._taken = self._acknowledged
                    self._unsent = self._partial = memoryview(b"")
                    self._aborted = False
                    self._decoder = self._new_decoder()
                    self._told = self._received
                    self._socket, self._records = sock, records
                    self._receive_timeout = None
                    # Frames may have arrived with the end of the handshake. They must be there
                    # before a reader waits for the socket.
                    failure = self._try_decode_records()
                    self._state = OPEN
                    self._generation += 1
                    generation = self._generation
                    self._changed.notify_all()
            complete = self._send_queued()
        self.received_since_heartbeat = True
        if failure is not None:
            self.interrupt(failure, generation)
        self._notify_loop()
        if not complete and self.on_send_blocked is not None:
            self.on_send_blocked()

    def fail(self, reason: str) -> None:
        """End the channel, because it cannot be resumed."""
        with self._lock:
            if self._state is CLOSED:
                return
            self._error = reason
            self._state = CLOSED
            self._generation += 1
            shut(self._socket)
            self._changed.notify_all()
        if self._bulk is not None:
            self._bulk.close()
        self._notify_loop()

    def wait_until_closed(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds while the channel is interrupted. True: it was closed."""
        with self._lock:
            if self._state is INTERRUPTED:
                self._changed.wait(timeout)
            return self._state is CLOSED

    # Closing

    def shutdown(self) -> None:
        if self._state is OPEN:
            self._send_close()
        self.fail("the channel was shut")

    def _send_close(self) -> None:
        """Tell the peer that this side will not resume the channel, if that is possible at once."""
        acquired: list[bool] = []
        try:
            acquired.extend(map(self._send_lock.acquire, (False,)))  # see `flush_nowait`
            # Frames that are queued are lost. The last record must be complete.
            if acquired[0] and not self._unsent and not self._partial and not self._aborted:
                end = _pack(0, self._received, 0, 0, 0, _HEARTBEAT, _ENDS, 0)
                self._socket.send(self._records.encode(end), _DONTWAIT)
        except OSError:
            return  # the peer finds out when it tries to resume
        finally:
            if acquired and acquired[0]:
                self._send_lock.release()

    def close(self) -> None:
        try:
            self.shutdown()
        finally:
            self._socket.close()

    def close_after_fork(self) -> None:
        self._socket.close()

    def _set_receive_timeout(self, sock: socket.socket, seconds: float | None) -> None:
        self._receive_timeout = seconds
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(seconds))


def _set_options(sock: socket.socket) -> None:
    """Prepare a connected socket. The kernel ends a connection that is dead for 20 s."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)

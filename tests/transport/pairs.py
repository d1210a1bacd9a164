"""Pairs of channels that are each other's peer, by any transport."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from telegrad.config import Config
from telegrad.transport import in_process
from telegrad.transport.buffer_pool import BufferPool
from telegrad.transport.bulk import BulkPeer, BulkTransfer
from telegrad.transport.channel import Channel
from telegrad.transport.records import MacRecords, Records, TlsRecords
from telegrad.transport.sealed_records import SealedRecords
from telegrad.transport.segments import SegmentAllocator, SegmentMappings, SharedSegment
from telegrad.transport.shared_memory import SharedMemoryTransfer
from telegrad.transport.stream import StreamChannel
from telegrad.transport.striped_tcp import StripedTcp
from telegrad.transport.stripes import SealedStripe, Stripe
from telegrad.transport.tcp import TcpChannel
from telegrad.transport.tls import TlsContexts
from telegrad.wire.frames import Kind, encode_header
from telegrad.wire.handshake import Incarnation

STREAMS = ["unix", "unix+shared"]
TCP = ["tcp", "tcp+tls", "tcp+sealed", "tcp+bulk"]
RECORDS = ["mac", "tls", "sealed", "sealed plain"]
MAX_FRAME = 64 << 20
FLOOR = 8192  # smallest buffer that goes through shared memory here
MIN_BULK = 30_000  # smallest buffer that is pulled here
GIVE_UP = 5.0  # seconds after which transfers without a stripe fail
KERNEL_BUFFER = 64 << 10  # small, so that a socket is soon full

Background = Callable[..., "Future[Any]"]


@dataclass
class End:
    """What one side of a pair has."""

    name: str
    allocator: SegmentAllocator = field(default_factory=lambda: SegmentAllocator(FLOOR, 1 << 30))
    mappings: SegmentMappings = field(default_factory=SegmentMappings)
    other: End | None = None
    stripes: list[Stripe] = field(default_factory=list)  # those that this side opened
    _threads: list[threading.Thread] = field(default_factory=list)

    def sharing_with(self, other: End) -> SharedMemoryTransfer:
        """Shared memory with the other side; segments are passed on by mapping them there at
        once.
        """
        announced: set[int] = set()

        def announce(segment: SharedSegment, until: float) -> bool:
            if segment.segment_id not in announced:
                other.mappings.add(self.name, segment.segment_id, segment.fd)
                announced.add(segment.segment_id)
            return True

        return SharedMemoryTransfer(self.allocator, self.mappings, other.name, announce)

    def pulling_from(self, other: End) -> BulkTransfer:
        """Buffers that each side pulls from the other."""
        self.other = other
        peer = BulkPeer(other.name, Incarnation(other.name), "tcp:there")
        return BulkTransfer(self.engine, peer, MIN_BULK)

    @functools.cached_property
    def engine(self) -> StripedTcp:
        return StripedTcp(self._connect, self._start, 3, GIVE_UP, GIVE_UP)

    def _connect(self, peer: BulkPeer) -> Stripe:
        """Open a stripe to the other end, which serves it on a thread of its own."""
        near, far = connected_stripes()
        other, name = self.other, Incarnation(self.name)
        assert other is not None
        other._start(lambda: other.engine.serve(far, name))
        self.stripes.append(near)
        return near

    def _start(self, job: Callable[[], None]) -> None:
        thread = threading.Thread(target=job, name=f"telegrad-{self.name}")
        thread.start()
        self._threads.append(thread)  # `close` may run meanwhile, and joins only what runs

    def close(self) -> None:
        self.engine.close()
        for thread in self._threads:
            thread.join(GIVE_UP)
        self.allocator.close()
        self.mappings.close()


@dataclass
class Pair:
    """Two channels that are each other's peer.

    Where there are sockets, `near_socket` and `far_socket` are theirs.
    """

    near: Channel
    far: Channel
    near_end: End
    far_end: End
    near_socket: socket.socket
    far_socket: socket.socket


def connected_sockets(family: str) -> tuple[socket.socket, socket.socket]:
    """Two sockets that are each other's peer."""
    if family == "unix":
        return socket.socketpair(socket.AF_UNIX)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # the accepted socket inherits it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BUFFER)
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def connected_stripes() -> tuple[Stripe, Stripe]:
    """Two stripes that are each other's peer."""
    near, far = connected_sockets("tcp")
    return (
        SealedStripe(near, b"k" * 32, server_side=False),
        SealedStripe(far, b"k" * 32, server_side=True),
    )


def fill_with_frames(sock: socket.socket) -> None:
    """Fill a unix socket with whole frames, behind the back of its channel, which so owes
    nothing.
    """
    alive = encode_header(Kind.HEARTBEAT, 0, b"")
    while True:
        try:
            assert sock.send(alive, socket.MSG_DONTWAIT) == len(alive)
        except BlockingIOError:
            return


def records_pair(
    near_socket: socket.socket, far_socket: socket.socket, kind: str
) -> tuple[Records, Records]:
    """The records of both ends of a connection, of one of the kinds of `RECORDS`."""
    key = b"k" * 32
    if kind == "mac":
        return MacRecords(key, server_side=False), MacRecords(key, server_side=True)
    if kind != "tls":
        encrypts = kind == "sealed"
        return SealedRecords(key, False, encrypts), SealedRecords(key, True, encrypts)
    contexts = TlsContexts(Config(), key)
    near = TlsRecords(near_socket, contexts.context(False), server_side=False)
    far = TlsRecords(far_socket, contexts.context(True), server_side=True)
    accepting = threading.Thread(target=far.shake_hands, args=(time.monotonic() + 20,))
    accepting.start()
    near.shake_hands(time.monotonic() + 20)
    accepting.join()
    return near, far


def tcp_channels(
    near_socket: socket.socket,
    far_socket: socket.socket,
    kind: str,
    on_interrupted: Callable[[TcpChannel, BaseException], None] | None = None,
    bulk: tuple[BulkTransfer | None, BulkTransfer | None] = (None, None),
) -> tuple[TcpChannel, TcpChannel]:
    """The channels of both ends of a connection. By default, an interruption ends them."""

    def end(channel: TcpChannel, error: BaseException) -> None:
        channel.fail(str(error))

    pool = BufferPool()
    near, far = (
        TcpChannel(
            sock,
            records,
            "5e551",
            Incarnation("1"),
            pool,
            MAX_FRAME,
            MAX_FRAME,
            60.0,
            on_interrupted or end,
            transfer,
        )
        for sock, records, transfer in zip(
            (near_socket, far_socket),
            records_pair(near_socket, far_socket, kind),
            bulk,
            strict=True,
        )
    )
    return near, far


def connected(kind: str) -> Iterator[Pair]:
    near_end, far_end = End("near"), End("far")
    family, _, extra = kind.partition("+")
    near_socket, far_socket = connected_sockets("unix" if family == "memory" else family)
    near: Channel
    far: Channel
    if family == "memory":
        near, far = in_process.create_pair(BufferPool())
    else:
        for sock in (near_socket, far_socket):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER)
        pool = BufferPool()
    if family == "tcp":
        transfers: tuple[BulkTransfer | None, BulkTransfer | None] = (None, None)
        if extra == "bulk":
            transfers = near_end.pulling_from(far_end), far_end.pulling_from(near_end)
        kind = extra if extra in RECORDS else "mac"
        near, far = tcp_channels(near_socket, far_socket, kind, bulk=transfers)
    elif family == "unix":
        near = StreamChannel(
            near_socket, pool, MAX_FRAME, near_end.sharing_with(far_end) if extra else None
        )
        far = StreamChannel(
            far_socket, pool, MAX_FRAME, far_end.sharing_with(near_end) if extra else None
        )
    try:
        yield Pair(near, far, near_end, far_end, near_socket, far_socket)
    finally:
        near.shutdown()
        far.shutdown()
        near.close()
        far.close()
        near_socket.close()
        far_socket.close()
        near_end.close()
        far_end.close()

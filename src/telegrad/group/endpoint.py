"""`LocalEndpoint`: what the connections of one agent share, whichever side opened them.

It holds the secret of the group, the introduction that this worker sends in a handshake, and the
memory that connections receive into or share with peers on this host. It also opens authenticated
sockets: the dialer needs them for calls, and both sides need them to pass shared-memory segments.

A connection has a purpose: ``exclusive`` (one call at a time), ``multiplexed`` (many calls at a
time), ``segment`` (it passes one shared-memory segment and ends), ``probe`` (it checks that the
worker is alive and ends), ``bulk`` (the worker that opened it pulls large buffers over it) or
``observe`` (JSON requests of an observer, which is not a worker). Nothing that a peer sends is
unpickled before its handshake has succeeded.

State: `addresses` is set once, by the listener. `_connecting` (sockets whose handshake is in
progress, by the incarnation of the peer) is changed under `_lock`. `_closed` is set once.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from telegrad.config import Config
from telegrad.errors import ProtocolError
from telegrad.group.membership import Member
from telegrad.transport import nixl_engine, sealed_records, sockets
from telegrad.transport.buffer_pool import BufferPool
from telegrad.transport.bulk import BulkPeer, BulkTransfer
from telegrad.transport.channel import Channel
from telegrad.transport.nixl_engine import NixlEngine
from telegrad.transport.segments import SegmentAllocator, SegmentMappings
from telegrad.transport.shared_memory import SegmentSender, SharedMemoryTransfer
from telegrad.transport.sockets import AuthenticatedSocket
from telegrad.transport.stream import StreamChannel
from telegrad.transport.striped_tcp import StripedTcp
from telegrad.transport.stripes import Stripe, cipher, open_stripe
from telegrad.transport.tcp import TcpChannel
from telegrad.transport.tls import TlsContexts
from telegrad.wire import handshake
from telegrad.wire.admission_token import make_token
from telegrad.wire.handshake import Incarnation, Introduction

EXCLUSIVE, MULTIPLEXED, SEGMENT, PROBE, BULK, OBSERVE = PURPOSES = (
    "exclusive",
    "multiplexed",
    "segment",
    "probe",
    "bulk",
    "observe",
)
CALLS = (EXCLUSIVE, MULTIPLEXED)

# To pull buffers takes three more messages and two more threads than to send them in the stream. No
# other message waits behind a large one in the stream of an exclusive connection.
_EXCLUSIVE_FACTOR = 4

_log = logging.getLogger(__name__)


class WrongWorker(ProtocolError):
    """Another worker, or another incarnation of it, listens at an address."""


class InProcessListener(Protocol):
    """An agent of this process that accepts connections without a socket."""

    def handshake(self) -> handshake.Steps:
        """Return the server's side of a handshake."""

    def accept_channel(self, channel: Channel, peer: Introduction) -> None:
        """Serve a channel whose peer was authenticated."""


# by address
in_process_listeners: weakref.WeakValueDictionary[str, InProcessListener]
in_process_listeners = weakref.WeakValueDictionary()


class EndpointRuntime(Protocol):
    """What the endpoint needs from its agent."""

    local_member: Member
    group: str


class LocalEndpoint:
    """The local end of all connections of one agent."""

    def __init__(
        self,
        runtime: EndpointRuntime,
        config: Config,
        key: bytes,
        start_thread: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """`start_thread` runs a function on a thread of the agent; None: on a new one."""
        self._runtime = runtime
        self._config = config
        self.key = key
        self.tls = TlsContexts(config, key)
        # the channels of connections that were accepted, by session id
        self.sessions: weakref.WeakValueDictionary[str, TcpChannel] = weakref.WeakValueDictionary()
        self.pool = BufferPool()
        self.allocator = SegmentAllocator(
            config.shared_memory_min_bytes, config.shared_memory_limit
        )
        self.mappings = SegmentMappings()
        self.addresses: tuple[str, ...] = ()
        self._segments = SegmentSender(self.connect)
        start = start_thread or _start_thread
        self.bulk = StripedTcp(
            self._connect_stripe,
            start,
            config.bulk_streams,
            config.heartbeat_timeout,
            config.resume_timeout,
        )
        self._nixl: NixlEngine | None = None
        if "tcp" in config.transports and nixl_engine.is_wanted(config):
            # a name of its own: that of the worker may be used again
            name = secrets.token_hex(16)
            self._nixl = NixlEngine(name, self.bulk, self._connect_stripe, start)
        self._connecting: dict[str, set[socket.socket]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __repr__(self) -> str:
        return f"<LocalEndpoint {self.addresses}, {len(self._connecting)} connecting>"

    def introduction(self, purpose: str, to: str = "", address: str = "") -> Introduction:
        """Return what this worker says of itself in a handshake.

        `to` is the worker at the other end, `address` the address of the side that accepts.
        """
        is_tcp = address.startswith("tcp:")
        local_member = self._runtime.local_member
        return {
            "name": local_member.name,
            "rank": local_member.rank,
            "incarnation": local_member.incarnation,
            "group": self._runtime.group,
            "purpose": purpose,
            "heartbeat": self._config.heartbeat_interval,
            "max_frame": self._config.max_frame,
            "unix": unix_address(self.addresses),
            "bulk": self._bulk_address(),
            # Where none is used, none is chosen: that loads the package `cryptography`.
            "cipher": cipher() if purpose == BULK else "",
            "records": sealed_records.cipher() if is_tcp and purpose in CALLS else "",
            "nixl": self._nixl is not None,
            "devices": dict(self._config.device_maps.get(to, {})),
            "address": address,
            "session": "",
            "received": -1,  # frames of an interrupted channel; -1: it is a new one
        }

    def connect(
        self,
        address: str,
        member: Member | None,
        purpose: str,
        until: float = math.inf,
        session: Introduction | None = None,
    ) -> AuthenticatedSocket:
        """Open a socket to `address` and authenticate both sides before `until`.

        Raise `WrongWorker` if `member` is given and another worker answers. `session` is added to
        the introduction of this worker.
        """
        timeout = max(min(self._config.connect_timeout, until - time.monotonic()), 0.001)
        sock = sockets.connect(address, timeout)
        incarnation = "" if member is None else member.incarnation
        with self._lock:
            self._connecting.setdefault(incarnation, set()).add(sock)
        try:
            # `stop_connecting` may have run before this socket was added
            if self._closed.is_set():
                raise OSError("this worker is shutting down")
            name = "" if member is None else member.name
            introduction = self.introduction(purpose, name, address) | (session or {})
            connection = sockets.authenticate(
                sock,
                self.tls,
                lambda binding: handshake.client(self.key, introduction, binding),
                server_side=False,
                timeout=timeout,
                token=make_token(self.key, address),
            )
            try:
                if member is not None:
                    verify_peer(connection.peer, member)
            except BaseException:
                connection.sock.close()
                raise
            return connection
        except BaseException:
            sock.close()
            raise
        finally:
            with self._lock:
                self._connecting[incarnation].discard(sock)
                if not self._connecting[incarnation]:
                    del self._connecting[incarnation]

    def make_channel(
        self,
        connection: AuthenticatedSocket,
        incarnation: Incarnation,
        unix: str,
        purpose: str,
        session: str,
        on_interrupted: Callable[[TcpChannel, BaseException], None],
    ) -> Channel:
        """Return a channel over an authenticated socket.

        Large buffers use shared memory if the peer is on this host: `unix` is its unix address.
        `session` and `on_interrupted` are those of a TCP channel.
        """
        sock, peer = connection.sock, connection.peer
        peer_limit = peer.get("max_frame")
        if not isinstance(peer_limit, int):
            peer_limit = self._config.max_frame
        limit = self._config.max_frame
        if connection.records is None:
            transfer = self._shared_memory_transfer(incarnation, unix) if unix else None
            return StreamChannel(sock, self.pool, limit, transfer, peer_limit)
        return TcpChannel(
            sock,
            sealed_records.channel_records(connection),
            session,
            incarnation,
            self.pool,
            limit,
            peer_limit,
            self._config.resume_timeout,
            on_interrupted,
            self._bulk_transfer(peer, incarnation, purpose),
        )

    def _bulk_transfer(
        self, peer: Introduction, incarnation: Incarnation, purpose: str
    ) -> BulkTransfer | None:
        """Return how large buffers are exchanged with a peer; None: in the stream."""
        address = peer.get("bulk")
        if not address or not self._bulk_address():
            return None
        bulk_peer = BulkPeer(str(peer["name"]), incarnation, str(address))
        engine = self._nixl if self._nixl is not None and peer.get("nixl") else self.bulk
        min_bytes = self._config.bulk_min_bytes
        if purpose == EXCLUSIVE:
            min_bytes *= _EXCLUSIVE_FACTOR
        return BulkTransfer(engine, bulk_peer, min_bytes)

    def _bulk_address(self) -> str:
        """Return the address at which peers pull large buffers; "" if they cannot."""
        if not self._config.bulk_streams:
            return ""
        return next((address for address in self.addresses if address.startswith("tcp:")), "")

    def _connect_stripe(self, peer: BulkPeer) -> Stripe:
        member = Member(peer.name, -1, peer.incarnation, (peer.address,))
        return open_stripe(self.connect(peer.address, member, BULK))

    def _shared_memory_transfer(self, incarnation: Incarnation, unix: str) -> SharedMemoryTransfer:
        announce = functools.partial(self._segments.announce, incarnation, unix)
        return SharedMemoryTransfer(self.allocator, self.mappings, incarnation, announce)

    def forget_peer(self, incarnation: Incarnation) -> None:
        """Free what is shared with a lost peer, and end the handshakes with it."""
        with self._lock:
            shut_sockets(self._connecting.get(incarnation, ()))
        self._segments.forget_peer(incarnation)
        self.bulk.forget_peer(incarnation)
        if self._nixl is not None:
            self._nixl.forget_peer(incarnation)
        self.allocator.connection_closed(incarnation, None)
        self.mappings.unmap(incarnation)

    def stop_connecting(self) -> None:
        """End the handshakes in progress; no other begins after this."""
        self._closed.set()
        with self._lock:
            for connecting in self._connecting.values():
                shut_sockets(connecting)

    def close(self) -> None:
        """End bulk transfers and free the shared memory. No connection may be in use."""
        self.bulk.close()
        if self._nixl is not None:
            self._nixl.close()
        self.allocator.close()
        self.mappings.close()


def verify_peer(peer: Introduction, member: Member) -> None:
    """Raise `WrongWorker` unless the introduction is that of this incarnation of `member`."""
    if peer.get("incarnation") != member.incarnation:
        raise WrongWorker(f"{peer.get('name')!r} answered in place of {member.name!r}")


def unix_address(addresses: tuple[str, ...]) -> str:
    """Return the unix address among `addresses`; "" if there is none."""
    return next((address for address in addresses if address.startswith("unix:")), "")


def shut_sockets(socks: Iterable[socket.socket]) -> None:
    """Shut sockets down, which ends the handshakes that use them."""
    for sock in socks:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("a connection was closed already: %s", error)


def _start_thread(job: Callable[[], None]) -> None:
    threading.Thread(target=job, daemon=True).start()

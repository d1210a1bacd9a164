"""How an agent opens and accepts connections: transports are probed, and every peer proves itself first.

A connection has a purpose: ``lane`` (one call at a time), ``pipe`` (many calls), ``segment`` (it passes one
shared-memory segment and ends) or ``probe`` (is anybody there?). Nothing a peer sends is unpickled before its handshake
has succeeded.

State: `_inbounds` (accepted connections) and `_strangers` (those that have not proven themselves), under `_lock`;
`counters` are statistics.
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
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from telegrad.client.peer import DialedConnection
from telegrad.config import Config
from telegrad.errors import AuthenticationError, PeerLost, ProtocolError
from telegrad.group.membership import Member
from telegrad.messages.routes import is_device_map
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.threads import ThreadPool
from telegrad.server.connection import ServerConnection, ServerRuntime
from telegrad.transport import in_process, segment_transfer, sockets
from telegrad.transport.channel import (
    Channel,
    ChannelClosed,
    PeerClosed,
    close_with_reason,
    send_goodbye,
)
from telegrad.transport.segment_transfer import SegmentSender
from telegrad.transport.shared_memory import (
    SegmentAllocator,
    SegmentMappings,
    SharedMemoryTransfer,
    SharedSegment,
)
from telegrad.transport.stream import StreamChannel
from telegrad.wire import handshake
from telegrad.wire.buffer_pool import BufferPool
from telegrad.wire.handshake import Introduction

_INTRODUCTION: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "incarnation": str,
    "unix": str,
    "heartbeat": (int, float),
}
_ACCEPT_AGAIN = 0.05  # seconds to wait after a connection could not be accepted
_MAX_STRANGERS = 256  # connections that have not proven themselves yet

_log = logging.getLogger(__name__)
_in_process: weakref.WeakValueDictionary[str, Connections] = weakref.WeakValueDictionary()


class _WrongWorker(ProtocolError):
    """Another worker, or another incarnation, listens at an address."""


class ListenerRuntime(ServerRuntime, Protocol):
    """What connections need of their agent."""

    config: Config
    clock: Clock
    threads: ThreadPool
    closing: bool
    local_member: Member
    group: str

    def declare_lost(self, name: str, incarnation: str, last_words: str = "") -> None: ...
    def is_lost(self, incarnation: str) -> bool: ...
    def check_silent_peer(self, name: str, incarnation: str) -> None: ...


class Connections:
    """The transports of one agent."""

    def __init__(self, owner: ListenerRuntime, config: Config, secret: bytes) -> None:
        self._owner = owner
        self._config = config
        self._secret = secret
        self._pool = BufferPool()
        self.arena = SegmentAllocator(config.shared_memory_floor, config.shared_memory_limit)
        self.mappings = SegmentMappings()
        self.counters: Counter[str] = Counter()
        self._listeners: list[socket.socket] = []
        self._strangers: set[socket.socket] = set()
        # by incarnation: connections that are being made
        self._dialling: dict[str, set[socket.socket]] = {}
        self._inbounds: set[ServerConnection] = set()
        self._last_words: dict[str, str] = {}
        self._segments = SegmentSender(self._connect)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = threading.Event()
        self.addresses: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<Connections {self.addresses} {len(self._inbounds)} inbound, {dict(self.counters)}>"
        )

    @property
    def server_connections(self) -> list[ServerConnection]:
        with self._lock:
            return list(self._inbounds)

    def listen(self) -> None:
        """Open every transport of the config; others can reach this agent from now on."""
        addresses = []
        for transport in self._config.transports:
            if transport == "memory":
                address = f"memory:{secrets.token_hex(8)}"
                _in_process[address] = self
            else:
                listener, address = sockets.listen(transport, self._config.listen)
                self._listeners.append(listener)
                if transport == "tcp":
                    address = self._advertised(address)
            addresses.append(address)
        self.addresses = tuple(addresses)

    def accept(self) -> None:
        """Start to serve those who connect."""
        for listener in self._listeners:
            self._owner.threads.start(lambda listener=listener: self._accept(listener))  # type: ignore[misc]

    # Outbound

    def dial(self, member: Member, purpose: str, timeout: float | None = None) -> DialedConnection:
        """A channel to a member by the best transport that works.

        Raises `TimeoutError` after `timeout` seconds, and `PeerLost` if the member cannot be reached.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        limit = time.monotonic() + self._config.connect_timeout  # for all transports together
        tried = []
        for transport in self._config.transports:
            for address in member.addresses:
                if not address.startswith(transport + ":"):
                    continue
                if time.monotonic() >= until:
                    raise TimeoutError
                try:
                    if transport == "memory":
                        return self._dial_memory(address, member, purpose)
                    if self._owner.closing:
                        raise PeerLost(
                            f"worker {self._owner.name!r} has left the group",
                            peer=member.name,
                            sent=False,
                        )
                    if self._owner.is_lost(member.incarnation):
                        raise PeerLost(
                            f"worker {member.name!r} was lost", peer=member.name, sent=False
                        )
                    return self._dial_socket(address, member, purpose, min(until, limit))
                except OSError as error:
                    tried.append(f"{address} ({error.strerror or error})")
                except AuthenticationError:
                    raise
                except ProtocolError as error:
                    tried.append(f"{address} ({error})")
        if time.monotonic() >= until:
            raise TimeoutError
        raise PeerLost(
            f"worker {member.name!r} cannot be reached{_hint(tried)}", peer=member.name, sent=False
        )

    def probe(self, member: Member) -> bool | None:
        """Is this member alive? None: it does not answer, and nothing shows that its process has ended."""
        alive: bool | None = False
        for address in member.addresses:
            if address in _in_process:
                return True
            if address.startswith("memory:"):
                continue
            try:
                self._connect(address, member, "probe")[0].close()
            except ConnectionRefusedError:
                continue  # nobody listens there any more
            except _WrongWorker:
                continue
            except (OSError, ProtocolError):
                alive = None
                continue
            return True
        return alive

    def _dial_memory(self, address: str, member: Member, purpose: str) -> DialedConnection:
        other = _in_process.get(address)
        if other is None:
            raise ProtocolError("another process")
        near, far = (
            handshake.client(self._secret, self._introduce(purpose, member.name)),
            other._server_steps(),
        )
        peer, client_said = handshake.converse(near, far)
        self._verify(peer, member)
        mine, theirs = in_process.pair(self._pool)
        other._welcome(theirs, client_said)
        return DialedConnection(mine, float(peer["heartbeat"]))

    def _dial_socket(
        self, address: str, member: Member, purpose: str, until: float
    ) -> DialedConnection:
        sock, peer = self._connect(address, member, purpose, until)
        try:
            unix = _unix_address(member.addresses)
            sharing = (
                self._sharing(member.incarnation, unix) if sock.family == socket.AF_UNIX else None
            )
            channel = StreamChannel(
                sock, self._pool, self._config.max_frame, sharing, self._peer_limit(peer)
            )
            return DialedConnection(channel, float(peer["heartbeat"]))
        except BaseException:
            sock.close()
            raise

    def _connect(
        self, address: str, member: Member | None, purpose: str, until: float = math.inf
    ) -> tuple[socket.socket, Introduction]:
        timeout = max(min(self._config.connect_timeout, until - time.monotonic()), 0.001)
        sock = sockets.connect(address, timeout)
        incarnation = "" if member is None else member.incarnation
        with self._lock:
            self._dialling.setdefault(incarnation, set()).add(sock)
        try:
            # `close` has looked at those that are dialling already, or is about to
            if self._closed.is_set():
                raise OSError("this worker is shutting down")
            introduction = self._introduce(purpose, "" if member is None else member.name)
            peer = sockets.shake_hands(sock, handshake.client(self._secret, introduction), timeout)
            if member is not None:
                self._verify(peer, member)
        except BaseException:
            sock.close()
            raise
        finally:
            with self._lock:
                self._dialling[incarnation].discard(sock)
                if not self._dialling[incarnation]:
                    del self._dialling[incarnation]
        return sock, peer

    def _verify(self, peer: Introduction, member: Member) -> None:
        if peer.get("incarnation") != member.incarnation:
            raise _WrongWorker(f"{peer.get('name')!r} answered in place of {member.name!r}")

    # Inbound

    def _accept(self, listener: socket.socket) -> None:
        """Serve those who connect until the agent closes. A shortage of descriptors, memory or threads passes."""
        while not self._owner.closing:
            try:
                self._accept_one(listener)
            except (OSError, RuntimeError, MemoryError) as error:
                if self._owner.closing or listener.fileno() < 0:
                    return
                self.counters["failed_accepts"] += 1
                _log.warning("worker %r cannot accept a connection: %s", self._owner.name, error)
                self._closed.wait(_ACCEPT_AGAIN)

    def _accept_one(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        try:
            with self._lock:
                full = len(self._strangers) >= _MAX_STRANGERS
                if not full and not self._owner.closing:
                    self._strangers.add(sock)
            if self._owner.closing:  # `close` has looked at the strangers already, or is about to
                sock.close()
            elif full:
                self.counters["refused_too_many_unauthenticated"] += 1
                sock.close()
            else:
                self._owner.threads.start(lambda: self._receive(sock))
        except BaseException:
            self._forget_stranger(sock)
            sock.close()
            raise

    def _receive(self, sock: socket.socket) -> None:
        """A stranger is at the door. Whatever it does, the agent goes on."""
        try:
            sockets.check_user(sock)
            peer = sockets.shake_hands(sock, self._server_steps(), self._config.connect_timeout)
            if peer["purpose"] == "segment":
                segment_transfer.receive_segment(sock, peer["incarnation"], self.mappings)
                return
            if peer["purpose"] == "probe":
                sock.close()
                return
            sharing = None
            if sock.family == socket.AF_UNIX and peer["unix"]:
                sharing = self._sharing(peer["incarnation"], peer["unix"])
            channel = StreamChannel(
                sock, self._pool, self._config.max_frame, sharing, self._peer_limit(peer)
            )
        except AuthenticationError as error:
            self._turn_away(sock, "refused_authentication", error)
        except ProtocolError as error:
            self._turn_away(sock, "refused_protocol_error", error)
        except BaseException as error:
            self._turn_away(sock, "refused_broken_connection", error)
        else:
            self._forget_stranger(sock)  # first: `close` is to say good-bye to it from now on
            self._welcome(channel, peer)
        finally:
            self._forget_stranger(sock)

    def _forget_stranger(self, sock: socket.socket) -> None:
        with self._lock:
            self._strangers.discard(sock)

    def _peer_limit(self, peer: Introduction) -> int:
        """The largest message that a peer accepts."""
        limit = peer.get("max_frame")
        return limit if isinstance(limit, int) else self._config.max_frame

    def _turn_away(self, sock: socket.socket, why: str, error: BaseException) -> None:
        self.counters[why] += 1
        _log.warning("worker %r closed a connection: %s", self._owner.name, error)
        sock.close()

    def _server_steps(self) -> handshake.Steps:
        return handshake.server(self._secret, self._introduce("serve"), self._refuse)

    def _refuse(self, peer: Introduction) -> str | None:
        if self._owner.closing:
            return "this worker is shutting down"
        if peer.get("group") != self._owner.group:
            return "this worker belongs to another group"
        if not all(isinstance(peer.get(name), kind) for name, kind in _INTRODUCTION.items()):
            return "the introduction makes no sense"
        if not is_device_map(peer.get("devices", {})):
            return "the device map makes no sense"
        if peer.get("purpose") not in ("lane", "pipe", "segment", "probe"):
            return f"unknown purpose {peer.get('purpose')!r}"
        if self._owner.is_lost(str(peer.get("incarnation"))):
            return "this worker has given you up; join the group again"
        return None

    def _welcome(self, channel: Channel, peer: Introduction) -> None:
        inbound = ServerConnection(self._owner, channel, peer)
        with self._lock:
            self._inbounds.add(inbound)
        if self._owner.closing or self._owner.is_lost(inbound.incarnation):
            inbound.ended(ChannelClosed("this worker is shutting down"))
        else:
            self._serve(inbound)

    def _serve(self, inbound: ServerConnection) -> None:
        """Begin to serve a connection. If the system refuses a thread, try again: until then, its calls wait."""
        try:
            self._owner.event_loops.add(inbound)
        except ChannelClosed as error:
            inbound.ended(error)
        except RuntimeError as error:
            if not self._owner.closing:
                _log.warning("worker %r cannot serve a connection yet: %s", self._owner.name, error)
                again = functools.partial(self._serve, inbound)
                self._owner.clock.at(time.monotonic() + _ACCEPT_AGAIN, again)

    def ended(self, inbound: ServerConnection, error: BaseException) -> None:
        """An inbound connection is over. See `AgentRuntime.check_silent_peer`."""
        if isinstance(error, ProtocolError):
            self.counters["closed_protocol_error"] += 1
            _log.warning(
                "worker %r closed the connection from %r: %s",
                self._owner.name,
                inbound.peer_name,
                error,
            )
        with self._lock:
            if isinstance(error, PeerClosed):
                self._last_words[inbound.incarnation] = error.words
            self._inbounds.discard(inbound)
            gone = not any(each.incarnation == inbound.incarnation for each in self._inbounds)
            self._changed.notify_all()
        if not gone:
            return
        words = self._last_words.pop(inbound.incarnation, None)
        if words is not None:
            self._owner.declare_lost(inbound.peer_name, inbound.incarnation, words)
        else:
            self._owner.check_silent_peer(inbound.peer_name, inbound.incarnation)

    def wait_until_alone(self, timeout: float) -> bool:
        """Wait until every other worker has closed its connections to this one."""
        until = time.monotonic() + timeout
        me = self._owner.local_member.incarnation
        with self._lock:
            while any(each.incarnation != me for each in self._inbounds):
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
        return True

    def _sharing(self, incarnation: str, unix_address: str) -> SharedMemoryTransfer:
        def announce(segment: SharedSegment, until: float) -> bool:
            return self._segments.announce(segment, incarnation, unix_address, until)

        return SharedMemoryTransfer(self.arena, self.mappings, incarnation, announce)

    def forget(self, incarnation: str) -> None:
        """A peer is gone: nothing that was shared with it is used again, and nobody waits for it to answer."""
        with self._lock:
            _shut(self._dialling.get(incarnation, ()))
        self._segments.forget(incarnation)
        self.arena.abandon(incarnation, None)
        self.mappings.forget(incarnation)

    # The end

    def close(self, last_words: str | None) -> None:
        self._closed.set()
        for address in self.addresses:
            _in_process.pop(address, None)
        for listener in self._listeners:
            try:
                listener.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                _log.debug("a listener was closed already: %s", error)
            listener.close()
        with self._lock:
            _shut(self._strangers)
            for dialling in self._dialling.values():
                _shut(dialling)
            inbounds = list(self._inbounds)
        for inbound in inbounds:
            if last_words is not None:
                _finish(inbound.channel)
            send_goodbye(inbound.channel, last_words)
            inbound.channel.shut()
        self.arena.close()
        self.mappings.close()

    def drop(self) -> None:
        """After a fork, in the child: close the parent's sockets without a word, so that they end with the parent."""
        for sock in (*self._listeners, *self._strangers):
            sock.close()
        for inbound in self._inbounds:
            inbound.channel.drop()

    def shut_all(self, incarnation: str, last_words: str) -> None:
        """End the connections of a peer that was given up, and tell it why."""
        for inbound in self.server_connections:
            if inbound.incarnation == incarnation:
                close_with_reason(inbound.channel, last_words)

    def _introduce(self, purpose: str, to: str = "") -> Introduction:
        me = self._owner.local_member
        return {
            "name": me.name,
            "rank": me.rank,
            "incarnation": me.incarnation,
            "group": self._owner.group,
            "purpose": purpose,
            "heartbeat": self._config.heartbeat_interval,
            "max_frame": self._config.max_frame,
            "unix": _unix_address(self.addresses),
            "devices": dict(self._config.device_maps.get(to, {})),
        }

    def _advertised(self, address: str) -> str:
        host, port = self._config.listen, address.rpartition(":")[2]
        if self._config.advertise is not None:
            host = self._config.advertise
        elif host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        return f"tcp:{host}:{port}"


def _finish(channel: Channel) -> None:
    """Send the answers that waited."""
    try:
        channel.flush_deferred()
    except ChannelClosed as error:
        _log.debug("nobody is left to take an answer: %s", error)


def _shut(socks: Iterable[socket.socket]) -> None:
    """End handshakes."""
    for sock in socks:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("a connection was closed already: %s", error)


def _unix_address(addresses: tuple[str, ...]) -> str:
    return next((address for address in addresses if address.startswith("unix:")), "")


def _hint(tried: list[str]) -> str:
    if not tried:
        return ": it offers no transport that this worker uses"
    loopback = any(text.startswith(("tcp:127.", "tcp:localhost")) for text in tried)
    advice = (
        ". It listens on loopback only; if it is on another host, start it with TELEGRAD_LISTEN"
        if loopback
        else ""
    )
    return f"; tried {', '.join(tried)}{advice}"

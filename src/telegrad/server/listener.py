"""`Listener`: accept connections from other workers, authenticate them and serve them.

Nothing that a peer sends is unpickled before its handshake has succeeded. `Admission` bounds the
connections that have not finished their handshake, and each handshake is limited in time.

State: `_connections` (the `ServerConnection`s that are open), `_observers` (sockets of observers)
and `_farewells` (why peers closed their connections, by incarnation) are changed under
`_lock`. `_admissions` is complete when `listen` returns.
"""

from __future__ import annotations

import functools
import logging
import secrets
import socket
import threading
import time
from typing import Protocol

from telegrad.config import Config
from telegrad.errors import AuthenticationError, ProtocolError, error_text
from telegrad.free_threading import CounterTable
from telegrad.group.endpoint import (
    BULK,
    OBSERVE,
    PROBE,
    PURPOSES,
    SEGMENT,
    LocalEndpoint,
    in_process_listeners,
    shut_sockets,
)
from telegrad.group.failure_detector import REFUSAL_OF_LOST, FailureDetector
from telegrad.group.hosts import is_loopback
from telegrad.group.joins import JoinWatcher
from telegrad.group.membership import Member
from telegrad.messages.device_routes import is_device_map
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.executor import ThreadPool
from telegrad.server.admission import Admission
from telegrad.server.connection import ServerConnection, ServerRuntime
from telegrad.server.refusal_log import RefusalLog
from telegrad.server.used_tokens import UsedTokens
from telegrad.transport import sockets
from telegrad.transport.channel import (
    Channel,
    ChannelClosed,
    PeerClosed,
    close_with_reason,
    send_leave,
)
from telegrad.transport.sealed_records import channel_records
from telegrad.transport.shared_memory import receive_segment
from telegrad.transport.sockets import AuthenticatedSocket
from telegrad.transport.stripes import open_stripe
from telegrad.transport.tcp import TcpChannel
from telegrad.wire import handshake
from telegrad.wire.frames import Kind
from telegrad.wire.handshake import Incarnation, Introduction

_INTRODUCTION: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "incarnation": str,
    "unix": str,
    "heartbeat": (int, float),
    "address": str,
    "session": str,
    "received": int,
}
_RETRY = 0.05  # seconds to wait after a connection could not be served
_MAX_OBSERVERS = 64

_log = logging.getLogger(__name__)


class ListenerRuntime(ServerRuntime, Protocol):
    """What the listener needs from its agent."""

    config: Config
    clock: Clock
    threads: ThreadPool
    closing: bool
    local_member: Member
    group: str
    failures: FailureDetector
    joins: JoinWatcher

    def serve_observer(self, connection: AuthenticatedSocket) -> None: ...


class Listener:
    """Accept and serve the connections that other workers open to one agent."""

    def __init__(self, runtime: ListenerRuntime, endpoint: LocalEndpoint, config: Config) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._config = config
        self.counters = CounterTable()
        self._admissions: list[Admission] = []  # one for each socket that listens
        self._refusals = RefusalLog()
        self._tokens = UsedTokens(endpoint)
        self._observers: set[socket.socket] = set()
        self._connections: set[ServerConnection] = set()
        self._farewells: dict[str, PeerClosed] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def __repr__(self) -> str:
        return (
            f"<Listener {self._endpoint.addresses} {len(self._connections)} connections, "
            f"{self.counters.counts()}>"
        )

    @property
    def connections(self) -> list[ServerConnection]:
        """The connections that other workers have opened to this one."""
        with self._lock:
            return list(self._connections)

    def listen(self) -> None:
        """Open every transport of the config. Peers can connect; `accept` serves them."""
        if "tcp" in self._config.transports:
            self._check_tls()
        addresses = []
        for transport in self._config.transports:
            if transport == "memory":
                address = f"memory:{secrets.token_hex(8)}"
                in_process_listeners[address] = self
            else:
                sock, address = sockets.listen(transport, self._config.listen)
                self._admissions.append(
                    Admission(
                        self._runtime,
                        sock,
                        self._authenticate,
                        self._config.connect_timeout,
                        self.counters,
                        self._refusals,
                        self._tokens.accept if transport == "tcp" else None,
                    )
                )
                if transport == "tcp":
                    address = self._advertised(address)
            addresses.append(address)
        self._endpoint.addresses = tuple(addresses)

    def _check_tls(self) -> None:
        """Raise `UsageError` if TLS cannot be used, but peers will need it."""
        # Peers on this host use unix sockets if both sides can.
        local = self._config.transports != ("tcp",) and is_loopback(self._config.listen)
        if self._config.tls_cert is not None or not local:
            self._endpoint.tls.check_usable()

    def _advertised(self, address: str) -> str:
        """Return the address of a TCP socket as other hosts should use it."""
        host, port = self._config.listen, address.rpartition(":")[2]
        if self._config.advertise is not None:
            host, given_port = _split_port(self._config.advertise)
            port = given_port or port
        elif host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        return f"tcp:{host}:{port}"

    # Accepting

    def accept(self) -> None:
        """Start to accept connections, on one thread for each listening socket."""
        for admission in self._admissions:
            self._runtime.threads.start(admission.run)

    def _authenticate(self, sock: socket.socket) -> None:
        """Run the handshake with an accepted socket, then serve it.

        Never raise, whatever the peer sends.
        """
        try:
            connection = sockets.authenticate(
                sock,
                self._endpoint.tls,
                self.handshake,
                server_side=True,
                timeout=self._config.connect_timeout,
            )
            peer = connection.peer
            for admission in self._admissions:
                admission.trust(sock)
            incarnation = peer["incarnation"]
            if peer["purpose"] == SEGMENT:
                receive_segment(sock, incarnation, self._endpoint.mappings)
                return
            if peer["purpose"] == PROBE:
                sock.close()
                return
            # not on this thread: those of handshakes are limited
            if peer["purpose"] == BULK:
                self._forget_unauthenticated(sock)
                stripe = open_stripe(connection)
                serve = functools.partial(self._endpoint.bulk.serve, stripe, incarnation)
                self._runtime.threads.start(serve)  # until it ends
                return
            if peer["purpose"] == OBSERVE:
                self._runtime.threads.start(lambda: self._serve_observer(connection))
                return
            if _resumes(peer):
                self._resume(connection)
                return
            on_interrupted = functools.partial(self._interrupted, peer["name"])
            channel = self._endpoint.make_channel(
                connection,
                incarnation,
                peer["unix"],
                peer["purpose"],
                peer["session"],
                on_interrupted,
            )
            if isinstance(channel, TcpChannel):
                self._endpoint.sessions[channel.session] = channel
        except AuthenticationError as error:
            self._refuse_socket(sock, "refused_authentication", error)
        except ProtocolError as error:
            self._refuse_socket(sock, "refused_protocol_error", error)
        except BaseException as error:
            self._refuse_socket(sock, "refused_broken_connection", error)
        else:
            # first, because `close` sends a LEAVE frame to authenticated connections only
            self._forget_unauthenticated(sock)
            self.accept_channel(channel, peer)
        finally:
            self._forget_unauthenticated(sock)

    def _forget_unauthenticated(self, sock: socket.socket) -> None:
        for admission in self._admissions:
            admission.forget(sock)

    def _refuse_socket(self, sock: socket.socket, counter: str, error: BaseException) -> None:
        self.counters.increment(counter)
        self._refusals.refused(self._runtime.name, error)
        sock.close()

    def _serve_observer(self, connection: AuthenticatedSocket) -> None:
        """Answer an observer on this thread. It does not count as a connection of a worker."""
        sock = connection.sock
        with self._lock:
            if self._runtime.closing or len(self._observers) >= _MAX_OBSERVERS:
                sock.close()
                return
            self._observers.add(sock)
        try:
            self._runtime.serve_observer(connection)
        finally:
            with self._lock:
                self._observers.discard(sock)
            sock.close()

    # Channels that were interrupted

    def _resume(self, connection: AuthenticatedSocket) -> None:
        """Let an interrupted channel go on over a new connection."""
        channel = self._interrupted_channel(connection.peer)
        try:
            if channel is None or connection.records is None:
                raise ChannelClosed("the channel has ended meanwhile")
            received, interruption = connection.peer["received"], connection.peer["interruption"]
            channel.resume(connection.sock, channel_records(connection), received, interruption)
        except ChannelClosed:
            connection.sock.close()

    def _interrupted_channel(self, peer: Introduction) -> TcpChannel | None:
        """Return the channel that a peer wants to resume."""
        channel = self._endpoint.sessions.get(peer["session"])
        if channel is not None and channel.incarnation == peer["incarnation"]:
            return channel
        return None

    def _interrupted(self, name: str, channel: TcpChannel, error: BaseException) -> None:
        """Wait until the peer resumes its channel, and end the channel if it does not."""
        _log.info("the connection from worker %r was interrupted: %s", name, error)
        limit = self._config.resume_timeout

        def give_up() -> None:
            if channel.is_interrupted and channel.interruptions == interruption:
                channel.fail(f"it was not resumed within {limit} s")

        interruption = channel.interruptions
        self._runtime.clock.call_at(time.monotonic() + limit, give_up)
        # The peer may have ended. If so, this worker cannot connect to it.
        self._runtime.failures.check_silent_peer(name, channel.incarnation)

    def handshake(self, binding: bytes = b"") -> handshake.Steps:
        """Return the server's side of a handshake."""
        key = self._endpoint.key
        return handshake.server(key, self._introduce, self._reason_to_refuse, binding)

    def _introduce(self, peer: Introduction) -> Introduction:
        """Return what this worker tells about itself to a peer that it accepts."""
        introduction = self._endpoint.introduction(peer["purpose"], address=peer["address"])
        if _resumes(peer):
            channel = self._interrupted_channel(peer)
            introduction["received"], peer["interruption"] = (
                (0, -1) if channel is None else channel.prepare_resume()
            )
        return introduction

    def _reason_to_refuse(self, peer: Introduction) -> str | None:
        """Return why a peer that knows the secret is refused; None: it is accepted."""
        if self._runtime.closing:
            return "this worker is shutting down"
        # an observer that was given an address does not know the group
        is_observer = peer.get("purpose") == OBSERVE and not peer.get("group")
        if peer.get("group") != self._runtime.group and not is_observer:
            return "this worker belongs to another group"
        if not all(isinstance(peer.get(name), kind) for name, kind in _INTRODUCTION.items()):
            return "the introduction is not valid"
        if peer["address"] not in self._endpoint.addresses:
            return (
                f"the connection was meant for {peer['address']!r}, "
                f"but this worker listens at {', '.join(self._endpoint.addresses)}: let the "
                "worker that was meant set TELEGRAD_ADVERTISE to an address that leads to it"
            )
        if self._runtime.failures.is_lost(Incarnation(str(peer.get("incarnation")))):
            return REFUSAL_OF_LOST
        if _resumes(peer) and self._interrupted_channel(peer) is None:
            return "the channel that was interrupted has ended here"
        if not is_device_map(peer.get("devices", {})):
            return "the device map is not valid"
        if peer.get("purpose") not in PURPOSES:
            return f"unknown purpose {peer.get('purpose')!r}"
        return None

    # Serving

    def accept_channel(self, channel: Channel, peer: Introduction) -> None:
        """Serve a channel whose peer was authenticated."""
        connection = ServerConnection(self._runtime, channel, peer)
        with self._lock:
            self._connections.add(connection)
        self._runtime.recorder.add_event(
            "connection opened",
            peer=connection.peer_name,
            purpose=connection.group,
            transport=channel.kind,
        )
        if self._runtime.closing or self._runtime.failures.is_lost(connection.incarnation):
            connection.on_ended(ChannelClosed("this worker is shutting down"))
        else:
            self._runtime.joins.peer_connected(connection.peer_name, connection.incarnation)
            self._serve(connection)

    def _serve(self, connection: ServerConnection) -> None:
        """Begin to read a connection. Retry later if no thread can be started."""
        try:
            self._runtime.event_loops.add(connection)
        except ChannelClosed as error:
            connection.on_ended(error)
        except RuntimeError as error:
            if not self._runtime.closing:
                name = self._runtime.name
                _log.warning("worker %r cannot serve a connection yet: %s", name, error)
                retry = functools.partial(self._serve, connection)
                self._runtime.clock.call_at(time.monotonic() + _RETRY, retry)

    def connection_ended(self, connection: ServerConnection, error: BaseException) -> None:
        """Remove a connection. If its peer has no other, find out whether the peer is lost."""
        name, incarnation = connection.peer_name, connection.incarnation
        self._runtime.recorder.add_event(
            "connection closed", peer=name, purpose=connection.group, reason=error_text(error)
        )
        if isinstance(error, ProtocolError):
            self.counters.increment("closed_protocol_error")
            _log.warning(
                "worker %r closed the connection from %r: %s", self._runtime.name, name, error
            )
        with self._lock:
            if isinstance(error, PeerClosed):
                self._farewells[incarnation] = error
            self._connections.discard(connection)
            has_others = any(each.incarnation == incarnation for each in self._connections)
            self._changed.notify_all()
        if has_others:
            return
        farewell = self._farewells.pop(incarnation, None)
        if farewell is None:
            self._runtime.failures.check_silent_peer(name, incarnation)
        elif farewell.expelled:
            self._runtime.failures.expelled_by(name, incarnation, farewell.reason)
        else:
            self._runtime.failures.declare_lost(name, incarnation, farewell.reason)

    def wait_until_unused(self, patience: float) -> bool:
        """Wait until every other worker has closed its connections to this one.

        Give up if none of them does for `patience` seconds.
        """
        local_incarnation = self._runtime.local_member.incarnation

        def users() -> int:
            return sum(each.incarnation != local_incarnation for each in self._connections)

        until = time.monotonic() + patience
        with self._lock:
            before = users()
            while before:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
                now = users()
                if now < before:
                    until = time.monotonic() + patience
                before = now
        return True

    # Closing

    def close_peer(self, incarnation: Incarnation, reason: str) -> None:
        """Close the connections of a lost peer, and tell it why."""
        for connection in self.connections:
            if connection.incarnation == incarnation:
                close_with_reason(connection.channel, reason, Kind.EXPEL)

    def close(self, reason: str | None) -> None:
        """Close all sockets. Tell the peers the reason; None: tell them nothing."""
        for address in self._endpoint.addresses:
            in_process_listeners.pop(address, None)
        for admission in self._admissions:
            admission.close()
        with self._lock:
            shut_sockets(self._observers)
        for connection in self.connections:
            if reason is not None:
                _flush(connection.channel)
            send_leave(connection.channel, reason)
            connection.channel.shutdown()

    def close_after_fork(self) -> None:
        """In the child of a fork: close this process's copies of the sockets without a message.

        The connections stay open in the parent.
        """
        for admission in self._admissions:
            for sock in (admission.listening, *admission._strangers):
                sock.close()
        for sock in self._observers:
            sock.close()
        for connection in self._connections:
            connection.channel.close_after_fork()


def _split_port(address: str) -> tuple[str, str]:
    """Return the host and the port of an address, which may have none: then the port is ""."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and host and (":" not in host or host.endswith("]")):
        return host.strip("[]"), port
    return address, ""


def _resumes(peer: Introduction) -> bool:
    """Return whether a peer connects to resume a channel. A new channel has received nothing."""
    received: int = peer["received"]
    return received >= 0


def _flush(channel: Channel) -> None:
    """Send the replies that were held back."""
    try:
        channel.flush_deferred()
    except ChannelClosed as error:
        _log.debug("a reply could not be sent before closing: %s", error)

"""`Dialer`: open connections to other workers by the best transport that works.

State: none of its own; the handshakes in progress are those of the `LocalEndpoint`.
"""

from __future__ import annotations

import functools
import logging
import math
import secrets
import socket
import time
from typing import NamedTuple, Protocol

from telegrad.config import Config
from telegrad.errors import AuthenticationError, PeerLost, ProtocolError
from telegrad.group.endpoint import (
    PROBE,
    LocalEndpoint,
    WrongWorker,
    in_process_listeners,
    unix_address,
    verify_peer,
)
from telegrad.group.failure_detector import REFUSAL_OF_LOST, Attempts, FailureDetector
from telegrad.group.membership import Member
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.executor import ThreadPool
from telegrad.transport import in_process
from telegrad.transport.channel import Channel, ChannelClosed
from telegrad.transport.sealed_records import channel_records
from telegrad.transport.sockets import AuthenticatedSocket
from telegrad.transport.tcp import TcpChannel
from telegrad.wire import handshake
from telegrad.wire.handshake import ConnectionRefused

_RESUME_PAUSES = (0.01, 1.0)  # seconds between two attempts to resume a channel: first, longest
_RESUME_ATTEMPT = 3.0  # seconds for one attempt

_log = logging.getLogger(__name__)


class DialedConnection(NamedTuple):
    """A new connection, and the heartbeat interval of the worker at its other end."""

    channel: Channel
    heartbeat: float


class _FailedAttempt(NamedTuple):
    """Why no transport reached a member."""

    failures: list[str]
    final: bool  # another attempt would fail, too
    refused: bool  # no process listens at its TCP address


class DialerRuntime(Protocol):
    """What dialing needs from its agent."""

    name: str
    closing: bool
    clock: Clock
    threads: ThreadPool
    failures: FailureDetector


class Dialer:
    """Open the connections of one agent to others."""

    def __init__(self, runtime: DialerRuntime, endpoint: LocalEndpoint, config: Config) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self._config = config

    def __repr__(self) -> str:
        return f"<Dialer of {self._runtime.name!r} by {', '.join(self._config.transports)}>"

    def dial(self, member: Member, purpose: str, timeout: float | None = None) -> DialedConnection:
        """Return a connection to a member by the first transport that works.

        Raise `TimeoutError` after `timeout` seconds, and `PeerLost` if the member cannot be
        reached. A member of another host is tried again while it may be out of reach.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        patience = 0.0 if member.is_local else self._config.resume_timeout
        attempts = Attempts(member, self._config, patience)
        pause = _RESUME_PAUSES[0]
        while True:
            attempt = self._dial_once(member, purpose, until)
            if isinstance(attempt, DialedConnection):
                return attempt
            now = time.monotonic()
            if now >= until:
                raise TimeoutError
            if attempts.failed(attempt.refused) or attempt.final:
                raise PeerLost(
                    f"worker {member.name!r} cannot be reached"
                    f"{_describe_failures(attempt.failures)}",
                    peer=member.name,
                    sent=False,
                )
            if attempt.refused:
                self._runtime.failures.look_up(member)
            time.sleep(min(pause, until - now))
            pause = min(pause * 2, _RESUME_PAUSES[1])

    def _dial_once(
        self, member: Member, purpose: str, until: float
    ) -> DialedConnection | _FailedAttempt:
        """Try every transport once. Return the connection, or why there is none."""
        limit = time.monotonic() + self._config.connect_timeout  # for all transports together
        failures: list[str] = []
        final, refused = True, True
        for transport in self._config.transports:
            for address in member.addresses:
                if not address.startswith(transport + ":"):
                    continue
                if time.monotonic() >= until:
                    raise TimeoutError
                try:
                    if transport == "memory":
                        return self._dial_in_process(address, member, purpose)
                    self._check_reachable(member)
                    return self._dial_socket(address, member, purpose, min(until, limit))
                except OSError as error:
                    failures.append(f"{address} ({error.strerror or error})")
                    if transport == "tcp":
                        final &= isinstance(error, socket.gaierror)  # the name is wrong
                        refused &= isinstance(error, ConnectionRefusedError)
                except AuthenticationError as error:
                    raise AuthenticationError(
                        f"worker {member.name!r} at {address}: {error}", peer=member.name
                    ) from None
                except ProtocolError as error:
                    if self._is_expelled(member, error):
                        raise _expelled_error(member) from None
                    failures.append(f"{address} ({error})")
                    if transport == "tcp":
                        final &= isinstance(error, WrongWorker | ConnectionRefused)
                        refused = False
        return _FailedAttempt(failures, final, refused)

    def probe(self, member: Member) -> bool | None:
        """Return whether a member is alive.

        None: it does not answer, but nothing shows that its process has ended.
        """
        alive: bool | None = False
        for address in member.addresses:
            if address in in_process_listeners:
                return True
            if address.startswith("memory:"):
                continue
            try:
                self._endpoint.connect(address, member, PROBE).sock.close()
            except ConnectionRefusedError:
                continue  # no process listens there any more
            except WrongWorker:
                continue
            except (OSError, ProtocolError):
                alive = None
                continue
            return True
        return alive

    def _check_reachable(self, member: Member) -> None:
        """Raise `PeerLost` if this worker has left the group, or the member was lost."""
        if self._runtime.closing:
            reason = f"worker {self._runtime.name!r} has left the group"
        elif self._runtime.failures.has_expelled(member.incarnation):
            raise _expelled_error(member)
        elif self._runtime.failures.is_lost(member.incarnation):
            reason = f"worker {member.name!r} was lost"
        else:
            return
        raise PeerLost(reason, peer=member.name, sent=False)

    def _is_expelled(self, member: Member, error: ProtocolError) -> bool:
        """Return whether a member has refused this worker because it declared it lost."""
        expelled = isinstance(error, ConnectionRefused) and error.reason == REFUSAL_OF_LOST
        if expelled:
            self._runtime.failures.expelled_by(member.name, member.incarnation, REFUSAL_OF_LOST)
        return expelled

    def _dial_in_process(self, address: str, member: Member, purpose: str) -> DialedConnection:
        listener = in_process_listeners.get(address)
        if listener is None:
            raise ProtocolError("no worker of this process listens there")
        endpoint = self._endpoint
        introduction = endpoint.introduction(purpose, member.name, address)
        client_steps = handshake.client(endpoint.key, introduction)
        server, client = handshake.run_in_memory(client_steps, listener.handshake())
        verify_peer(server, member)
        local_channel, remote_channel = in_process.create_pair(endpoint.pool)
        listener.accept_channel(remote_channel, client)
        return DialedConnection(local_channel, float(server["heartbeat"]))

    def _dial_socket(
        self, address: str, member: Member, purpose: str, until: float
    ) -> DialedConnection:
        session = secrets.token_hex(16)
        connection = self._endpoint.connect(address, member, purpose, until, {"session": session})

        def reconnect(channel: TcpChannel, error: BaseException) -> None:
            _log.info("the connection to worker %r was interrupted: %s", member.name, error)
            resume = functools.partial(self._resume, channel, address, member, purpose)
            self._runtime.threads.start_with_retry(resume, self._runtime.clock)

        try:
            channel = self._endpoint.make_channel(
                connection,
                member.incarnation,
                unix_address(member.addresses),
                purpose,
                session,
                reconnect,
            )
            return DialedConnection(channel, float(connection.peer["heartbeat"]))
        except BaseException:
            connection.sock.close()
            raise

    @staticmethod
    def _resume_over(
        channel: TcpChannel, connection: AuthenticatedSocket, interruption: int
    ) -> None:
        assert connection.records is not None
        try:
            received = int(connection.peer["received"])
            channel.resume(connection.sock, channel_records(connection), received, interruption)
        except BaseException:
            connection.sock.close()
            raise

    def _resume(self, channel: TcpChannel, address: str, member: Member, purpose: str) -> None:
        """Connect an interrupted channel again, or end it if that is not possible in time."""
        started = time.monotonic()
        attempts = Attempts(member, self._config, self._config.resume_timeout)
        until = started + self._config.resume_timeout
        pause = _RESUME_PAUSES[0]
        while channel.is_interrupted and not self._runtime.closing:
            received, interruption = channel.prepare_resume()
            session = {"session": channel.session, "received": received}
            now, refused = time.monotonic(), False
            try:
                limit = min(until, now + _RESUME_ATTEMPT)
                connection = self._endpoint.connect(address, member, purpose, limit, session)
                self._resume_over(channel, connection, interruption)
            except ChannelClosed:
                return  # it was closed, or another thread has resumed it
            except (WrongWorker, ConnectionRefused) as error:
                # a peer that has just accepted the channel may not know it yet
                if (
                    not isinstance(error, ConnectionRefused)
                    or now - started > _RESUME_PAUSES[1]
                    or self._is_expelled(member, error)
                ):
                    channel.fail(f"it cannot be resumed: {error}")
                    return
                reason = str(error)
            except (OSError, ProtocolError) as error:
                # Who does not know the secret can say nothing about the worker.
                refused = isinstance(error, ConnectionRefusedError | AuthenticationError)
                reason = str(error)
            else:
                _log.info(
                    "the connection to worker %r was resumed after %.1f s",
                    member.name,
                    time.monotonic() - started,
                )
                return
            if lost := attempts.failed(refused):
                channel.fail(f"{lost} ({address}: {reason})")
                return
            if refused:
                self._runtime.failures.look_up(member)
            if channel.wait_until_closed(pause):
                return
            pause = min(pause * 2, _RESUME_PAUSES[1])


def _expelled_error(member: Member) -> PeerLost:
    """Return the error for a call to a member that has declared this worker lost."""
    text = f"worker {member.name!r} cannot be called: {REFUSAL_OF_LOST}"
    return PeerLost(text, peer=member.name, sent=False, expelled=True)


def _describe_failures(failures: list[str]) -> str:
    """Return the end of the error message for a member that no transport reached."""
    if not failures:
        return ": it offers no transport that this worker uses"
    advice = ""
    local = ("tcp:127.", "tcp:localhost")
    if any(failure.startswith(local) and "refused" in failure for failure in failures):
        advice = (
            ". It listens on loopback only; if it is on another host, start it with TELEGRAD_LISTEN"
        )
    return f"; tried {', '.join(failures)}{advice}"

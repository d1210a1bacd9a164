"""`Dialer`: open connections to other workers by the best transport that works.

State: none of its own; the handshakes in progress are those of the `LocalEndpoint`.
"""

from __future__ import annotations

import math
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
from telegrad.group.failure_detector import FailureDetector
from telegrad.group.membership import Member
from telegrad.transport import in_process
from telegrad.transport.channel import Channel
from telegrad.wire import handshake


class DialedConnection(NamedTuple):
    """A new connection, and the heartbeat interval of the worker at its other end."""

    channel: Channel
    heartbeat: float


class DialerRuntime(Protocol):
    """What dialing needs from its agent."""

    name: str
    closing: bool
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
        reached.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        limit = time.monotonic() + self._config.connect_timeout  # for all transports together
        failures = []
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
                except AuthenticationError:
                    raise
                except ProtocolError as error:
                    failures.append(f"{address} ({error})")
        if time.monotonic() >= until:
            raise TimeoutError
        raise PeerLost(
            f"worker {member.name!r} cannot be reached{_describe_failures(failures)}",
            peer=member.name,
            sent=False,
        )

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
                self._endpoint.connect(address, member, PROBE)[0].close()
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
        elif self._runtime.failures.is_lost(member.incarnation):
            reason = f"worker {member.name!r} was lost"
        else:
            return
        raise PeerLost(reason, peer=member.name, sent=False)

    def _dial_in_process(self, address: str, member: Member, purpose: str) -> DialedConnection:
        listener = in_process_listeners.get(address)
        if listener is None:
            raise ProtocolError("another process")
        endpoint = self._endpoint
        introduction = endpoint.introduction(purpose, member.name)
        client_steps = handshake.client(endpoint.secret, introduction)
        server, client = handshake.run_in_memory(client_steps, listener.handshake())
        verify_peer(server, member)
        local_channel, remote_channel = in_process.create_pair(endpoint.pool)
        listener.accept_channel(remote_channel, client)
        return DialedConnection(local_channel, float(server["heartbeat"]))

    def _dial_socket(
        self, address: str, member: Member, purpose: str, until: float
    ) -> DialedConnection:
        sock, peer = self._endpoint.connect(address, member, purpose, until)
        try:
            unix = unix_address(member.addresses)
            channel = self._endpoint.make_channel(sock, peer, member.incarnation, unix)
            return DialedConnection(channel, float(peer["heartbeat"]))
        except BaseException:
            sock.close()
            raise


def _describe_failures(failures: list[str]) -> str:
    """Return the end of the error message for a member that no transport reached."""
    if not failures:
        return ": it offers no transport that this worker uses"
    advice = ""
    if any(failure.startswith(("tcp:127.", "tcp:localhost")) for failure in failures):
        advice = (
            ". It listens on loopback only; if it is on another host, start it with TELEGRAD_LISTEN"
        )
    return f"; tried {', '.join(failures)}{advice}"

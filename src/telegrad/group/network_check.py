"""The network check: when a worker joins, find out whether workers of other hosts can reach it.

Workers of one host need no check, and it costs them nothing. Otherwise:

- In a group of fixed size, each worker connects to a few workers of the next host, so that each is
  tried once. It writes what it found into the store and waits for what the others found. So every
  worker raises the same error, and the whole check takes O(n) connections.
- A worker that joins an open group, or comes back, cannot wait for the others. It connects to some
  workers of other hosts, and asks one of them to connect back.

A connection that breaks, or that cannot be opened, says nothing about the next one: it is tried
again for `Config.connect_timeout`, or for a second if nothing listens there, because workers listen
before others learn their addresses. An answer of the other side, such as a wrong secret, is final.

The versions of all workers are compared, too: other protocols, or TLS on some workers only, are
errors; other versions of Python or torch are warnings.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from telegrad.current import thread_state
from telegrad.errors import (
    InternalError,
    JoinError,
    ProtocolError,
    TelegradError,
)
from telegrad.futures import Future
from telegrad.group.collectives import CallingRuntime
from telegrad.group.endpoint import PROBE, LocalEndpoint, WrongWorker
from telegrad.group.hosts import describe_interfaces, is_loopback
from telegrad.group.membership import Member
from telegrad.messages.remote_functions import DeferredReply, internal
from telegrad.wire.handshake import HandshakeBroken

_SAMPLE = 4  # workers that a newcomer compares itself with and tries to reach
_MAX_NAMES = 8  # in a message
_REFUSED_SECONDS = 1.0  # for which a connection is tried that is refused
_PAUSES = (0.02, 0.5)  # seconds between two attempts: first, longest

_log = logging.getLogger(__name__)


class NetworkCheckRuntime(CallingRuntime, Protocol):
    """What the network check needs from its agent."""

    endpoint: LocalEndpoint


class PeerCheck(NamedTuple):
    """What came of a connection to a worker: a problem, or "".

    `ended`: the process of that worker may have ended, which is no problem of the network.
    """

    problem: str
    ended: bool = False


def check_fixed_group(runtime: NetworkCheckRuntime, until: float) -> None:
    """Raise `JoinError` if the workers of a group of fixed size cannot work together."""
    members, local = runtime.directory.members(refresh=False), runtime.local_member
    compare_versions(members)
    if len({member.host for member in members}) == 1:
        return
    has_come_back = runtime.directory.has_come_back(local)
    if has_come_back:
        problems = _check_newcomer(runtime, members, until)
    else:
        results = _try_all(runtime, targets(members, local), until)
        problems = [check.problem for check in results.values() if check.problem]
    runtime.directory.write_check(local, json.dumps(problems))
    if not has_come_back:
        checks = runtime.directory.wait_for_checks(members, until)
        problems = [problem for text in checks for problem in json.loads(text)]
    _raise_if(problems, local)


def check_newcomer(runtime: NetworkCheckRuntime, until: float) -> None:
    """Raise `JoinError` if this worker, which joins an open group, does not fit into it."""
    members = [*runtime.directory.sample(_SAMPLE), runtime.local_member]
    compare_versions(members)
    _raise_if(_check_newcomer(runtime, members, until), runtime.local_member)


def _check_newcomer(
    runtime: NetworkCheckRuntime, members: Sequence[Member], until: float
) -> list[str]:
    local = runtime.local_member
    others = [member for member in members if member.host != local.host]
    # The next ones by rank come first, so that not all newcomers try the same.
    others.sort(key=lambda member: (member.rank < local.rank, member.rank))
    checks = _try_all(runtime, others[:_SAMPLE], until)
    reached = [name for name, check in checks.items() if not check.problem]
    for name in reached:
        left = min(max(until - time.monotonic(), 1.0), runtime.config.connect_timeout)
        try:
            reply = runtime.start(name, _connect_back, (local.name,), None, left, internal=True)
            check = PeerCheck(*reply.result(left))
        except TelegradError as error:
            _log.debug("worker %r could not be asked to connect back: %s", name, error)
        else:
            return [check.problem] if check.problem else []
    if reached:
        return []
    return [check.problem for check in checks.values() if not check.ended]


def targets(members: Sequence[Member], local: Member) -> list[Member]:
    """Return the workers that this one connects to. Each worker is the target of another host's.

    The workers of a host share those of the next host, in the order of their ranks.
    """
    hosts: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda member: member.rank):
        hosts.setdefault(member.host, []).append(member)
    names = list(hosts)
    own_host = hosts[local.host]
    next_host = hosts[names[(names.index(local.host) + 1) % len(names)]]
    index = [member.rank for member in own_host].index(local.rank)
    return next_host[index :: len(own_host)] or [next_host[index % len(next_host)]]


def compare_versions(members: Sequence[Member]) -> None:
    """Raise `JoinError` if workers cannot understand each other; log if they might not."""
    problems = version_problems(members)
    if problems:
        raise JoinError(" | ".join(problems))
    for value, what, consequence in (
        (_minor("python"), "versions of Python", "functions sent by value may not run"),
        (_minor("torch"), "versions of torch", "some objects may not be unpickled"),
    ):
        text = _differences(members, value, what)
        if text:
            _log.warning("%s: %s. Install the same version everywhere", text, consequence)


def version_problems(members: Sequence[Member]) -> list[str]:
    """Return why workers cannot understand each other."""
    problems = []
    protocols = _differences(members, lambda each: str(each.protocol), "versions of the protocol")
    if protocols:
        problems.append(f"{protocols}. Install the same version of telegrad on all of them")
    tls = _differences(members, lambda each: each.tls, "settings of TLS")
    if tls and _use_tcp(members):
        problems.append(
            f"{tls}. Set TELEGRAD_TLS and the certificates alike for all of them. Python before "
            "3.13 has no pre-shared keys: use one version everywhere, or certificates of your own"
        )
    return problems


def _use_tcp(members: Sequence[Member]) -> bool:
    """Return whether some of these workers connect to others by TCP."""
    return len({member.host for member in members}) > 1 or any(
        bool(member.addresses) and len(tcp_addresses(member)) == len(member.addresses)
        for member in members
    )


def _minor(field: str) -> Callable[[Member], str]:
    """Return a function that returns the first two numbers of a version."""
    return lambda member: ".".join(str(getattr(member, field)).split(".")[:2])


def _differences(members: Sequence[Member], value: Callable[[Member], str], what: str) -> str:
    """Return a text that says which workers have which value; "" if all have the same."""
    names: dict[str, list[str]] = {}
    for member in members:
        names.setdefault(value(member), []).append(member.name)
    if len(names) < 2:
        return ""
    parts = []
    for each, having in names.items():
        more = f" and {len(having) - _MAX_NAMES} more" if len(having) > _MAX_NAMES else ""
        parts.append(f"{each or 'unknown'} ({', '.join(having[:_MAX_NAMES])}{more})")
    return f"the workers have different {what}: {', '.join(parts)}"


def _raise_if(problems: Sequence[str], local: Member) -> None:
    if problems:
        tcp = ", ".join(tcp_addresses(local)) or "no TCP address"
        raise JoinError(
            f"the network between the workers does not work: {' | '.join(dict.fromkeys(problems))} "
            f"| This is worker {local.name!r}: it advertises {tcp}, and its interfaces are "
            f"{describe_interfaces()}. `telegrad doctor` checks the connection of two hosts"
        )


# Connecting


def _try_all(
    runtime: NetworkCheckRuntime, members: Sequence[Member], until: float
) -> dict[str, PeerCheck]:
    """Connect to members at the same time. Return what came of it, by name."""
    until = min(until, time.monotonic() + runtime.config.connect_timeout)
    futures = {member.name: _try_on_thread(runtime, member, until) for member in members}
    return {name: future.wait() for name, future in futures.items()}


def _try_on_thread(runtime: NetworkCheckRuntime, member: Member, until: float) -> Future[PeerCheck]:
    future: Future[PeerCheck] = Future()

    def run() -> None:
        try:
            future.set_result(_try(runtime, member, until))
        except BaseException as error:
            future.set_exception(InternalError(f"the network check failed: {error!r}"))

    runtime.threads.start(run)
    return future


def _try(runtime: NetworkCheckRuntime, member: Member, until: float) -> PeerCheck:
    """Connect to a member of another host by TCP."""
    local = runtime.local_member
    addresses = tcp_addresses(member)
    if "tcp" not in runtime.config.transports or not addresses:
        without = local.name if addresses else member.name
        return PeerCheck(
            f"worker {without!r} does not use TCP, but {local.name!r} and {member.name!r} are on "
            "different hosts: add tcp to its TELEGRAD_TRANSPORTS"
        )
    check = PeerCheck("")
    for address in addresses:
        if is_loopback(_host(address)):
            check = PeerCheck(
                f"worker {member.name!r} listens on loopback only ({address}), but worker "
                f"{local.name!r} is on another host: start {member.name!r} with "
                "TELEGRAD_LISTEN=0.0.0.0 or the address of its network interface"
            )
            continue
        error = _connect(runtime, member, address, until)
        if error is None:
            return PeerCheck("")
        ended = isinstance(error, ConnectionRefusedError | WrongWorker)
        check = PeerCheck(describe_failure(error, local, member, address), ended)
    return check


def _connect(
    runtime: NetworkCheckRuntime, member: Member, address: str, until: float
) -> OSError | ProtocolError | None:
    """Connect to a member, again if that may help. Return why it is not possible; None: it is."""
    started, pause = time.monotonic(), _PAUSES[0]
    while True:
        try:
            runtime.endpoint.connect(address, member, PROBE, until).sock.close()
        except (OSError, HandshakeBroken) as error:
            refused = isinstance(error, ConnectionRefusedError)
            limit = min(until, started + _REFUSED_SECONDS) if refused else until
            if time.monotonic() + pause >= limit or is_unknown_name(error):
                return error
            _log.debug("the network check tries %r again: %s", member.name, error)
        except ProtocolError as error:
            return error
        else:
            return None
        time.sleep(pause)
        pause = min(pause * 2, _PAUSES[1])


def describe_failure(error: Exception, local: Member, member: Member, address: str) -> str:
    """Return a text that says why a worker cannot connect to another, and what to do."""
    name = member.name
    text = str(error.strerror or error) if isinstance(error, OSError) else str(error)
    failure = f"worker {local.name!r} cannot reach worker {name!r} at {address} ({text})"
    advertise = f"set TELEGRAD_ADVERTISE for {name!r} to an address that the other hosts can reach"
    if isinstance(error, WrongWorker):
        return f"{failure}: the address belongs to another worker: {advertise}"
    if isinstance(error, HandshakeBroken):
        return (
            f"{failure}: several attempts failed. See why in the log of {name!r}; it may also be "
            f"a firewall or proxy between the hosts, or another program: then {advertise}"
        )
    if isinstance(error, ProtocolError):
        return failure  # an answer, which says what to do
    if isinstance(error, socket.gaierror):
        return f"{failure}: the name is unknown: {advertise}"
    if isinstance(error, ConnectionRefusedError):
        advice = f"{advertise}, or TELEGRAD_LISTEN to that interface"
        return f"{failure}: nothing listens there, or a firewall refuses it: {advice}"
    return f"{failure}: it is the wrong interface ({advertise}), or a firewall blocks the port"


def is_unknown_name(error: Exception) -> bool:
    """Return whether a host name does not exist. A name server may also just not answer."""
    return isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN


def tcp_addresses(member: Member) -> list[str]:
    """Return the TCP addresses of a member."""
    return [address for address in member.addresses if address.startswith("tcp:")]


def _host(address: str) -> str:
    return address.removeprefix("tcp:").rpartition(":")[0]


@internal
def _connect_back(name: str) -> DeferredReply:
    """Connect to the worker `name`, which asks for it. The reply is a `PeerCheck`."""
    runtime: NetworkCheckRuntime | None = thread_state.runtime
    if runtime is None:
        raise InternalError("a network check outside an agent")
    member = runtime.directory.find(name, refresh=True)
    until = time.monotonic() + runtime.config.connect_timeout
    return DeferredReply(_try_on_thread(runtime, member, until))

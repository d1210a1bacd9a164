"""Strangers come in crowds, say nothing or speak slowly; members get in meanwhile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from telegrad import Agent
from telegrad.free_threading import CounterTable
from telegrad.group.secret import group_key
from telegrad.server import admission
from telegrad.server.admission import Admission
from telegrad.server.refusal_log import RefusalLog
from telegrad.testing import LocalCluster
from telegrad.transport import sockets
from telegrad.wire import handshake
from telegrad.wire.admission_token import make_token
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import PATIENCE, until
from tests.local.raw_sockets import address_of, introduction, is_closed, unauthenticated_socket

CROWD = 300


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    """An open group; w0 is connected to w1."""
    workers = cluster(2, fixed_size=False)
    assert workers["w0"].call("w1", abs, -1) == 1
    return workers


@pytest.fixture
def crowd() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def admission_of(agent: Agent) -> Admission:
    (only,) = agent._runtime.listener._admissions
    return only


def come(crowd: ExitStack, agent: Agent, transport: str, count: int) -> list[socket.socket]:
    """Connect and say nothing; by TCP, from another address than that of the members."""
    if transport == "unix":
        return [crowd.enter_context(unauthenticated_socket(agent, "unix")) for _ in range(count)]
    (address,) = agent._runtime.local_member.addresses
    target = ("127.0.0.1", int(address.rpartition(":")[2]))
    return [
        crowd.enter_context(socket.create_connection(target, PATIENCE, ("127.0.0.2", 0)))
        for _ in range(count)
    ]


def test_members_join_and_call_in_a_crowd_of_silent_strangers(
    workers: LocalCluster, crowd: ExitStack, transport: str
) -> None:
    agent = workers["w1"]
    come(crowd, agent, transport, CROWD)
    until(lambda: len(admission_of(agent).strangers) >= admission.MAX_PER_SOURCE)
    assert admission_of(agent)._threads == 0  # they cost no threads
    assert workers["w0"].call("w1", abs, -1) == 1
    for index in range(3):
        member = workers.join(f"new{index}")
        assert member.call("w1", abs, -1) == 1
        assert workers["w1"].call(member.name, abs, -1) == 1


def test_the_oldest_strangers_make_room_for_others(
    workers: LocalCluster, crowd: ExitStack, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_STRANGERS", 10)
    monkeypatch.setattr(admission, "MAX_PER_SOURCE", 10)
    monkeypatch.setattr(admission, "_MAY_STAY", 0.0)
    agent = workers["w1"]
    strangers = come(crowd, agent, transport, 30)
    until(lambda: agent.statistics().get("refused_evicted") == 20)
    assert all(map(is_closed, strangers[:20]))
    assert len(admission_of(agent).strangers) == 10
    assert workers.join("new").call("w1", abs, -1) == 1


@pytest.mark.parametrize("transport", ["tcp"])
def test_strangers_that_stop_within_tls_keep_nobody_out(
    workers: LocalCluster, crowd: ExitStack, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_HANDSHAKES", 2)
    monkeypatch.setattr(admission, "_MAY_STAY", 0.1)
    agent = workers["w1"]
    for sock in come(crowd, agent, transport, 6):
        sock.send(b"\x16\x03\x01")  # the beginning of a record
    until(lambda: admission_of(agent)._threads == 2)
    assert workers.join("new").call("w1", abs, -1) == 1


# nothing, the beginning of a TLS record, one that never ends, and a token of another group
OPENINGS = {
    "silent": b"",
    "record": b"\x16\x03\x01",
    "hello": b"\x16\x03\x01\x02\x00" + bytes(200),
    "token": make_token(b"k" * 32, "tcp:127.0.0.1:1"),
}


@pytest.fixture(params=OPENINGS)
def opening(request: pytest.FixtureRequest) -> bytes:
    return OPENINGS[request.param]


def half_open(crowd: ExitStack, agent: Agent, opening: bytes) -> socket.socket:
    """Begin a connection from the address of the members. The backlog may be full."""
    sock = crowd.enter_context(socket.socket())
    sock.setblocking(False)
    sock.connect_ex(("127.0.0.1", int(address_of(agent, "tcp").rpartition(":")[2])))
    with contextlib.suppress(OSError):  # the backlog is full, or the worker has closed it
        sock.send(opening)
    return sock


@pytest.mark.parametrize("transport", ["tcp"])
def test_strangers_at_the_address_of_members_that_never_make_room(
    workers: LocalCluster, crowd: ExitStack, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep all threads of strangers, and nobody ends them."""
    monkeypatch.setattr(admission, "MAX_HANDSHAKES", 2)
    monkeypatch.setattr(admission, "_MAY_STAY", 10 * PATIENCE)
    agent = workers["w1"]
    for _ in range(6):
        half_open(crowd, agent, OPENINGS["hello"])
    until(lambda: admission_of(agent)._threads == 2)
    for index in range(3):
        member = workers.join(f"new{index}")
        assert member.call("w1", abs, -1) == 1
    assert admission_of(agent)._threads == 2


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_thousand_strangers_at_the_address_of_members(
    workers: LocalCluster, crowd: ExitStack, transport: str, opening: bytes
) -> None:
    agent = workers["w1"]
    for _ in range(1100):
        half_open(crowd, agent, opening)
    member = workers.join("new")
    assert member.call("w1", abs, -1) == 1
    assert workers["w1"].call("new", abs, -1) == 1


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["tcp"])
def test_members_join_and_call_in_a_flood_from_their_own_address(
    workers: LocalCluster, in_background: Background, transport: str, opening: bytes
) -> None:
    """A thread opens connections as fast as possible; thousands are open at any time."""
    agent, stopped = workers["w1"], threading.Event()
    count = iter(range(10**9))

    def flood() -> None:
        with ExitStack() as crowd:
            open_sockets: deque[socket.socket] = deque()
            while not stopped.is_set():
                open_sockets.append(half_open(crowd, agent, opening))
                if next(count) > 4000:
                    open_sockets.popleft().close()

    flooding = in_background(flood)
    try:
        until(lambda: next(count) > 4000)
        for index in range(10):
            member = workers.join(f"new{index}")
            assert member.call("w1", abs, -1) == 1
        assert workers["w0"].call("w1", abs, -1) == 1
    finally:
        stopped.set()
    flooding.result(PATIENCE)


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_token_is_accepted_once_and_only_at_its_address(workers: LocalCluster) -> None:
    agent = workers["w1"]
    key, address = agent._runtime.endpoint.key, address_of(agent, "tcp")
    tokens = agent._runtime.listener._tokens
    token = make_token(key, address)
    assert tokens.accept(token)
    assert not tokens.accept(token)
    assert not tokens.accept(make_token(key, address_of(workers["w0"], "tcp")))
    assert not tokens.accept(make_token(bytes(32), address))
    for damaged in (b"", token[:-1], token[:-1] + bytes([token[-1] ^ 1]), b"x" + token[1:]):
        assert not tokens.accept(damaged)


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_recorded_token_gives_no_place_before_others(
    workers: LocalCluster, crowd: ExitStack
) -> None:
    agent = workers["w1"]
    token = make_token(agent._runtime.endpoint.key, address_of(agent, "tcp"))
    for _ in range(2):
        crowd.enter_context(unauthenticated_socket(agent, "tcp")).send(token)
    places = admission_of(agent)._snapshot
    until(lambda: [each.has_token for each in places()] == [True, False])


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_token_that_arrives_in_pieces(workers: LocalCluster) -> None:
    agent = workers["w1"]
    token = make_token(agent._runtime.endpoint.key, address_of(agent, "tcp"))
    with unauthenticated_socket(agent, "tcp") as sock:
        sock.send(token[:7])
        until(lambda: admission_of(agent)._threads == 1)
        sock.send(token[7:])
        endpoint, said = agent._runtime.endpoint, introduction(agent, "tcp")
        connection = sockets.authenticate(
            sock,
            endpoint.tls,
            lambda binding: handshake.client(endpoint.key, said, binding),
            server_side=False,
            timeout=PATIENCE,
        )
        assert connection.peer["name"] == "w1"


@pytest.mark.parametrize("transport", ["tcp"])
def test_the_strangers_of_the_largest_source_make_room(
    workers: LocalCluster, crowd: ExitStack, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_PER_SOURCE", 10)
    monkeypatch.setattr(admission, "_MAY_STAY", 0.01)
    agent = workers["w1"]
    quiet = crowd.enter_context(unauthenticated_socket(agent, "tcp"))
    come(crowd, agent, transport, 30)
    until(lambda: agent.statistics().get("refused_evicted") == 20)
    assert quiet.getsockname()[0] == "127.0.0.1"
    assert {stranger.source for stranger in admission_of(agent)._snapshot()} == {
        "127.0.0.1",
        "127.0.0.2",
    }


def test_strangers_that_speak_slowly_keep_nobody_out(
    workers: LocalCluster, crowd: ExitStack, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_HANDSHAKES", 4)
    monkeypatch.setattr(admission, "_MAY_STAY", 0.2)
    agent = workers["w1"]
    for sock in come(crowd, agent, transport, 40):
        sock.send(b"T")
    until(lambda: admission_of(agent)._threads == 4)
    assert workers.join("new").call("w1", abs, -1) == 1
    assert admission_of(agent)._threads <= 4
    assert workers["w0"].call("w1", abs, -1) == 1


def test_a_burst_of_members_is_not_refused(
    cluster: Clusters, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come at the same time and are more than the limits allow: they wait in the backlog."""
    workers = cluster(2)
    monkeypatch.setattr(admission, "MAX_STRANGERS", 4)
    monkeypatch.setattr(admission, "MAX_PER_SOURCE", 4)
    monkeypatch.setattr(admission, "MAX_HANDSHAKES", 2)
    monkeypatch.setattr(admission, "_RETRY", 0.001)
    dial = workers["w0"]._runtime.dial
    member = workers["w1"]._runtime.local_member
    with ThreadPoolExecutor(40) as pool:
        connections = list(pool.map(lambda _: dial(member, "exclusive"), range(80)))
    for connection in connections:
        connection.channel.close()
    assert "refused_evicted" not in workers["w1"].statistics()


# Descriptors

SHORTAGE = """
import json, socket, sys
from telegrad.config import Config
from telegrad.transport import sockets
from telegrad.transport.tls import TlsContexts
from telegrad.wire import handshake

address, key, introduction, count = sys.argv[1:]
key, introduction = bytes.fromhex(key), json.loads(introduction)
strangers = [sockets.connect(address, 30) for _ in range(int(count))]
print("the crowd is there", flush=True)
sys.stdin.readline()
member = sockets.connect(address, 30)
steps = lambda binding: handshake.client(key, introduction, binding)
tls = TlsContexts(Config(), key)
connection = sockets.authenticate(member, tls, steps, server_side=False, timeout=30)
print(connection.peer["name"], flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("transport", ["unix"])
def test_a_member_gets_in_although_strangers_have_used_up_all_descriptors(
    workers: LocalCluster, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_MAY_STAY", 0.1)
    agent = workers["w1"]
    arguments = [
        agent._runtime.local_member.addresses[0],
        group_key(agent.config.secret).hex(),
        json.dumps(introduction(agent, purpose="probe")),
        "60",
    ]
    child = subprocess.Popen(
        [sys.executable, "-c", SHORTAGE, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    with child:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
            assert child.stdout.readline() == "the crowd is there\n"
            until(lambda: len(admission_of(agent).strangers) >= 15)
            assert workers["w0"].call("w1", abs, -1) == 1
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "w1\n"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            child.stdin.write("\n")
            child.stdin.close()
    assert workers.join("new").call("w1", abs, -1) == 1


# The log


def test_few_of_many_refusals_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog()
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            log.refused("w0", f"number {number}")
        assert len(caplog.messages) == RefusalLog.LINES
        log._since -= 2 * RefusalLog.PERIOD
        log.refused("w0", "the next")
    assert (
        caplog.messages[-2]
        == f"{1000 - RefusalLog.LINES} further messages of this kind were left out"
    )
    assert caplog.messages[-1] == "worker 'w0' closed a connection: the next"


def test_a_stranger_that_speaks_when_it_has_to_make_room(
    workers: LocalCluster, crowd: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening, address = sockets.listen("unix", "")
    listening.setblocking(False)
    served = threading.Event()

    def authenticate(sock: socket.socket) -> None:
        served.set()
        door.forget(sock)
        sock.close()

    runtime = workers["w1"]._runtime
    door = Admission(runtime, listening, authenticate, PATIENCE, CounterTable(), RefusalLog())
    door._poller.register(listening.fileno(), select.POLLIN)  # its events come first
    monkeypatch.setattr(admission, "_MAY_STAY", 0.0)
    spare = os.dup(listening.fileno())
    first = crowd.enter_context(sockets.connect(address, PATIENCE))
    door._accept()
    first.send(b"x")
    monkeypatch.setattr(admission, "_MAY_STAY", PATIENCE)
    monkeypatch.setattr(admission, "MAX_PER_SOURCE", 1)
    monkeypatch.setattr(admission, "MAX_STRANGERS", 1)
    second = crowd.enter_context(sockets.connect(address, PATIENCE))
    os.close(spare)  # the second gets this descriptor, not that of the first
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(door.run)  # finds both, and the first has to make room
        try:
            second.send(b"x")
            assert served.wait(PATIENCE)
        finally:
            door.close()
        running.result(PATIENCE)


def test_the_thread_ends_if_the_agent_closes_just_before_it_polls(
    workers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    number = listening.fileno()
    runtime = workers["w0"]._runtime
    accepting = Admission(
        runtime, listening, lambda sock: None, PATIENCE, CounterTable(), RefusalLog()
    )
    mine, others = socket.socketpair()  # nothing ever arrives there

    def close_and_reuse_the_number() -> None:
        accepting.close()
        if listening.fileno() < 0:
            os.dup2(mine.fileno(), number)

    monkeypatch.setattr(accepting, "_poll_milliseconds", close_and_reuse_the_number)
    thread = threading.Thread(target=accepting.run)
    thread.start()
    thread.join(PATIENCE)
    has_ended = not thread.is_alive()
    others.close()  # ends the thread in any case
    thread.join()
    mine.close()
    assert has_ended

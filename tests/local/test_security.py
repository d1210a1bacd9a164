"""Nobody gets in who does not know the secret, and whatever strangers send, the agent goes on."""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from telegrad import Agent, Config, expose
from telegrad.errors import ProtocolError, TelegradError, UsageError
from telegrad.group.secret import group_key, key_file
from telegrad.refs import remote
from telegrad.refs.owner_calls import create_call
from telegrad.testing import LocalCluster
from telegrad.transport import sockets
from telegrad.transport.buffer_pool import BufferPool
from telegrad.wire import handshake
from telegrad.wire.frames import BUFFER_ENTRY, DEFINES_FUNCTION, HEADER, INLINE_FUNCTION, Kind
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Log, until
from tests.local.raw_sockets import (
    MemberSocket,
    Recorder,
    introduction,
    is_closed,
    shake_hands,
    trickle,
    unauthenticated_socket,
)

HELLO = struct.pack("<4sH32s", handshake.MAGIC, handshake.VERSION, os.urandom(32))


class Bomb:
    """Notes when it is unpickled."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __reduce__(self) -> tuple[Any, ...]:
        return self._log.note, ("unpickled",)


@expose
def exposed(x: int, *, y: int = 0) -> int:
    return x + y


def hidden(*args: Any) -> str:
    return "should not run"


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(cluster: Clusters) -> LocalCluster:
    return cluster(2, tls="off")


@pytest.fixture
def agent(pair: LocalCluster) -> Iterator[Agent]:
    """An agent that must be unharmed at the end of the test."""
    yield pair["w1"]
    assert pair["w0"].call("w1", abs, -1) == 1
    assert pair["w0"].submit("w1", abs, -1).wait() == 1


def turned_away(agent: Agent) -> int:
    return sum(
        count
        for name, count in agent.statistics().items()
        if name.startswith(("refused", "closed"))
    )


# Where it listens


def test_only_abstract_unix_sockets_and_loopback_by_default() -> None:
    with Agent("w", store=dist.HashStore(), config=Config()) as agent:
        mine = {
            os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)
        }
        tcp = [
            fields[1]
            for fields in _table("tcp", "tcp6")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine
        ]
        unix = [
            fields[7]
            for fields in _table("unix")
            if f"socket:[{fields[6]}]" in mine and len(fields) > 7
        ]
        assert [address.partition(":")[0] for address in tcp] == ["0100007F"]  # 127.0.0.1
        assert {name.partition("-")[0] for name in unix} == {"@telegrad"}
        assert [address.partition(":")[0] for address in agent._runtime.local_member.addresses] == [
            "memory",
            "unix",
            "tcp",
        ]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _table(*names: str) -> Iterator[list[str]]:
    for name in names:
        path = Path("/proc/net", name)
        if path.exists():
            yield from (line.split() for line in path.read_text().splitlines()[1:])


def test_the_secret_is_never_shown(pair: LocalCluster) -> None:
    secret = pair.config.secret
    assert secret is not None
    for text in (repr(pair.config), repr(pair["w0"]), str(pair["w0"].statistics())):
        assert secret not in text


# Before the handshake


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n", id="http"),
        pytest.param(os.urandom(4096), id="garbage"),
        pytest.param(b"\0" * 4096, id="zeros"),
        pytest.param(pickle.dumps([1, 2, 3] * 20, 5), id="pickle"),
        pytest.param(handshake.MAGIC + b"\xff\xff" + b"v" * 64, id="other version"),
        pytest.param(HELLO + b"\xff\xff" + b"x" * 70000, id="oversized introduction"),
        pytest.param(HELLO + struct.pack("<H", 20) + b"{" + b"x" * 51, id="wrong proof"),
        pytest.param(HELLO + struct.pack("<H", 0) + b"x" * 32, id="empty introduction"),
    ],
)
def test_what_is_no_handshake_is_closed_and_counted(
    agent: Agent, transport: str, data: bytes
) -> None:
    with unauthenticated_socket(agent, transport) as sock:
        sock.sendall(data)
        assert is_closed(sock)
    until(lambda: turned_away(agent) == 1)


@pytest.mark.parametrize("length", [0, 1, 4, len(HELLO) - 1, len(HELLO), len(HELLO) + 1])
def test_a_truncated_handshake_is_closed_and_counted(
    agent: Agent, transport: str, length: int
) -> None:
    with unauthenticated_socket(agent, transport) as sock:
        sock.sendall((HELLO + b"\x10\x00")[:length])
        sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    until(lambda: turned_away(agent) == 1)


def test_a_recorded_handshake_cannot_be_replayed(agent: Agent, transport: str) -> None:
    with unauthenticated_socket(agent, transport) as sock:
        recorder = Recorder(sock)
        key = group_key(agent.config.secret)
        steps = handshake.client(key, introduction(agent, transport))
        sockets._run(recorder, steps, time.monotonic() + PATIENCE)  # type: ignore[arg-type]
    with unauthenticated_socket(agent, transport) as sock:
        for data in recorder.sent:
            sock.sendall(data)
        assert is_closed(sock)
    until(lambda: agent.statistics().get("refused_authentication") == 1)


def test_the_agents_own_proof_cannot_be_reflected(agent: Agent, transport: str) -> None:
    """Its proof as a server, sent back as if it were a client's, opens no door."""
    with unauthenticated_socket(agent, transport) as sock:
        sock.sendall(HELLO)
        answer = b""
        while len(answer) < len(HELLO) + 32:
            answer += sock.recv(4096)
        sock.sendall(struct.pack("<H", 0) + answer[len(HELLO) :])
        assert is_closed(sock)
    until(lambda: turned_away(agent) == 1)


def test_nothing_is_unpickled_before_the_handshake(agent: Agent, transport: str, log: Log) -> None:
    bomb = pickle.dumps(Bomb(log), 5)
    call = HEADER.pack(len(bomb), 1, 0, 0, 0, Kind.CALL, INLINE_FUNCTION, 0) + bomb
    openings = [bomb, call, HELLO + call, HELLO + struct.pack("<H", len(bomb)) + bomb + b"x" * 32]
    for opening in openings:
        with unauthenticated_socket(agent, transport) as sock:
            sock.sendall(opening + b"\0" * 4096)
            assert is_closed(sock)
    assert log.entries == []
    pickle.loads(bomb)
    assert log.entries == ["unpickled"]  # it would have gone off


def test_a_silent_stranger_is_closed_in_time(cluster: Clusters, transport: str) -> None:
    agent = cluster(1, connect_timeout=0.1, tls="off")["w0"]
    with unauthenticated_socket(agent, transport) as sock:
        assert is_closed(sock)
    until(lambda: turned_away(agent) == 1)


def test_a_stranger_that_trickles_is_closed_in_time(cluster: Clusters, transport: str) -> None:
    """The limit is for the whole handshake, or a few patient strangers could keep everybody else
    out.
    """
    agent = cluster(1, connect_timeout=0.2, tls="off")["w0"]
    with unauthenticated_socket(agent, transport) as sock:
        assert trickle(sock, HELLO, pause=0.05) < len(HELLO) / 2


def test_closing_an_agent_ends_its_strangers(cluster: Clusters, transport: str) -> None:
    for _ in range(10):  # at the door, just let in, or in the middle of the handshake
        agent = cluster(1)["w0"]
        with unauthenticated_socket(agent, transport) as sock:
            sock.sendall(HELLO[:10])
            agent.close()
            assert is_closed(sock)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("transport", ["unix"])
def test_another_user_is_refused_on_a_unix_socket(agent: Agent, transport: str) -> None:
    name = agent._runtime.local_member.addresses[0].removeprefix("unix:@")
    program = (
        "import os, socket, sys; sock = socket.socket(socket.AF_UNIX); os.setuid(65534); "
        "sock.connect(chr(0) + sys.argv[1]); sys.exit(sock.recv(1) != b'')"
    )
    subprocess.run([sys.executable, "-S", "-c", program, name], check=True, timeout=PATIENCE)
    until(lambda: agent.statistics().get("refused_authentication") == 1)


# After the handshake: a member that breaks the protocol


def _call(length: int = 0, *, function: int = 1, buffers: int = 0, flags: int = 0) -> bytes:
    return HEADER.pack(length, 1, function, 0, buffers, Kind.CALL, flags, 0)


BROKEN_CALLS = {
    "oversized body": _call(1 << 50),
    "too many buffers": _call(buffers=1 << 20),
    "oversized buffer": _call(buffers=1) + BUFFER_ENTRY.pack(1 << 50, 0, 0, 0),
    "unknown segment": _call(buffers=1) + BUFFER_ENTRY.pack(8, 4096, 77, 0),
    "undefined function": _call(function=9),
    "definition beyond the body": _call(8, flags=DEFINES_FUNCTION) + b"\xff" * 8,
    "unknown kind": HEADER.pack(0, 1, 1, 0, 0, 77, 0, 0),
}


@pytest.mark.parametrize("purpose", ["multiplexed", "exclusive"])
@pytest.mark.parametrize("frame", BROKEN_CALLS.values(), ids=BROKEN_CALLS)
def test_a_member_that_breaks_the_protocol_is_closed_and_counted(
    agent: Agent, transport: str, frame: bytes, purpose: str
) -> None:
    with unauthenticated_socket(agent, transport) as sock:
        member = shake_hands(sock, agent, purpose=purpose)
        member.sendall(frame)
        assert is_closed(sock)
    until(lambda: agent.statistics().get("closed_protocol_error") == 1)


def test_a_reply_to_a_callee_is_closed_and_counted(agent: Agent, transport: str) -> None:
    with unauthenticated_socket(agent, transport) as sock:
        member = shake_hands(sock, agent)
        member.sendall(HEADER.pack(0, 1, 1, 0, 0, Kind.REPLY, 0, 0))
        assert is_closed(sock)
    until(lambda: agent.statistics().get("closed_protocol_error") == 1)


@pytest.mark.parametrize("purpose", ["multiplexed", "exclusive"])
def test_a_message_for_which_there_is_no_memory_is_skipped_and_answered(
    agent: Agent, transport: str, purpose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(pool: BufferPool, nbytes: int) -> memoryview:
        raise MemoryError(f"no room for {nbytes} bytes")

    monkeypatch.setattr(BufferPool, "reserve", exhausted)
    with unauthenticated_socket(agent, transport) as sock:
        member = shake_hands(sock, agent, purpose=purpose)
        for call, flags in (
            (1, DEFINES_FUNCTION),
            (2, 0),
            (3, DEFINES_FUNCTION),
        ):  # the connection goes on
            member.sendall(
                HEADER.pack(1 << 20, call, 1, 0, 0, Kind.CALL, flags, 0) + bytes(1 << 20)
            )
            kind = Kind.HEARTBEAT  # acknowledges the bytes
            while kind == Kind.HEARTBEAT:
                fields = HEADER.unpack(_read(member, HEADER.size))
                length, answered, function, _, _, kind, _, _ = fields
            # the definition of function 1 was lost
            assert (answered, kind, function) == (call, Kind.FAILURE, 1)
            assert b"no room" in _read(member, length)


def _read(sock: MemberSocket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, "the connection ended"
        data += part
    return data


def test_a_member_that_claims_much_and_sends_little_costs_little(
    agent: Agent, transport: str
) -> None:
    before = _resident()
    with ExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(unauthenticated_socket(agent, transport))
            member = shake_hands(sock, agent)
            member.sendall(HEADER.pack(1 << 30, 1, 1, 0, 0, Kind.CALL, 0, 0) + b"x" * 100)
        until(lambda: repr(agent._runtime.listener.connections).count("inside a frame") == 8)
        assert _resident() - before < 1 << 29


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "changes",
    [{"purpose": "mischief"}, {"group": "another"}, {"heartbeat": "soon"}, {"incarnation": None}],
)
def test_a_member_with_a_strange_introduction_is_closed_and_counted(
    agent: Agent, transport: str, changes: dict[str, Any]
) -> None:
    with unauthenticated_socket(agent, transport) as sock:
        # some are refused during the handshake, some right after it
        with contextlib.suppress(ProtocolError):
            shake_hands(sock, agent, **changes)
        assert is_closed(sock)
    until(lambda: turned_away(agent) == 1)


@pytest.mark.parametrize("direction", ["argument", "result"])
def test_a_message_beyond_the_limit_fails_alone(
    cluster: Clusters, transport: str, direction: str
) -> None:
    w0 = cluster(2, max_frame=1 << 20)["w0"]
    function, args = (
        (torch.numel, (torch.zeros(1 << 20),))
        if direction == "argument"
        else (torch.zeros, (1 << 20,))
    )
    for attempt in (w0.call, lambda *args: w0.submit(*args).wait()):
        with pytest.raises(TelegradError, match="limit"):
            attempt("w1", function, *args)
        assert w0.call("w1", abs, -1) == 1


# Only what was registered


@pytest.fixture
def strict(cluster: Clusters) -> LocalCluster:
    return cluster(2, only_registered=True)


def test_an_exposed_function_is_served(strict: LocalCluster) -> None:
    assert strict["w0"].call("w1", exposed, 1, y=2) == 3
    assert strict["w0"].submit("w1", exposed, 1, y=2).wait() == 3


@pytest.mark.parametrize(
    "function",
    [
        hidden,
        eval,
        os.getpid,
        lambda: hidden(1),
        "text".upper,
        type("Local", (), {}),
        subprocess.Popen,
    ],
)
def test_anything_else_is_refused(strict: LocalCluster, function: Any) -> None:
    w0 = strict["w0"]
    for attempt in (lambda: w0.call("w1", function), lambda: w0.submit("w1", function).wait()):
        with pytest.raises(UsageError, match="serves only registered functions"):
            attempt()
    assert w0.call("w1", exposed, 1) == 1


def test_a_function_cannot_claim_to_be_ours(strict: LocalCluster) -> None:
    def impostor() -> str:
        return "should not run"

    impostor.__module__ = "telegrad.group.collectives"
    with pytest.raises(UsageError, match="serves only registered functions"):
        strict["w0"].call("w1", impostor)


def test_the_arguments_of_a_refused_call_are_not_unpickled(strict: LocalCluster, log: Log) -> None:
    w0 = strict["w0"]
    for attempt in (
        lambda: w0.call("w1", hidden, Bomb(log)),
        lambda: w0.submit("w1", hidden, Bomb(log)).wait(),
    ):
        with pytest.raises(UsageError, match="serves only registered functions"):
            attempt()
    assert log.entries == []


def test_the_definition_of_a_refused_function_is_not_unpickled(
    cluster: Clusters, transport: str, log: Log
) -> None:
    agent = cluster(1, only_registered=True, tls="off")["w0"]
    definitions = [
        pickle.dumps(Bomb(log), 5),
        pickle.dumps(operator.methodcaller("note", "called"), 5),
        b"cno_such_module_of_tests\nfunction\n.",
        b"garbage",
        b"",
        # an exposed function with other attributes
        pickle.dumps(exposed, 5)[:-1] + b"}\x8c\x01a\x8c\x01bsb.",
        # a function that is created remotely, but is not registered
        pickle.dumps(create_call(hidden), 5),
        pickle.dumps(create_call(exposed), 5).replace(b"exposed", b"hidden!"),
    ]
    for definition in definitions:
        body = len(definition).to_bytes(4, "little") + definition + pickle.dumps(Bomb(log), 5)
        frame = HEADER.pack(len(body), 1, 1, 0, 0, Kind.CALL, DEFINES_FUNCTION, 0) + body
        with unauthenticated_socket(agent, transport) as sock:
            member = shake_hands(sock, agent)
            member.sendall(frame)
            length, *_, kind, _, _ = HEADER.unpack(_read(member, HEADER.size))
            assert kind == Kind.FAILURE
            assert b"serves only registered functions" in _read(member, length)
    assert log.entries == []
    assert not hasattr(exposed, "a")


EXPOSED: list[Any] = [torch.add, torch.Tensor.add, operator.add, str.upper]
for function in EXPOSED:
    expose(function)


@pytest.mark.parametrize("function", EXPOSED)
def test_functions_of_any_kind_can_be_exposed(strict: LocalCluster, function: Any) -> None:
    args = ("a",) if function is str.upper else (torch.ones(1), torch.ones(1))
    assert strict["w0"].call("w1", function, *args) == function(*args)


@expose
class Counter:
    @expose
    def up(self) -> int:
        return 1

    def hidden(self) -> int:
        return 2


def test_references_to_exposed_classes_work(strict: LocalCluster) -> None:
    w0 = strict["w0"]
    with pytest.raises(UsageError, match=r"builtins\.list is not one"):
        w0._runtime.invoke("w1", create_call(list), (w0.name, ("key", 1)))
    counter = remote("w1", Counter, agent=strict["w0"])
    assert counter.rpc_sync().up() == 1
    with pytest.raises(UsageError, match="hidden is not one"):
        counter.rpc_sync().hidden()


def test_barriers_and_shutdown_still_work(strict: LocalCluster) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert (
            list(pool.map(lambda agent: agent.all_gather(agent.name), strict))
            == [{"w0": "w0", "w1": "w1"}] * 2
        )
        assert list(pool.map(Agent.shutdown, strict)) == [(), ()]


def test_a_function_is_exposed_without_being_changed() -> None:
    assert exposed(1, y=2) == 3
    assert expose(exposed) is exposed


# The key file


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return key_file()


def test_a_key_is_made_once_and_for_its_user_alone(key: Path, tmp_path: Path) -> None:
    assert key == tmp_path / "state" / "telegrad" / "secret"
    made = group_key(None)
    assert group_key(None) == made
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert len(key.read_text()) == 64
    assert os.listdir(key.parent) == ["secret"]


def test_many_who_make_the_key_at_once_agree(key: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: group_key(None), range(32)))) == 1


def test_another_key_is_another_secret(key: Path) -> None:
    first = group_key(None)
    key.unlink()
    assert group_key(None) != first


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_can_read_is_refused(key: Path, mode: int) -> None:
    group_key(None)
    key.chmod(mode)
    with pytest.raises(UsageError, match="readable by you alone"):
        group_key(None)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_key_of_another_user_is_refused(key: Path) -> None:
    group_key(None)
    os.chown(key, 65534, -1)
    with pytest.raises(UsageError, match="belong to you"):
        group_key(None)


@pytest.mark.parametrize("text", ["", " \n", "short"])
def test_a_key_that_anybody_can_guess_is_refused(key: Path, text: str) -> None:
    group_key(None)
    key.write_text(text)
    with pytest.raises(UsageError, match=str(key)):
        group_key(None)


def test_a_place_where_no_key_can_be_written_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"TELEGRAD_SECRET or Config.secret"):
        group_key(None)


def test_a_given_secret_needs_no_file(key: Path) -> None:
    assert (
        group_key("a secret of our own")
        == group_key("a secret of our own")
        != group_key("another secret")
    )
    assert not key.exists()


def test_agents_without_any_setting_find_each_other(key: Path) -> None:
    store = dist.HashStore()
    with Agent("a", store=store, config=Config()) as a, Agent("b", store=store, config=Config()):
        assert a.call("b", abs, -1) == 1
    assert key.exists()

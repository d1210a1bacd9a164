"""Attackers between two workers or at a port do not get in.

They do not know the secret. Whatever they do, none of their code runs, no call runs twice, no call
returns a wrong value, and members of the group can still call each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import re
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from telegrad import Agent
from telegrad.errors import TelegradError
from telegrad.group.secret import group_key
from telegrad.wire import admission_token, handshake
from telegrad.wire.frames import HEADER, INLINE_FUNCTION, Kind
from tests.local.attacks import (
    HERE,
    PROXIED,
    SECRET,
    Scene,
    note_and_return,
    outcome,
    port_of,
    settings,
)
from tests.local.gates import PATIENCE, Gate, Log, hold_at, until
from tests.local.proxy import Chunk, Proxy
from tests.local.raw_sockets import is_closed, trickle

TLS_HANDSHAKE = b"\x16\x03"  # the first bytes of a record with a ClientHello


class Bomb:
    """Notes when it is unpickled."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __reduce__(self) -> tuple[Any, ...]:
        return self._log.note, ("unpickled",)


def connected(scene: Scene) -> Agent:
    """Return a member that has made calls on each kind of connection.

    An attacker can delay a call, but not beyond its deadline.
    """
    member = scene.join("member", timeout=4.0)
    assert member.call("victim", abs, -1) == 1
    assert member.submit("victim", abs, -1).wait() == 1
    return member


# Between the two: frames of an attacker


def test_injected_frames_do_not_run(scene: Scene, log: Log) -> None:
    """The attacker relays the handshake, then sends a call to the callee and a reply to the
    caller.
    """
    member, gate = connected(scene), Gate()
    pending = member.submit("victim", hold_at, gate, "right")
    gate.wait_for(1)
    bomb = pickle.dumps(Bomb(log), 5)
    call = HEADER.pack(len(bomb), 7, 0, 0, 0, Kind.CALL, INLINE_FUNCTION, 0) + bomb
    replies = b"".join(
        HEADER.pack(len(bomb), call_id, 0, 0, 0, Kind.REPLY, 0, 0) + bomb for call_id in range(20)
    )
    for number in scene.proxy.connections():
        scene.proxy.inject(number, call, to_server=True)
        scene.proxy.inject(number, replies, to_server=False)
    gate.open()
    assert outcome(pending.wait) in ("right", "refused")
    scene.members_work()
    assert log.entries == []
    pickle.loads(bomb)
    assert log.entries == ["unpickled"]  # it would have gone off


def test_a_recorded_connection_cannot_be_replayed(scene: Scene, log: Log) -> None:
    recorded: dict[int, bytes] = {}

    def record(chunk: Chunk) -> list[bytes]:
        if chunk.to_server:
            recorded[chunk.connection] = recorded.get(chunk.connection, b"") + chunk.data
        return [chunk.data]

    scene.proxy.change = record
    member = connected(scene)
    assert member.call("victim", note_and_return, log, "sync") == "sync"
    assert member.submit("victim", note_and_return, log, "async").wait() == "async"
    for data in list(recorded.values()):
        with socket.create_connection((HERE, port_of(scene.victim)), PATIENCE) as sock:
            sock.sendall(data)
            assert is_closed(sock)
    assert log.entries == ["sync", "async"]
    scene.members_work()


# Between the two: changed bytes of members


def flipped(data: bytes, index: int) -> bytes:
    changed = bytearray(data)
    changed[index] ^= 1
    return bytes(changed)


TAMPERING: dict[str, Callable[[bytes], list[bytes | None]]] = {
    "replayed": lambda data: [data, data],
    "first bit flipped": lambda data: [flipped(data, 0)],
    "middle bit flipped": lambda data: [flipped(data, len(data) // 2)],
    "last bit flipped": lambda data: [flipped(data, -1)],
    "one byte more": lambda data: [data + b"\0"],
    "truncated": lambda data: [data[: len(data) // 2], None],
}


class Once:
    """A change of the next chunk in one direction."""

    def __init__(self, to_server: bool, tamper: Callable[[bytes], list[bytes | None]]) -> None:
        self._to_server = to_server
        self._tamper = tamper
        self._lock = threading.Lock()
        self.done = threading.Event()

    def __call__(self, chunk: Chunk) -> list[bytes | None]:
        with self._lock:
            if chunk.to_server is not self._to_server or self.done.is_set():
                return [chunk.data]
            self.done.set()
        return self._tamper(chunk.data)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("to_server", [True, False], ids=["request", "reply"])
@pytest.mark.parametrize("how", TAMPERING)
def test_tampered_frames_are_found(
    scene: Scene, log: Log, kind: str, to_server: bool, how: str
) -> None:
    member = connected(scene)
    scene.proxy.change = change = Once(to_server, TAMPERING[how])
    found = {}
    for entry in (f"{number} {'.' * 1000}" for number in range(3)):
        if kind == "sync":
            found[entry] = outcome(member.call, "victim", note_and_return, log, entry)
        else:
            pending = member.submit("victim", note_and_return, log, entry)
            found[entry] = outcome(pending.wait)
    assert change.done.is_set()
    check_ran_once(found, log)
    scene.members_work()


def test_calls_survive_connections_that_break_inside_a_reply(scene: Scene, log: Log) -> None:
    member = connected(scene)
    for entry in range(20):
        scene.proxy.change = change = Once(False, TAMPERING["truncated"])
        assert member.call("victim", note_and_return, log, entry) == entry
        assert change.done.is_set()
    assert log.entries == list(range(20))


def check_ran_once(found: dict[Any, Any], log: Log) -> None:
    """Calls return their own value and have run once, or they failed and ran at most once."""
    for entry, result in found.items():
        runs = log.entries.count(entry)
        assert (result, runs) in ((entry, 1), ("refused", 0), ("refused", 1))
    assert set(log.entries) <= set(found)


@pytest.mark.parametrize("to_server", [True, False], ids=["requests", "replies"])
def test_reordered_frames_are_found(scene: Scene, log: Log, to_server: bool) -> None:
    """The attacker holds a chunk back and sends it after the next one."""
    member = connected(scene)
    held: list[Chunk] = []
    holding, swapped = threading.Event(), threading.Event()

    def swap(chunk: Chunk) -> list[bytes | None]:
        if chunk.to_server is not to_server or swapped.is_set():
            return [chunk.data]
        if not held:
            held.append(chunk)
            holding.set()
            return []
        if chunk.connection != held[0].connection:
            return [chunk.data]
        swapped.set()
        return [chunk.data, held[0].data]

    scene.proxy.change = swap
    first = member.submit("victim", note_and_return, log, "first")
    assert holding.wait(PATIENCE)
    second = member.submit("victim", note_and_return, log, "second")
    found = {"first": outcome(first.wait), "second": outcome(second.wait)}
    check_ran_once(found, log)
    scene.members_work()


def filled(elements: int) -> torch.Tensor:
    return torch.ones(elements)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_flipped_bit_of_a_large_tensor_is_found(scene: Scene, kind: str) -> None:
    member, elements = connected(scene), 1 << 20
    passed = threading.Semaphore(20)  # chunks that pass before one is changed
    late = Once(False, TAMPERING["middle bit flipped"])

    def change(chunk: Chunk) -> list[bytes | None]:
        if not chunk.to_server and len(chunk.data) > 1 << 12 and not passed.acquire(blocking=False):
            return late(chunk)
        return [chunk.data]

    scene.proxy.change = change
    call = member.call if kind == "sync" else lambda *args: member.submit(*args).wait()
    result = outcome(call, "victim", filled, elements)
    assert late.done.is_set()
    # Without TLS, the contents of large buffers are not authenticated: see SECURITY.md.
    if scene.mode == "tls" and result != "refused":
        assert torch.equal(result, filled(elements))
    scene.members_work()


# Downgrades


@pytest.mark.parametrize("encrypted", ["member", "victim"])
def test_workers_with_and_without_encryption_do_not_talk(log: Log, encrypted: str) -> None:
    store = dist.HashStore()
    modes = {name: "tls" if name == encrypted else "plain" for name in ("member", "victim")}
    with (
        Agent("victim", store=store, config=settings(modes["victim"])),
        pytest.raises(TelegradError, match="TELEGRAD_TLS"),
        Agent("member", store=store, config=settings(modes["member"])) as member,
    ):
        member.call("victim", note_and_return, log, "ran")
    assert log.entries == []


def test_no_fallback_when_connections_are_reset(scene: Scene, log: Log) -> None:
    """An attacker who resets every connection at its first reply sees only the same opening."""
    openings: dict[int, bytes] = {}

    def reset(chunk: Chunk) -> list[bytes | None]:
        if chunk.to_server:
            openings[chunk.connection] = openings.get(chunk.connection, b"") + chunk.data
        return [chunk.data] if chunk.to_server else [None]

    scene.proxy.change = reset
    with pytest.raises(TelegradError):
        scene.join("member", timeout=1.0).call("victim", note_and_return, log, "ran")
    expected = TLS_HANDSHAKE if scene.mode == "tls" else handshake.MAGIC
    assert openings
    for opening in openings.values():
        assert opening.startswith(admission_token.MAGIC)
        assert opening[admission_token.SIZE :].startswith(expected)
    assert log.entries == []
    scene.members_work()


def test_tls_1_2_is_refused() -> None:
    """As a client, with the right port; the victim accepts TLS 1.3 only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with ExitStack() as stack:
        scene = Scene("tls", stack)
        with (
            socket.create_connection((HERE, port_of(scene.victim)), PATIENCE) as sock,
            pytest.raises(ssl.SSLError, match=re.compile("version|alert", re.IGNORECASE)),
        ):
            context.wrap_socket(sock)
        scene.members_work()


def test_an_attacker_who_answers_in_place_of_the_victim_is_found(scene: Scene, log: Log) -> None:
    """It knows the protocol, and has a certificate or a secret of its own."""
    config = settings(scene.mode, secret="of the attacker's own")
    with Agent("victim", store=dist.HashStore(), config=config) as impostor:
        scene.proxy.reset()
        with Proxy({(PROXIED, port_of(scene.victim)): (HERE, port_of(impostor))}) as proxy:
            with pytest.raises(TelegradError, match="secret"):
                scene.join("member").call("victim", note_and_return, log, "ran")
            assert proxy.accepted > 0
    scene.proxy.listen()
    assert log.entries == []
    scene.members_work()


def test_another_member_cannot_answer_in_place_of_the_victim(scene: Scene, log: Log) -> None:
    """The attacker redirects a connection to another worker that knows the secret."""
    other = scene.join("other")
    scene.proxy.reset()
    with Proxy({(PROXIED, port_of(scene.victim)): (HERE, port_of(other))}):
        with pytest.raises(TelegradError, match="victim"):
            scene.join("member", timeout=2.0).call("victim", note_and_return, log, "ran")
    scene.proxy.listen()
    assert log.entries == []
    scene.members_work()


# At the port: strangers


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = context.wrap_bio(ssl.MemoryBIO(), outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(4096),
    "half a hello, then garbage": client_hello()[:50] + bytes(range(256)) * 16,
    "a hello, then garbage": client_hello() + bytes(range(256)) * 16,
    "our own hello, then garbage": handshake.MAGIC + bytes(range(256)) * 16,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_closed(mode: str, data: bytes) -> None:
    with ExitStack() as stack:
        scene = Scene(mode, stack)
        with socket.create_connection((HERE, port_of(scene.victim)), PATIENCE) as sock:
            with contextlib.suppress(OSError):  # the worker may have closed it already
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
        scene.members_work()


@pytest.mark.parametrize("data", [client_hello(), handshake.MAGIC + bytes(60)], ids=["tls", "own"])
def test_a_slow_handshake_is_closed(mode: str, data: bytes) -> None:
    with Agent("victim", store=dist.HashStore(), config=settings(mode, connect_timeout=0.3)) as it:
        with socket.create_connection((HERE, port_of(it)), PATIENCE) as sock:
            assert trickle(sock, data, pause=0.05) < len(data)
        until(lambda: any(name.startswith("refused") for name in it.statistics()))


@pytest.mark.parametrize("who", ["member", "victim"])
def test_a_wrong_secret_is_refused(mode: str, log: Log, who: str) -> None:
    store = dist.HashStore()
    secrets = {name: "a wrong secret of some length" if name == who else SECRET for name in NAMES}
    with (
        Agent("victim", store=store, config=settings(mode, secret=secrets["victim"])),
        pytest.raises(TelegradError, match="secret"),
        Agent("member", store=store, config=settings(mode, secret=secrets["member"])) as member,
    ):
        member.call("victim", note_and_return, log, "ran")
    assert log.entries == []


NAMES = ("member", "victim")


# Offline


def test_guessing_a_secret_is_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each guess costs a run of scrypt with 16 MB or more."""
    used: list[dict[str, Any]] = []
    scrypt = hashlib.scrypt

    def recorded(password: bytes, **parameters: Any) -> bytes:
        used.append(parameters)
        return scrypt(password, **parameters)

    monkeypatch.setattr(hashlib, "scrypt", recorded)
    group_key("a secret that people can remember")
    assert len(used) == 1
    assert used[0]["n"] * used[0]["r"] * 128 >= 1 << 24
    assert used[0]["salt"]
    group_key("0123456789abcdef" * 4)  # a random key cannot be guessed
    assert len(used) == 1

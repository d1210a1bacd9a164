"""An attacker between two workers alters, drops, repeats, reorders or splices whole records.

The proxy knows where records begin and end, as an attacker does. Every call returns its own value
and runs once: the connection that was tampered with is replaced, and what it lost is sent again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from telegrad import Agent
from telegrad.errors import TelegradError
from telegrad.transport import aead, sealed_records
from telegrad.wire import handshake
from tests.local.attacks import Scene, note_and_return, outcome
from tests.local.gates import Log, until
from tests.local.proxy import Chunk, unchanged

Stream = tuple[int, bool]  # the number of a connection, and whether it goes to the server
_TAG = 16
_LARGE = 1000  # bytes: records of calls and replies here, not of heartbeats

# How connections are protected, and whether the package `cryptography` seals their records.
WAYS = {"sealed": ("tls", True), "tls": ("tls", False)} | {
    "sealed plain": ("plain", True),
    "mac": ("plain", False),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if not WAYS[request.param][1]:
        monkeypatch.setattr(sealed_records, "cipher", lambda: "")
    elif not aead.has_package():
        pytest.skip("needs the package cryptography")
    return str(request.param)


@pytest.fixture
def victims(way: str) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(WAYS[way][0], stack)


def split(data: bytes, way: str) -> tuple[bytes, bytes]:
    """Return the first record of a stream, "" if it is not complete, and the rest."""
    if way == "tls":  # type, version, length
        end = 5 + int.from_bytes(data[3:5], "big") if len(data) >= 5 else len(data) + 1
    else:
        end = 4 + int.from_bytes(data[:4], "little") + _TAG if len(data) >= 4 else len(data) + 1
    return (data[:end], data[end:]) if end <= len(data) else (b"", data)


class Attacker:
    """Forwards records of the connections that are open now; `attack` replaces one of them.

    `seen` has the records of each stream that passed so far. An attack gets them, the stream and
    the record that it replaces. It returns what is sent instead, at once and after the next record.
    """

    def __init__(self, way: str, connections: list[int]) -> None:
        self.seen: dict[Stream, list[bytes]] = {
            (number, to_server): [] for number in connections for to_server in (True, False)
        }
        self.connections = connections
        self._way = way
        self._incomplete = dict.fromkeys(self.seen, b"")
        self._attack: Attack | None = None
        self._to_server = False
        self._after_next: dict[Stream, list[bytes | None]] = {}
        self._lock = threading.Lock()
        self.done = threading.Event()

    def arm(self, attack: Attack, to_server: bool) -> None:
        """Attack the next large record in a direction."""
        with self._lock:
            self._attack, self._to_server = attack, to_server

    def __call__(self, chunk: Chunk) -> list[bytes | None]:
        stream = chunk.connection, chunk.to_server
        if stream not in self.seen:
            return [chunk.data]
        sent: list[bytes | None] = []
        with self._lock:
            data = self._incomplete[stream] + chunk.data
            while True:
                record, data = split(data, self._way)
                if not record:
                    break
                sent += self._pass(stream, record)
            self._incomplete[stream] = data
        return sent

    def _pass(self, stream: Stream, record: bytes) -> list[bytes | None]:
        after = self._after_next.pop(stream, [])
        attack = self._attack
        if attack is None or stream[1] is not self._to_server or len(record) < _LARGE:
            self.seen[stream].append(record)
            return [record, *after]
        self._attack = None
        self.done.set()
        sent, later = attack(self.seen, stream, record)
        if later:
            self._after_next[stream] = later
        return [*sent, *after]


Attack = Callable[
    [dict[Stream, list[bytes]], Stream, bytes], tuple[list[bytes | None], list[bytes | None]]
]


def other_stream(seen: dict[Stream, list[bytes]], stream: Stream) -> bytes:
    """The last record in this direction on another connection."""
    return next(
        records[-1]
        for other, records in seen.items()
        if records and other[1] is stream[1] and other != stream
    )


def shorter(record: bytes) -> bytes:
    """A record whose header tells one byte less."""
    if record[1:3] == b"\x03\x03":  # of TLS
        return record[:3] + (int.from_bytes(record[3:5], "big") - 1).to_bytes(2, "big") + record[5:]
    return (int.from_bytes(record[:4], "little") - 1).to_bytes(4, "little") + record[4:]


ATTACKS: dict[str, Attack] = {
    "altered": lambda seen, stream, record: ([record[:50] + b"?" + record[51:]], []),
    "another length": lambda seen, stream, record: ([shorter(record)], []),
    "a huge length": lambda seen, stream, record: ([b"\xff" * 5 + record[5:]], []),
    "dropped": lambda seen, stream, record: ([], []),
    "repeated": lambda seen, stream, record: ([record, record], []),
    "reordered": lambda seen, stream, record: ([], [record]),
    "an earlier one again": lambda seen, stream, record: ([record, seen[stream][0]], []),
    "an earlier one instead": lambda seen, stream, record: ([seen[stream][0]], []),
    "reflected": lambda seen, stream, record: ([seen[stream[0], not stream[1]][-1]], []),
    "of another connection": lambda seen, stream, record: ([other_stream(seen, stream)], []),
    "cut before it": lambda seen, stream, record: ([None], []),
    "cut inside it": lambda seen, stream, record: ([record[: len(record) // 2], None], []),
    "cut after it": lambda seen, stream, record: ([record, None], []),
}


# A record that is held back and never followed is like a network that is cut: the call ends at its
# deadline.
WITHHELD = {"dropped", "reordered"}
DEADLINE = 3.0


def follow(scene: Scene, way: str, member: Agent, log: Log, entry: str) -> Attacker:
    """Return an attacker who has seen records of connections of each kind, in both directions."""
    scene.proxy.change = unchanged
    call_both_ways(member, log, f"before {entry}")  # so the connections are there
    attacker = Attacker(way, scene.proxy.connections())
    scene.proxy.change = attacker
    call_both_ways(member, log, f"seen {entry}")
    until(lambda: all(attacker.seen.values()))
    return attacker


def call_both_ways(member: Agent, log: Log, entry: str) -> None:
    for call in (member.call, lambda *args: member.submit(*args).wait()):
        assert call("victim", note_and_return, log, padded(entry)) == padded(entry)


def padded(entry: str) -> str:
    return entry + "." * _LARGE


@pytest.mark.slow
@pytest.mark.parametrize("to_server", [True, False], ids=["request", "reply"])
def test_no_record_is_accepted_but_the_next_one(
    victims: Scene, way: str, log: Log, to_server: bool
) -> None:
    member = victims.join("member", timeout=DEADLINE)
    for how, attack in ATTACKS.items():
        attacker = follow(victims, way, member, log, how)
        before = victims.proxy.accepted
        attacker.arm(attack, to_server)
        texts = [padded(f"{how} {number}") for number in range(4)]
        pending = {text: member.submit("victim", note_and_return, log, text) for text in texts[::2]}
        found = {
            text: outcome(member.call, "victim", note_and_return, log, text) for text in texts[1::2]
        } | {text: outcome(future.wait) for text, future in pending.items()}
        assert attacker.done.is_set(), how
        for text, result in found.items():
            runs = log.entries.count(text)
            allowed = {(text, 1), ("refused", 0), ("refused", 1)}
            assert (result, runs) in (allowed if how in WITHHELD else {(text, 1)}), how
        if how not in WITHHELD:
            until(lambda before=before: victims.proxy.accepted > before)  # type: ignore[misc]
    victims.members_work()


def test_records_of_an_earlier_connection_are_not_accepted(
    victims: Scene, way: str, log: Log
) -> None:
    """The attacker ends the connections, and appends old records to those that replace them."""
    member = victims.join("member")
    attacker = follow(victims, way, member, log, "it")
    old = {
        to_server: b"".join(
            record
            for (_, direction), records in attacker.seen.items()
            if direction is to_server
            for record in records
        )
        for to_server in (True, False)
    }
    before = victims.proxy.accepted
    for number in attacker.connections:
        victims.proxy.inject(number, b"garbage that ends it " * 10, to_server=True)
    call_both_ways(member, log, "replaced")
    until(lambda: victims.proxy.accepted > before)
    for number in set(victims.proxy.connections()) - set(attacker.connections):
        for to_server in (True, False):
            victims.proxy.inject(number, old[to_server], to_server=to_server)
    call_both_ways(member, log, "after")
    for entry in ("before it", "seen it", "replaced", "after"):
        assert log.entries.count(padded(entry)) == 2
    victims.members_work()


# Which records are used, and their keys


def test_nobody_can_change_what_the_introductions_say(log: Log) -> None:
    """Without TLS they can be read, so the attacker lets each end believe that the other one has
    no cipher.
    """
    if not aead.has_package():
        pytest.skip("needs the package cryptography")
    told, untold = b'"records": "aes-256-gcm"', b'"rec0rds": "aes-256-gcm"'
    for to_server in (True, False):
        changed = threading.Event()

        def change(
            chunk: Chunk, to_server: bool = to_server, changed: threading.Event = changed
        ) -> list[bytes | None]:
            if chunk.to_server is to_server and told in chunk.data:
                changed.set()
                return [chunk.data.replace(told, untold)]
            return [chunk.data]

        with ExitStack() as stack:
            scene = Scene("plain", stack)
            scene.proxy.change = change
            with pytest.raises(TelegradError):
                scene.join("member", timeout=1.0).call("victim", note_and_return, log, "ran")
            assert changed.is_set()
            scene.members_work()
    assert log.entries == []


def test_who_learns_the_secret_later_cannot_compute_the_keys(
    scene: Scene, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of a session is derived from the nonces of both ends, which TLS encrypts."""
    nonces: list[bytes] = []
    recorded: list[bytes] = []

    class Random:
        def urandom(self, size: int) -> bytes:
            nonces.append(os.urandom(size))
            return nonces[-1]

    def record(chunk: Chunk) -> list[bytes]:
        recorded.append(chunk.data)
        return [chunk.data]

    monkeypatch.setattr(handshake, "os", Random())
    scene.proxy.change = record
    call_both_ways(scene.join("member"), log, "recorded")
    assert len(nonces) >= 4
    traffic = b"".join(recorded)
    readable = [nonce for nonce in nonces if nonce in traffic]
    assert bool(readable) is (scene.mode == "plain")

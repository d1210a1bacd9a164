"""Stripes: what is sent arrives, and nothing else does."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from telegrad.config import Config
from telegrad.errors import ProtocolError
from telegrad.transport import aead, sockets, stripes
from telegrad.transport.records import RecordStream
from telegrad.transport.stripes import STATUS, PlainStripe, RecordStripe, SealedStripe, Stripe
from telegrad.transport.tls import TlsContexts
from telegrad.wire import handshake
from tests.transport.pairs import Background, connected_sockets, records_pair

LATE = 20.0
KEY = b"k" * 32
TAG = aead.TAG_BYTES
RECORD = stripes.RECORD
KINDS = ["sealed", "tls", "plain"]
OWN = ["sealed", "plain"]  # whose messages are authenticated here
ABOUT = b"the request"


def make_stripes(kind: str, near: socket.socket, far: socket.socket) -> tuple[Stripe, Stripe]:
    if kind == "plain":
        return PlainStripe(near, KEY, server_side=False), PlainStripe(far, KEY, server_side=True)
    if kind == "tls":
        near_records, far_records = records_pair(near, far, "tls")
        return (
            RecordStripe(RecordStream(near, near_records)),
            RecordStripe(RecordStream(far, far_records)),
        )
    return SealedStripe(near, KEY, server_side=False), SealedStripe(far, KEY, server_side=True)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ends(background: Background) -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = connected_sockets("tcp")
    with near, far:
        near.settimeout(LATE)
        far.settimeout(LATE)
        yield near, far


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def receive(stripe: Stripe, size: int, about: bytes = ABOUT) -> bytes:
    memory = bytearray(size)
    stripe.receive(memoryview(memory), about)
    return bytes(memory)


@pytest.mark.parametrize("size", [0, 1, 15, 4096, RECORD - 1, RECORD, RECORD + 1, 3 * RECORD + 7])
def test_messages_arrive_in_both_directions(
    ends: tuple[socket.socket, socket.socket], kind: str, size: int, background: Background
) -> None:
    near, far = make_stripes(kind, *ends)
    data = random_bytes(size)
    for sender, receiver in ((near, far), (far, near), (near, far)):
        received = background(receive, receiver, size)
        sender.send(data, ABOUT, more=True)
        sender.send(b"next")
        assert received.result(LATE) == data
        assert receive(receiver, 4, b"") == b"next"


@pytest.mark.parametrize("size", [1, RECORD, 3 * RECORD + 7])
def test_contents_arrive_in_parts_between_messages(
    ends: tuple[socket.socket, socket.socket], kind: str, size: int, background: Background
) -> None:
    near, far = make_stripes(kind, *ends)
    parts = [random_bytes(RECORD), random_bytes(size)]

    def send() -> None:
        stripes.send_chunk(near, map(memoryview, parts), ABOUT)
        near.send(b"after it")

    sending = background(send)
    assert receive(far, STATUS.size) == STATUS.pack(stripes.OK)
    memory = bytearray(RECORD + size)
    far.receive_contents(memoryview(memory)[:RECORD], ABOUT, 0)
    far.receive_contents(memoryview(memory)[RECORD:], ABOUT, RECORD)
    assert memory == b"".join(parts)
    assert receive(far, 8, b"") == b"after it"
    sending.result(LATE)


def test_a_read_only_source_and_a_part_of_a_buffer(
    ends: tuple[socket.socket, socket.socket], kind: str
) -> None:
    near, far = make_stripes(kind, *ends)
    near.send(memoryview(b"0123456789")[3:7], ABOUT)
    memory = bytearray(10)
    far.receive(memoryview(memory)[2:6], ABOUT)
    assert bytes(memory) == b"\0\x003456\0\0\0\0"


def captured(kind: str, messages: list[bytes], about: bytes = ABOUT) -> list[bytes]:
    """What a stripe sends for each message."""
    sock, other = connected_sockets("tcp")
    with sock, other:
        stripe, _ = make_stripes(kind, sock, other)
        sent = []
        for message in messages:
            stripe.send(message, about)
            sent.append(other.recv(len(message) + TAG, socket.MSG_WAITALL))
    return sent


def flipped(data: bytes, index: int) -> bytes:
    changed = bytearray(data)
    changed[index] ^= 1
    return bytes(changed)


ATTACKS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "first bit flipped": lambda first, second: flipped(first, 0) + second,
    "bit in the middle flipped": lambda first, second: flipped(first, 50) + second,
    "bit of the tag flipped": lambda first, second: flipped(first, -1) + second,
    "reordered": lambda first, second: second + first,
    "replayed": lambda first, second: first + first,
    "left out": lambda first, second: second + second,
    "zeros": lambda first, second: bytes(len(first + second)),
    "a byte more": lambda first, second: b"\0" + first + second[:-1],
    "a byte less": lambda first, second: first[1:] + second + b"\0",
}


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("attack", ATTACKS)
def test_changed_messages_are_found(
    ends: tuple[socket.socket, socket.socket], own: str, attack: str
) -> None:
    _, far = make_stripes(own, *ends)
    first, second = captured(own, [b"a" * 100, b"b" * 100])
    ends[0].sendall(ATTACKS[attack](first, second))
    with pytest.raises(ProtocolError, match="changed on its way"):
        [receive(far, 100) for _ in range(2)]


@pytest.mark.parametrize("own", OWN)
def test_unchanged_messages_pass(ends: tuple[socket.socket, socket.socket], own: str) -> None:
    """The attacks above fail because of what they change."""
    _, far = make_stripes(own, *ends)
    ends[0].sendall(b"".join(captured(own, [b"a" * 100, b"b" * 100])))
    assert receive(far, 100) + receive(far, 100) == b"a" * 100 + b"b" * 100


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("about", [b"another request", b"", ABOUT + b"a"])
def test_an_answer_to_another_request_is_found(
    ends: tuple[socket.socket, socket.socket], own: str, about: bytes
) -> None:
    _, far = make_stripes(own, *ends)
    ends[0].sendall(captured(own, [b"a" * 100], about)[0])
    with pytest.raises(ProtocolError, match="changed on its way"):
        receive(far, 100)


@pytest.mark.parametrize("own", OWN)
def test_a_reflected_message_is_found(ends: tuple[socket.socket, socket.socket], own: str) -> None:
    """The two directions have different keys."""
    near, _ = make_stripes(own, *ends)
    ends[1].sendall(captured(own, [b"a" * 100])[0])
    with pytest.raises(ProtocolError, match="changed on its way"):
        receive(near, 100)


def test_contents_cannot_be_left_out_of_a_sealed_stripe(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Nor be taken for a message, or the other way round."""
    _, far = make_stripes("sealed", *ends)
    status, contents = captured("sealed", [b"s" * 100, b"c" * 100])
    ends[0].sendall(contents)
    with pytest.raises(ProtocolError, match="changed on its way"):
        receive(far, 100)
    ends[0].sendall(status + contents)  # after a failure, nothing is accepted
    with pytest.raises(ProtocolError, match="changed on its way"):
        receive(far, 100)


@pytest.mark.parametrize("cut", [0, 1, 100, 100 + TAG - 1])
def test_a_truncated_message_is_a_broken_connection(
    ends: tuple[socket.socket, socket.socket], kind: str, cut: int
) -> None:
    _, far = make_stripes(kind, *ends)
    if kind in OWN:
        ends[0].sendall(captured(kind, [b"a" * 100])[0][:cut])
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises((ConnectionError, ProtocolError)):
        receive(far, 100)


def test_sealed_bytes_are_not_the_plain_ones() -> None:
    data = random_bytes(4096)
    (sent,) = captured("sealed", [data])
    assert data[:16] not in sent


def test_no_nonce_is_used_twice(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys that change often, in both directions."""
    used: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(aead, "RECORDS_PER_KEY", 3)
    near, far = make_stripes("sealed", *ends)
    assert isinstance(near, SealedStripe)
    assert isinstance(far, SealedStripe)
    for stripe, other in ((near, far), (far, near)):
        for number in range(10):
            nonce = aead._pack_nonce(stripe._sending._records)
            stripe.send(bytes([number]) * 50, ABOUT)
            used.append((stripe._sending._key, nonce))
            assert receive(other, 50) == bytes([number]) * 50
    assert len(set(used)) == len(used) == 20
    assert len({key for key, _ in used}) == 8
    assert all(len(nonce) == aead.NONCE_BYTES for _, nonce in used)


# Which kind of stripe a connection gets


def authenticated(
    mode: str, ciphers: tuple[str, str], background: Background
) -> tuple[Stripe, Stripe]:
    """The stripes of a connection whose ends say that they have these ciphers."""
    tls = TlsContexts(Config(tls="on" if mode == "tls" else "off"), KEY)
    near, far = connected_sockets("tcp")

    def accept() -> Stripe:
        introduction = {"cipher": ciphers[1]}
        connection = sockets.authenticate(
            far,
            tls,
            lambda binding: handshake.server(
                KEY, lambda peer: introduction, lambda peer: None, binding
            ),
            server_side=True,
            timeout=LATE,
        )
        return stripes.open_stripe(connection, own_cipher=ciphers[1])

    accepting = background(accept)
    connection = sockets.authenticate(
        near,
        tls,
        lambda binding: handshake.client(KEY, {"cipher": ciphers[0]}, binding),
        server_side=False,
        timeout=LATE,
    )
    opened = stripes.open_stripe(connection, own_cipher=ciphers[0])
    return opened, accepting.result(LATE)


@pytest.mark.parametrize(
    ("mode", "ciphers", "expected"),
    [
        ("tls", (stripes.CIPHER, stripes.CIPHER), SealedStripe),
        ("tls", (stripes.CIPHER, ""), RecordStripe),
        ("tls", ("", stripes.CIPHER), RecordStripe),
        ("tls", ("", ""), RecordStripe),
        ("tls", (stripes.CIPHER, "a later one"), RecordStripe),
        ("off", (stripes.CIPHER, stripes.CIPHER), PlainStripe),
    ],
)
def test_both_ends_use_the_same_kind(
    background: Background, mode: str, ciphers: tuple[str, str], expected: type[Stripe]
) -> None:
    near, far = authenticated(mode, ciphers, background)
    assert type(near) is type(far) is expected
    data = random_bytes(300_000)
    received = background(receive, far, len(data))
    near.send(data, ABOUT)
    assert received.result(LATE) == data
    near.close()
    far.close()


def test_each_connection_has_its_own_keys(background: Background) -> None:
    keys = set()
    for _ in range(3):
        for stripe in authenticated("tls", (stripes.CIPHER, stripes.CIPHER), background):
            assert isinstance(stripe, SealedStripe)
            keys |= {stripe._sending._key, stripe._receiving._key}
            stripe.close()
    assert len(keys) == 6


def test_data_before_the_first_request_is_refused(background: Background) -> None:
    """An attacker appends bytes to the last message of the handshake."""
    near, far = connected_sockets("tcp")
    with near, far:
        near_records, far_records = records_pair(near, far, "tls")
        far.sendall(far_records.encode(b"unexpected"))
        near_records._fill(LATE + 1e9)  # type: ignore[attr-defined]
        peer = {"cipher": stripes.CIPHER}
        connection = sockets.AuthenticatedSocket(near, peer, near_records, KEY, True, False)
        with pytest.raises(ProtocolError, match="before it was asked for"):
            stripes.open_stripe(connection, stripes.CIPHER)


# The cipher

CIPHERS: list[type[aead.Cipher]] = [aead.LibraryCipher]
if aead._package() is not None:
    CIPHERS.append(aead.PackageCipher)


def sealed_by(implementation: type[aead.Cipher], data: bytes) -> bytes:
    sealed = memoryview(bytearray(len(data) + TAG))
    implementation(KEY, True).seal(b"n" * 12, ABOUT, memoryview(data), sealed)
    return bytes(sealed)


def test_there_is_a_cipher() -> None:
    assert aead.is_available()


@pytest.mark.parametrize("size", [1, 16, 1000])
@pytest.mark.parametrize("sealing", CIPHERS)
@pytest.mark.parametrize("opening", CIPHERS)
def test_all_ciphers_have_the_same_results(
    sealing: type[aead.Cipher], opening: type[aead.Cipher], size: int
) -> None:
    data = random_bytes(size)
    sealed = sealed_by(sealing, data)
    memory = bytearray(size)
    opener = opening(KEY, False)
    opener.open(b"n" * 12, ABOUT, memoryview(sealed), memoryview(memory))
    assert memory == data
    for wrong in ((b"m" * 12, ABOUT, sealed), (b"n" * 12, b"", sealed), (b"n" * 12, ABOUT, b"x")):
        nonce, about, text = wrong
        text = text.ljust(len(sealed), b"\0")
        with pytest.raises(aead.TagError):
            opener.open(nonce, about, memoryview(text), memoryview(memory))
    opener.open(b"n" * 12, ABOUT, memoryview(sealed), memoryview(memory))  # it can go on
    assert memory == data


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let the implementation be chosen again, and that choice be forgotten afterwards."""
    for name in ("_library", "_package", "has_package", "_fastest"):
        monkeypatch.setattr(aead, name, getattr(aead, name).__wrapped__)
    return monkeypatch


def test_a_missing_library_is_no_error(choosing: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"no {name}")

    choosing.setattr(ctypes, "CDLL", missing)
    choosing.setattr(aead, "_package", lambda: None)
    assert not aead.is_available()
    assert stripes.cipher() == ""


def test_an_implementation_that_computes_nonsense_is_not_used(
    choosing: pytest.MonkeyPatch,
) -> None:
    choosing.setattr(aead, "_EXPECTED", bytes(32))
    assert not aead.is_available()


def test_the_one_that_holds_the_lock_must_be_much_faster(choosing: pytest.MonkeyPatch) -> None:
    times = {aead.LibraryCipher: 3.0, aead.PackageCipher: 1.0}
    choosing.setattr(aead, "_THREADS", 2)
    choosing.setattr(aead, "_works", lambda implementation: True)
    choosing.setattr(aead, "_seconds", times.__getitem__)
    choosing.setattr(aead, "_package", lambda: "it is there")
    assert aead._fastest() is aead.PackageCipher
    choosing.setattr(aead, "_THREADS", 4)  # together, they are faster
    assert aead._fastest() is aead.LibraryCipher


@pytest.mark.parametrize("implementation", CIPHERS)
def test_several_threads_encrypt_at_the_same_time(implementation: type[aead.Cipher]) -> None:
    data = random_bytes(1 << 20)
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: sealed_by(implementation, data), range(16)))
    assert set(results) == {results[0]}

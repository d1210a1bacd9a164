"""`SealedRecords` and `MacRecords`: records that carry anything, and that nobody can change."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

import pytest

from telegrad.errors import ProtocolError
from telegrad.transport import aead, sealed_records
from telegrad.transport.records import MacRecords, RecordError, Records
from telegrad.transport.sealed_records import MAX_RECORD, SealedRecords, channel_records
from telegrad.transport.sockets import AuthenticatedSocket
from tests.transport.pairs import connected_sockets, records_pair

KEY = b"k" * 32
MAKE: dict[str, Callable[[bytes, bool], Records]] = {
    "mac": MacRecords,
    "sealed": lambda key, server_side: SealedRecords(key, server_side, encrypts=True),
    "sealed plain": lambda key, server_side: SealedRecords(key, server_side, encrypts=False),
}
SEALED = ["sealed", "sealed plain"]

Ends = tuple[Records, Records]


def make_ends(kind: str, keys: tuple[bytes, bytes] = (KEY, KEY)) -> Ends:
    return MAKE[kind](keys[0], False), MAKE[kind](keys[1], True)


@pytest.fixture(params=list(MAKE))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ends(kind: str) -> Ends:
    return make_ends(kind)


def read_all(receiver: Records, size: int = 1 << 18) -> bytes:
    space, data = memoryview(bytearray(size)), b""
    while count := receiver.read_into(space):
        data += bytes(space[:count])
    return data


def deliver(sent: bytes, receiver: Records, piece: int, space: int = 1 << 18) -> bytes:
    """Let at most `piece` bytes arrive at a time, as a reader of a channel does."""
    data = b""
    while sent:
        buffer = receiver.get_buffer()
        count = min(piece, len(buffer), len(sent))
        assert count
        buffer[:count] = sent[:count]
        receiver.buffer_updated(count)
        sent = sent[count:]
        data += read_all(receiver, space)
    return data


@pytest.mark.parametrize("piece", [1, 3, 1000, 1 << 20])
def test_data_of_any_size_arrives_in_any_pieces(ends: Ends, piece: int) -> None:
    near, far = ends
    sizes = [1, 2, 15, 16, 17, 1000] if piece < 1000 else [1, MAX_RECORD, MAX_RECORD + 1, 700_000]
    parts = [random.Random(size).randbytes(size) for size in sizes]
    sent = b"".join(bytes(near.encode(part)) for part in parts)
    assert deliver(sent, far, piece) == b"".join(parts)


@pytest.mark.parametrize("space", [1, 10, 1 << 14, MAX_RECORD])
def test_data_is_read_into_spaces_of_any_size(ends: Ends, space: int) -> None:
    near, far = ends
    data = random.Random(space).randbytes(100 * space if space < 100 else 300_000)
    assert deliver(bytes(near.encode(data)), far, 50_000, space) == data


def test_random_records_in_random_pieces(ends: Ends) -> None:
    generator = random.Random(5)
    near, far = ends
    expected = received = b""
    waiting = b""
    for _ in range(300):
        data = generator.randbytes(generator.choice([1, 40, 5000, 70_000, 200_000]))
        waiting += bytes(near.encode(data))
        expected += data
        count = generator.randrange(len(waiting) + 1)
        space = generator.choice([100, 1 << 14, 1 << 17])
        received += deliver(waiting[:count], far, generator.choice([7777, 1 << 20]), space)
        waiting = waiting[count:]
    assert received + deliver(waiting, far, 1 << 20) == expected


@pytest.mark.parametrize(
    "attack", ["flip", "tag", "length", "replay", "reorder", "drop", "other key", "reflect"]
)
def test_a_record_that_was_tampered_with_fails(kind: str, attack: str) -> None:
    near, far = make_ends(kind)
    first, second = bytes(near.encode(b"first")), bytes(near.encode(b"second!"))
    other = make_ends(kind, (b"o" * 32, KEY))[0]

    def flipped(place: int) -> bytes:
        return first[:place] + bytes([first[place] ^ 1]) + first[place + 1 :]

    sent = {
        "flip": flipped(6),
        "tag": flipped(len(first) - 1),
        "length": flipped(0) + second,
        "replay": first + first,
        "reorder": second + first,
        "drop": second,
        "other key": bytes(other.encode(b"first")),
        "reflect": bytes(far.encode(b"first")),
    }[attack]
    far.feed(memoryview(sent))
    with pytest.raises(RecordError, match="changed on its way"):
        read_all(far)


@pytest.mark.parametrize("attack", ["flip", "replay", "reorder", "drop"])
def test_nothing_is_accepted_after_a_record_that_failed(kind: str, attack: str) -> None:
    """Otherwise, a reader that goes on would find that a record was left out by nobody."""
    near, far = make_ends(kind)
    first, second, third = (bytes(near.encode(text)) for text in (b"first", b"second", b"third"))
    flipped = first[:6] + bytes([first[6] ^ 1]) + first[7:]
    sent, accepted = {
        "flip": (flipped + second + third, b""),
        "replay": (first + first + second + third, b"first"),
        "reorder": (first + third + second + third, b"first"),
        "drop": (first + third + third, b"first"),
    }[attack]
    far.feed(memoryview(sent))
    received = b""
    space = memoryview(bytearray(100))
    for _ in range(10):
        try:
            received += bytes(space[: far.read_into(space)])
        except RecordError:
            continue
    assert received == accepted


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00"])
def test_a_record_of_an_impossible_size_fails_at_once(ends: Ends, length: bytes) -> None:
    far = ends[1]
    far.feed(memoryview(length))
    with pytest.raises(RecordError, match=r"a record of (4294967295|0) bytes"):
        read_all(far)


def test_plain_records_are_readable_and_sealed_ones_are_not() -> None:
    text = b"what nobody else may read"
    for kind, readable in (("mac", True), ("sealed plain", True), ("sealed", False)):
        near, _ = make_ends(kind)
        assert (text in bytes(near.encode(text))) == readable


def test_a_record_that_is_sealed_for_another_purpose_fails() -> None:
    """The keys of plain, encrypted and bulk records differ."""
    plain, encrypted = (SealedRecords(KEY, False, encrypts) for encrypts in (False, True))
    for sender, receives_encrypted in ((plain, True), (encrypted, False)):
        receiver = SealedRecords(KEY, True, receives_encrypted)
        receiver.feed(memoryview(sender.encode(b"data")))
        with pytest.raises(RecordError):
            read_all(receiver)


@pytest.mark.parametrize("kind", SEALED)
def test_keys_are_replaced_before_they_have_sealed_too_much(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aead, "RECORDS_PER_KEY", 3)
    near, far = make_ends(kind)
    keys = set()
    for number in range(10):
        far.feed(memoryview(near.encode(b"%d" % number)))
        keys.add(near._sending._key)  # type: ignore[attr-defined]
        assert read_all(far) == b"%d" % number
    assert len(keys) == 4


# The change from the records of the handshake


def connection(
    sock: socket.socket, records: Records, cipher: str, server_side: bool
) -> AuthenticatedSocket:
    return AuthenticatedSocket(sock, {"records": cipher}, records, KEY, True, server_side)


@pytest.mark.parametrize("cipher", ["", sealed_records.CIPHER])
def test_frames_may_arrive_with_the_end_of_the_handshake(cipher: str) -> None:
    """Both sides take the same records, and no byte is lost when they change."""
    near_socket, far_socket = connected_sockets("tcp")
    with near_socket, far_socket:
        near, far = records_pair(near_socket, far_socket, "tls")
        after = channel_records(connection(far_socket, far, cipher, True))
        assert (after is far) == (not cipher)
        welcome = bytes(far.encode(b"welcome")) if cipher else b""
        far_socket.sendall(welcome + bytes(after.encode(b"frame")))
        received = b""
        if cipher:
            received = near.read(7, time.monotonic() + 20)  # type: ignore[attr-defined]
            assert received == b"welcome"
        near_channel = channel_records(connection(near_socket, near, cipher, False))
        data = b""
        while not data:
            data = read_all(near_channel)
            if not data:
                near_channel.feed(memoryview(near_socket.recv(1000)))
        assert data == b"frame"


def test_decrypted_data_that_nobody_read_is_refused() -> None:
    near_socket, far_socket = connected_sockets("tcp")
    with near_socket, far_socket:
        near, far = records_pair(near_socket, far_socket, "tls")
        far_socket.sendall(bytes(far.encode(b"more than asked for")))
        assert near.read(4, time.monotonic() + 20) == b"more"  # type: ignore[attr-defined]
        with pytest.raises(ProtocolError, match="before it was asked for"):
            channel_records(connection(near_socket, near, sealed_records.CIPHER, False))

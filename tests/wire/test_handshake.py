"""The handshake against honest peers, liars, eavesdroppers and noise."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.errors import AuthenticationError, ProtocolError
from telegrad.wire import handshake
from telegrad.wire.handshake import MAGIC, MAX_INTRODUCTION, VERSION, Introduction, Steps
from tests.wire.conversation import Alter, Side, Stalled, converse, unchanged

SECRET = b"the secret of this group"
NEAR: Introduction = {"name": "near", "rank": 0, "unicode": "Größe 大"}
FAR: Introduction = {"name": "far", "rank": 1, "addresses": ["unix:@x"]}

HELLO = 4 + 2 + 32  # magic, version, nonce
PROOF = 32


def client(secret: bytes = SECRET, introduction: Introduction = NEAR) -> Steps:
    return handshake.client(secret, introduction)


def server(
    secret: bytes = SECRET, introduction: Introduction = FAR, reason: str | None = None
) -> Steps:
    return handshake.server(secret, lambda peer: introduction, lambda peer: reason)


def flip(position: int, mask: int) -> Alter:
    """Change one byte of the stream."""

    def alter(start: int, words: bytes) -> bytes:
        index = position - start
        if 0 <= index < len(words):
            return words[:index] + bytes([words[index] ^ mask]) + words[index + 1 :]
        return words

    return alter


# Among honest peers


def test_each_side_learns_what_the_other_says_of_itself() -> None:
    near, far = converse(client(), server())
    assert near.outcome().session_key == far.outcome().session_key
    assert near.outcome().peer == FAR
    assert far.outcome().peer == NEAR


def test_the_secret_never_travels() -> None:
    near, far = converse(client(), server())
    assert SECRET not in near.said + far.said


def test_no_two_handshakes_look_alike() -> None:
    first, second = converse(client(), server()), converse(client(), server())
    for one, other in zip(first, second, strict=True):
        assert one.said[6:HELLO] != other.said[6:HELLO]
        assert one.said[-PROOF:] != other.said[-PROOF:]


def test_the_server_may_refuse_a_proven_peer_and_say_why() -> None:
    near, far = converse(client(), server(reason="diese Gruppe ist voll — désolé"))
    with pytest.raises(ProtocolError, match="refused: diese Gruppe ist voll — désolé"):
        near.outcome()
    with pytest.raises(ProtocolError, match="refused 'near': diese Gruppe ist voll"):
        far.outcome()


def test_a_long_reason_is_cut_not_lost() -> None:
    near, _ = converse(client(), server(reason="é" * MAX_INTRODUCTION))
    with pytest.raises(ProtocolError, match=r"refused: é{4096}$"):
        near.outcome()


def test_an_empty_reason_is_a_refusal_too() -> None:
    near, _ = converse(client(), server(reason=""))
    with pytest.raises(ProtocolError, match="refused"):
        near.outcome()


def test_the_server_decides_by_the_introduction() -> None:
    seen: list[Introduction] = []

    def refuse(peer: Introduction) -> str | None:
        seen.append(peer)
        return None

    converse(client(), handshake.server(SECRET, lambda peer: FAR, refuse))
    assert seen == [NEAR]


def test_two_agents_of_one_process_shake_hands_without_a_connection() -> None:
    assert handshake.run_in_memory(client(), server()) == (FAR, NEAR)
    with pytest.raises(ProtocolError, match="another group"):
        handshake.run_in_memory(client(), server(reason="another group"))
    with pytest.raises(AuthenticationError):
        handshake.run_in_memory(client(b"another secret"), server())


# Wrong secrets


def test_a_client_with_another_secret_notices_and_says_nothing_of_itself() -> None:
    near, far = converse(client(b"another secret"), server())
    with pytest.raises(AuthenticationError, match="TELEGRAD_SECRET"):
        near.outcome()
    assert len(near.said) == HELLO
    with pytest.raises(Stalled):
        far.outcome()


def test_a_server_with_another_secret_is_noticed() -> None:
    near, _ = converse(client(), server(b"another secret"))
    with pytest.raises(AuthenticationError, match="the worker that was called does not know"):
        near.outcome()


def test_a_client_that_skips_the_check_and_guesses_its_proof_is_turned_away() -> None:
    seen: list[Introduction] = []
    far = Side(handshake.server(SECRET, lambda peer: FAR, seen.append))
    far.hear(b"")
    far.hear(MAGIC + struct.pack("<H", VERSION) + os.urandom(32))
    text = b'{"name": "mallory"}'
    answer = far.hear(struct.pack("<H", len(text)) + text + os.urandom(PROOF))
    with pytest.raises(AuthenticationError, match="a peer that connected"):
        far.outcome()
    assert (answer, seen) == (b"", [])


def test_nothing_of_an_unproven_introduction_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: bytes) -> Introduction:
        pytest.fail(f"{text!r} was parsed before its proof was checked")

    monkeypatch.setattr(handshake, "_parse_json", parse)
    _, far = converse(client(), server(), up=flip(HELLO + 2, 1))
    with pytest.raises(AuthenticationError):
        far.outcome()


# In the middle


@pytest.mark.parametrize("mask", [1, 2, 128, 255])
def test_a_byte_that_is_changed_on_the_way_up_is_noticed(mask: int) -> None:
    length = len(converse(client(), server())[0].said)
    for position in range(length):
        _, far = converse(client(), server(), up=flip(position, mask))
        with pytest.raises((ProtocolError, Stalled)):
            far.outcome()


@pytest.mark.parametrize("mask", [1, 2, 128, 255])
def test_a_byte_that_is_changed_on_the_way_down_is_noticed(mask: int) -> None:
    length = len(converse(client(), server())[1].said)
    unnoticed = []
    for position in range(length):
        near, _ = converse(client(), server(), down=flip(position, mask))
        try:
            near.outcome()
        except (ProtocolError, Stalled):
            continue
        unnoticed.append(position)
    assert unnoticed == []


def test_a_recorded_client_does_not_get_in_again() -> None:
    recorded, _ = converse(client(), server())
    far = Side(server())
    far.hear(b"")
    far.hear(recorded.said)
    with pytest.raises(AuthenticationError):
        far.outcome()


def test_a_recorded_server_convinces_nobody() -> None:
    _, recorded = converse(client(), server())
    near = Side(client())
    near.hear(b"")
    near.hear(recorded.said)
    with pytest.raises(AuthenticationError):
        near.outcome()
    assert len(near.said) == HELLO


def test_the_welcome_of_another_conversation_is_not_accepted() -> None:
    _, recorded = converse(client(), server())
    reply = HELLO + PROOF

    def replace_welcome(start: int, words: bytes) -> bytes:
        return words if start < reply else recorded.said[start : start + len(words)]

    near, _ = converse(client(), server(), down=replace_welcome)
    with pytest.raises(AuthenticationError):
        near.outcome()


def test_a_peer_that_sends_everything_back_is_not_accepted() -> None:
    near = Side(client())
    hello = near.hear(b"")
    near.hear(hello + hello)  # enough bytes for a hello and a proof
    with pytest.raises(AuthenticationError):
        near.outcome()


def test_the_proof_of_a_client_is_no_proof_of_a_server() -> None:
    """Somebody who can make a client prove itself must not be able to use that proof towards
    another client.
    """
    victim = Side(client())
    theirs = victim.hear(b"")[6:]
    mine = os.urandom(32)
    stolen = handshake._proof(SECRET, b"client", theirs + mine + handshake._digest(b""))
    victim.hear(MAGIC + struct.pack("<H", VERSION) + mine + stolen)
    with pytest.raises(AuthenticationError):
        victim.outcome()


# Other versions, other protocols


def other_version(start: int, words: bytes) -> bytes:
    return words if start else MAGIC + struct.pack("<H", VERSION + 1) + words[6:]


VERSIONS_DIFFER = f"version {VERSION + 1} .* this worker version {VERSION}: install the same"


def test_the_client_says_which_versions_differ() -> None:
    near, _ = converse(client(), server(), down=other_version)
    with pytest.raises(ProtocolError, match=VERSIONS_DIFFER):
        near.outcome()


def test_the_server_says_which_versions_differ() -> None:
    _, far = converse(client(), server(), up=other_version)
    with pytest.raises(ProtocolError, match=VERSIONS_DIFFER):
        far.outcome()


def test_a_server_of_another_version_still_answers_so_that_the_client_learns_of_it() -> None:
    _, far = converse(client(), server(), up=other_version)
    assert far.said[:6] == MAGIC + struct.pack("<H", VERSION)


def test_another_protocol_is_recognised_and_not_answered() -> None:
    far = Side(server())
    far.hear(b"")
    assert far.hear(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n") == b""
    with pytest.raises(ProtocolError, match="not a Telegrad connection"):
        far.outcome()
    near = Side(client())
    near.hear(b"")
    near.hear(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n")
    with pytest.raises(ProtocolError, match="not a Telegrad connection"):
        near.outcome()


# Sizes and contents


def test_the_largest_introduction_travels() -> None:
    introduction = {"name": "x" * (MAX_INTRODUCTION - len('{"name": ""}'))}
    near, far = converse(client(introduction=introduction), server(introduction=introduction))
    assert near.outcome().peer == far.outcome().peer == introduction


def test_an_introduction_that_is_too_large_is_not_sent() -> None:
    too_large = {"name": "x" * MAX_INTRODUCTION}
    near, _ = converse(client(introduction=too_large), server())
    with pytest.raises(ProtocolError, match="an introduction of"):
        near.outcome()
    _, far = converse(client(), server(introduction=too_large))
    with pytest.raises(ProtocolError, match="an introduction of"):
        far.outcome()


def test_an_introduction_that_claims_to_be_too_large_is_refused_before_it_is_read() -> None:
    far = Side(server())
    far.hear(b"")
    far.hear(MAGIC + struct.pack("<H", VERSION) + os.urandom(32))
    assert far.wanted == 2
    far.hear(struct.pack("<H", MAX_INTRODUCTION + 1))
    with pytest.raises(ProtocolError, match=f"an introduction of {MAX_INTRODUCTION + 1} bytes"):
        far.outcome()


def test_no_side_ever_wants_more_than_the_bound() -> None:
    def biggest(start: int, words: bytes) -> bytes:
        return words if start < HELLO + PROOF else b"\x01\xff\xff" + words[3:]

    near, _ = converse(client(), server(), down=biggest)
    with pytest.raises(ProtocolError, match="an introduction of 65535 bytes"):
        near.outcome()
    assert near.wanted <= MAX_INTRODUCTION + PROOF


NONSENSE = {
    "nothing": b"",
    "words": b"not json",
    "list": b"[1, 2]",
    "text": b'"text"',
    "null": b"null",
    "not utf-8": b"\xff\xfe",
    "cut": b'{"a": 1',
    "deep lists": b"[" * 8000,
    "deep objects": b'{"a":' * 1600,
    "huge number": b"1" * 8000,
}


@pytest.mark.parametrize("text", NONSENSE.values(), ids=NONSENSE)
def test_a_proven_introduction_that_makes_no_sense_is_refused(
    text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_pack_json", lambda introduction: text)
    _, far = converse(client(), server())
    with pytest.raises(ProtocolError, match="an introduction that is not"):
        far.outcome()


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200), st.booleans())
def test_noise_gets_nobody_in(noise: bytes, with_hello: bool) -> None:
    hello = MAGIC + struct.pack("<H", VERSION) + bytes(32)
    for side in (Side(server()), Side(client())):
        side.hear(b"")
        side.hear((hello if with_hello else b"") + noise)
        with pytest.raises((ProtocolError, Stalled)):
            side.outcome()


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 200), st.binary(min_size=1, max_size=40), st.booleans())
def test_bytes_put_in_the_middle_are_noticed(position: int, extra: bytes, upwards: bool) -> None:
    changed = False

    def insert(start: int, words: bytes) -> bytes:
        nonlocal changed
        index = position - start
        if not 0 <= index < len(words):
            return words
        longer = words[:index] + extra + words[index:]
        changed = not longer.startswith(words)
        return longer

    near, far = converse(
        client(), server(), *((insert, unchanged) if upwards else (unchanged, insert))
    )
    if changed:
        with pytest.raises((ProtocolError, Stalled)):
            (far if upwards else near).outcome()

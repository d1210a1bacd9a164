"""Listening, connecting, who may come in, and the handshake over real sockets."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from telegrad.config import Config
from telegrad.errors import AuthenticationError, ProtocolError, UsageError
from telegrad.transport import sockets
from telegrad.transport.tls import TlsContexts
from telegrad.wire import handshake
from telegrad.wire.handshake import Introduction, Steps
from tests.transport.pairs import Background, connected_sockets

LATE = 20.0
SECRET = b"the secret of this group"
SOMEBODY_ELSE = 65534

Sockets = tuple[socket.socket, socket.socket]


@pytest.fixture(params=["unix", "tcp"])
def ends(request: pytest.FixtureRequest, background: Background) -> Iterator[Sockets]:
    """Two connected sockets."""
    near, far = connected_sockets(request.param)
    with near, far:
        yield near, far


def client(secret: bytes = SECRET) -> Steps:
    return handshake.client(secret, {"name": "near"})


def server(secret: bytes = SECRET, reason: str | None = None) -> Steps:
    return handshake.server(secret, lambda peer: {"name": "far"}, lambda peer: reason)


def shake_hands(sock: socket.socket, steps: Steps, timeout: float) -> Introduction:
    """Run a handshake without TLS."""
    return sockets.authenticate(
        sock,
        TlsContexts(Config(tls="off"), SECRET),
        lambda binding: steps,
        server_side=steps.__name__ == "server",  # type: ignore[attr-defined]
        timeout=timeout,
    ).peer


# Listening and connecting


@pytest.mark.parametrize(
    ("transport", "host", "prefix"),
    [("unix", "127.0.0.1", "unix:@telegrad-"), ("tcp", "127.0.0.1", "tcp:127.0.0.1:")],
)
def test_a_listener_can_be_reached_at_its_address(transport: str, host: str, prefix: str) -> None:
    listener, address = sockets.listen(transport, host)
    with listener:
        assert address.startswith(prefix)
        with sockets.connect(address, timeout=LATE) as near:
            far, _ = listener.accept()
            with far:
                near.sendall(b"hello")
                assert far.recv(5) == b"hello"


def test_ipv6_addresses_work_too() -> None:
    try:
        listener, address = sockets.listen("tcp", "::1")
    except UsageError:
        pytest.skip("no IPv6 here")
    with listener:
        assert address.startswith("tcp:::1:")
        with sockets.connect(address, timeout=LATE) as near:
            assert near.family == socket.AF_INET6


def test_every_listener_has_an_address_of_its_own() -> None:
    for transport in ("unix", "tcp"):
        one, first = sockets.listen(transport, "127.0.0.1")
        other, second = sockets.listen(transport, "127.0.0.1")
        with one, other:
            assert first != second


def test_a_name_of_a_unix_socket_leaves_no_file() -> None:
    listener, address = sockets.listen("unix", "")
    with listener:
        assert listener.getsockname() == b"\0" + address.removeprefix("unix:@").encode()
    with pytest.raises(ConnectionRefusedError):
        sockets.connect(address, timeout=LATE)


@pytest.mark.parametrize("host", ["256.0.0.1", "192.0.2.7"])
def test_an_address_that_is_not_ours_is_a_usage_error_that_names_the_setting(host: str) -> None:
    with pytest.raises(
        UsageError, match=r"cannot listen on .* set Config.listen or TELEGRAD_LISTEN"
    ):
        sockets.listen("tcp", host)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_connecting_to_nobody_is_an_os_error(transport: str) -> None:
    listener, address = sockets.listen(transport, "127.0.0.1")
    listener.close()
    with pytest.raises(OSError, match="refused"):
        sockets.connect(address, timeout=LATE)


def test_a_loopback_listener_is_not_reachable_from_outside() -> None:
    listener, _ = sockets.listen("tcp", "127.0.0.1")
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"


# Users


def test_the_same_user_may_come_in() -> None:
    for family in ("unix", "tcp"):
        near, far = connected_sockets(family)
        with near, far:
            sockets.check_same_user(far)


STRANGER = """
import os, socket, sys
os.setgid({uid}); os.setuid({uid})
sock = socket.socket(socket.AF_UNIX)
sock.connect(chr(0) + {name!r})
sys.exit(len(sock.recv(1)))
"""


@pytest.mark.process
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_may_not_come_in() -> None:
    listener, address = sockets.listen("unix", "")
    code = STRANGER.format(uid=SOMEBODY_ELSE, name=address.removeprefix("unix:@"))
    with listener, subprocess.Popen([sys.executable, "-S", "-c", code]) as stranger:
        listener.settimeout(LATE)
        far, _ = listener.accept()
        with (
            far,
            pytest.raises(
                AuthenticationError, match=f"a process of user {SOMEBODY_ELSE} tried to connect"
            ),
        ):
            sockets.check_same_user(far)
        assert stranger.wait(LATE) == 0


@pytest.mark.parametrize(
    ("mine", "peer", "welcome"), [(1000, 1000, True), (1000, 0, True), (1000, 1001, False)]
)
def test_only_this_user_and_root_may_come_in(
    mine: int, peer: int, welcome: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unix:
        family = socket.AF_UNIX

        def getsockopt(self, *_: int) -> bytes:
            return struct.pack("3i", 1, peer, peer)

    monkeypatch.setattr(os, "getuid", lambda: mine)
    if welcome:
        sockets.check_same_user(Unix())  # type: ignore[arg-type]
    else:
        with pytest.raises(AuthenticationError):
            sockets.check_same_user(Unix())  # type: ignore[arg-type]


# The handshake


def test_both_sides_learn_who_the_other_is(ends: Sockets, background: Background) -> None:
    near, far = ends
    accepting = background(shake_hands, far, server(), LATE)
    assert shake_hands(near, client(), LATE) == {"name": "far"}
    assert accepting.result(LATE) == {"name": "near"}


def test_what_follows_the_handshake_is_not_swallowed_by_it(
    ends: Sockets, background: Background
) -> None:
    near, far = ends

    def call() -> Introduction:
        introduction = shake_hands(near, client(), LATE)
        near.sendall(b"first frame")
        return introduction

    calling = background(call)
    shake_hands(far, server(), LATE)
    far.sendall(b"first reply")
    calling.result(LATE)
    assert near.recv(100) == b"first reply"
    assert far.recv(100) == b"first frame"


def test_a_wrong_secret_ends_it_for_both(ends: Sockets, background: Background) -> None:
    near, far = ends
    accepting = background(shake_hands, far, server(), LATE)
    with pytest.raises(AuthenticationError):
        shake_hands(near, client(b"another"), LATE)
    near.close()
    with pytest.raises(ProtocolError, match="closed the connection during the handshake"):
        accepting.result(LATE)


def test_a_refusal_arrives_with_its_reason(ends: Sockets, background: Background) -> None:
    near, far = ends
    accepting = background(shake_hands, far, server(reason="this group is full"), LATE)
    with pytest.raises(ProtocolError, match="refused: this group is full"):
        shake_hands(near, client(), LATE)
    with pytest.raises(ProtocolError, match="refused 'near'"):
        accepting.result(LATE)


@pytest.mark.parametrize("steps", [client, server])
def test_a_peer_that_says_nothing_is_given_up(ends: Sockets, steps: type) -> None:
    with pytest.raises(ProtocolError, match="did not finish its handshake within"):
        shake_hands(ends[1], steps(), timeout=0.05)


def test_a_peer_that_stops_in_the_middle_is_given_up(ends: Sockets) -> None:
    near, far = ends
    near.sendall(handshake.MAGIC + struct.pack("<H", handshake.VERSION) + bytes(32) + b"\x10")
    with pytest.raises(ProtocolError, match="did not finish its handshake within"):
        shake_hands(far, server(), timeout=0.05)


def test_a_peer_that_sends_drop_by_drop_is_given_up_in_time(
    ends: Sockets, background: Background
) -> None:
    """Otherwise a few strangers could hold every place that is kept for strangers, for hours."""
    near, far = ends
    stop = threading.Event()

    def drip() -> None:
        for _ in range(200):
            if stop.wait(0.02):
                return
            near.send(handshake.MAGIC[:1])

    hello = (
        handshake.MAGIC + struct.pack("<H", handshake.VERSION) + bytes(32) + struct.pack("<H", 8000)
    )
    near.sendall(hello)
    dripping = background(drip)
    with pytest.raises(ProtocolError, match="did not finish its handshake within"):
        shake_hands(far, server(), timeout=0.1)
    assert not dripping.done()
    stop.set()
    dripping.result(LATE)


def test_a_peer_that_hangs_up_is_noticed(ends: Sockets) -> None:
    near, far = ends
    near.sendall(b"TLGD")
    near.close()
    with pytest.raises(ProtocolError, match="closed the connection during the handshake"):
        shake_hands(far, server(), LATE)


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n" + bytes(100), bytes(5000), os.urandom(5000)], ids=len
)
def test_noise_is_refused(ends: Sockets, noise: bytes) -> None:
    near, far = ends
    near.sendall(noise)
    with pytest.raises(ProtocolError, match=r"not a Telegrad connection|is no worker"):
        shake_hands(far, server(), LATE)

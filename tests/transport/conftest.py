"""Connected pairs of channels, one kind of transport after the other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from telegrad.transport import stream, tcp_sender
from tests.transport.pairs import STREAMS, TCP, Background, Pair, connected


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocked sender looks at its deadline soon."""
    monkeypatch.setattr(stream, "_SEND_TIMEOUT", 0.02)
    monkeypatch.setattr(tcp_sender, "_WAIT", 0.02)


@pytest.fixture
def background() -> Iterator[Background]:
    """Runs functions on threads of their own: `background(channel.recv)` gives a future."""
    with ThreadPoolExecutor(max_workers=16, thread_name_prefix="background") as executor:
        yield executor.submit


@pytest.fixture(params=["memory", *STREAMS, *TCP])
def pair(request: pytest.FixtureRequest, background: Background) -> Iterator[Pair]:
    """Every transport in turn. It ends before the threads of `background`, so that they do."""
    yield from connected(request.param)


@pytest.fixture(params=STREAMS)
def streams(request: pytest.FixtureRequest, background: Background) -> Iterator[Pair]:
    """Unix sockets, whose bytes are those of the frames."""
    yield from connected(request.param)


@pytest.fixture
def shared(background: Background) -> Iterator[Pair]:
    """Unix sockets with shared memory."""
    yield from connected("unix+shared")

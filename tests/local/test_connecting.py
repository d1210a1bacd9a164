"""Asynchronous calls to a worker that is not connected yet: they are packed at once and wait, their
callers do not.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import Agent
from telegrad.client.dialer import DialedConnection, Dialer
from telegrad.errors import CallTimeout, PeerLost, UsageError
from telegrad.group.endpoint import EXCLUSIVE
from telegrad.group.membership import Member
from telegrad.runtime import AgentRuntime
from telegrad.server.connection import ServerConnection
from telegrad.testing import LocalCluster
from telegrad.transport import sockets
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.handshake import Incarnation
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import PATIENCE, Gate, Log, Meeting, hold_at, note_in, until


def note_always(log: Log, entry: Any) -> None:
    log.note(entry)


note_always.must_run = True  # type: ignore[attr-defined]


@pytest.fixture
def w0(pair: LocalCluster, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """A worker that connects to another only when the gate is open."""
    dial = Dialer.dial

    def dial_later(self: Dialer, *args: Any) -> DialedConnection:
        gate.hold()
        return dial(self, *args)

    monkeypatch.setattr(Dialer, "dial", dial_later)
    return pair["w0"]


@pytest.fixture
def silent(cluster: Clusters) -> Iterator[tuple[Agent, Incarnation]]:
    """A worker, and the incarnation of a member `silent` that accepts connections and never
    answers.
    """
    w0 = cluster(1, connect_timeout=2 * PATIENCE)["w0"]
    w0._runtime.dialer._config = w0.config.__class__(**{**vars(w0.config), "transports": ("unix",)})
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"telegrad-test-{secrets.token_hex(8)}"
        listener.bind("\0" + name)
        listener.listen()
        yield w0, w0._runtime.directory.register("silent", 1, (f"unix:@{name}",)).incarnation


def test_a_call_before_the_connection_is_packed_and_waits(w0: Agent, gate: Gate) -> None:
    tensor = torch.ones(1000)
    future = w0.submit("w1", torch.sum, tensor)
    gate.wait_for()
    tensor.zero_()
    assert not future.done()
    gate.open()
    assert future.result(PATIENCE) == 1000


def test_calls_before_the_connection_keep_their_order(
    w0: Agent, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[int] = []
    handle = ServerConnection.handle

    def note(self: ServerConnection, frame: Frame) -> None:
        if frame.kind == Kind.CALL and self.is_multiplexed:
            arrived.append(frame.call_id)
        handle(self, frame)

    monkeypatch.setattr(ServerConnection, "handle", note)
    futures = [w0.submit("w1", abs, -number) for number in range(50)]
    gate.wait_for()
    gate.open()
    futures += [w0.submit("w1", abs, -number) for number in range(50, 100)]
    assert [future.result(PATIENCE) for future in futures] == list(range(100))
    assert arrived == sorted(arrived)
    assert len(arrived) == 100


def test_a_synchronous_call_waits_for_the_same_connection(
    w0: Agent, gate: Gate, in_background: Background
) -> None:
    future = w0.submit("w1", abs, -1)
    gate.wait_for()
    called = in_background(w0.call, "w1", abs, -2)
    gate.open()
    assert called.result(PATIENCE) == 2
    assert future.result(PATIENCE) == 1


def test_a_deadline_passes_before_the_connection_is_there(w0: Agent, gate: Gate, log: Log) -> None:
    late = w0._runtime.start("w1", note_in, (log, "late"), timeout=0.05)
    creation = w0._runtime.start("w1", note_always, (log, "creation"), timeout=0.05)
    for future in (late, creation):
        error = future.exception(PATIENCE)
        assert isinstance(error, CallTimeout)
        assert not error.sent
    gate.open()
    w0.submit("w1", note_in, log, "next").result(PATIENCE)
    assert log.wait_for(2) == ["creation", "next"]


def test_a_call_is_cancelled_before_the_connection_is_there(
    w0: Agent, gate: Gate, log: Log
) -> None:
    assert w0.submit("w1", note_in, log, "cancelled").cancel()
    gate.open()
    w0.submit("w1", note_in, log, "next").result(PATIENCE)
    assert log.entries == ["next"]
    assert w0.statistics()["calls_pending"] == 0


def test_calls_that_wait_fail_if_nobody_can_be_reached(
    pair: LocalCluster, w0: Agent, gate: Gate
) -> None:
    futures = [w0.submit("w1", abs, -1) for _ in range(3)]
    gate.wait_for()
    pair["w1"]._runtime.abort()
    gate.open()
    for future in futures:
        error = future.exception(PATIENCE)
        assert isinstance(error, PeerLost)
        assert not error.sent


def test_the_next_call_connects_again(
    w0: Agent, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open()
    dial, failures = (
        w0._runtime.dialer.dial,
        iter([PeerLost("out of descriptors", peer="w1", sent=False)]),
    )

    def fail_once(*args: Any) -> DialedConnection:
        for failure in failures:
            raise failure
        return dial(*args)

    monkeypatch.setattr(w0._runtime.dialer, "dial", fail_once)
    assert isinstance(w0.submit("w1", abs, -1).exception(PATIENCE), PeerLost)
    assert w0.submit("w1", abs, -1).result(PATIENCE) == 1


def test_calls_that_wait_fail_when_the_worker_is_given_up(
    silent: tuple[Agent, Incarnation],
) -> None:
    w0, incarnation = silent
    future = w0.submit("silent", abs, -1)
    until(lambda: bool(w0._runtime.endpoint._connecting))
    w0._runtime.failures.declare_lost("silent", incarnation, reason="it was given up")
    error = future.exception(PATIENCE)
    assert isinstance(error, PeerLost)
    assert "it was given up" in str(error)
    assert not error.sent


@pytest.mark.parametrize("end", [AgentRuntime.close, AgentRuntime.abort])
def test_calls_that_wait_fail_when_their_worker_closes(
    silent: tuple[Agent, Incarnation], end: Callable[[AgentRuntime], None]
) -> None:
    w0, _ = silent
    future = w0.submit("silent", abs, -1)
    until(lambda: bool(w0._runtime.endpoint._connecting))
    end(w0._runtime)
    assert isinstance(future.exception(PATIENCE), PeerLost)
    assert not w0._runtime.endpoint._connecting


def test_a_call_that_waits_counts_as_under_way(w0: Agent, gate: Gate) -> None:
    served = Gate()
    future = w0.submit("w1", hold_at, served)
    assert [peer.calls_in_progress for peer in w0._runtime.peers.all()] == [1]
    gate.open()
    served.wait_for()
    served.open()
    assert future.result(PATIENCE) is None


# What a peer keeps and refuses


def test_idle_connections_are_closed_except_one(
    cluster: Clusters, in_background: Background
) -> None:
    w0 = cluster(2)["w0"]
    meeting = Meeting(3)
    calls = [in_background(w0.call, "w1", meet, meeting) for _ in range(3)]
    for call in calls:
        call.result(PATIENCE)
    (peer,) = w0._runtime.peers.all()
    until(lambda: len(peer._idle) == 3)
    peer.close_idle_connections(older_than=0.0)
    assert len(peer._idle) == 3
    peer.close_idle_connections(older_than=time.monotonic() + 1)
    assert len(peer._idle) == 1
    assert w0.call("w1", abs, -1) == 1
    assert "'w1'" in repr(w0._runtime.peers)


def meet(meeting: Meeting) -> None:
    meeting.join()


def test_a_time_limit_that_is_over_ends_the_search_for_an_address(cluster: Clusters) -> None:
    w0 = cluster(2)["w0"]
    member = w0._runtime.peers.member("w1")
    with pytest.raises(TimeoutError):
        w0._runtime.dial(member, EXCLUSIVE, -1.0)
    nowhere = dataclasses.replace(member, addresses=())
    with pytest.raises(TimeoutError):
        w0._runtime.dial(nowhere, EXCLUSIVE, -1.0)
    with pytest.raises(PeerLost, match="cannot be reached"):
        w0._runtime.dial(nowhere, EXCLUSIVE, None)


@pytest.mark.parametrize("timeout", [0, -1.0, math.inf])
def test_a_time_limit_is_positive(cluster: Clusters, timeout: float) -> None:
    with pytest.raises(UsageError, match="a timeout is a positive number of seconds or None"):
        cluster(1)["w0"].with_timeout(timeout)


def test_a_member_of_another_host_is_dialled_until_it_can_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network that is down for a moment is no reason to give up a call."""
    attempts = itertools.count()
    connect = sockets.connect

    def flaky(address: str, timeout: float) -> socket.socket:
        if next(attempts) < 3:
            raise OSError(errno.EHOSTUNREACH, "No route to host")
        return connect(address, timeout)

    with LocalCluster(2, transports=("tcp",)) as cluster:
        monkeypatch.setattr(Member, "is_local", property(lambda member: False))
        monkeypatch.setattr(sockets, "connect", flaky)
        assert cluster["w0"].call("w1", abs, -1) == 1
        assert next(attempts) > 3


def test_the_advertised_address_may_have_a_port() -> None:
    with LocalCluster(1, transports=("tcp",), advertise="127.0.0.1:5555") as cluster:
        assert cluster["w0"]._runtime.local_member.addresses == ("tcp:127.0.0.1:5555",)


def test_certificates_that_cannot_be_used_are_an_error_when_an_agent_opens(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no certificate")
    path = str(tmp_path / "file")
    with (
        pytest.raises(UsageError, match="TELEGRAD_TLS_CERT"),
        LocalCluster(1, tls_ca=path, tls_cert=path, tls_key=path),
    ):
        pass

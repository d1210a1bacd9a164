"""Workers with certificates of the user's own authority (``TELEGRAD_TLS_CA``, ``_CERT``, ``_KEY``).

The certificates are required in addition to the secret of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import Agent
from telegrad.errors import AuthenticationError, JoinError
from telegrad.refs import remote
from telegrad.testing import LocalCluster
from telegrad.transport import sockets
from telegrad.transport.tcp import TcpChannel
from telegrad.transport.tls import TlsContexts
from telegrad.wire import handshake
from tests.local.certificates import EXPIRED, Authority

Groups = Callable[..., LocalCluster]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "stranger")


@pytest.fixture
def group() -> Iterator[Groups]:
    """Return a function that opens workers w0, w1, ... over TCP, each with its own settings."""
    clusters: list[LocalCluster] = []

    def open_group(*settings: dict[str, Any]) -> LocalCluster:
        cluster = LocalCluster(0)
        clusters.append(cluster)
        config = replace(cluster.config, transports=("tcp",), join_timeout=20)
        cluster.agents = [
            Agent(
                f"w{rank}",
                store=cluster.store,
                rank=rank,
                world_size=len(settings),
                config=replace(config, **each),
            )
            for rank, each in enumerate(settings)
        ]
        return cluster.__enter__()

    yield open_group
    for cluster in clusters:
        cluster.close()


def test_workers_with_certificates_of_one_authority_call_each_other(
    group: Groups, authority: Authority
) -> None:
    cluster = group(authority.settings("first"), authority.settings("second"))
    w0, w1 = cluster
    assert w0.call("w1", torch.add, torch.ones(2), 1).tolist() == [2.0, 2.0]
    assert w1.submit("w0", abs, -2).result(timeout=30) == 2
    large = torch.arange(1_000_000)  # pulled over connections of its own
    assert torch.equal(w0.call("w1", torch.neg, large), -large)
    assert remote("w1", dict, args=([("a", 1)],), agent=w0).to_here() == {"a": 1}
    tls = w0._runtime.endpoint.tls
    assert tls.describe() == "TLS 1.3 with given certificates"
    assert not tls.uses_psk


def test_a_certificate_may_be_signed_by_an_intermediate_authority(
    group: Groups, tmp_path: Path, authority: Authority
) -> None:
    intermediate = Authority(tmp_path, "intermediate", signed_by=authority)
    w0, _ = group(intermediate.settings("first", trusted=authority), authority.settings("second"))
    assert w0.call("w1", abs, -3) == 3


def test_a_call_does_not_notice_that_its_connection_was_replaced(
    group: Groups, authority: Authority
) -> None:
    w0, w1 = group(authority.settings("first"), authority.settings("second"))
    assert w0.call("w1", abs, -1) == 1
    connections = w1._runtime.listener.connections
    assert connections
    for connection in connections:
        assert isinstance(connection.channel, TcpChannel)
        connection.channel.interrupt(OSError("cut by the test"))
    assert w0.call("w1", abs, -2) == 2


def test_the_certificate_of_another_authority_is_refused_by_the_caller(
    group: Groups, authority: Authority, stranger: Authority
) -> None:
    w0, _ = group(authority.settings("first"), stranger.settings("second", trusted=authority))
    with pytest.raises(AuthenticationError, match="refused the peer's certificate") as raised:
        w0.call("w1", abs, -1)
    assert raised.value.peer == "w1"
    assert "worker 'w1' at tcp:" in str(raised.value)


def test_the_certificate_of_another_authority_is_refused_by_the_callee(
    group: Groups, authority: Authority, stranger: Authority
) -> None:
    w0, _ = group(stranger.settings("first", trusted=authority), authority.settings("second"))
    for _attempt in range(20):  # the reason arrives each time
        with pytest.raises(AuthenticationError, match="refused this worker's certificate"):
            w0.call("w1", abs, -1)


def test_a_certificate_that_has_expired_is_refused(group: Groups, authority: Authority) -> None:
    w0, _ = group(authority.settings("first"), authority.settings("second", valid=EXPIRED))
    with pytest.raises(AuthenticationError, match="certificate has expired"):
        w0.call("w1", abs, -1)


def test_a_certificate_does_not_replace_the_secret(group: Groups, authority: Authority) -> None:
    cluster = group(authority.settings("first"))
    [address] = cluster["w0"]._runtime.endpoint.addresses
    wrong_key = bytes(32)
    tls = TlsContexts(replace(cluster.config, **authority.settings("intruder")), wrong_key)
    with pytest.raises(AuthenticationError, match="does not know this group's secret"):
        sockets.authenticate(
            sockets.connect(address, 30),
            tls,
            lambda binding: handshake.client(wrong_key, {"name": "intruder"}, binding),
            server_side=False,
            timeout=30,
        )


def test_certificates_on_some_workers_only_are_an_error_when_workers_join(
    group: Groups, authority: Authority
) -> None:
    with pytest.raises(JoinError, match="different settings of TLS"):
        group(authority.settings("first"), {})

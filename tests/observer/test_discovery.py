"""How the workers of a group are found, and what is said if they are not."""

from __future__ import annotations

import os
import socket

import pytest
import torch.distributed as dist

from telegrad.config import Config
from telegrad.errors import JoinError, UsageError
from telegrad.group import store_connection
from telegrad.observer import attach
from telegrad.observer.connection import Credentials, NoAnswer, WorkerConnection
from telegrad.server import listener
from telegrad.testing import LocalCluster

OTHER = Config(secret="a secret that no group has")


def test_one_of_several_groups_must_be_chosen() -> None:
    with LocalCluster(1, transports=("unix",)) as first:
        with LocalCluster(1, transports=("unix",)) as second:
            with pytest.raises(UsageError, match=f"several groups .*\n  --pid {os.getpid()}: "):
                attach(pid=os.getpid(), config=first.config)
            with attach(
                address=second.agents[0]._runtime.endpoint.addresses[0], config=first.config
            ) as group:
                assert group.name in repr(group)
                assert "w0" in repr(group)


def test_workers_with_another_secret_are_not_found() -> None:
    with LocalCluster(1, transports=("unix",)):
        with pytest.raises(UsageError, match=f"no worker in process {os.getpid()} that answers"):
            attach(pid=os.getpid(), config=OTHER)


def test_an_address_without_a_transport_is_one_of_tcp() -> None:
    with LocalCluster(1, transports=("tcp",)) as cluster:
        (address,) = cluster.agents[0]._runtime.endpoint.addresses
        with attach(address=address.removeprefix("tcp:"), config=cluster.config) as group:
            assert [worker.name for worker in group.workers] == ["w0"]
    with pytest.raises(UsageError, match="is not host:port, tcp:host:port or unix:@name"):
        attach(address="somewhere", config=OTHER)


@pytest.mark.parametrize(
    "prefix", ["telegrad_1", "/worker/attempt_0/telegrad_0", "/worker/attempt_1"]
)
def test_the_newest_group_of_a_store(prefix: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = f"127.0.0.1:{store.port}"
    with pytest.raises(UsageError, match="no worker has registered yet"):
        attach(rendezvous, config=OTHER)
    if prefix == "telegrad_1":
        store.set("telegrad_0/group", "a group that has ended")
    with LocalCluster(2, store=dist.PrefixStore(prefix, store)) as cluster:
        with attach(f"tcp://{rendezvous}", config=cluster.config) as group:
            assert [worker.name for worker in group.workers] == ["w0", "w1"]


@pytest.mark.parametrize("rendezvous", ["host", "host:", ":1234", "host:port"])
def test_the_address_of_a_store_needs_a_port(rendezvous: str) -> None:
    with pytest.raises(UsageError, match="is not host:port of a TCP store"):
        attach(rendezvous, config=OTHER)


@pytest.mark.parametrize("listens", [True, False])
def test_a_store_that_does_not_answer(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_connection, "_GRACE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        if not listens:
            silent.close()
        with pytest.raises(JoinError, match=f"no store answers at {address} within 0.1 s"):
            attach(address, config=OTHER, timeout=0.1)


def test_a_worker_with_too_many_observers_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LocalCluster(1, transports=("unix",)) as cluster:
        (address,) = cluster.agents[0]._runtime.endpoint.addresses
        monkeypatch.setattr(listener, "_MAX_OBSERVERS", 0)
        with pytest.raises(UsageError, match="cannot be asked: it has closed the connection"):
            attach(address=address, config=cluster.config)
        connection = WorkerConnection([address], Credentials(cluster.config))
        with pytest.raises(NoAnswer, match="it has closed the connection"):
            connection.converse("debug", 1.0)


def test_no_time_is_left() -> None:
    """A connection that took all the time is closed."""
    with LocalCluster(1, transports=("unix",)) as cluster:
        addresses = cluster.agents[0]._runtime.endpoint.addresses
        connection = WorkerConnection(addresses, Credentials(cluster.config))
        with pytest.raises(NoAnswer, match="no answer for 0 s"):
            connection.request("members", 0.0)
        assert "not connected" in repr(connection)


def test_torch_writes_nothing_about_a_store_that_is_not_there(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(JoinError, match="Connection refused"):
        attach(f"127.0.0.1:{port}", timeout=0.5)
    assert capfd.readouterr().err == ""

"""Problems of the network show when a worker joins, on every worker, with what to do.

The workers are agents of this process that believe to be on different hosts.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from telegrad import Agent, Config
from telegrad.errors import JoinError, UsageError
from telegrad.group import network_check
from telegrad.group.endpoint import LocalEndpoint
from telegrad.group.hosts import host_id, interfaces, is_loopback
from telegrad.group.membership import Directory, Member
from telegrad.group.network_check import compare_versions, targets
from telegrad.testing import LocalCluster
from telegrad.transport import tls
from telegrad.wire.handshake import ConnectionRefused, Incarnation
from tests.local.gates import PATIENCE
from tests.local.proxy import Change, Chunk, Proxy, unchanged

SECRET = "sixteen characters or more"
PROXIED = "127.0.9.1"


@pytest.fixture(autouse=True)
def loopback_is_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 127.0.0.1 be an address that other hosts can use, and 127.0.0.9 one that they cannot."""
    monkeypatch.setattr(network_check, "is_loopback", lambda host: host == "127.0.0.9")


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What workers by name write into the directory instead of what is true."""
    details: dict[str, dict[str, Any]] = {}
    register = Directory.register

    def register_as_told(self: Directory, name: str, *args: Any, **kwargs: Any) -> Member:
        return register(self, name, *args, **{**kwargs, "host": name, **details.get(name, {})})

    monkeypatch.setattr(Directory, "register", register_as_told)
    return details


def config(**settings: Any) -> Config:
    defaults = {"secret": SECRET, "join_timeout": PATIENCE, "transports": ("tcp",)}
    return Config(**{**defaults, **settings})  # type: ignore[arg-type]


def open_all(configs: Sequence[Config], fixed_size: bool = True) -> list[Future[Agent]]:
    """Open workers w0, w1, ... at the same time, and close them when all have joined or failed."""
    store = dist.HashStore()
    size = len(configs) if fixed_size else None
    agents = [
        Agent(f"w{rank}", store=store, rank=rank, world_size=size, config=each)
        for rank, each in enumerate(configs)
    ]
    with ThreadPoolExecutor(len(agents)) as pool:
        joined = [pool.submit(agent.open) for agent in agents]
        for each in joined:
            each.exception(PATIENCE)
    for agent in agents:
        agent.close()
    return joined  # type: ignore[return-value]


def errors_of(joined: Sequence[Future[Agent]]) -> Iterator[str]:
    for each in joined:
        error = each.exception()
        assert isinstance(error, JoinError)
        yield str(error)


# A group of fixed size


@pytest.mark.parametrize("size", [2, 5])
def test_hosts_that_reach_each_other_join(hosts: dict[str, Any], size: int) -> None:
    assert [each.exception() for each in open_all([config()] * size)] == [None] * size


def test_workers_of_one_host_make_no_connections() -> None:
    with LocalCluster(3, transports=("tcp",)) as workers:
        assert [len(agent._runtime.listener.connections) for agent in workers] == [0, 0, 0]


@pytest.mark.parametrize(
    ("advertise", "message"),
    [
        ("127.0.0.9", r"'w1' listens on loopback only \(tcp:127.0.0.9:\d+\).*TELEGRAD_LISTEN"),
        ("no-such-host.invalid", r"cannot reach worker 'w1' at tcp:no-such.*TELEGRAD_ADVERTISE"),
        ("127.0.0.3", r"cannot reach worker 'w1' at tcp:127.0.0.3:.*nothing listens there"),
    ],
)
def test_a_wrong_address_is_told_to_every_worker(
    hosts: dict[str, Any], advertise: str, message: str
) -> None:
    joined = open_all([config(), config(advertise=advertise), config()])
    for name, text in zip(("w0", "w1", "w2"), errors_of(joined), strict=True):
        assert re.search(message, text)
        assert f"This is worker '{name}'" in text
        assert "lo 127.0.0.1" in text  # its interfaces


@pytest.fixture
def proxied(
    monkeypatch: pytest.MonkeyPatch, hosts: Any
) -> Iterator[Callable[[Change], list[Proxy]]]:
    """Let connections to w1 pass a proxy, which it must advertise."""
    with ExitStack() as stack:
        proxies: list[Proxy] = []
        change: list[Change] = []
        register = Directory.register

        def register_and_listen(
            self: Directory, name: str, rank: int, addresses: Any, **details: Any
        ) -> Member:
            if name == "w1":
                port = int(addresses[0].rpartition(":")[2])
                routes = {(PROXIED, port): ("127.0.0.1", port)}
                proxies.append(stack.enter_context(Proxy(routes, *change)))
            return register(self, name, rank, addresses, **details)

        def use(given: Change) -> list[Proxy]:
            change.append(given)
            return proxies

        monkeypatch.setattr(Directory, "register", register_and_listen)
        yield use


@pytest.mark.parametrize("where", [(True, 0), (False, 0), (True, 1), (False, 1)])
def test_a_connection_that_breaks_is_tried_again(
    proxied: Callable[[Change], list[Proxy]], where: tuple[bool, int]
) -> None:
    """Before, in the middle, and at the end of the handshakes."""

    def break_first(chunk: Chunk) -> list[bytes | None]:
        broken = chunk.connection < 3 and (chunk.to_server, chunk.index) == where
        return [None] if broken else [chunk.data]

    proxies = proxied(break_first)
    joined = open_all([config(), config(advertise=PROXIED)])
    assert [each.exception() for each in joined] == [None, None]
    assert proxies[0].accepted >= 4


def test_a_connection_that_is_refused_is_tried_again(
    proxied: Callable[[Change], list[Proxy]], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies = proxied(unchanged)
    connect = LocalEndpoint.connect
    refusals: list[ConnectionRefusedError] = []

    def connect_twice(self: LocalEndpoint, address: str, *args: Any) -> Any:
        is_first = PROXIED in address and not refusals
        if is_first:
            proxies[0].reset()
        try:
            return connect(self, address, *args)
        except ConnectionRefusedError as error:
            refusals.append(error)
            proxies[0].listen()
            raise

    monkeypatch.setattr(LocalEndpoint, "connect", connect_twice)
    joined = open_all([config(), config(advertise=PROXIED)])
    assert [each.exception() for each in joined] == [None, None]
    assert len(refusals) == 1


def test_connections_that_always_break_are_told_with_fitting_advice(
    proxied: Callable[[Change], list[Proxy]],
) -> None:
    proxies = proxied(lambda chunk: [None])
    settings = config(connect_timeout=0.5)
    for text in errors_of(open_all([settings, config(advertise=PROXIED, connect_timeout=0.5)])):
        assert "'w0' cannot reach worker 'w1' at tcp:127.0.9.1" in text
        assert "log of 'w1'" in text
        assert "firewall" in text
        assert "same version" not in text
    assert proxies[0].accepted > 1


def test_another_group_is_told_with_fitting_advice(hosts: dict[str, Any]) -> None:
    local, other = members({}, {})
    error = ConnectionRefused("this worker belongs to another group")
    text = network_check.describe_failure(error, local, other, "tcp:10.0.0.1:5")
    assert text.endswith("(the connection was refused: this worker belongs to another group)")


def test_an_address_of_another_worker_is_found(hosts: dict[str, Any]) -> None:
    """For example if a port is forwarded to the wrong host."""
    with LocalCluster(1, transports=("tcp",)) as others, pytest.MonkeyPatch.context() as patch:
        (address,) = others["w0"]._runtime.local_member.addresses
        patch.setitem(hosts, "w1", {})
        register = Directory.register

        def register_elsewhere(
            self: Directory, name: str, rank: int, addresses: Any, **kwargs: Any
        ) -> Member:
            return register(self, name, rank, (address,) if name == "w1" else addresses, **kwargs)

        patch.setattr(Directory, "register", register_elsewhere)
        for text in errors_of(open_all([config(), config()])):
            assert f"cannot reach worker 'w1' at {address}" in text


def test_workers_without_tcp_on_several_hosts_are_told(hosts: dict[str, Any]) -> None:
    for text in errors_of(open_all([config(), config(transports=("unix",))])):
        assert "worker 'w1' does not use TCP" in text
        assert "TELEGRAD_TRANSPORTS" in text


def test_a_worker_that_does_not_finish_is_named(hosts: dict[str, Any]) -> None:
    store = dist.HashStore()
    agents = [
        Agent(f"w{rank}", store=store, rank=rank, world_size=2, config=config(join_timeout=0.3))
        for rank in range(2)
    ]
    for agent in agents:
        agent.open(wait=False)
    with pytest.raises(JoinError, match=r"did not finish their network check.*: w1"):
        agents[0]._runtime.wait_for_members()
    agents[1].close()


def test_a_worker_that_comes_back_does_not_wait_for_the_others(hosts: dict[str, Any]) -> None:
    store = dist.HashStore()

    def worker(name: str, rank: int, **settings: Any) -> Agent:
        return Agent(name, store=store, rank=rank, world_size=2, config=config(**settings))

    first, second = worker("w0", 0), worker("w1", 1)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Agent.open, (first, second)))
    second._runtime.abort()
    with worker("w1", 1) as back:
        assert back.call("w0", abs, -1) == 1
    with pytest.raises(JoinError, match=r"worker 'w0' cannot reach worker 'w1'"):
        worker("w1", 1, advertise="127.0.0.3").open()
    first.close()


# Open groups


@pytest.fixture
def founder(hosts: dict[str, Any]) -> Iterator[tuple[Any, Agent]]:
    store = dist.HashStore()
    with Agent("founder", store=store, config=config()) as agent:
        yield store, agent


def test_a_newcomer_that_can_be_reached_joins(founder: tuple[Any, Agent]) -> None:
    store, agent = founder
    with Agent("new", store=store, config=config()):
        assert agent.call("new", abs, -1) == 1


def test_a_newcomer_that_cannot_be_reached_is_told(founder: tuple[Any, Agent]) -> None:
    store, agent = founder
    new = Agent("new", store=store, config=config(advertise="127.0.0.3"))
    with pytest.raises(JoinError, match=r"'founder' cannot reach worker 'new' at tcp:127\.0\.0\.3"):
        new.open()
    assert [info.name for info in agent.get_worker_infos()] == ["founder"]


def test_a_newcomer_that_reaches_nobody_is_told(hosts: dict[str, Any]) -> None:
    store = dist.HashStore()
    with Agent("founder", store=store, config=config(advertise="no-such-host.invalid")):
        with pytest.raises(JoinError, match="'new' cannot reach worker 'founder'"):
            Agent("new", store=store, config=config()).open()


def test_a_newcomer_does_not_mind_workers_that_have_ended(founder: tuple[Any, Agent]) -> None:
    store, agent = founder
    agent._runtime.abort()
    with Agent("new", store=store, config=config()) as new:
        assert new.call("new", abs, -1) == 1


# Versions


def members(*details: dict[str, Any]) -> list[Member]:
    return [
        replace(
            Member(f"w{rank}", rank, Incarnation(f"i{rank}"), (), protocol=3, python="3.12.1"),
            **each,
        )
        for rank, each in enumerate(details)
    ]


def test_another_protocol_is_an_error(hosts: dict[str, Any]) -> None:
    hosts["w1"] = {"protocol": 999}
    for text in errors_of(open_all([config(), config()])):
        assert "different versions of the protocol" in text
        assert "999 (w1)" in text
        assert "Install the same version of telegrad" in text


def test_tls_on_some_workers_only_is_an_error(hosts: dict[str, Any]) -> None:
    for text in errors_of(open_all([config(), config(tls="off")])):
        assert "off (w1)" in text

    # on one host, nobody needs TLS unless a worker has TCP only
    unix, tcp = "unix:@name", "tcp:127.0.0.1:1"
    compare_versions(
        members({"tls": "psk", "addresses": (unix, tcp)}, {"tls": "off", "addresses": (unix,)})
    )
    with pytest.raises(JoinError, match=r"TLS: psk \(w0\), off \(w1\).*TELEGRAD_TLS"):
        compare_versions(
            members({"tls": "psk", "addresses": (unix, tcp)}, {"tls": "off", "addresses": (tcp,)})
        )
    with pytest.raises(JoinError, match=r"TLS: psk \(w0\), off \(w1\).*TELEGRAD_TLS"):
        compare_versions(members({"tls": "psk"}, {"tls": "off", "host": "another"}))


@pytest.mark.parametrize("field", ["python", "torch"])
def test_other_versions_of_python_and_torch_are_warnings(
    field: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        compare_versions(members(*({field: version} for version in ("2.11.1", "2.11.2", "2.11"))))
        assert not caplog.messages
        compare_versions(members(*({field: version} for version in ("2.11.1", "2.11", "2.12"))))
    assert "2.11 (w0, w1), 2.12 (w2)" in caplog.text


def test_a_long_list_of_workers_is_shortened() -> None:
    with pytest.raises(JoinError, match=r"w7 and 92 more\), 4 \(w100\)"):
        compare_versions(members(*[{}] * 100, {"protocol": 4}))


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"transports": ("tcp",)}, True),
        ({"listen": "0.0.0.0"}, True),
        ({"listen": "0.0.0.0", "tls": "off"}, False),
        ({}, False),  # on one host, unix sockets are used
    ],
)
def test_a_missing_package_for_tls_is_an_error_when_a_worker_joins(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], is_refused: bool
) -> None:
    monkeypatch.setattr(tls, "HAS_PSK", False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    agent = Agent("w0", store=dist.HashStore(), config=Config(secret=SECRET, **settings))
    if is_refused:
        with pytest.raises(UsageError, match="pip install cryptography"):
            agent.open()
    else:
        with agent:
            assert agent.call("w0", abs, -1) == 1


# Who connects to whom


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 5), (5, 1), (3, 2, 4), (1, 1, 1, 1)])
def test_each_worker_is_tried_from_another_host(sizes: tuple[int, ...]) -> None:
    names = [f"h{host}" for host, size in enumerate(sizes) for _ in range(size)]
    group = members(*({"host": name} for name in names))
    tried = [(member, target) for member in group for target in targets(group, member)]
    assert {member.rank for member, _ in tried} == {target.rank for _, target in tried}
    assert {member.rank for member, _ in tried} == set(range(len(group)))
    assert all(member.host != target.host for member, target in tried)
    assert len(tried) <= 2 * len(group)


# This host


def test_the_interfaces_of_this_host() -> None:
    assert "127.0.0.1" in interfaces()["lo"]
    for addresses in interfaces().values():
        for address in addresses:
            socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def test_loopback_addresses() -> None:
    assert [is_loopback(each) for each in ("127.0.0.1", "127.3.2.1", "::1", "localhost")] == [
        True
    ] * 4
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("host.example")


def test_a_host_has_one_id() -> None:
    host_id.cache_clear()
    first = host_id()
    host_id.cache_clear()
    assert host_id() == first != ""

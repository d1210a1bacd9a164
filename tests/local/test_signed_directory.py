"""Whoever can write to the store, but does not know the secret, leads nobody elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from telegrad import Agent, Config
from telegrad.errors import AuthenticationError, JoinError, PeerLost, StoreTampered
from telegrad.group import membership
from telegrad.group.signed_store import SignedStore
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.counting_store import CountingStore
from tests.local.gates import PATIENCE, until

SECRET = "sixteen characters or more"


@pytest.fixture
def transport() -> str:
    return "unix"


@pytest.fixture
def trio(cluster: Clusters) -> LocalCluster:
    """An open group: its workers read the store before each first call."""
    return cluster(3, fixed_size=False)


def poison(store: Any, key: str) -> None:
    """Change the address in an entry, as somebody does who has no secret."""
    signature, nonce, number, value = bytes(store.get(key)).decode().split(" ", 3)
    value = value.replace("unix:@telegrad", "unix:@attacker") if "unix" in value else "2"
    store.set(key, " ".join((signature, nonce, number, value)))


# Changed entries


@pytest.mark.parametrize("to", ["w1", 1])
def test_a_poisoned_address_is_an_error_that_names_the_worker(
    trio: LocalCluster, to: str | int
) -> None:
    poison(trio.store, "rank/1")
    worker = f"worker {to!r}" if isinstance(to, str) else f"the worker with rank {to}"
    with pytest.raises(StoreTampered, match=rf"{worker} \(rank/1\).*without the group's secret"):
        trio["w0"].call(to, abs, -1)
    with pytest.raises(StoreTampered, match=r"\(rank/1\)"):
        trio["w0"].submit(to, abs, -1)
    assert trio["w0"].call("w2", abs, -1) == 1


def test_a_poisoned_name_is_an_error(trio: LocalCluster) -> None:
    poison(trio.store, "name/w1")
    with pytest.raises(StoreTampered, match=r"worker 'w1' \(name/w1\)"):
        trio["w0"].call("w1", abs, -1)


@pytest.mark.parametrize(
    "text", ["", "x", "0" * 64, f"{'0' * 64} 1 {{}}", f"{'0' * 64} {'9' * 99} x"]
)
def test_nonsense_is_an_error(trio: LocalCluster, text: str) -> None:
    trio.store.set("rank/1", text)
    with pytest.raises(StoreTampered, match="rank/1"):
        trio["w0"].call("w1", abs, -1)


def test_a_poisoned_list_of_workers_is_an_error(trio: LocalCluster) -> None:
    trio.store.set("slot/3", "0")
    with pytest.raises(StoreTampered, match="slot/3"):
        trio["w0"].get_worker_infos()


def test_a_newcomer_finds_a_poisoned_entry(trio: LocalCluster) -> None:
    poison(trio.store, "rank/1")
    with pytest.raises(StoreTampered, match=r"\(rank/1\)"):
        trio.join("new").call("w1", abs, -1)


def test_connections_that_exist_do_not_care(trio: LocalCluster) -> None:
    assert trio["w0"].call("w1", abs, -1) == 1
    for key in ("rank/1", "name/w1"):
        poison(trio.store, key)
    assert trio["w0"].call("w1", abs, -1) == 1


# Copied entries


def test_an_entry_of_another_worker_is_an_error(trio: LocalCluster) -> None:
    trio.store.set("rank/1", trio.store.get("rank/2"))
    with pytest.raises(StoreTampered, match=r"worker 'w1' \(rank/1\)"):
        trio["w0"].call("w1", abs, -1)
    trio.store.set("name/w2", trio.store.get("name/w1"))
    with pytest.raises(StoreTampered, match="name/w2"):
        trio["w0"].call("w2", abs, -1)


def test_an_entry_of_another_group_is_an_error(cluster: Clusters, trio: LocalCluster) -> None:
    others = cluster(3, fixed_size=False)
    trio.store.set("rank/1", others.store.get("rank/1"))
    with pytest.raises(StoreTampered, match=r"worker 'w1' \(rank/1\)"):
        trio["w0"].call("w1", abs, -1)


# Entries that were put back or removed


def test_an_earlier_incarnation_that_was_put_back_is_an_error(trio: LocalCluster) -> None:
    w0 = trio["w0"]
    w0.call("w1", abs, -1)
    first = trio.store.get("rank/1")
    trio.kill("w1")
    trio.join("w1")
    until(lambda: _answers(w0, "w1"))
    trio.store.set("rank/1", first)
    assert w0.call("w1", abs, -1) == 1  # by the connection that it has
    with pytest.raises(StoreTampered, match=r"'w1' \(rank/1\) was put back.*number 1.*number 2"):
        w0.get_worker_infos()


def _answers(agent: Agent, to: str) -> bool:
    """Whether a call succeeds. The first one may still find the connection to the lost worker."""
    try:
        return bool(agent.call(to, abs, -1))
    except PeerLost:
        return False


def test_a_worker_that_left_does_not_come_back_by_its_old_entry(trio: LocalCluster) -> None:
    first = trio.store.get("rank/2")
    trio["w2"].shutdown()
    assert len(trio["w0"].get_worker_infos()) == 2
    trio.store.set("rank/2", first)
    with pytest.raises(StoreTampered, match=r"'w2' \(rank/2\) was put back"):
        trio["w0"].call("w2", abs, -1)


def test_an_earlier_rank_of_a_name_that_was_put_back_is_an_error(trio: LocalCluster) -> None:
    first = trio.store.get("name/w2")
    trio["w2"].shutdown()
    trio.join("w2")
    trio["w0"].get_worker_infos()
    assert trio["w0"].call("w2", abs, -1) == 1
    trio.store.set("name/w2", first)
    with pytest.raises(StoreTampered, match="name/w2"):
        trio["w0"]._runtime.directory.find("w2", refresh=True)


@pytest.mark.parametrize("key", ["rank/1", "name/w1"])
def test_a_removed_entry_is_an_error_for_who_has_seen_it(trio: LocalCluster, key: str) -> None:
    directory = trio["w0"]._runtime.directory
    directory.find("w1", refresh=True)
    trio.store.delete_key(key)
    with pytest.raises(StoreTampered, match=rf"worker 'w1' \({key}\) was removed"):
        directory.find("w1", refresh=True)


# Another secret


def test_a_worker_with_another_secret_is_told_when_it_joins(trio: LocalCluster) -> None:
    stranger = Agent("stranger", store=trio.store, config=Config(secret=SECRET))
    with pytest.raises(
        AuthenticationError, match=r"'stranger' has another secret.*TELEGRAD_SECRET"
    ):
        stranger.open()
    assert trio["w0"].call("w1", abs, -1) == 1


def test_those_who_wait_for_a_worker_with_another_secret_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = dist.HashStore()
    member = Agent(
        "member", store=store, rank=0, world_size=2, config=Config(secret=SECRET, join_timeout=0.2)
    )
    member.open(wait=False)
    stranger = Agent(
        "stranger", store=store, rank=1, world_size=2, config=Config(secret="another " + SECRET)
    )
    with pytest.raises(AuthenticationError, match="'stranger' has another secret"):
        stranger.open()
    with caplog.at_level(logging.WARNING):
        with pytest.raises(JoinError, match=r"missing ranks: \[1\].*'stranger' has another secret"):
            member._runtime.wait_for_members()
    assert "'stranger' has another secret" in caplog.text


def test_nobody_waits_long_for_a_worker_with_another_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "_PROBLEM_GRACE", 0.05)
    monkeypatch.setattr(membership, "_LOOK_FOR_PROBLEMS", 0.02)
    store = dist.HashStore()
    config = Config(secret=SECRET, join_timeout=3600.0)
    member = Agent("member", store=store, rank=0, world_size=3, config=config)
    member.open(wait=False)
    stranger = Agent(
        "stranger", store=store, rank=1, world_size=3, config=Config(secret="another " + SECRET)
    )
    with pytest.raises(AuthenticationError):
        stranger.open()
    with pytest.raises(JoinError, match=r"2 of 3 workers are missing.*'stranger' has another"):
        member._runtime.wait_for_members()


def test_a_worker_that_is_started_again_with_the_right_secret_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "_LOOK_FOR_PROBLEMS", 0.02)
    store = dist.HashStore()

    def make(name: str, rank: int, secret: str) -> Agent:
        config = Config(secret=secret, join_timeout=PATIENCE)
        return Agent(name, store=store, rank=rank, world_size=2, config=config)

    member = make("member", 0, SECRET)
    member.open(wait=False)
    with pytest.raises(AuthenticationError):
        make("other", 1, "another " + SECRET).open()
    joined = threading.Event()

    def wait() -> None:
        member._runtime.wait_for_members()
        joined.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    with make("other", 1, SECRET) as other:
        assert joined.wait(PATIENCE)
        waiting.join(PATIENCE)
        assert other.call("member", abs, -1) == 1
        member.close()


def test_a_message_of_an_outsider_is_shortened_and_quoted(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    store.set("problem/1", "\x1b[2J" + "x" * 100_000)
    member = Agent(
        "member", store=store, rank=0, world_size=2, config=Config(secret=SECRET, join_timeout=0.1)
    )
    with pytest.raises(JoinError) as caught:
        member.open()
    assert "\x1b" not in str(caught.value) + caplog.text
    assert len(str(caught.value)) < 1000


# The store itself


@pytest.fixture(params=["hash", "file", "tcp"])
def make_store(request: pytest.FixtureRequest, tmp_path: Any) -> Callable[[], Any]:
    return {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 2),
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, True),
    }[request.param]


def test_an_entry_is_written_once_for_each_previous_one(make_store: Callable[[], Any]) -> None:
    store = make_store()
    first, second = (SignedStore(store, b"secret") for _ in range(2))
    assert first.write("key", "a", None)
    assert not second.write("key", "a", None)
    entry = second.read("key", "it")
    assert entry is not None
    assert (entry.number, entry.value) == (1, "a")
    assert second.write("key", "b", entry)
    assert not first.write("key", "c", first.last_seen("key"))
    assert first.read("key", "it") == second.last_seen("key")


def test_claims_of_many_at_once_differ(make_store: Callable[[], Any]) -> None:
    signed = SignedStore(make_store(), b"secret")
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: signed.claim("slot", str), range(40)))
    assert sorted(numbers) == list(range(40))
    entries = [signed.read(f"slot/{number}", "it") for number in range(40)]
    assert [entry.value for entry in entries if entry is not None] == list(map(str, range(40)))


def test_a_group_in_a_store_that_ends_is_an_error() -> None:
    signed = SignedStore(dist.HashStore(), b"secret")
    signed.close()
    for use in (lambda: signed.read("key", "it"), lambda: signed.write("key", "a", None)):
        with pytest.raises(JoinError, match="does not answer"):
            use()


def test_workers_that_come_at_once_do_not_compete_for_numbers() -> None:
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(40)]
    signed = [SignedStore(store, b"secret") for store in stores]
    for each in signed:  # none has seen what the others wrote since it started
        each.claim("slot", str)
    assert {store.count for store in stores} == {2}


def test_a_number_that_was_taken_but_not_used_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may end between the two requests that register it."""
    monkeypatch.setattr(membership, "_FILL_AFTER", 0.0)
    with LocalCluster(2, fixed_size=False) as cluster:
        cluster.store.add("slots", 2)
        cluster.join("late")
        assert [each.name for each in cluster["w0"].get_worker_infos()] == ["w0", "w1", "late"]
        assert cluster["w0"].call("late", abs, -1) == 1


def test_a_counter_that_was_changed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_FILL_AFTER", 0.0)
    with LocalCluster(1, fixed_size=False) as cluster:
        cluster.store.add("slots", 10**9)
        with pytest.raises(StoreTampered, match="counter of workers"):
            cluster.join("late")

"""The tree of receivers stays a tree, whoever joins, fails, is lost and comes back."""

from __future__ import annotations

import random
import time

import pytest
import torch

from telegrad.weights.deltas import Part
from telegrad.weights.layout import Layout
from telegrad.weights.streams import Pacer
from telegrad.weights.topology import Source, Topology
from telegrad.weights.versions import Update, VersionStore


def depth(topology: Topology, worker: str) -> int:
    """Return how far a receiver is from the root. It raises if there is a cycle."""
    steps = 0
    while worker != "root":
        worker = topology._parents[worker]
        steps += 1
        assert steps < 1000
    return steps


def test_hosts_form_a_tree_and_workers_of_a_host_share() -> None:
    topology = Topology("root", "h0", 2)
    assert topology.join("a", "h0", None) == Source("root", True)
    assert topology.join("b", "h1", None) == Source("root", False)
    assert topology.join("c", "h1", None) == Source("b", True)
    assert topology.join("d", "h2", None) == Source("root", False)
    assert topology.join("e", "h3", None) == Source("b", False)
    # b is gone: another worker of its host takes its place
    assert topology.join("c", "h1", "b") == Source("root", False)
    topology.remove("b")
    assert topology.join("e", "h3", "b") == Source("d", False)
    # b comes back
    assert topology.join("b", "h1", None) == Source("c", True)


def test_a_worker_that_cannot_share_is_like_a_host() -> None:
    topology = Topology("root", "h0", 1)
    assert topology.join("a", None, None) == Source("root", False)
    assert topology.join("b", None, None) == Source("a", False)
    assert topology.join("a", None, "root") == Source("root", False)


@pytest.mark.parametrize("seed", range(20))
def test_random_histories(seed: int) -> None:
    rng = random.Random(seed)
    fan_out = rng.choice([1, 2, 3])
    topology = Topology("root", "h0", fan_out)
    hosts = {f"w{number}": rng.choice([None, "h0", "h1", "h2", "h3"]) for number in range(12)}
    sources: dict[str, Source] = {}
    for _ in range(400):
        worker = rng.choice(list(hosts))
        if worker in sources and rng.random() < 0.3:
            topology.remove(worker)
            del sources[worker]
            continue
        failed = None
        if worker in sources and sources[worker].worker not in sources:
            failed = sources[worker].worker
        sources[worker] = topology.join(worker, hosts[worker], failed)
        assert sources[worker].worker != worker
        if not sources[worker].is_shared:
            assert depth(topology, worker) <= len(hosts)
    # all that still take part join again until their sources do, too
    for _ in range(len(hosts)):
        for worker, source in list(sources.items()):
            if source.worker != "root" and source.worker not in sources:
                sources[worker] = topology.join(worker, hosts[worker], source.worker)
    for source in sources.values():
        assert source.worker == "root" or source.worker in sources


def test_bandwidth_spreads_what_is_sent() -> None:
    started = time.monotonic()
    assert Pacer(None).reserve(1 << 40) <= time.monotonic()
    pacer = Pacer(1000.0)
    first = pacer.reserve(1_000_000)
    assert started <= first <= time.monotonic()
    assert pacer.reserve(500_000) == first + 1000
    assert pacer.reserve(1) == first + 1500
    pacer.give_back(500_001)
    assert pacer.reserve(1) == pytest.approx(first + 1000)


def test_a_part_is_counted_once_and_given_back_with_its_ticket() -> None:
    layout = Layout.of({"a": torch.zeros(1000)})
    store = VersionStore("e", layout, shared=False, history=0, bandwidth=1.0)
    store.complete(store.take_image(), 1)
    part = Part(b"", torch.empty(1000, dtype=torch.uint8), 0)
    update = store.wait_for_update("reader", None).wait()
    assert isinstance(update, Update)
    first = store.due(update.ticket, 0, 0, part)
    second = store.due(update.ticket, 0, 1, part)
    assert second == first + 1000
    assert store.due(update.ticket, 0, 1, part) == second
    other = store.wait_for_update("reader", None).wait()  # it begins again
    assert isinstance(other, Update)
    assert store.due(other.ticket, 0, 0, part) == pytest.approx(first + 1000)

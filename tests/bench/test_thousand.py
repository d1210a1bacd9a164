"""A group of many workers joins, calls a tree, loses a tenth and shuts down, in one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks import thousand


def test_sixty_workers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    share = thousand.run_share(store.port, 0, 1, 60)
    assert share["agents"] == 60
    # Neither threads nor descriptors of a worker depend on the number of workers.
    assert share["after_join"]["threads"] <= 60 * 3 + 1
    # Of its descriptors, two are its connection to the store.
    assert share["after_join"]["descriptors"] <= 60 * 4 + 1
    assert set(share["seconds"]) == {"join", "tree", "tree again", "loss", "shutdown"}


def test_the_tree_has_all_workers() -> None:
    size = 1000
    ranks = [0]
    for rank in ranks:
        ranks += thousand.children_of(rank, size)
    assert sorted(ranks) == list(range(size))
    lost = set(thousand.lost_ranks(size))
    assert not any(child for rank in lost for child in thousand.children_of(rank, size))

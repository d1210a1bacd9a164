"""Servers of tables are killed at planned points and restarted; no saved step is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from telegrad import ps
from telegrad.errors import JoinError, PeerLost, StaleReference, UsageError
from telegrad.ps.embeddings import service
from telegrad.ps.embeddings.messages import TablesSpec
from telegrad.ps.embeddings.row_hash import initialize
from telegrad.ps.embeddings.shard import TableShard
from telegrad.ps.server.checkpoint import ShardSnapshot
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE
from tests.ps.accidents import Accidents, accident_points
from tests.ps.test_embeddings import DIM, EVERY, EXACT, input_of, loss_of, push, row, table

Clusters = Callable[..., LocalCluster]
STEPS = 12
RULE = ps.RowAdam(lr=0.03)


def train(
    workers: LocalCluster, number: int, trainers: int, servers: list[str], **options: Any
) -> Tensor:
    worker = f"w{len(servers) + number}"
    bag = table(
        ps.EmbeddingBag, workers, worker, servers, optimizer=RULE, trainers=trainers, **options
    )
    for step in range(STEPS):
        loss_of(bag(input_of(step, number))).backward()
        bag.tables.step()
    end = bag.rows(EVERY)
    bag.tables.close()
    return end


def undisturbed(trainers: int, steps: int = STEPS) -> Tensor:
    leaf = nn.Parameter(
        initialize(torch.empty(len(EVERY), DIM, dtype=torch.float64), EVERY, 0, 1.0)
    )
    optimizer = torch.optim.SparseAdam([leaf], lr=0.03)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.cat([input_of(step, number) for number in range(trainers)])
        loss_of(F.embedding_bag(inputs, leaf, sparse=True)).backward()
        optimizer.step()
    return leaf.detach()


@accident_points(
    TableShard,
    {
        "before a pull": (TableShard, "pull", [9, 20]),
        "before a push": (TableShard, "push", [9, 20]),
    },
)
def test_chaos_ends_where_an_undisturbed_run_does(
    cluster: Clusters,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    method: str,
    plan: list[int],
    servers: list[str],
) -> None:
    """With every step on disk before it is acknowledged, nothing is lost, moments included."""
    workers = cluster(len(servers) + 2)
    accidents = Accidents(where, method, plan, monkeypatch)
    rule = ps.Checkpoint(tmp_path, every=1, wait=True)
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(train, workers, number, 2, servers, checkpoint=rule) for number in range(2)
        ]
        for _ in plan:
            accidents.happen(workers)
        results: list[Tensor] = [each.result(PATIENCE) for each in ends]
    for end in results:
        torch.testing.assert_close(end, undisturbed(2), **EXACT)


def test_a_server_without_recent_checkpoint_goes_on_from_the_last(
    cluster: Clusters, tmp_path: Path
) -> None:
    workers = cluster(2)
    rule = ps.Checkpoint(tmp_path, every=2, wait=True)
    bag = table(ps.EmbeddingBag, workers, optimizer=ps.RowSGD(lr=1.0), std=0.0, checkpoint=rule)
    for _ in range(3):
        push(bag)
    workers.kill("w1")
    workers.join("w1", 1)
    assert row(bag) == -2.0  # the third step is lost
    assert bag.tables.version == 3
    push(bag)
    assert (row(bag), bag.tables.version) == (-3.0, 4)


def test_without_checkpoints_a_dead_server_is_an_error(cluster: Clusters) -> None:
    workers = cluster(2)
    bag = table(ps.EmbeddingBag, workers)
    push(bag)
    workers.kill("w1")
    with pytest.raises(PeerLost, match="w1"):
        push(bag)


def test_a_server_without_any_checkpoint_is_a_clear_error(
    cluster: Clusters, tmp_path: Path
) -> None:
    workers = cluster(2)
    bag = table(ps.EmbeddingBag, workers, checkpoint=ps.Checkpoint(tmp_path, every=1, wait=True))
    push(bag)
    workers.kill("w1")
    shutil.rmtree(tmp_path)
    workers.join("w1", 1)
    with pytest.raises(JoinError, match="without its part of tables 'table'"):
        push(bag)


def test_a_checkpoint_that_cannot_be_written_is_a_warning(
    cluster: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = ps.Checkpoint(tmp_path, every=1, wait=True)
    bag = table(ps.EmbeddingBag, cluster(2), optimizer=ps.RowSGD(lr=1.0), std=0.0, checkpoint=rule)

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.warns(UserWarning, match="tables 'table' on 'w1': .*no space left"):
            push(bag)
    push(bag)
    assert row(bag) == -2.0


def test_a_server_that_is_leaving_says_so_in_a_way_that_is_tried_again() -> None:
    """A call may be served in the moment in which its agent closes; then it has no agent."""
    with pytest.raises(StaleReference, match="leaving"):
        service.pull("table", [], store_new=True)


def test_patience_has_an_end(cluster: Clusters, tmp_path: Path) -> None:
    workers = cluster(2)
    bag = table(ps.EmbeddingBag, workers, checkpoint=ps.Checkpoint(tmp_path), patience=0.05)
    workers.kill("w1")
    with pytest.raises(PeerLost, match="w1"):
        push(bag)


@pytest.mark.parametrize(
    "rule", [ps.RowSGD(lr=0.1), ps.RowAdagrad(lr=0.1), ps.RowAdam(lr=0.03)], ids=repr
)
@pytest.mark.parametrize("consistency", [ps.Sync(), ps.Async()], ids=repr)
def test_a_new_run_goes_on_where_an_old_one_ended(
    cluster: Clusters, tmp_path: Path, rule: Any, consistency: Any
) -> None:
    def run(steps: range, **options: Any) -> Tensor:
        workers = cluster(3)
        bag = table(
            ps.EmbeddingBag,
            workers,
            servers=["w1", "w2"],
            optimizer=rule,
            consistency=consistency,
            **options,
        )
        assert bag.tables.version == steps[0]
        for step in steps:
            loss_of(bag(input_of(step))).backward()
            bag.tables.step()
        end: Tensor = bag.rows(EVERY)
        bag.tables.close()
        workers.close()
        return end

    point = ps.Checkpoint(tmp_path, every=1000, resume=True)
    run(range(5), checkpoint=point)
    assert torch.equal(run(range(5, 10), checkpoint=point), run_whole(cluster, rule, consistency))


def run_whole(cluster: Clusters, rule: Any, consistency: Any) -> Tensor:
    bag = table(
        ps.EmbeddingBag, cluster(3), servers=["w1", "w2"], optimizer=rule, consistency=consistency
    )
    for step in range(10):
        loss_of(bag(input_of(step))).backward()
        bag.tables.step()
    end: Tensor = bag.rows(EVERY)
    return end


def test_servers_that_saved_different_versions_find_a_round() -> None:
    """Two trainers join servers of which one has made more steps."""
    spec = TablesSpec("table", 0, ("w0",), ps.Sync(), trainers=2, checkpoint=None)
    shard = TableShard(spec, run="", archive=None)
    shard.restore(ShardSnapshot(2, "another", {}, [], [{"servers": [0, 1], "tables": {}}], {}), [])
    assert [shard.announce(trainer, spec) for trainer in ("a", "b")] == [2, 2]
    joined = [shard.join(trainer, 5) for trainer in ("a", "b")]
    assert [each.result(PATIENCE).version for each in joined] == [5, 5]


def test_a_run_is_resumed_on_as_many_servers(cluster: Clusters, tmp_path: Path) -> None:
    point = ps.Checkpoint(tmp_path, resume=True)
    for servers in (["w1"], ["w1", "w2"]):
        workers = cluster(3)
        if len(servers) == 2:
            with pytest.raises(UsageError, match="resume with the same servers"):
                table(ps.EmbeddingBag, workers, servers=servers, checkpoint=point)
        else:
            bag = table(ps.EmbeddingBag, workers, servers=servers, checkpoint=point)
            push(bag)
            bag.tables.close()
        workers.close()


def test_a_checkpoint_of_another_optimizer_is_refused(cluster: Clusters, tmp_path: Path) -> None:
    point = ps.Checkpoint(tmp_path, resume=True)
    workers = cluster(2)
    bag = table(ps.EmbeddingBag, workers, optimizer=ps.RowAdam(), checkpoint=point)
    push(bag)
    bag.tables.close()
    workers.close()
    with pytest.raises(UsageError, match="another dimension or optimizer"):
        table(ps.EmbeddingBag, cluster(2), optimizer=ps.RowSGD(), checkpoint=point)


def test_without_resume_a_new_run_starts_anew(cluster: Clusters, tmp_path: Path) -> None:
    for _ in range(2):
        workers = cluster(2)
        bag = table(ps.EmbeddingBag, workers, std=0.0, checkpoint=ps.Checkpoint(tmp_path, every=1))
        assert (bag.tables.version, row(bag)) == (0, 0.0)
        push(bag)
        bag.tables.close()
        workers.close()

"""Servers are killed at planned points and restarted: no acknowledged step is lost or repeated."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import ps
from telegrad.agent import Agent
from telegrad.errors import PeerLost, UsageError
from telegrad.ps.messages import worker_of
from telegrad.ps.server import service
from telegrad.ps.server.checkpoint import CheckpointArchive
from telegrad.ps.server.registry import value_or_deferred
from telegrad.ps.server.service import ParameterShards
from telegrad.ps.server.shard import ParameterShard
from telegrad.ps.trainer.shard_client import ShardClient
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE, until
from tests.ps import training
from tests.ps.accidents import Accidents, accident_points, snapshot, when_cut_off
from tests.ps.training import Trainers, check_same, model

Clusters = Callable[..., LocalCluster]
Make = Callable[[LocalCluster], Trainers]
STEPS = 12


def undisturbed(trainers: int, steps: int, **options: Any) -> nn.Module:
    net = model()
    training.train(
        torch.optim.SGD(net.parameters(), **options), net, range(steps), list(range(trainers))
    )
    return net


@pytest.fixture
def started(trainers_of: Make) -> Iterator[Callable[..., Any]]:
    """Starts trainers that train while the test does something to their servers."""
    threads: list[threading.Thread] = []

    def start(
        cluster: LocalCluster, count: int, first: int, **options: Any
    ) -> Callable[[], list[nn.Module]]:
        nets: list[nn.Module] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                nets.extend(trainers_of(cluster).train(count, STEPS, first, **options))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        threads.append(thread)
        thread.start()

        def ended() -> list[nn.Module]:
            thread.join(PATIENCE)
            assert not errors, errors
            return nets

        return ended

    yield start
    for thread in threads:
        thread.join(PATIENCE)


@accident_points(ParameterShard, {})
def test_chaos_ends_where_an_undisturbed_run_does(
    cluster: Clusters,
    started: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: Any,
    method: str,
    plan: list[int],
    servers: list[str],
) -> None:
    """With every step on disk before it is acknowledged, nothing is lost, momentum included."""
    workers = cluster(4)
    accidents = Accidents(where, method, plan, monkeypatch)
    rule = ps.Checkpoint(tmp_path, every=1, wait=True)
    ended = started(workers, 2, 2, servers=servers, checkpoint=rule, lr=0.1, momentum=0.9)
    for _ in plan:
        accidents.happen(workers)
    expected = undisturbed(2, STEPS, lr=0.1, momentum=0.9)
    for net in ended():
        check_same(net, expected)


@pytest.mark.parametrize("servers", [["w0"], ["w0", "w1"]], ids=len)
def test_trainers_bring_back_what_a_server_had_not_saved(
    cluster: Clusters,
    started: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    servers: list[str],
) -> None:
    workers = cluster(5)
    accidents = Accidents(ParameterShard, "apply", [9], monkeypatch)
    rule = ps.Checkpoint(tmp_path, every=1000)
    ended = started(workers, 3, 2, servers=servers, checkpoint=rule, lr=0.1)
    accidents.happen(workers)
    expected = undisturbed(3, STEPS, lr=0.1)
    for net in ended():
        check_same(net, expected)


@pytest.mark.parametrize("rule", [ps.Async(), ps.Stale(5)], ids=repr)
def test_a_step_that_another_trainer_brings_back_counts_once(
    cluster: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Any
) -> None:
    """The server dies before its reply, without a checkpoint; another trainer has the version."""
    workers = cluster(3)
    point = ps.Checkpoint(tmp_path, every=1000)
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    first, second = (
        ps.Optimizer(net, "w0", agent=workers[worker], consistency=rule, checkpoint=point, lr=1.0)
        for net, worker in zip(nets, ("w1", "w2"), strict=True)
    )
    before = nets[0].weight.detach().clone()
    for net in nets:
        net.weight.grad = torch.ones_like(net.weight)
    pushed, lost, brought = threading.Event(), threading.Event(), threading.Event()
    push, rejoin = value_or_deferred, ShardClient._rejoin

    def answer_later(future: Any) -> Any:
        answer = push(future)
        if not pushed.is_set():
            pushed.set()
            assert lost.wait(PATIENCE)
        return answer

    def rejoin_later(self: ShardClient, acknowledged: int) -> None:
        if self is first._clients[0]:
            assert brought.wait(PATIENCE)
        rejoin(self, acknowledged)

    monkeypatch.setattr(service, "value_or_deferred", answer_later)
    monkeypatch.setattr(ShardClient, "_rejoin", rejoin_later)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(first.step)
        assert pushed.wait(PATIENCE)
        second.step()
        torch.testing.assert_close(nets[1].weight.detach(), before - 2)
        when_cut_off(workers["w0"], lost.set)
        workers.kill("w0")
        workers.join("w0", 0)
        second.step()
        brought.set()
        step.result(PATIENCE)
    torch.testing.assert_close(nets[0].weight.detach(), before - 3)


def test_without_checkpoints_a_dead_server_is_an_error(cluster: Clusters) -> None:
    workers = cluster(2)
    net = model()
    optimizer = ps.Optimizer(net, servers="w1", agent=workers["w0"], lr=0.1)
    training.train(optimizer, net, range(1), [0])
    workers.kill("w1")
    with pytest.raises(PeerLost, match="w1"):
        training.train(optimizer, net, range(1), [0])


def test_patience_has_an_end(cluster: Clusters, tmp_path: Path) -> None:
    workers = cluster(2)
    net = model()
    rule = ps.Checkpoint(tmp_path)
    optimizer = ps.Optimizer(
        net, servers="w1", agent=workers["w0"], checkpoint=rule, patience=0.05, lr=0.1
    )
    workers.kill("w1")
    with pytest.raises(PeerLost, match="w1"):
        training.train(optimizer, net, range(1), [0])


# Checkpoints


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor])
@pytest.mark.parametrize("rule", [ps.Sync(), ps.Async()], ids=repr)
def test_a_new_run_goes_on_where_an_old_one_ended(
    cluster: Clusters, tmp_path: Path, kind: Any, rule: Any
) -> None:
    expected = model()
    training.train(kind(expected.parameters(), lr=0.01), expected, range(10), [0])
    net = model()
    for steps in (range(5), range(5, 10)):
        workers = cluster(3)
        point = ps.Checkpoint(tmp_path, every=1000, resume=True)
        with ps.Optimizer(
            net,
            ["w1", "w2"],
            kind,
            agent=workers["w0"],
            consistency=rule,
            checkpoint=point,
            lr=0.01,
        ) as optimizer:
            assert optimizer.version == steps[0]
            training.train(optimizer, net, steps, [0])
        workers.close()
        # the next run starts with other parameters, and does not use them
        final, net = net, model(seed=1)
    check_same(final, expected)


def test_a_new_run_begins_with_the_newest_version_that_all_servers_have(
    cluster: Clusters, tmp_path: Path
) -> None:
    """One of them was killed before it had saved as much as the other."""
    expected = model()
    training.train(
        torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), expected, range(9), [0]
    )

    def run(first: int, last: int, seed: int) -> nn.Module:
        workers = cluster(3)
        net = model(seed)
        point = ps.Checkpoint(tmp_path, every=2, resume=True, wait=True, keep=3)
        with ps.Optimizer(
            net, ["w1", "w2"], agent=workers["w0"], checkpoint=point, lr=0.1, momentum=0.9
        ) as optimizer:
            assert optimizer.version == first
            training.train(optimizer, net, range(first, last), [0])
        workers.close()
        return net

    run(0, 6, seed=0)
    shutil.rmtree(tmp_path / "default" / "w1" / "6")
    check_same(run(4, 9, seed=1), expected)
    saved = {
        server: sorted(int(each.name) for each in (tmp_path / "default" / server).glob("[0-9]*"))
        for server in ("w1", "w2")
    }
    assert saved == {"w1": [6, 8, 9], "w2": [6, 8, 9]}
    for version in (6, 8):
        shutil.rmtree(tmp_path / "default" / "w1" / str(version))
    shutil.rmtree(tmp_path / "default" / "w2" / "9")
    with pytest.raises(UsageError, match="none in common"):
        run(9, 9, seed=0)


def test_a_checkpoint_of_something_else_is_refused(cluster: Clusters, tmp_path: Path) -> None:
    point = ps.Checkpoint(tmp_path, resume=True)
    workers = cluster(3)
    with ps.Optimizer(model(), ["w1"], agent=workers["w0"], checkpoint=point, lr=0.1):
        pass
    workers.close()
    workers = cluster(3)
    with pytest.raises(UsageError, match="another number of servers"):
        ps.Optimizer(model()[:3], ["w1"], agent=workers["w0"], checkpoint=point, lr=0.1)


def test_without_resume_a_new_run_starts_anew(cluster: Clusters, tmp_path: Path) -> None:
    for _ in range(2):
        workers = cluster(2)
        net = model()
        with ps.Optimizer(
            net, "w1", agent=workers["w0"], checkpoint=ps.Checkpoint(tmp_path, every=1), lr=0.1
        ) as made:
            assert made.version == 0
            training.train(made, net, range(3), [0])
        workers.close()


def in_the_foreground(job: Callable[[], None]) -> None:
    job()


def test_an_archive_keeps_the_newest_and_ignores_what_is_not_whole(tmp_path: Path) -> None:
    archive = CheckpointArchive(ps.Checkpoint(tmp_path, keep=2), "default", "w0", in_the_foreground)
    for version in (1, 2, 10):
        archive.save(snapshot(version))
    (tmp_path / "default" / "w0" / "11.new").mkdir()
    assert archive.versions() == [2, 10]
    found = archive.newest()
    assert found is not None
    assert (found.version, found.applied, found.groups) == (10, {"a": 10}, [{"lr": 0.1}])
    assert torch.equal(found.values["weight"], torch.full((3,), 10.0))


def test_what_cannot_be_written_is_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = CheckpointArchive(ps.Checkpoint(tmp_path), "default", "w0", in_the_foreground)

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        archive.save(snapshot(1))
        assert archive.problem is not None
        assert "no space left" in archive.problem
        with pytest.raises(UsageError, match="no space left"):
            archive.write_now(snapshot(1))
    assert list((tmp_path / "default" / "w0").iterdir()) == []  # what was begun takes up no space
    archive.save(snapshot(3))
    state: Any = (archive.versions(), archive.problem)  # mypy would take `problem` for text
    assert state == ([3], None)


def test_writing_goes_on_beside_training_and_the_newest_wins(tmp_path: Path) -> None:
    jobs: list[Callable[[], None]] = []
    archive = CheckpointArchive(ps.Checkpoint(tmp_path), "default", "w0", jobs.append)
    for version in (1, 2, 3):
        archive.save(snapshot(version))
    assert archive.versions() == []
    (job,) = jobs
    job()
    archive.finish()
    assert archive.versions() == [3]


def test_an_archive_answers_for_what_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = CheckpointArchive(ps.Checkpoint(tmp_path), "default", "w0", in_the_foreground)
    archive.save(snapshot(1))
    assert archive.find(2) is None
    assert archive.members() == ([], False)
    folder = tmp_path / "default" / "w0"
    (folder / "members.json").write_text("{")
    assert archive.members() == ([], False)
    assert "members.json cannot be used" in caplog.text
    assert repr(archive) == f"<CheckpointArchive {folder}: versions [1]>"
    shutil.rmtree(folder)
    assert (archive.versions(), archive.newest()) == ([], None)


def test_a_version_that_is_written_again_replaces_the_first(tmp_path: Path) -> None:
    archive = CheckpointArchive(ps.Checkpoint(tmp_path), "default", "w0", in_the_foreground)
    archive.save(snapshot(1))
    archive.save(snapshot(1)._replace(applied={"b": 7}))
    found = archive.newest()
    assert found is not None
    assert found.applied == {"b": 7}


def test_its_rules_are_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="every"):
        ps.Checkpoint(tmp_path, every=0)


# Trainers


def test_trainers_die_and_others_take_their_place(cluster: Clusters) -> None:
    """At planned steps a trainer is killed after it sent its gradients, and a new one joins."""
    workers = cluster(7)
    servers = ["w0", "w1"]
    expected = model()
    local = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)

    def begin(worker: str) -> tuple[nn.Module, ps.Optimizer]:
        net = model(seed=int(worker[1:]))
        return net, ps.Optimizer(net, servers, agent=workers[worker], lr=0.1, momentum=0.9)

    def round_of(alive: dict[str, tuple[nn.Module, ps.Optimizer]], step: int) -> None:
        numbers = [int(worker[1:]) for worker in alive]
        with ThreadPoolExecutor(len(alive)) as pool:
            each = [
                pool.submit(training.train, optimizer, net, range(step, step + 1), [number])
                for (net, optimizer), number in zip(alive.values(), numbers, strict=True)
            ]
            for trained in each:
                trained.result(PATIENCE)
        training.train(local, expected, range(step, step + 1), numbers)
        for net, _ in alive.values():
            check_same(net, expected)

    first = begin("w2")
    expected.load_state_dict(first[0].state_dict())
    alive = {"w2": first, "w3": begin("w3"), "w4": begin("w4")}
    round_of(alive, 0)
    for step, victim, newcomer in ((1, "w3", "w5"), (2, "w2", "w6")):
        net, optimizer = alive.pop(victim)
        with ThreadPoolExecutor(1) as pool:
            doomed = pool.submit(
                training.train, optimizer, net, range(step, step + 1), [int(victim[1:])]
            )
            shards = [
                workers[server]._runtime.service(ParameterShards).find("default")
                for server in servers
            ]

            def victim_reported(victim: str = victim, shards: list[Any] = shards) -> bool:
                return all(_has(each, workers[victim]) for each in shards)

            until(victim_reported)
            workers.kill(victim)
            assert doomed.exception(PATIENCE) is not None

        def victim_left(victim: str = victim, shards: list[Any] = shards) -> bool:
            return not any(_has(each, workers[victim]) for each in shards)

        until(victim_left)
        round_of(alive, step)
        alive[newcomer] = begin(newcomer)
        check_same(alive[newcomer][0], expected)
    round_of(alive, 3)


def _has(shard: ParameterShard, agent: Agent) -> bool:
    """Has this trainer reported in the round that is under way?"""
    return agent._runtime.local_member.incarnation in map(worker_of, shard.waiting)

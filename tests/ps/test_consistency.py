"""Who waits for whom, what is stale and what is dropped; who joins and leaves meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import ps
from telegrad.errors import CallTimeout, JoinError, StaleReference
from telegrad.ps.server import service
from telegrad.ps.server.shard import ParameterShard
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE, until
from tests.ps.training import model

Clusters = Callable[..., LocalCluster]


class Trainer:
    """A trainer whose steps the test starts one by one. Its gradients are all `gradient`."""

    def __init__(self, cluster: LocalCluster, worker: str, rule: Any, **options: Any) -> None:
        self.net = model(seed=int(worker[1:]))
        self.agent = cluster[worker]
        self._thread = ThreadPoolExecutor(1)
        options = {"lr": 1.0, "servers": "w0", **options}
        self.joined = self._thread.submit(
            ps.Optimizer, self.net, consistency=rule, agent=self.agent, **options
        )

    @property
    def optimizer(self) -> ps.Optimizer:
        return self.joined.result(PATIENCE)

    def begin(self, gradient: float = 1.0) -> Future[Any]:
        for each in self.net.parameters():
            each.grad = torch.full_like(each, gradient)
        return self._thread.submit(self.optimizer.step)

    def step(self, gradient: float = 1.0) -> None:
        self.begin(gradient).result(PATIENCE)

    def weight(self) -> float:
        """One of the parameters, once this trainer has them; all change by the same."""
        self.joined.result(PATIENCE)
        return float(next(self.net.parameters()).detach().flatten()[0])

    def close(self) -> None:
        self._thread.submit(self.optimizer.close).result(PATIENCE)

    def end(self) -> None:
        self._thread.shutdown()


@pytest.fixture
def trainer() -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []

    def make(*args: Any, **options: Any) -> Trainer:
        made.append(Trainer(*args, **options))
        return made[-1]

    yield make
    while made:
        made.pop().end()


def shard(cluster: LocalCluster) -> ParameterShard:
    return cluster["w0"]._runtime.service(service.ParameterShards).find("default")


def waiting(cluster: LocalCluster, trainer: Trainer) -> Callable[[], bool]:
    return lambda: trainer.optimizer._trainer in shard(cluster).waiting


def two(
    cluster: LocalCluster, trainer: Callable[..., Trainer], rule: Any
) -> tuple[Trainer, Trainer]:
    first, second = (trainer(cluster, worker, rule, trainers=2) for worker in ("w1", "w2"))
    first.joined.result(PATIENCE)
    second.joined.result(PATIENCE)
    return first, second


def test_a_round_waits_for_every_trainer(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(3)
    a, b = two(workers, trainer, ps.Sync())
    before = a.weight()
    step = a.begin(1.0)
    until(waiting(workers, a))
    assert not step.done()
    b.step(3.0)
    step.result(PATIENCE)
    assert a.weight() == b.weight() == before - 2.0
    assert (a.optimizer.staleness, a.optimizer.version) == (0, 1)


def test_who_leaves_is_not_waited_for(cluster: Clusters, trainer: Callable[..., Trainer]) -> None:
    workers = cluster(3)
    a, b = two(workers, trainer, ps.Sync())
    step = a.begin()
    until(waiting(workers, a))
    b.close()
    step.result(PATIENCE)
    a.step()
    assert a.optimizer.version == 2


def test_shutdown_leaves_first(cluster: Clusters, trainer: Callable[..., Trainer]) -> None:
    workers = cluster(3)
    a, b = two(workers, trainer, ps.Sync())
    step = a.begin()
    until(waiting(workers, a))
    assert b.agent.shutdown(timeout=0.1) == ("w0", "w1")
    step.result(PATIENCE)


def test_a_killed_trainer_leaves_the_round(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(4)
    a, b, c = (trainer(workers, worker, ps.Sync(), trainers=3) for worker in ("w1", "w2", "w3"))
    before = a.weight()
    doomed = b.begin(100.0)
    until(waiting(workers, b))
    steps = [a.begin(1.0)]
    until(waiting(workers, a))
    workers.kill("w2")
    assert doomed.exception(PATIENCE) is not None
    until(lambda: not waiting(workers, b)())
    assert not steps[0].done()
    c.step(3.0)
    steps[0].result(PATIENCE)
    assert a.weight() == c.weight() == before - 2.0


def test_a_quorum_drops_who_comes_late(cluster: Clusters, trainer: Callable[..., Trainer]) -> None:
    workers = cluster(4)
    a, b, c = (
        trainer(workers, worker, ps.Sync(quorum=2), trainers=3) for worker in ("w1", "w2", "w3")
    )
    before = a.weight()
    first = a.begin(1.0)
    b.step(3.0)
    first.result(PATIENCE)
    assert c.optimizer.dropped == 0
    c.step(100.0)
    assert a.weight() == b.weight() == c.weight() == before - 2.0
    assert (c.optimizer.dropped, c.optimizer.staleness) == (1, 1)
    second = c.begin(1.0)
    a.step(1.0)
    second.result(PATIENCE)
    assert c.weight() == before - 3.0
    assert c.optimizer.dropped == 1


def test_async_never_waits_and_says_how_stale(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(3)
    a, b = two(workers, trainer, ps.Async())
    before = a.weight()
    for _ in range(5):
        a.step(1.0)
    assert a.optimizer.staleness == 0
    b.step(2.0)
    assert b.optimizer.staleness == 5
    assert b.weight() == before - 7.0
    b.step(1.0)
    assert b.optimizer.staleness == 0


def test_the_fastest_waits_when_it_is_too_far_ahead(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(3)
    a, b = two(workers, trainer, ps.Stale(3))
    before = a.weight()
    a.step()
    a.step()
    third = a.begin()
    until(waiting(workers, a))
    assert not third.done()
    b.step()
    assert b.optimizer.staleness == 3
    third.result(PATIENCE)
    assert a.weight() == b.weight() == before - 4.0  # what it waited for is in what it got
    fourth = a.begin()
    until(waiting(workers, a))
    b.close()  # and nobody is slower any more
    fourth.result(PATIENCE)


def test_who_waits_in_vain_for_others_to_come_leaves(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(3, join_timeout=0.2)
    alone = trainer(workers, "w1", ps.Sync(), trainers=3)
    assert isinstance(alone.joined.exception(PATIENCE), JoinError)
    assert shard(workers).members == set()


@pytest.mark.parametrize("rule", [ps.Sync(), ps.Sync(quorum=2), ps.Async(), ps.Stale(1)], ids=repr)
def test_who_joins_gets_the_current_model(
    cluster: Clusters, trainer: Callable[..., Trainer], rule: Any
) -> None:
    workers = cluster(4)
    a = trainer(workers, "w2", rule, servers=["w0", "w1"])
    for _ in range(3):
        a.step()
    b = trainer(workers, "w3", rule, servers=["w0", "w1"])
    assert b.optimizer.version == 3
    assert b.weight() == a.weight()
    both = a.begin(), b.begin()
    for step in both:
        step.result(PATIENCE)
    assert shard(workers).version == (4 if isinstance(rule, ps.Sync) else 5)


def one_joins_in_a_round(
    workers: LocalCluster, trainer: Callable[..., Trainer]
) -> tuple[Trainer, Trainer, Future[None], Trainer]:
    """Two trainers, of which the first has begun a step, and one that waits for the next round."""
    servers = ["w0", "w1"]
    a, b = (
        trainer(workers, worker, ps.Sync(), servers=servers, trainers=2) for worker in ("w2", "w3")
    )
    assert a.weight() == b.weight()
    step = a.begin()
    until(waiting(workers, a))
    c = trainer(workers, "w4", ps.Sync(), servers=servers)
    until(lambda: len(shard(workers).members) == 3)
    return a, b, step, c


def test_who_joins_in_the_middle_of_a_round_starts_with_the_next(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(5)
    a, b, step, c = one_joins_in_a_round(workers, trainer)
    assert not c.joined.done()
    b.step()
    step.result(PATIENCE)
    assert c.optimizer.version == 1
    assert c.weight() == a.weight()
    steps = a.begin(), b.begin()
    until(waiting(workers, a))
    until(waiting(workers, b))
    assert not any(each.done() for each in steps)
    c.step()
    for each in steps:
        each.result(PATIENCE)
    assert a.weight() == c.weight()


def test_who_waits_for_a_round_to_end_starts_when_everybody_in_it_has_died(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(5)
    _, _, doomed, c = one_joins_in_a_round(workers, trainer)
    for worker in ("w2", "w3"):
        workers.kill(worker)
    assert doomed.exception(PATIENCE) is not None
    before = c.weight()
    c.step()
    assert (c.optimizer.version, c.weight()) == (2, before - 1.0)


def test_a_worker_may_have_one_trainer_after_the_other(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(2)
    first = trainer(workers, "w1", ps.Sync(), name="same")
    first.step()
    first.step()
    first.close()
    second = trainer(workers, "w1", ps.Sync(), name="same")
    assert second.weight() == first.weight()
    second.step()  # its first, which is not one of the other's again
    assert second.weight() == first.weight() - 1.0


def test_a_push_that_is_repeated_counts_once(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(2)
    a = trainer(workers, "w1", ps.Async())
    a.step()
    after = a.weight()
    again: Any = ("default", a.optimizer._trainer, 1, 0, {}, None, True)
    answer = a.agent.call("w0", service.push, *again)
    assert answer.version == 1
    assert float(answer.values[:8].view(torch.float64)) == after
    with pytest.raises(StaleReference):
        a.agent.call("w0", service.push, "default", "a stranger", *again[2:])


@pytest.mark.parametrize("rule", [ps.Async(), ps.Stale(2), ps.Sync(quorum=1)], ids=repr)
def test_nobody_sees_a_version_that_is_half_written(cluster: Clusters, rule: Any) -> None:
    """All parameters are equal in every version, so what is not equal was torn."""
    workers = cluster(4)

    def work(worker: str) -> int:
        net = nn.Linear(300, 300)
        for each in net.parameters():
            nn.init.zeros_(each)
        torn = 0
        with ps.Optimizer(
            net, servers="w0", agent=workers[worker], consistency=rule, lr=1.0
        ) as optimizer:
            for _ in range(100):
                for each in net.parameters():
                    each.grad = torch.ones_like(each)
                optimizer.step()
                torn += any(bool((each != net.bias[0]).any()) for each in net.parameters())
        return torn

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, ["w1", "w2", "w3"])) == [0, 0, 0]


def test_an_error_of_the_optimizer_reaches_every_trainer(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(3)
    a, b = (
        trainer(workers, worker, ps.Sync(), trainers=2, optimizer=Failing)
        for worker in ("w1", "w2")
    )
    steps = a.begin(), b.begin()
    for step in steps:
        assert "not today" in str(step.exception(PATIENCE))


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ArithmeticError("not today")


def test_trainers_that_wait_for_each_other_in_two_quorums_are_told(cluster: Clusters) -> None:
    """Of four trainers that step two models, two are in each, and each waits for three."""
    workers = cluster(5, join_timeout=4.0)
    names = [f"w{number}" for number in range(1, 5)]

    def made(worker: str, name: str) -> tuple[nn.Linear, ps.Optimizer]:
        net = nn.Linear(1, 1)
        rule = ps.Sync(quorum=3)
        return net, ps.Optimizer(
            net, "w0", agent=workers[worker], name=name, trainers=4, consistency=rule, lr=0.1
        )

    def step(pair: tuple[nn.Linear, ps.Optimizer]) -> None:
        pair[0](torch.ones(1, 1)).sum().backward()
        pair[1].step()

    with ThreadPoolExecutor(4) as pool:
        first = list(pool.map(lambda worker: made(worker, "first"), names))
        second = list(pool.map(lambda worker: made(worker, "second"), names))
        waiting = [pool.submit(step, pair) for pair in (*first[:2], *second[2:])]
        errors = [each.exception(PATIENCE) for each in waiting]
    for error in errors:
        assert isinstance(error, CallTimeout)
        assert "with a quorum" in str(error)


def test_the_steps_of_a_single_quorum_have_no_limit(
    cluster: Clusters, trainer: Callable[..., Trainer]
) -> None:
    workers = cluster(3)
    a, _ = two(workers, trainer, ps.Sync(quorum=2))
    assert a.optimizer._registration.step_timeout is None
    other = trainer(workers, "w1", ps.Sync(), name="other")
    assert a.optimizer._registration.step_timeout is None
    assert other.optimizer._registration.step_timeout is None

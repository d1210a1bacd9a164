"""The names of parameter servers if a worker creates several optimizers."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import ps
from telegrad.errors import UsageError
from telegrad.ps.server.service import ParameterShards
from telegrad.ps.trainer.trainer_registry import TrainerRegistry
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE, until

Clusters = Callable[..., LocalCluster]


def step(optimizer: ps.Optimizer, net: nn.Module) -> None:
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_optimizers_without_names_are_of_different_parameter_servers(cluster: Clusters) -> None:
    """The n-th of one worker trains with the n-th of another, even if earlier ones are closed."""
    workers = cluster(3)

    def train(number: int) -> list[float]:
        agent = workers[f"w{1 + number}"]
        found = []
        optimizers = []
        for model in range(3):
            net = nn.Linear(2, 1, bias=False)
            nn.init.constant_(net.weight, model + 100 * number)
            optimizers.append(ps.Optimizer(net, "w0", lr=1.0, trainers=2, agent=agent))
            step(optimizers[-1], net)
            if model == 0:
                optimizers[-1].close()
            found.append(net.weight[0, 0].item())
        assert [each.name for each in optimizers] == ["default", "default-2", "default-3"]
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, range(2), timeout=PATIENCE)
    assert first == second
    assert all(value % 100 == (model - 1) % 100 for model, value in enumerate(first))


def test_a_name_that_is_in_use_is_an_error(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]
    net = nn.Linear(2, 1)
    with ps.Optimizer(net, "w1", name="a", lr=0.1, agent=agent) as optimizer:
        with pytest.raises(
            UsageError, match="already a trainer of parameter server 'a', and a second"
        ):
            ps.Optimizer(nn.Linear(2, 1), "w1", name="a", lr=0.1, agent=agent)
        step(optimizer, net)
    # it goes on with that server
    with ps.Optimizer(net, "w1", name="a", lr=0.1, agent=agent) as optimizer:
        assert optimizer.version == 1
    table = ps.Embedding(5, 2, "w1", name="b", agent=agent)
    with pytest.raises(UsageError, match="already a trainer of tables 'b'"):
        ps.Embedding(5, 2, "w1", name="b", agent=agent)
    other, third = ps.Embedding(5, 2, "w1", agent=agent), ps.EmbeddingBag(5, 2, "w1", agent=agent)
    assert [table.name, other.name, third.name] == ["b", "table", "table-2"]


def test_one_that_could_not_be_made_takes_no_name(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]
    with pytest.raises(UsageError, match="several times in a step"):
        ps.Optimizer(nn.Linear(2, 1), "w1", optimizer=torch.optim.LBFGS, agent=agent)
    with ps.Optimizer(nn.Linear(2, 1), "w1", lr=0.1, agent=agent) as optimizer:
        assert optimizer.name == "default"


@pytest.mark.parametrize("make", ["optimizer", "table"])
def test_one_that_is_dropped_leaves(cluster: Clusters, make: str) -> None:
    workers = cluster(3)
    agent = workers["w0"]

    def made(agent: Any) -> Any:
        if make == "table":
            return ps.Embedding(5, 2, "w1", name="a", agent=agent)
        return ps.Optimizer(nn.Linear(2, 1), "w1", name="a", lr=0.1, agent=agent)

    def members() -> set[str]:
        held = workers["w1"]._runtime.service(ParameterShards)._registry._shards
        return next(iter(held.values())).members

    dropped, other = made(agent), made(workers["w2"])
    assert len(members()) == 2
    del dropped
    gc.collect()
    agent._runtime.service(TrainerRegistry)._check_collected()  # as the clock does
    until(lambda: len(members()) == 1)
    again = made(agent)
    assert len(members()) == 2
    for each in (again, other):
        each.close() if make == "optimizer" else each.tables.close()


def test_copies_of_a_model_with_tables_use_the_same_rows(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]
    net = nn.Sequential(ps.Embedding(5, 2, "w1", agent=agent), nn.Linear(2, 1))
    average: Any = torch.optim.swa_utils.AveragedModel(net)
    copied = copy.deepcopy(net)
    with ps.Optimizer(net, "w1", lr=0.1, agent=agent) as optimizer:
        net(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        average.update_parameters(net)
        ids = torch.tensor([1, 2, 3])
        with torch.no_grad():
            for other in (copied, average.module):
                assert torch.equal(other[0](ids), net[0](ids))
        with pytest.raises(UsageError, match="state_dict"):
            torch.save(net, "/dev/null")
    another = nn.Sequential(ps.Embedding(5, 2, "w1", agent=agent), nn.Linear(2, 1))
    another(torch.tensor([1, 2])).sum().backward()
    torch.optim.Adam(another.parameters()).step()  # which leaves the rows alone
    table: Any = another[0]
    assert table.weight.grad is None
    table.tables.step()

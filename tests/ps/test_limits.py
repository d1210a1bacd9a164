"""Models, options and memory at the edge of what parameter servers accept."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import ps
from telegrad.errors import JoinError, StaleReference, UsageError
from telegrad.ps.messages import worker_of
from telegrad.ps.server.registry import ShardRegistry
from telegrad.ps.server.service import ParameterShards
from telegrad.ps.trainer.shard_client import PushRequest
from telegrad.testing import LocalCluster
from telegrad.transport import flat_memory
from tests.local.gates import until
from tests.ps import training
from tests.ps.training import check_same, model

Clusters = Callable[..., LocalCluster]


def test_a_model_that_is_frozen_cannot_be_trained(cluster: Clusters) -> None:
    with pytest.raises(UsageError, match="none of the parameters requires a gradient"):
        ps.Optimizer(model().requires_grad_(False), ["w1"], agent=cluster(2)["w0"], lr=0.1)


class WithEmpty(nn.Module):
    """A model with a parameter that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.net = model()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x) + self.empty.sum()
        return result


def test_a_parameter_without_elements_is_trained_with_the_others(cluster: Clusters) -> None:
    net, local_net = WithEmpty(), WithEmpty()
    optimizer = ps.Optimizer(net, ["w1"], agent=cluster(2)["w0"], lr=0.1)
    local = torch.optim.SGD(local_net.parameters(), lr=0.1)
    for made, trained in ((optimizer, net), (local, local_net)):
        training.train(made, trained, range(3), [0])
    check_same(net, local_net)


def test_an_option_may_be_a_tensor(cluster: Clusters) -> None:
    net, local_net = model(), model()
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = ps.Optimizer(
        net, ["w1"], torch.optim.Adam, agent=cluster(2)["w0"], lr=rate.clone(), foreach=False
    )
    local = torch.optim.Adam(local_net.parameters(), lr=rate.clone(), foreach=False)
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["lr"] = local.param_groups[0]["lr"] = rate / 4
        training.train(optimizer, net, range(step, step + 1), [0])
        training.train(local, local_net, range(step, step + 1), [0])
        check_same(net, local_net)


class Counting(torch.optim.Optimizer):
    """Divide each gradient by a step counter that is a number, and not a tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                total = state.setdefault("total", torch.zeros_like(parameter))
                total.add_(parameter.grad)
                parameter.sub_(group["lr"] * total / state["count"])


def test_the_state_of_an_optimizer_may_hold_numbers(cluster: Clusters) -> None:
    net, local_net = model(), model()
    optimizer = ps.Optimizer(net, ["w1", "w2"], Counting, agent=cluster(3)["w0"], lr=0.1)
    local = Counting(local_net.parameters())
    training.train(optimizer, net, range(3), [0])
    training.train(local, local_net, range(3), [0])
    state = optimizer.state_dict()
    counts = [each["count"] for each in state["state"].values()]
    assert counts == [3] * len(list(net.parameters()))
    local.load_state_dict(state)
    optimizer.load_state_dict(state)
    training.train(optimizer, net, range(3, 5), [0])
    training.train(local, local_net, range(3, 5), [0])
    check_same(net, local_net)


# Shared memory


def test_memory_of_another_size_or_owner_is_not_mapped() -> None:
    memory = flat_memory.allocate_shared(100)
    assert memory is not None
    mapped = flat_memory.open_shared(memory.handle)
    assert mapped is not None
    memory.contents[3] = 7
    assert mapped.contents[3] == 7
    assert flat_memory.open_shared(memory.handle._replace(nbytes=99)) is None
    assert flat_memory.open_shared(memory.handle._replace(token=b"x" * 16)) is None
    assert flat_memory.open_shared(memory.handle._replace(descriptor=9999)) is None
    assert memory.tensor_at(0, torch.float32, (0, 3)).shape == (0, 3)


def test_without_memory_files_training_goes_on(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    net, local_net = model(), model()
    optimizer = ps.Optimizer(net, ["w1"], agent=cluster(2)["w0"], lr=0.1)
    training.train(optimizer, net, range(2), [0])
    training.train(torch.optim.SGD(local_net.parameters(), lr=0.1), local_net, range(2), [0])
    check_same(net, local_net)
    assert "private memory on cpu" in repr(optimizer._flat)


# Calls that a server refuses


def test_a_server_refuses_what_cannot_be(cluster: Clusters) -> None:
    workers = cluster(2)
    optimizer = ps.Optimizer(model(), ["w1"], agent=workers["w0"], lr=0.1)
    shards = workers["w1"]._runtime.service(ParameterShards)
    shard = shards.find("default")
    (client,) = optimizer._clients
    shard._shared_gradients.clear()
    with pytest.raises(UsageError, match="got a push without gradients"):
        client.start_push(PushRequest(1, 0, {})).wait()
    shards.create(client.spec, torch.zeros(1), None)  # it exists and is used
    assert shards.find("default") is shard
    with pytest.raises(StaleReference):
        shards.find("another")


def test_a_server_does_not_admit_trainers_of_a_lost_worker(cluster: Clusters) -> None:
    workers = cluster(2)
    optimizer = ps.Optimizer(model(), ["w1"], agent=workers["w0"], lr=0.1)
    trainer = optimizer._trainer
    registry = workers["w1"]._runtime.service(ShardRegistry)
    registry.reject_if_lost(trainer)
    workers.kill("w0")
    until(lambda: workers["w1"]._runtime.is_lost(worker_of(trainer)))
    with pytest.raises(JoinError, match="has given up the worker of this trainer"):
        registry.reject_if_lost(trainer)
    assert "ParameterShard of 'default'" in repr(registry)

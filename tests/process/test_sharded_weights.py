"""Trainers with FSDP publish their shards, and workers with tensor parallelism get theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from telegrad import Agent, Config
from telegrad.weights import Publisher, Subscriber
from tests.process.fleet import Fleet

pytestmark = pytest.mark.process

TRAINERS, WORKERS = 2, 2
PATIENCE = 40.0  # seconds
_here: dict[str, Any] = {}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def join(rank: int, size: int, folder: str) -> None:
    """Ranks 0 and 1 are a group of trainers, the others a group of workers."""
    torch.set_num_threads(1)
    is_trainer = rank < TRAINERS
    group = "trainers" if is_trainer else "workers"
    place, places = (rank, TRAINERS) if is_trainer else (rank - TRAINERS, WORKERS)
    store = dist.FileStore(f"{folder}/{group}", places)
    dist.init_process_group("gloo", store=store, rank=place, world_size=places)
    config = Config(secret="for the tests of sharded weights")
    agent = Agent(f"w{rank}", store=dist.FileStore(f"{folder}/store", -1), config=config)
    agent.open()
    _here.update(agent=agent, model=model())


def open_trainer() -> None:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  # it takes long to import

    sharded = fully_shard(_here["model"], mesh=dist.init_device_mesh("cpu", (TRAINERS,)))
    _here["optimizer"] = torch.optim.Adam(sharded.parameters())
    _here["publisher"] = Publisher(sharded, "policy", agent=_here["agent"])


def train(version: int) -> dict[str, torch.Tensor]:
    """Make a step, publish, and return the whole weights."""
    torch.manual_seed(version)
    _here["model"](torch.randn(4, 6)).square().sum().backward()
    _here["optimizer"].step()
    _here["optimizer"].zero_grad()
    _here["publisher"].publish(version)
    whole = {name: each.full_tensor() for name, each in _here["model"].state_dict().items()}
    return {name: each.detach().clone() for name, each in whole.items()}


def open_worker() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415

    mesh = dist.init_device_mesh("cpu", (WORKERS,))
    weights = model().state_dict()
    _here["weights"] = {
        name: distribute_tensor(torch.zeros_like(each), mesh, [Shard(each.dim() - 1)])
        for name, each in weights.items()
    }
    _here["subscriber"] = Subscriber("policy", agent=_here["agent"], weights=_here["weights"])


def pull(version: int) -> dict[str, torch.Tensor]:
    """Wait for a version, and return the whole weights."""
    subscriber: Subscriber = _here["subscriber"]
    assert subscriber.newer_than(version - 1).result(PATIENCE) == version
    assert subscriber.pull_into(_here["weights"], timeout=PATIENCE) == version
    return {name: each.full_tensor().clone() for name, each in _here["weights"].items()}


def leave() -> None:
    _here["agent"].close()
    dist.destroy_process_group()


def test_trainers_with_fsdp_and_workers_with_tensor_parallelism(tmp_path: Path) -> None:
    with Fleet(TRAINERS + WORKERS, join, str(tmp_path)) as fleet:
        trainers, workers = fleet.workers[:TRAINERS], fleet.workers[TRAINERS:]

        def do(group: list[Any], function: Any, *args: Any) -> list[Any]:
            for worker in group:
                worker.begin(function, *args)
            return [worker.result() for worker in group]

        do(trainers, open_trainer)
        do(workers, open_worker)
        for version in range(3):
            expected = do(trainers, train, version)[0]
            for found in do(workers, pull, version):
                assert all(torch.equal(found[name], expected[name]) for name in expected)
        do([*trainers, *workers], leave)

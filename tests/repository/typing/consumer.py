"""A program that uses the public names, for type checkers: mypy and pyright must infer these types.

It is not run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import telegrad
import telegrad.rpc as rpc
from telegrad import Agent, Config, Future, WorkerInfo, autograd, ps
from telegrad.batching import Batching
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.refs import RRef, remote
from telegrad.testing import LocalCluster
from telegrad.weights import StalenessFilter, Versioned


def length(text: str) -> int:
    return len(text)


@telegrad.batched
def double(rows: Tensor) -> Tensor:
    return rows * 2


@telegrad.batched(max_size=8, max_wait=0.01)
def triple(rows: Tensor) -> Tensor:
    return rows * 3


@telegrad.batched
def label(rows: Tensor, names: list[str]) -> list[int]:
    return [len(name) for name in names[: len(rows)]]


class Policy:
    version = 3

    @telegrad.batched
    def act(self, rows: Tensor) -> Tensor:
        return rows * 4

    @telegrad.batched(version=lambda self: self.version)
    def judge(self, rows: Tensor) -> list[float]:
        return [1.0] * len(rows)

    judge_versioned = judge.versioned


@telegrad.expose
def exposed(text: str) -> int:
    return len(text)


def calls(agent: Agent) -> None:
    assert_type(agent.call("w1", length, "abc"), int)
    future = agent.submit("w1", length, "abc")
    assert_type(future, Future[int])
    assert_type(future.wait(), int)
    assert_type(future.result(timeout=1.0), int)
    assert_type(future.exception(), "BaseException | None")
    assert_type(future.cancel(), bool)
    assert_type(agent.get_worker_info(), WorkerInfo)
    assert_type(telegrad.current_agent(), "Agent | None")
    assert_type(double(torch.ones(1)), Tensor)
    assert_type(triple(torch.ones(1)), Tensor)
    assert_type(exposed("abc"), int)


def batches(agent: Agent, policy: Policy) -> None:
    assert_type(double.batching, Batching)
    assert_type(label(torch.ones(1), "a"), int)  # one element, where the function takes lists
    assert_type(agent.call("w1", label, torch.ones(1), names="a"), int)
    assert_type(policy.act(torch.ones(1)), Tensor)
    assert_type(Policy.act.batching, Batching)
    answer = policy.judge_versioned(torch.ones(1))
    assert_type(answer, Versioned[float])
    assert_type(agent.call("w1", double.versioned, torch.ones(1)), Versioned[Tensor])
    assert_type(agent.call("w1", label.versioned, torch.ones(1), "a"), Versioned[int])
    fresh = StalenessFilter(max_staleness=2)
    assert_type(list(fresh([answer])), "list[Versioned[float]]")


async def awaited(agent: Agent) -> None:
    assert_type(await agent.submit("w1", length, "abc"), int)


def torch_names() -> None:
    rpc.init_rpc("w0", rank=0, world_size=2)
    assert_type(rpc.rpc_sync("w1", length, args=("abc",)), int)
    assert_type(rpc.rpc_async("w1", length, args=("abc",)).wait(), int)
    reference = rpc.remote("w1", length, args=("abc",))
    assert_type(reference, RRef[int])
    assert_type(reference.to_here(), int)
    assert_type(rpc.get_worker_info(), WorkerInfo)
    rpc.shutdown()


def references(cluster: LocalCluster) -> None:
    reference = remote("w1", length, ("abc",), agent=cluster["w0"])
    assert_type(reference, RRef[int])
    assert_type(reference.to_here(timeout=1.0), int)
    assert_type(reference.owner(), WorkerInfo)


def gradients(agent: Agent, loss: Tensor) -> None:
    layer = RemoteModule("w1/cpu", nn.Linear, (4, 1), agent=agent)
    optimizer = DistributedOptimizer(torch.optim.SGD, layer.remote_parameters(), lr=0.1)
    with autograd.context(agent=agent) as context_id:
        assert_type(context_id, int)
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)
        assert_type(autograd.get_gradients(context_id), "dict[Tensor, Tensor]")


def parameter_server(agent: Agent, model: nn.Module, servers: Sequence[str]) -> None:
    optimizer = ps.Optimizer(
        model,
        servers=servers,
        optimizer=torch.optim.SGD,
        lr=0.1,
        consistency=ps.Sync(quorum=2),
        agent=agent,
    )
    optimizer.zero_grad()
    optimizer.step()
    optimizer.close()


def settings() -> None:
    config = Config(timeout=None, listen="127.0.0.1")
    assert_type(config.timeout, "float | None")
    assert_type(config.transports, "tuple[str, ...]")

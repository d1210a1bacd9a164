"""Distributed autograd between real processes: one is killed in the middle, or trains with others
by DDP.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import telegrad.rpc as rpc
from telegrad import Config, autograd
from telegrad.errors import PeerLost, UsageError
from tests.process.fleet import Fleet

pytestmark = pytest.mark.process


def join(rank: int, size: int, path: str) -> None:
    config = Config(secret="for the tests of autograd")
    options = rpc.RpcBackendOptions(init_method=f"file://{path}", config=config)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def contexts_here() -> int:
    return rpc._get_current_rpc_agent().statistics().get("autograd_contexts", 0)


# Killed in the middle


def double(x: Tensor) -> Tensor:
    return 2 * x


def double_and_die(x: Tensor) -> Tensor:
    """When its gradient comes back, the process is no more."""
    y = 2 * x
    y.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    return y


def double_through(function: Any, to: str, x: Tensor) -> Tensor:
    result: Tensor = rpc.rpc_sync(to, function, args=(2 * x,))
    return result


def train_until_lost() -> tuple[str, str | None]:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", double_through, args=(double_and_die, "w2", x))
        try:
            autograd.backward(context_id, [y.sum()])
        except PeerLost as error:
            return type(error).__name__, error.peer
    return "none", None


def train() -> list[float]:
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w1", double_through, args=(double, "w0", x))
        autograd.backward(context_id, [y.sum()])
        gradient: list[float] = autograd.get_gradients(context_id)[x].tolist()
        return gradient


def test_a_process_is_killed_during_backward(tmp_path: Path) -> None:
    with Fleet(3, join, str(tmp_path / "store")) as fleet:
        assert fleet[0].do(train_until_lost) == ("PeerLost", "w2")
        assert fleet[0].do(train) == [4, 4, 4]
        assert fleet[0].do(contexts_here) == 0


# With DistributedDataParallel

_state: dict[str, nn.Module] = {}


def layer(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 3, dtype=torch.double)


def inputs_of(rank: int) -> Tensor:
    return torch.linspace(-1, 1 + rank, 12, dtype=torch.double).view(4, 3)


def prepare(rank: int, path: str) -> None:
    """Ranks 0 and 1 train together; rank 2 has a layer that both use."""
    if rank == 2:
        _state["layer"] = layer(2)
        return
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    _state["first"] = DistributedDataParallel(layer(0))
    _state["last"] = DistributedDataParallel(layer(1))


def serve(x: Tensor) -> Tensor:
    result: Tensor = _state["layer"](x).tanh()
    return result


def served_gradients(context_id: int) -> list[Tensor]:
    found = autograd.get_gradients(context_id)
    return [found[parameter] for parameter in _state["layer"].parameters()]


def train_with_others(rank: int) -> list[list[Tensor]]:
    """Local, then remote, then local again; the gradients of one step, in that order."""
    with autograd.context() as context_id:
        y = rpc.rpc_sync("w2", serve, args=(_state["first"](inputs_of(rank)),))
        autograd.backward(context_id, [(_state["last"](y) ** 2).sum()])
        mine = autograd.get_gradients(context_id)
        local = [
            [mine[each].clone() for each in _state[name].parameters()] for name in ("first", "last")
        ]
        remote = rpc.rpc_sync("w2", served_gradients, args=(context_id,))
        return [local[0], remote, local[1]]


def leave(rank: int) -> None:
    if rank < 2:
        dist.destroy_process_group()


def gradients_in_one_process(rank: int) -> list[list[Tensor | None]]:
    layers = [layer(0), layer(2), layer(1)]
    (layers[2](layers[1](layers[0](inputs_of(rank))).tanh()) ** 2).sum().backward()
    return [[parameter.grad for parameter in each.parameters()] for each in layers]


@pytest.mark.slow
def test_data_parallel_layers_around_a_remote_one(tmp_path: Path) -> None:
    """Gradients of replicated layers are averaged, as DDP does; those of the shared one belong to
    each context.
    """
    with Fleet(3, join, str(tmp_path / "store")) as fleet:
        for rank, worker in enumerate(fleet.workers):
            worker.begin(prepare, rank, str(tmp_path / "group"))
        for worker in fleet.workers:
            worker.result()
        for rank in (0, 1):
            fleet[rank].begin(train_with_others, rank)
        found = [fleet[rank].result() for rank in (0, 1)]
        for rank in (0, 1):
            fleet[rank].begin(leave, rank)
        for rank in (0, 1):
            fleet[rank].result()
    alone: list[Any] = [gradients_in_one_process(rank) for rank in (0, 1)]
    for rank in (0, 1):
        for number in (0, 2):
            average = [(a + b) / 2 for a, b in zip(alone[0][number], alone[1][number], strict=True)]
            torch.testing.assert_close(found[rank][number], average)
        torch.testing.assert_close(found[rank][1], alone[rank][1])


# With FSDP2


def prepare_shards(rank: int, path: str) -> None:
    if rank == 0:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        _state["sharded"] = layer(0)
        fully_shard(_state["sharded"], mesh=mesh)
    else:
        _state["layer"] = layer(2)


def train_with_shards() -> tuple[str, list[Tensor], list[Tensor]]:
    """What a pass through a sharded module says; its gradients in the proposed way, and those of
    one process.
    """
    module = _state["sharded"]
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("w1", serve, args=(module(inputs_of(0)),)).sum()
        try:
            autograd.backward(context_id, [loss])
            said = "no error"
        except UsageError as error:
            said = str(error)
    with autograd.context() as context_id:
        output = module(inputs_of(0))
        detached = output.detach().requires_grad_()
        autograd.backward(context_id, [rpc.rpc_sync("w1", serve, args=(detached,)).sum()])
        output.backward(autograd.get_gradients(context_id)[detached])
    gradients: list[Any] = [parameter.grad for parameter in module.parameters()]
    found = [gradient.full_tensor() for gradient in gradients]
    layers = [layer(0), layer(2)]
    layers[1](layers[0](inputs_of(0))).tanh().sum().backward()
    dist.destroy_process_group()
    expected: list[Any] = [parameter.grad for parameter in layers[0].parameters()]
    return said, found, expected


def test_parameters_of_fsdp2_are_refused_with_a_way_out(tmp_path: Path) -> None:
    with Fleet(2, join, str(tmp_path / "store")) as fleet:
        for rank in range(2):
            fleet[rank].do(prepare_shards, rank, str(tmp_path / "gloo"))
        said, found, expected = fleet[0].do(train_with_shards)
    assert "fully_shard" in said
    torch.testing.assert_close(found, expected)

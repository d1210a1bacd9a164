"""A model with a `ps.Optimizer` is an ordinary model: what users do with it works or raises."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from telegrad import ps
from telegrad.errors import UsageError
from telegrad.free_threading import has_gil
from telegrad.testing import LocalCluster

Clusters = Callable[..., LocalCluster]
Train = Callable[[Any, nn.Module, int], None]


class Net(nn.Module):
    """Convolutions, for memory formats, and parameters that are divided between two servers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.second(self.first(images).relu()).mean((2, 3)))
        return found


def images(step: int) -> Tensor:
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step))


def loss(net: nn.Module, step: int) -> Tensor:
    found: Tensor = net(images(step).to(next(net.parameters()).dtype)).square().mean()
    return found


def plain(optimizer: Any, net: nn.Module, step: int) -> None:
    optimizer.zero_grad()
    loss(net, step).backward()
    optimizer.step()


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def compared(cluster: Clusters) -> Callable[..., nn.Module]:
    """Train a model locally and with a parameter server, and compare after every step."""
    workers = cluster(3)

    def compare(
        train: Train = plain,
        change: Callable[[nn.Module], object] = lambda net: None,
        prepare: Callable[[nn.Module], object] = lambda net: None,
        steps: int = 4,
        **options: Any,
    ) -> nn.Module:
        mine, other = Net(), Net()
        for net in (mine, other):
            prepare(net)
        local = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        settings = {"lr": 0.1, "momentum": 0.9, "agent": workers["w0"], **options}
        with ps.Optimizer(mine, ["w1", "w2"], **settings) as remote:
            for step in range(steps):
                if step == 1:
                    change(mine)
                    change(other)
                train(local, other, step)
                train(remote, mine, step)
                close_to(mine, other)
        return mine

    return compare


def close_to(net: nn.Module, other: nn.Module) -> None:
    for mine, its in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-7)
        assert mine.stride() == its.stride()


# Memory


def new_vector(net: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, net.parameters())


def new_data(net: nn.Module) -> None:
    for each in net.parameters():
        each.data = each.data.clone()


def other_weights(net: nn.Module) -> None:
    net.load_state_dict(Net(seed=7).state_dict())


def initialise(net: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    for each in net.parameters():
        nn.init.normal_(each, std=0.1, generator=generator)


CHANGES: list[Callable[[nn.Module], object]] = [
    lambda net: net.to(memory_format=torch.channels_last),
    new_vector,
    new_data,
    lambda net: net.double().float(),
    other_weights,
    initialise,
]


@pytest.mark.parametrize("consistency", [ps.Sync(), ps.Async()], ids=repr)
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_are_moved_or_written_to(
    compared: Any, change: Any, consistency: Any
) -> None:
    compared(change=change, consistency=consistency)


def test_a_channels_last_model_stays_so(compared: Any) -> None:
    net = compared(prepare=lambda net: net.to(memory_format=torch.channels_last))
    assert net.first.weight.is_contiguous(memory_format=torch.channels_last)


def clamped(optimizer: Any, net: nn.Module, step: int) -> None:
    plain(optimizer, net, step)
    with torch.no_grad():
        for each in net.parameters():
            each.clamp_(-0.05, 0.05)


def test_weights_that_are_clipped_after_every_step(compared: Any) -> None:
    compared(train=clamped)


@pytest.mark.parametrize("consistency", [ps.Sync(), ps.Async()], ids=repr)
def test_writes_that_nothing_notices_are_errors(cluster: Clusters, consistency: Any) -> None:
    net = Net()
    options: dict[str, Any] = {"lr": 0.1, "consistency": consistency}
    with ps.Optimizer(net, "w1", agent=cluster(2)["w0"], **options) as optimizer:
        for step in range(12):
            plain(optimizer, net, step)

        def write_and_step() -> None:
            for step in range(12):
                net.head.weight.data.clamp_(-1e-3, 1e-3)
                plain(optimizer, net, step)

        with pytest.raises(UsageError, match=r"'head\.weight' was written to through \.data"):
            write_and_step()


def test_a_swap_with_averaged_weights_takes_nothing_back(cluster: Clusters) -> None:
    """What another trainer did meanwhile stays, since what is written is what was there."""
    workers = cluster(3)
    mine, other = Net(), Net()
    options: dict[str, Any] = {"servers": "w2", "consistency": ps.Async(), "lr": 0.1}
    with (
        ps.Optimizer(mine, agent=workers["w0"], **options) as remote,
        ps.Optimizer(other, agent=workers["w1"], **options) as another,
    ):
        kept = copy.deepcopy(mine.state_dict())
        plain(another, other, 0)
        mine.load_state_dict(Net(seed=3).state_dict())
        mine.load_state_dict(kept)
        remote.step()
    close_to(mine, other)


def test_other_types_and_shapes_are_errors(cluster: Clusters) -> None:
    net = Net()
    with ps.Optimizer(net, "w1", lr=0.1, agent=cluster(2)["w0"]) as optimizer:
        net.double()
        loss(net, 0).backward()
        with pytest.raises(
            UsageError, match=r"'first\.weight' was torch\.float32 .* is torch\.float64"
        ):
            optimizer.step()
        net.float()
        plain(optimizer, net, 1)
        net.head.bias.data = torch.zeros(5)
        with pytest.raises(UsageError, match=r"'head\.bias' .* of shape \(5,\)"):
            optimizer.step()


# Which parameters there are


def test_parameters_that_are_unfrozen(cluster: Clusters, compared: Any) -> None:
    def unfreeze(net: nn.Module) -> None:
        net.requires_grad_(True)

    def freeze(net: nn.Module) -> None:
        net.first.requires_grad_(False)  # type: ignore[union-attr]

    compared(prepare=freeze, change=unfreeze, include_frozen=True)
    net = Net()
    freeze(net)
    with ps.Optimizer(net, "w1", lr=0.1, agent=cluster(2)["w0"]) as optimizer:
        plain(optimizer, net, 0)
        unfreeze(net)
        with pytest.raises(UsageError, match="include_frozen"):
            plain(optimizer, net, 1)


def replace_parameter(net: Any) -> None:
    net.head.weight = nn.Parameter(torch.zeros(2, 4))


def replace_module(net: Any) -> None:
    net.head = nn.Linear(4, 2)


def add_module(net: Any) -> None:
    net.more = nn.Linear(4, 2)


def extend_module(net: Any) -> None:
    net.first.more = nn.Linear(4, 2)  # the first submodule of this module


@pytest.mark.parametrize("change", [replace_parameter, replace_module, add_module, extend_module])
def test_parameters_that_the_optimizer_does_not_know_are_errors(
    cluster: Clusters, change: Any
) -> None:
    workers = cluster(2)
    net, other = Net(), Net()
    with ps.Optimizer(net, "w1", lr=0.1, agent=workers["w0"]) as optimizer:
        net.first.register_buffer("steps", torch.zeros(1))
        net.empty = nn.ReLU()
        plain(optimizer, net, 0)
        change(net)
        with pytest.raises(
            UsageError, match=r"parameters (head|more|first.more)\.weight.* would not be trained"
        ):
            plain(optimizer, net, 1)
    with ps.Optimizer(other.parameters(), "w1", lr=0.1, agent=workers["w0"]) as optimizer:
        change(other)
        plain(optimizer, other, 0)  # torch's optimizers do not know of it either


def test_optimizers_and_parameters_that_servers_cannot_have(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]
    with pytest.raises(UsageError, match="RowAdam"):
        ps.Optimizer(Net(), "w1", optimizer=torch.optim.SparseAdam, agent=agent)
    with pytest.raises(UsageError, match="plain dense tensors"):
        ps.Optimizer(nn.LazyLinear(2), "w1", lr=0.1, agent=agent)
    with pytest.raises(UsageError, match="plain dense tensors"):
        ps.Optimizer(nn.Linear(2, 2, device="meta"), "w1", lr=0.1, agent=agent)
    with torch.inference_mode():
        net = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="inference mode"):
        ps.Optimizer(net, "w1", lr=0.1, agent=agent)


# Gradients


def test_gradients_that_are_kept(cluster: Clusters) -> None:
    """Before and after a step, whole or as views, with the same tensor in every step."""
    workers = cluster(2)
    net = Net()
    kept: list[tuple[Tensor, Tensor]] = []

    def keep() -> None:
        for each in net.parameters():
            assert each.grad is not None
            kept.append((each.grad, each.grad.clone()))
            kept.append((each.grad.view(-1)[:1], each.grad.view(-1)[:1].clone()))

    with ps.Optimizer(net, "w1", lr=0.1, agent=workers["w0"]) as optimizer:
        for step in range(6):
            optimizer.zero_grad()
            loss(net, step).backward()
            if step in (0, 3):
                keep()
            optimizer.step()
            if step in (1, 4):
                optimizer.step()
                keep()
        optimizer.zero_grad()
        optimizer.step()  # zeros go to the server, not into what is kept
    for gradient, copied in kept:
        assert torch.equal(gradient, copied)


def accumulated(optimizer: Any, net: nn.Module, step: int) -> None:
    optimizer.zero_grad(set_to_none=step % 3 == 0)
    for piece in range(2):
        loss(net, 2 * step + piece).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    optimizer.step()
    optimizer.step()  # again, with the same gradients


def differentiated_twice(optimizer: Any, net: nn.Module, step: int) -> None:
    optimizer.zero_grad()
    loss(net, step).backward(create_graph=True)
    penalty = sum(each.grad.square().sum() for each in net.parameters() if each.grad is not None)
    assert isinstance(penalty, Tensor)
    penalty.backward()
    optimizer.step()
    net.zero_grad()  # what refers to its own graph is a circle


def own_gradient_tensors(optimizer: Any, net: nn.Module, step: int) -> None:
    """Gradients are views of a tensor of the user, who zeroes it and never calls `zero_grad`."""
    whole = net.__dict__.setdefault(
        "whole", torch.zeros(sum(each.numel() for each in net.parameters()))
    )
    whole.zero_()
    if step == 0:
        pieces = whole.split([each.numel() for each in net.parameters()])
        for each, piece in zip(net.parameters(), pieces, strict=True):
            each.grad = piece.view(each.shape)
    loss(net, step).backward()
    assert whole.any()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@pytest.mark.parametrize("train", [accumulated, differentiated_twice, own_gradient_tensors])
def test_ways_to_make_gradients(compared: Any, train: Train) -> None:
    compared(train=train)


def test_the_same_gradient_tensor_is_copied_once(cluster: Clusters) -> None:
    net = Net()
    with ps.Optimizer(net, "w1", lr=0.1, agent=cluster(2, transports=("unix",))["w0"]) as optimizer:
        loss(net, 0).backward()
        optimizer.step()
        place = optimizer._flat._tracked[0].address
        assert net.first.weight.grad is not None
        # without the interpreter lock, counts of references do not tell that nothing else uses it
        assert (net.first.weight.grad.data_ptr() == place) == has_gil()
        assert optimizer._flat.in_place
    assert net.first.weight.grad.data_ptr() != place


def test_sparse_gradients_become_dense(cluster: Clusters) -> None:
    mine, other = nn.Embedding(5, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
    other.load_state_dict(mine.state_dict())
    local = torch.optim.SGD(other.parameters(), lr=0.1)
    with ps.Optimizer(mine, "w1", lr=0.1, agent=cluster(2)["w0"]) as remote:
        for optimizer, net in ((local, other), (remote, mine)):
            for _ in range(2):
                optimizer.zero_grad()
                net(torch.tensor([1, 3, 1])).square().sum().backward()
                optimizer.step()
    close_to(mine, other)


# Copies and files


def size(value: object) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def test_files_are_those_of_a_model_that_nobody_trains(cluster: Clusters, tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    net = Net()
    net.head.to(torch.bfloat16)
    sizes = size(net.state_dict()), size(net.head.state_dict()), size(net.head)

    def check() -> None:
        assert (size(net.state_dict()), size(net.head.state_dict()), size(net.head)) == sizes
        safetensors.save_model(net, str(tmp_path / "model.safetensors"))
        safetensors.load_model(net, str(tmp_path / "model.safetensors"))
        assert size(net.head.weight.grad) < 2000

    with ps.Optimizer(net, "w1", lr=0.1, agent=cluster(2)["w0"]) as optimizer:
        for each in net.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        check()
    check()


def test_copies_and_averages_are_independent(compared: Any) -> None:
    averages: list[tuple[nn.Module, nn.Module]] = []

    def train(optimizer: Any, net: nn.Module, step: int) -> None:
        plain(optimizer, net, step)
        if step == 0:
            averages.append((torch.optim.swa_utils.AveragedModel(net), copy.deepcopy(net)))
        average, copied = averages[
            -1 - (len(averages) > 1 and isinstance(optimizer, torch.optim.SGD))
        ]
        average.update_parameters(net)  # type: ignore[operator]
        if step:
            assert not torch.equal(
                copied.get_parameter("head.weight"), net.get_parameter("head.weight")
            )

    compared(train=train, steps=3)


def test_a_compiled_model(cluster: Clusters) -> None:
    mine, other = Net(), Net()
    compiled = torch.compile(mine, backend="aot_eager")
    local = torch.optim.SGD(other.parameters(), lr=0.1)
    with ps.Optimizer(compiled, "w1", lr=0.1, agent=cluster(2)["w0"]) as remote:  # type: ignore[arg-type]
        for step in range(3):
            plain(local, other, step)
            plain(remote, compiled, step)  # type: ignore[arg-type]
    close_to(mine, other)


@pytest.mark.parametrize("transport", ["unix"])
def test_nothing_keeps_a_model_that_was_dropped(cluster: Clusters) -> None:
    net = Net()
    with ps.Optimizer(net, "w1", lr=0.1, agent=cluster(2)["w0"]) as optimizer:
        plain(optimizer, net, 0)
    weight = weakref.ref(net.head.weight)
    assert not net.head.weight._post_accumulate_grad_hooks
    del net, optimizer
    gc.collect()
    assert weight() is None


def test_training_goes_on_with_another_optimizer_after_the_end(compared: Any) -> None:
    net, other = compared(), compared()
    for each in (net, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        plain(optimizer, each, 9)
    close_to(net, other)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix"])
def test_beside_parameters_that_fsdp_has_sharded(transport: str) -> None:
    """They are an error for servers; other parameters can be trained. Gloo leaks a socket."""
    program = f"from {__name__} import train_beside_fsdp; train_beside_fsdp()"
    root = Path(__file__).parents[2]
    # its imports take a while
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100, cwd=root)


def train_beside_fsdp() -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    mine, other = Net(), Net()
    fully_shard(mine.first, mesh=init_device_mesh("cpu", (1,)))
    with LocalCluster(2) as cluster:
        with pytest.raises(UsageError, match=r"'first\.weight' is a DTensor"):
            ps.Optimizer(mine, "w1", lr=0.1, agent=cluster["w0"])
        rest = [*mine.second.parameters(), *mine.head.parameters()]
        sharded = torch.optim.SGD(mine.first.parameters(), lr=0.1)
        local = torch.optim.SGD(other.parameters(), lr=0.1)
        with ps.Optimizer(rest, "w1", lr=0.1, agent=cluster["w0"]) as optimizer:
            for step in range(3):
                sharded.zero_grad()
                plain(optimizer, mine, step)
                sharded.step()
                plain(local, other, step)
    for each, its in zip(mine.parameters(), other.parameters(), strict=True):
        whole = each.full_tensor() if isinstance(each, DTensor) else each
        torch.testing.assert_close(whole, its, rtol=1e-5, atol=1e-7)
    torch.distributed.destroy_process_group()

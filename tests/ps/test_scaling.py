"""GradScaler, autocast, clipping and means, for parameters and tables and for all trainers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import ps
from telegrad.ps.compression import Compressor, unpack
from telegrad.ps.embeddings import row_storage
from telegrad.ps.layout import ParameterLayout
from telegrad.ps.server.shard_optimizer import _mean
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE

Clusters = Callable[..., LocalCluster]
LIMIT = 0.05


class Net(nn.Module):
    """Rows of an embedding, on a server or not, and a layer above."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self.head = nn.Linear(3, 1, bias=False)
        nn.init.constant_(self.head.weight, 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.rows(ids))
        return found


def on_servers(agent: Any, **options: Any) -> Net:
    return Net(
        ps.Embedding(10, 3, "w0", optimizer=ps.RowSGD(lr=0.1), std=0.5, agent=agent, **options)
    )


def here(net: Net, agent: Any) -> Net:
    assert isinstance(net.rows, ps.Embedding)
    return Net(nn.Embedding.from_pretrained(net.rows.rows(torch.arange(10)), freeze=False))


def ids(step: int) -> Tensor:
    return torch.randint(10, (4,), generator=torch.Generator().manual_seed(step))


def scaled_step(
    optimizer: Any, scaler: Any, net: Net, step: int, clip: bool, factor: float = 1.0
) -> None:
    optimizer.zero_grad()
    for piece in range(2):  # accumulated
        with torch.autocast("cpu", enabled=False):
            loss = net(ids(2 * step + piece)).square().mean() * factor
        scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
    scaler.step(optimizer)
    scaler.update()


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("clip", [False, True])
def test_scaling_and_clipping_are_those_of_one_process(cluster: Clusters, clip: bool) -> None:
    """With gradients that are infinite in one of the steps."""
    workers = cluster(2)
    mine = on_servers(workers["w1"])
    other = here(mine, workers["w1"])
    local = torch.optim.SGD(other.parameters(), lr=0.1)
    scales = scaler(), scaler()
    with ps.Optimizer(mine, "w0", lr=0.1, agent=workers["w1"]) as remote:
        for step in range(6):
            factor = math.inf if step == 2 else 1.0
            scaled_step(local, scales[0], other, step, clip, factor)
            scaled_step(remote, scales[1], mine, step, clip, factor)
        assert isinstance(mine.rows, ps.Embedding)
        assert isinstance(other.rows, nn.Embedding)
        torch.testing.assert_close(mine.head.weight, other.head.weight)
        torch.testing.assert_close(mine.rows.rows(torch.arange(10)), other.rows.weight.detach())
        assert scales[0].get_scale() == scales[1].get_scale()
        assert remote.skipped == 1


@pytest.mark.parametrize("servers", [["w0"], ["w0", "w1"]], ids=len)
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_that_one_trainer_skips_all_skip(
    cluster: Clusters, servers: list[str], clip: bool
) -> None:
    workers = cluster(4)

    def train(number: int) -> tuple[list[Tensor], int, int, float]:
        agent = workers[f"w{2 + number}"]
        net, scaling = on_servers(agent, trainers=2), scaler()
        with ps.Optimizer(net, servers, lr=0.1, momentum=0.9, trainers=2, agent=agent) as optimizer:
            for step in range(5):
                factor = math.inf if (step, number) == (2, 1) else 1.0
                scaled_step(optimizer, scaling, net, 10 * step + number, clip, factor)
            assert isinstance(net.rows, ps.Embedding)
            values = [net.head.weight.detach().clone(), net.rows.rows(torch.arange(10))]
            return values, optimizer.version, optimizer.skipped, scaling.get_scale()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, range(2), timeout=PATIENCE)
    expected = here(on_servers(workers["w0"], name="fresh"), workers["w0"])
    groups: list[dict[str, Any]] = [
        {"params": expected.head.parameters(), "momentum": 0.9},
        {"params": expected.rows.parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for step in (0, 1, 3, 4):
        optimizer.zero_grad()
        total = [torch.zeros_like(each) for each in expected.parameters()]
        for number in range(2):
            expected.zero_grad()
            for piece in range(2):
                expected(ids(2 * (10 * step + number) + piece)).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(expected.parameters(), LIMIT)
            for each, gradient in zip(expected.parameters(), total, strict=True):
                assert each.grad is not None
                gradient += each.grad / 2
        for each, gradient in zip(expected.parameters(), total, strict=True):
            each.grad = gradient
        optimizer.step()
    assert isinstance(expected.rows, nn.Embedding)
    for values, version, skipped, _ in (first, second):
        torch.testing.assert_close(values[0], expected.head.weight.detach())
        torch.testing.assert_close(values[1], expected.rows.weight.detach())
        assert (version, skipped) == (5, 1)
    assert (first[3], second[3]) == (2048.0, 512.0)  # each trainer scales with its own factor


def test_without_rounds_a_step_is_skipped_alone(cluster: Clusters) -> None:
    workers = cluster(3)
    options: dict[str, Any] = {"servers": "w0", "lr": 1.0, "consistency": ps.Async()}
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    with (
        ps.Optimizer(nets[0], agent=workers["w1"], **options) as one,
        ps.Optimizer(nets[1], agent=workers["w2"], **options) as other,
    ):
        before = nets[0].weight.item()
        scaling = scaler()
        for optimizer, net, gradient in ((one, nets[0], math.inf), (other, nets[1], 1.0)):
            scaling.scale(torch.ones(1))
            net.weight.grad = torch.full((1, 1), gradient * scaling.get_scale())
            scaling.step(optimizer)
        assert (one.skipped, other.skipped) == (1, 0)
        assert nets[1].weight.item() == pytest.approx(before - 1)


# Means


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("count", [2, 3])
def test_the_mean_of_large_gradients_is_finite(dtype: torch.dtype, count: int) -> None:
    large = torch.full((4,), torch.finfo(dtype).max * 0.75, dtype=dtype)
    torch.testing.assert_close(_mean([large] * count, torch.empty_like(large)), large)
    rows = torch.arange(2)
    found, mean = row_storage._mean([(rows, large.view(2, 2))] * count, count)
    assert torch.equal(found, rows)
    torch.testing.assert_close(mean, large.view(2, 2))


def test_trainers_of_float16_models(cluster: Clusters) -> None:
    workers = cluster(3)
    nets = [nn.Linear(1, 1, bias=False).half() for _ in range(2)]

    def train(number: int) -> None:
        nn.init.zeros_(nets[number].weight)
        with ps.Optimizer(
            nets[number], "w0", lr=1e-5, trainers=2, agent=workers[f"w{1 + number}"]
        ) as optimizer:
            nets[number].weight.grad = torch.full((1, 1), 40000.0, dtype=torch.float16)
            optimizer.step()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, range(2), timeout=PATIENCE))
    for net in nets:
        assert net.weight.item() == pytest.approx(-0.4, rel=1e-2)


# Compression


class Sender:
    """A compressor of two parameters, and the sum of what arrives."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.share = ParameterLayout.of(
            [[(0, "a", torch.zeros(3)), (1, "b", torch.zeros(2))]]
        ).divide(1)[0]
        self.compressor = Compressor(self.share, dtype)
        self.total = torch.zeros(3)
        self.step = 0

    def send(self, gradient: float | None, applied: bool = True) -> None:
        self.step += 1
        flat = torch.zeros(self.share.nbytes, dtype=torch.uint8)
        self.share.parts[0].of(flat).fill_(gradient or 0.0)
        missing = {0} if gradient is None else set()
        received = unpack(self.share, self.compressor.pack(self.step, flat, missing))
        if applied:
            self.compressor.commit()
            if gradient is not None:
                self.total += self.share.parts[0].of(received)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_steps_without_gradients_keep_the_remainder(dtype: torch.dtype) -> None:
    sender = Sender(dtype)
    gradient = 1 + 2**-12
    for _ in range(500):
        sender.send(gradient)
        sender.send(None)
        # dropped, skipped or failed: it counts for nothing
        sender.send(1e3 * gradient, applied=False)
    torch.testing.assert_close(sender.total, torch.full((3,), 500 * gradient), rtol=1e-5, atol=1e-2)


def test_what_is_too_large_is_sent_in_several_steps() -> None:
    sender = Sender(torch.float16)
    for gradient in (70_000.0, 1.0, 1.0):
        sender.send(gradient)
    assert sender.total.tolist() == [70_002.0] * 3


@pytest.mark.parametrize("gradient", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_sent_as_it_is_and_only_once(gradient: float) -> None:
    sender = Sender(torch.float16)
    sender.send(gradient)
    torch.testing.assert_close(sender.total, torch.full((3,), gradient), equal_nan=True)
    sender.total.zero_()
    sender.send(2.0)
    assert sender.total.tolist() == [2.0] * 3


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_skipped_round_keeps_the_remainder_of_all(cluster: Clusters) -> None:
    """What both trainers send in the end is the sum of the gradients of the rounds that counted."""
    workers = cluster(3)
    gradient, rounds = 1 + 2**-9, 40
    turn = threading.Barrier(2)

    def train(number: int) -> float:
        net, scaling = nn.Linear(1, 1, bias=False), torch.amp.GradScaler("cpu", init_scale=1.0)
        nn.init.zeros_(net.weight)
        options: dict[str, Any] = {"lr": 1.0, "trainers": 2, "compression": torch.bfloat16}
        with ps.Optimizer(net, "w0", agent=workers[f"w{1 + number}"], **options) as optimizer:
            for step in range(rounds):
                turn.wait(PATIENCE)
                scaling.scale(torch.ones(1))
                infinite = step % 2 == 1 and number == 1
                net.weight.grad = torch.full((1, 1), math.inf if infinite else gradient)
                scaling.step(optimizer)
                scaling.update(1.0)
        return net.weight.item()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(train, range(2), timeout=PATIENCE))
    assert found == [pytest.approx(-gradient * rounds / 2, abs=2**-8)] * 2

"""Parameter servers whose parameters are on the GPU: the same steps as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import ps
from tests.gpu.group import join, join_without_gpu
from tests.process.fleet import Fleet

STEPS = 6
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "by parameter": (torch.optim.Adafactor, {"lr": 0.01}),
}


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 5)).to(device)


def batch(trainer: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + trainer)
    return torch.randn(8, 20, generator=generator)


def train(
    rank: int, servers: list[str], trainers: int, kind: str, device: str, options: dict[str, Any]
) -> list[Tensor]:
    """Train one model and return its parameters on the CPU."""
    optimizer, settings = OPTIMIZERS[kind]
    model = network(device)
    with ps.Optimizer(
        model, servers, optimizer, trainers=trainers, **settings, **options
    ) as remote:
        for step in range(STEPS):
            remote.zero_grad()
            model(batch(rank, step).to(device)).square().mean().backward()
            remote.step()
        state = remote.state_dict()["state"]
    assert all(
        value.device.type == "cpu" or value.is_cuda
        for each in state.values()
        for value in each.values()
    )
    assert all(
        parameter.device.type == torch.device(device).type for parameter in model.parameters()
    )
    return [parameter.detach().cpu() for parameter in model.parameters()]


def expected(trainers: int, kind: str) -> list[Tensor]:
    """Return the parameters after the same training in one process."""
    optimizer, settings = OPTIMIZERS[kind]
    model = network("cpu")
    local = optimizer(model.parameters(), **settings)
    for step in range(STEPS):
        local.zero_grad()
        loss = torch.stack(
            [model(batch(1 + rank, step)).square().mean() for rank in range(trainers)]
        ).mean()
        loss.backward()
        local.step()
    return [parameter.detach() for parameter in model.parameters()]


def together(
    fleet: Fleet, servers: list[str], kind: str, devices: list[str], **options: Any
) -> list[list[Tensor]]:
    first = len(servers)
    workers = [fleet[first + number] for number in range(len(devices))]
    for number, (worker, device) in enumerate(zip(workers, devices, strict=True)):
        worker.begin(train, 1 + number, servers, len(devices), kind, device, options)
    return [worker.result() for worker in workers]


def check(found: list[list[Tensor]], kind: str, tolerance: float = 1e-5) -> None:
    for mine in found:
        for value, right in zip(mine, expected(len(found), kind), strict=True):
            torch.testing.assert_close(value, right, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_trainers_on_the_gpu_make_the_steps_of_one_process(tmp_path: Path, kind: str) -> None:
    with Fleet(3, join, str(tmp_path / "store"), {}) as fleet:
        check(together(fleet, ["w0"], kind, ["cuda", "cuda"]), kind)


def test_parameters_are_divided_among_servers(tmp_path: Path) -> None:
    with Fleet(4, join, str(tmp_path / "store"), {}) as fleet:
        check(together(fleet, ["w0", "w1"], "Adam", ["cuda", "cuda"]), "Adam")


def test_trainers_on_the_gpu_and_the_cpu_train_together(tmp_path: Path) -> None:
    with Fleet(3, join, str(tmp_path / "store"), {}) as fleet:
        check(together(fleet, ["w0"], "SGD", ["cuda", "cpu"]), "SGD")


def test_a_server_needs_no_gpu(tmp_path: Path) -> None:
    with Fleet(2, join_without_gpu, str(tmp_path / "store"), {}) as fleet:
        fleet[0].begin(train, 1, ["w1"], 1, "Adam", "cuda", {})
        check([fleet[0].result()], "Adam")


def test_gradients_can_be_compressed_on_the_gpu(tmp_path: Path) -> None:
    with Fleet(3, join, str(tmp_path / "store"), {}) as fleet:
        found = together(fleet, ["w0"], "SGD", ["cuda", "cuda"], compression=torch.bfloat16)
    check(found, "SGD", tolerance=0.02)


def test_asynchronous_trainers_end_with_the_same_model(tmp_path: Path) -> None:
    with Fleet(2, join, str(tmp_path / "store"), {}) as fleet:
        check(together(fleet, ["w0"], "SGD", ["cuda"], consistency=ps.Async()), "SGD")


def test_a_checkpoint_made_on_the_gpu_is_gone_on_from(tmp_path: Path) -> None:
    rule = ps.Checkpoint(tmp_path / "saved", every=1, wait=True)
    with Fleet(2, join, str(tmp_path / "first"), {}) as fleet:
        half = together(fleet, ["w0"], "Adam", ["cuda"], checkpoint=rule)
    check(half, "Adam")
    again = ps.Checkpoint(tmp_path / "saved", every=1, wait=True, resume=True)
    with Fleet(2, join, str(tmp_path / "second"), {}) as fleet:
        (whole,) = together(fleet, ["w0"], "Adam", ["cuda"], checkpoint=again)
    for value, right in zip(whole, _twice("Adam"), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-5)


def _twice(kind: str) -> list[Tensor]:
    optimizer, settings = OPTIMIZERS[kind]
    model = network("cpu")
    local = optimizer(model.parameters(), **settings)
    for step in [*range(STEPS), *range(STEPS)]:
        local.zero_grad()
        model(batch(1, step)).square().mean().backward()
        local.step()
    return [parameter.detach() for parameter in model.parameters()]

"""References, remote modules, autograd and optimizers give the results of one process on CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import telegrad.rpc as rpc
from telegrad import autograd
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from tests.gpu.group import join
from tests.process.fleet import Fleet


class Net(nn.Module):
    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 10)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x.to(self.first.weight.device))))

    def references(self) -> list[rpc.RRef[Tensor]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def train_far_and_near(source: str, target: str) -> None:
    far, near = rpc.remote("w1", Net, args=(target,)), Net(source)
    optimizer = DistributedOptimizer(torch.optim.Adam, far.rpc_sync().references(), lr=1e-2)
    local = torch.optim.Adam(near.parameters(), lr=1e-2)
    for step in range(5):
        torch.manual_seed(step)
        x = torch.randn(16, 64).to(source).requires_grad_()
        local.zero_grad()
        near(x).sum().backward()
        expected, x.grad = x.grad, None
        local.step()
        with autograd.context() as context:
            y = far.rpc_sync().forward(x)
            assert y.device.type == torch.device(source).type
            autograd.backward(context, [y.sum()])
            gradient = autograd.get_gradients(context)[x]
            optimizer.step(context)
        assert gradient.device == x.device
        torch.testing.assert_close(gradient, expected)
    there = far.rpc_sync().state_dict()
    for name, value in near.state_dict().items():
        torch.testing.assert_close(there[name].to(value.device), value, rtol=1e-4, atol=1e-5)


def test_training_over_two_processes_is_training_in_one(pair: Fleet) -> None:
    pair[0].do(train_far_and_near, "cuda", "cuda")


@pytest.mark.parametrize(
    ("source", "target", "devices"), [("cpu", "cuda", {"cpu": 0}), ("cuda", "cpu", {0: "cpu"})]
)
def test_gradients_come_home_through_device_maps(
    tmp_path: Path, source: str, target: str, devices: dict[object, object]
) -> None:
    for unmapped in ("same", "refuse"):
        settings = {"maps": {0: {"w1": devices}}, "config": {"unmapped_devices": unmapped}}
        with Fleet(2, join, str(tmp_path / f"store-{unmapped}"), settings) as fleet:
            fleet[0].do(train_far_and_near, source, target)


def use_remote_module() -> None:
    module = RemoteModule("w1/cuda:0", nn.Linear, args=(8, 4))
    for x in (torch.ones(2, 8), torch.ones(2, 8, device="cuda")):
        y = module(x)
        assert y.shape == (2, 4)
    weights = [reference.to_here() for reference in module.remote_parameters()]
    assert all(weight.is_cuda for weight in weights)
    torch.testing.assert_close(module(x).to("cuda"), x @ weights[0].t() + weights[1])


def test_remote_modules_live_on_the_gpu(pair: Fleet) -> None:
    pair[0].do(use_remote_module)


def fetch_references() -> None:
    reference = rpc.remote("w1", torch.full, args=((1000,), 3.0), kwargs={"device": "cuda"})
    assert torch.all(reference.to_here() == 3).item()
    assert torch.all(reference.rpc_sync().mul(2) == 6).item()
    later = reference.remote().add(1)
    assert torch.all(later.to_here() == 4).item()


def test_references_to_cuda_tensors(pair: Fleet) -> None:
    pair[0].do(fetch_references)

"""Loops of `accelerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.conftest import Make, check_same, locally

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_state() -> None:
    """What accelerate keeps for the life of a process depends on the settings of the first
    Accelerator.
    """
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(32, 1, 4, 4, generator=generator), torch.randint(2, (32,), generator=generator)
    )


def train(make: Make, folder: Path, resume: bool = False, **settings: Any) -> nn.Module:
    """Two epochs, with the state saved after the first; or the second alone."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
    net = model()
    optimizer = make(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    net, optimizer, loader, scheduler = accelerator.prepare(
        net, optimizer, DataLoader(data(), 4), scheduler
    )
    if resume:
        accelerator.load_state(str(folder))
    for epoch in range(1 if resume else 0, 2):
        for inputs, targets in loader:
            with accelerator.accumulate(net):
                optimizer.zero_grad()
                with accelerator.autocast():
                    loss = nn.functional.cross_entropy(net(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
        if epoch == 0:
            accelerator.save_state(str(folder))
    whole: nn.Module = accelerator.unwrap_model(net)
    return whole


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "bf16"}], ids=str)
def test_training_and_resuming(on_servers: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = train(locally, tmp_path / "local", **settings)
    check_same(train(on_servers, tmp_path / "ps", **settings), expected)
    check_same(train(on_servers, tmp_path / "ps", resume=True, **settings), expected)
    check_same(train(locally, tmp_path / "ps", resume=True, **settings), expected)

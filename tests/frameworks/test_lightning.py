"""The `Trainer` of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.conftest import Make, check_same, locally

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")


class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make = make
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.net)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (
        torch.randn(32, 1, 4, 4, generator=generator),
        torch.randint(2, (32,), generator=generator),
    )
    return DataLoader(TensorDataset(inputs, targets), 4)


def train(
    make: Make, folder: Path, epochs: int, resume: Path | None = None, **settings: Any
) -> nn.Module:
    net = Classifier(make)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        **settings,
    )
    trainer.fit(net, data(), ckpt_path=None if resume is None else str(resume))
    trainer.save_checkpoint(folder / "last.ckpt")
    return net.net


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}], ids=str)
def test_training_and_resuming(on_servers: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = train(locally, tmp_path / "local", 4, **settings)
    check_same(train(on_servers, tmp_path / "ps", 4, **settings), expected)
    train(on_servers, tmp_path / "half", 2, **settings)
    check_same(
        train(on_servers, tmp_path / "rest", 4, tmp_path / "half" / "last.ckpt", **settings),
        expected,
    )
    check_same(
        train(locally, tmp_path / "elsewhere", 4, tmp_path / "half" / "last.ckpt", **settings),
        expected,
    )

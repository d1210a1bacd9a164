"""The `Trainer` of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from tests.frameworks.conftest import Make, check_same, locally

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")


class Sentences(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(16, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def train(make: Make, folder: Path, resume: Path | None = None, **settings: Any) -> Any:
    net = model()
    options = {
        "max_steps": 8,
        "save_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "lr_scheduler_type": "linear",
        **settings,
    }
    arguments = transformers.TrainingArguments(str(folder), **options)
    trainer = transformers.Trainer(
        net, arguments, train_dataset=Sentences(), optimizers=(make(net), None)
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return net


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"save_safetensors": False}], ids=str)
def test_training_and_resuming(on_servers: Make, tmp_path: Path, settings: dict[str, Any]) -> None:
    if "save_safetensors" in settings and not hasattr(
        transformers.TrainingArguments, "save_safetensors"
    ):
        pytest.skip("this version saves safetensors only")
    expected = train(locally, tmp_path / "local", **settings)
    check_same(train(on_servers, tmp_path / "ps", **settings), expected)
    resumed = train(on_servers, tmp_path / "again", tmp_path / "ps" / "checkpoint-4", **settings)
    check_same(resumed, expected)
    check_same(
        train(locally, tmp_path / "elsewhere", tmp_path / "ps" / "checkpoint-4", **settings),
        expected,
    )

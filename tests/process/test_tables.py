"""Tables on real processes, which are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from telegrad import ps
from telegrad.ps.embeddings.row_hash import initialize
from tests.process.fleet import Fleet
from tests.process.test_parameter_servers import join

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]

ROWS, DIM = 10**9, 8
_here: dict[str, Any] = {}


def input_of(step: int, trainer: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + trainer)
    return torch.randint(40, (5, 3), generator=generator) * 12_345_678


def loss_of(output: Tensor) -> Tensor:
    return ((output.sin() - 0.5) ** 2).mean()


def begin_training(folder: str, trainers: int) -> None:
    point = ps.Checkpoint(folder, every=1, wait=True)
    options: dict[str, Any] = {
        "checkpoint": point,
        "trainers": trainers,
        "optimizer": ps.RowAdam(lr=0.03),
        "dtype": torch.float64,
    }
    _here["bag"] = ps.EmbeddingBag(ROWS, DIM, ["w0", "w1"], **options)


def train(first: int, last: int, number: int) -> Tensor:
    bag = _here["bag"]
    for step in range(first, last):
        loss_of(bag(input_of(step, number))).backward()
        bag.tables.step()
    return bag.rows(torch.arange(40) * 12_345_678).clone()


class Local:
    """The same in one process, where only 40 rows are ever used."""

    def __init__(self) -> None:
        self.rows = nn.Parameter(
            initialize(
                torch.empty(40, DIM, dtype=torch.float64), torch.arange(40) * 12_345_678, 0, 1.0
            )
        )
        self._optimizer = torch.optim.SparseAdam([self.rows], lr=0.03)

    def train(self, steps: range, trainers: list[int]) -> None:
        for step in steps:
            inputs = torch.cat([input_of(step, number) for number in trainers]) // 12_345_678
            self._optimizer.zero_grad()
            loss_of(F.embedding_bag(inputs, self.rows, sparse=True)).backward()
            self._optimizer.step()


def test_killed_servers_and_trainers(tmp_path: Path) -> None:
    with Fleet(4, join, str(tmp_path / "store")) as fleet:

        def both(function: Any, *args: Any) -> list[Any]:
            for number, rank in enumerate((2, 3)):
                fleet[rank].begin(function, *args, *([number] if function is train else []))
            return [fleet[rank].result() for rank in (2, 3)]

        both(begin_training, str(tmp_path / "points"), 2)
        both(train, 0, 3)
        for victim, step in ((0, 3), (1, 6)):
            fleet[victim].kill()
            for number, rank in enumerate((2, 3)):
                fleet[rank].begin(train, step, step + 3, number)
            fleet.restart(victim)
            together = [fleet[rank].result() for rank in (2, 3)]
        fleet[2].begin(train, 9, 12, 0)  # waits for the other, which is killed instead
        fleet[3].kill()
        alone = fleet[2].result()
    local = Local()
    local.train(range(9), [0, 1])
    for rows in together:
        torch.testing.assert_close(rows, local.rows.detach(), rtol=1e-12, atol=1e-13)
    local.train(range(9, 12), [0])
    torch.testing.assert_close(alone, local.rows.detach(), rtol=1e-12, atol=1e-13)

"""Training loops of other packages, with `telegrad.ps.Optimizer` in place of an optimizer of torch.

They run by `make test-frameworks`, in an environment that has the packages; elsewhere they are
skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import ps
from telegrad.testing import LocalCluster

Make = Callable[[nn.Module], torch.optim.Optimizer]
# With a usual eps, Adam would make steps of full size from the rounding errors of gradients that
# should be 0.
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-3}


def locally(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **OPTIONS)


@pytest.fixture
def transport() -> str:
    return "unix"


@pytest.fixture
def on_servers() -> Iterator[Make]:
    """Makes optimizers whose steps two workers make, each on a cluster of its own: a new run of a
    program.
    """
    with ExitStack() as stack:

        def make(model: nn.Module) -> torch.optim.Optimizer:
            cluster = stack.enter_context(LocalCluster(3))
            return stack.enter_context(
                ps.Optimizer(model, ["w1", "w2"], torch.optim.AdamW, agent=cluster["w0"], **OPTIONS)
            )

        yield make


def check_same(model: nn.Module, other: nn.Module) -> None:
    for (name, mine), its in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            mine, its, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )

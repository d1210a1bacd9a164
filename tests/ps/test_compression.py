"""Gradients of 16 bits: smaller on the way, and nothing is lost for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import ps
from telegrad.errors import UsageError
from telegrad.ps.compression import Compressor, unpack
from telegrad.ps.layout import ParameterLayout
from telegrad.ps.server.shard import ParameterShard
from telegrad.testing import LocalCluster
from tests.ps import training
from tests.ps.training import check_same, model

Clusters = Callable[..., LocalCluster]
# neither float16 nor bfloat16 has it after a few additions; bfloat16 has nothing near it
GRADIENT = 1 + 2**-10


def test_what_rounding_takes_away_comes_with_the_next_steps() -> None:
    share = ParameterLayout.of(
        [[(0, "a", torch.zeros(3)), (1, "b", torch.zeros(2, dtype=torch.int64))]]
    ).divide(1)[0]
    compressor = Compressor(share, torch.bfloat16)
    flat = torch.zeros(share.nbytes, dtype=torch.uint8)
    total = torch.zeros(3)
    for step in range(200):
        share.parts[0].of(flat).fill_(GRADIENT)
        share.parts[1].of(flat).fill_(step)
        packed = compressor.pack(step, flat)
        assert compressor.pack(step, flat) is packed  # again: the same, and the rest counts once
        assert {each.dtype for each in packed} == {torch.bfloat16, torch.int64}
        compressor.commit()
        received = unpack(share, packed)
        total += share.parts[0].of(received)
        assert share.parts[1].of(received).tolist() == [step, step]
    torch.testing.assert_close(total, torch.full((3,), 200 * GRADIENT), atol=2**-8, rtol=0)


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_training_with_small_gradients(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    pushed: list[Any] = []
    real = ParameterShard.push

    def push(self: ParameterShard, *args: Any) -> Any:
        pushed.append(args[4])
        return real(self, *args)

    monkeypatch.setattr(ParameterShard, "push", push)
    workers = cluster(3)
    net = nn.Linear(4, 3, bias=False)
    before = net.weight.detach().clone()
    with ps.Optimizer(
        net, ["w1", "w2"], agent=workers["w0"], lr=1.0, compression=dtype
    ) as optimizer:
        for _ in range(100):
            net.weight.grad = torch.full_like(net.weight, GRADIENT)
            optimizer.step()
    assert {part.dtype for parts in pushed for part in parts} == {dtype}
    torch.testing.assert_close(
        before - net.weight.detach(), torch.full((3, 4), 100 * GRADIENT), atol=2**-7, rtol=1e-5
    )


def test_shared_memory_needs_none(cluster: Clusters) -> None:
    workers = cluster(2)
    net, expected = model(), model()
    training.train(torch.optim.SGD(expected.parameters(), lr=0.1), expected, range(3), [0])
    with ps.Optimizer(
        net, "w1", agent=workers["w0"], lr=0.1, compression=torch.bfloat16
    ) as optimizer:
        training.train(optimizer, net, range(3), [0])
    check_same(net, expected)
    with pytest.raises(UsageError, match="compressed to"):
        ps.Optimizer(net, "w1", agent=workers["w0"], compression=torch.int8)

"""Batches of tensors on a GPU: stacked, run and split there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad import batched
from tests.batching.models import waiting
from tests.local.gates import PATIENCE, Gate, Log

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class OnGpu:
    """Notes where each batch was; holds the first at a gate so that the others gather."""

    def __init__(self, log: Log, gate: Gate | None) -> None:
        self.log = log
        self.gate = gate

    @batched(max_size=4)
    def double(self, x: torch.Tensor) -> torch.Tensor:
        self.log.note((x.device.type, len(x)))
        if self.gate is not None:
            gate, self.gate = self.gate, None
            gate.hold()
        return x * 2


class Replayed:
    """Replays one CUDA graph for each of the fixed sizes."""

    def __init__(self) -> None:
        self.weight = torch.eye(3, device="cuda") * 2
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}

    @batched(max_size=4, pad_to=(1, 4))
    def double(self, x: torch.Tensor) -> torch.Tensor:
        graph, given, made = self.graphs.get(len(x)) or self._capture(x)
        given.copy_(x)
        graph.replay()
        return made.clone()

    def _capture(self, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        given = x.clone()
        given @ self.weight  # what is loaded on first use must not be loaded in a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = given @ self.weight
        self.graphs[len(x)] = graph, given, made
        return self.graphs[len(x)]


def test_tensors_on_a_gpu_are_stacked_there(log: Log, gate: Gate, in_background: Any) -> None:
    model = OnGpu(log, gate)
    inputs = [torch.full((3,), float(number), device="cuda") for number in range(4)]
    calls = [in_background(model.double, inputs[0])]
    gate.wait_for()
    calls += [in_background(model.double, x) for x in inputs[1:]]
    waiting(OnGpu.double, 3)
    gate.open()
    results = [call.result(PATIENCE) for call in calls]
    assert all(result.is_cuda and torch.equal(result, 2 * x) for result, x in zip(results, inputs, strict=True))
    assert log.entries == [("cuda", 1), ("cuda", 3)]


def test_fixed_sizes_suit_cuda_graphs(in_background: Any) -> None:
    model = Replayed()
    inputs = [torch.full((3,), float(number), device="cuda") for number in range(20)]
    calls = [in_background(model.double, x) for x in inputs]
    assert all(torch.equal(call.result(PATIENCE), 2 * x) for call, x in zip(calls, inputs, strict=True))
    assert model.graphs.keys() <= {1, 4}

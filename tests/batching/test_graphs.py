"""When a batch is replayed, which needs no GPU to decide; `test_gpu.py` tests the replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad.batching import cuda_graphs
from telegrad.messages.call_scope import current_scope


class Recorded:
    """Replace a captured graph, which needs a GPU."""

    def __init__(self, *call: Any) -> None:
        return

    def replay(self, inputs: list[torch.Tensor]) -> str:
        return "replayed"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> cuda_graphs.CudaGraphs:
    monkeypatch.setattr(cuda_graphs, "_CapturedGraph", Recorded)
    monkeypatch.setattr(cuda_graphs, "_is_graph_input", lambda leaf: isinstance(leaf, torch.Tensor))
    return cuda_graphs.CudaGraphs(lambda x: "run", "run")


def results(calls: cuda_graphs.CudaGraphs, *args: Any) -> list[str]:
    return [calls((), args, {}) for _ in range(4)]


def test_the_first_batch_of_a_signature_runs(calls: cuda_graphs.CudaGraphs) -> None:
    assert results(calls, torch.ones(3)) == ["run", "replayed", "replayed", "replayed"]
    assert results(calls, torch.ones(4)) == ["run", "replayed", "replayed", "replayed"]


def test_what_is_no_tensor_is_never_replayed(calls: cuda_graphs.CudaGraphs) -> None:
    assert results(calls, [3]) == ["run"] * 4


def test_a_context_gets_the_gradients_of_weights(calls: cuda_graphs.CudaGraphs) -> None:
    token = current_scope.set(object())  # type: ignore[arg-type]
    try:
        assert results(calls, torch.ones(3)) == ["run"] * 4
        with torch.no_grad():
            assert results(calls, torch.ones(3))[1:] == ["replayed"] * 3
    finally:
        current_scope.reset(token)

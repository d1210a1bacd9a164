"""Batches of tensors on a GPU: stacked, run and split there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad import batched
from tests.batching.models import waiting
from tests.local.gates import PATIENCE, Gate, Log

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


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
    """Counts how often its code runs."""

    def __init__(self, log: Log) -> None:
        self.weight = torch.full((3,), 2.0, device="cuda")
        self.log = log

    @batched(max_size=4, pad_to=(1, 4), cuda_graph=True)
    def double(
        self, x: torch.Tensor, more: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.log.note(len(x))
        return x * self.weight, {"sum": x.sum(1) + more["offset"]}


@batched(pad_to=(64,), cuda_graph=True)
def looks_at_values(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > 0 else x


@batched(pad_to=(64,), cuda_graph=True)
def returns_numbers(x: torch.Tensor) -> list[int]:
    return [1] * len(2 * x)


def test_tensors_on_a_gpu_are_stacked_there(log: Log, gate: Gate, in_background: Any) -> None:
    model = OnGpu(log, gate)
    inputs = [torch.full((3,), float(number), device="cuda") for number in range(4)]
    calls = [in_background(model.double, inputs[0])]
    gate.wait_for()
    calls += [in_background(model.double, x) for x in inputs[1:]]
    waiting(OnGpu.double, 3)
    gate.open()
    results = [call.result(PATIENCE) for call in calls]
    assert all(
        result.is_cuda and torch.equal(result, 2 * x)
        for result, x in zip(results, inputs, strict=True)
    )
    assert log.entries == [("cuda", 1), ("cuda", 3)]


def test_a_function_is_captured_once_for_each_size(
    log: Log, in_background: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Replayed(log)
    inputs = [torch.full((3,), float(number), device="cuda") for number in range(50)]
    for _ in range(3):
        offset = {"offset": torch.tensor(0.5, device="cuda")}
        calls = [in_background(model.double, x, offset) for x in inputs]
        for call, x in zip(calls, inputs, strict=True):
            doubled, sums = call.result(PATIENCE)
            assert torch.equal(doubled, 2 * x)
            assert torch.equal(sums["sum"], x.sum() + 0.5)
    assert not caplog.records
    assert len(log.entries) <= 4  # each size once as usual and once for its graph
    assert set(log.entries) <= {1, 4}


def test_a_graph_sees_weights_that_change_in_place(log: Log) -> None:
    model = Replayed(log)
    x, more = torch.ones(3, device="cuda"), {"offset": torch.tensor(0.0, device="cuda")}
    results = []
    for factor in (2.0, 2.0, 2.0, 5.0):
        model.weight.fill_(factor)
        results.append(model.double(x, more)[0])
    # none is overwritten by the next
    assert [result[0].item() for result in results] == [2, 2, 2, 5]
    assert log.entries == [1, 1]


def test_replays_on_different_streams_follow_each_other(log: Log) -> None:
    model, streams = Replayed(log), [torch.cuda.Stream() for _ in range(3)]
    inputs = [torch.full((3,), float(number), device="cuda") for number in range(30)]
    more = {"offset": torch.tensor(0.0, device="cuda")}
    torch.cuda.synchronize()
    results = []
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 3]):
            torch.cuda._sleep(1_000_000)
            results.append(model.double(x, more)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(result, 2 * x) for result, x in zip(results, inputs, strict=True))


@pytest.mark.parametrize(
    ("function", "expected", "reason"),
    [
        (looks_at_values, [2.0] * 5, "stream is capturing"),
        (returns_numbers, [1] * 5, "other things than CUDA tensors"),
    ],
)
def test_what_cannot_be_captured_runs_as_usual(
    function: Any, expected: list[float], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert [float(function(torch.tensor(1.0, device="cuda"))) for _ in range(5)] == expected
    (warning,) = [
        record.getMessage() for record in caplog.records if "CUDA graph" in record.getMessage()
    ]
    assert function.__qualname__ in warning
    assert reason in warning
    assert torch.rand(3, device="cuda").numel() == 3  # a capture that failed harms nobody


@batched(max_size=4, pad_to=(4,), cuda_graph=True)
def scaled(x: torch.Tensor, factors: list[float]) -> torch.Tensor:
    return x * factors[0]


def test_arguments_that_are_no_tensors_are_not_frozen() -> None:
    x = torch.tensor(1.0, device="cuda")
    assert [scaled(x, float(factor)).item() for factor in range(5)] == [0, 1, 2, 3, 4]


@batched(pad_to=(64,), cuda_graph=True)
def with_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def test_random_numbers_go_on_in_a_graph() -> None:
    x = torch.zeros(8, device="cuda")
    results = [with_noise(x) for _ in range(5)]
    assert len({tuple(result.tolist()) for result in results}) == 5


def test_gradients_are_not_lost_to_a_graph(log: Log) -> None:
    model, more = Replayed(log), {"offset": torch.tensor(0.0, device="cuda")}
    for _ in range(4):
        x = torch.ones(3, device="cuda", requires_grad=True)
        model.double(x, more)[0].sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 2, 2]


def test_what_is_on_the_cpu_runs_as_usual() -> None:
    assert [looks_at_values(torch.tensor(3.0)).item() for _ in range(3)] == [6, 6, 6]

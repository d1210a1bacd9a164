"""Threads that run functions of the user use as many OpenMP threads as the program has set."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from telegrad import autograd, batched
from telegrad.testing import LocalCluster


def _openmp() -> ctypes.CDLL:
    """Return the OpenMP library that torch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libgomp" in path or "libomp" in path:
            return ctypes.CDLL(f"/{path}")
    pytest.skip("torch has loaded no OpenMP library")


def threads_of_this_thread() -> int:
    """Return how many threads a matrix product uses here."""
    count: int = _openmp().omp_get_max_threads()
    return count


@batched
def threads_in_batch(rows: torch.Tensor) -> torch.Tensor:
    return torch.full_like(rows, threads_of_this_thread())


class ThreadsInBackward(torch.autograd.Function):
    """Return the number of threads as the gradient."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradients[0], threads_of_this_thread())


def identity(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = ThreadsInBackward.apply(x)  # type: ignore[no-untyped-call]
    return result


@pytest.fixture
def count() -> Iterator[int]:
    """Set a number of threads that no thread has by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 3)
    yield before + 3
    torch.set_num_threads(before)


def test_a_new_thread_does_not_have_the_number(count: int) -> None:
    # The reason for all this. If torch changes it, `apply_torch_num_threads` can go.
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(threads_of_this_thread()))
    thread.start()
    thread.join()
    assert found != [count]


def test_calls_use_the_number_that_was_set(count: int) -> None:
    with LocalCluster(2) as cluster:
        agent = cluster["w0"]
        assert agent.call("w1", threads_of_this_thread) == count
        futures = [agent.submit("w1", threads_of_this_thread) for _ in range(8)]
        assert {future.result(timeout=30) for future in futures} == {count}


def test_batches_use_the_number_that_was_set(count: int) -> None:
    with LocalCluster(2) as cluster:
        futures = [cluster["w0"].submit("w1", threads_in_batch, torch.zeros(1)) for _ in range(8)]
        assert {future.result(timeout=30).item() for future in futures} == {count}


def test_backward_passes_use_the_number_that_was_set(count: int) -> None:
    with LocalCluster(2) as cluster, autograd.context(agent=cluster["w0"]) as context_id:
        x = torch.ones(1, requires_grad=True)
        y = cluster["w0"].call("w1", identity, x)
        autograd.backward(context_id, [y.sum()])
        assert autograd.get_gradients(context_id)[x].item() == count

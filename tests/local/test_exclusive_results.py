"""`is_exclusive` detects every other reference to a result: those could write to its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad.cuda.sole_reference import is_exclusive
from telegrad.free_threading import has_gil

KEPT: list[Any] = []


def fresh() -> Tensor:
    return torch.ones(3)


def kept() -> Tensor:
    tensor = fresh()
    KEPT.append(tensor)
    return tensor


def part_of_kept() -> Tensor:
    return kept()[1:]


def over_kept_memory() -> Tensor:
    storage = fresh().untyped_storage()
    KEPT.append(storage)
    return torch.empty(0).set_(storage)


def over_memory_of_others() -> Tensor:
    array = fresh().numpy().copy()
    KEPT.append(array)
    return torch.from_numpy(array)


def kept_by_a_graph() -> Tensor:
    weight = torch.ones(3, requires_grad=True)
    result = weight.detach() * 2
    KEPT.append(weight * result)
    return result


def in_kept_tuple() -> tuple[Tensor]:
    value = (fresh(),)
    KEPT.append(value)
    return value


def passed_through(function: Callable[[Tensor], Any]) -> Any:
    """Do what a worker does: drop the arguments before the result is checked."""
    args = (fresh(),)
    value = function(*args)
    del args
    return value


@pytest.mark.parametrize(
    "make",
    [
        fresh,
        lambda: passed_through(lambda tensor: tensor),
        lambda: (fresh(), fresh()),
        lambda: [fresh(), 3, "words", None],
        lambda: passed_through(lambda tensor: (tensor, 1.5)),
    ],
    ids=["fresh", "argument", "tuple", "list", "argument in a tuple"],
)
def test_a_result_without_other_references_is_exclusive(make: Callable[[], Any]) -> None:
    value = make()
    # Without the interpreter lock, counts may be too low.
    assert is_exclusive(value, 1, any_device=True) == has_gil()


@pytest.mark.parametrize(
    "make",
    [
        kept,
        lambda: kept().detach(),
        part_of_kept,
        lambda: fresh()[1:],
        over_kept_memory,
        over_memory_of_others,
        kept_by_a_graph,
        lambda: torch.ones(3, requires_grad=True) * 2,
        lambda: (fresh(), kept()),
        in_kept_tuple,
        lambda: (fresh(), {"weights": kept()}),
        lambda: (fresh(), [kept()]),
        lambda: [(each := fresh()), each],
        lambda: [fresh() for _ in range(100)],
        lambda: torch.eye(3).to_sparse(),
        lambda: (fresh(), torch.eye(3).to_sparse()),
        lambda: (torch.nn.Parameter(torch.ones(3)), fresh()),
    ],
)
def test_a_result_with_another_reference_is_not_exclusive(make: Callable[[], Any]) -> None:
    value = make()
    assert not is_exclusive(value, 1, any_device=True)


def test_tensors_of_other_devices_and_small_tensors_are_not_exclusive() -> None:
    value = fresh()
    assert is_exclusive(value, 12, any_device=True) == has_gil()
    assert not is_exclusive(value, 12)
    assert not is_exclusive(value, 13, any_device=True)

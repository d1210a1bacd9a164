"""What goes into a batch and comes out of it."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from telegrad import batched
from telegrad.batching.calls import signature_of, split, stack
from telegrad.errors import UsageError


@dataclass(frozen=True)
class Observation:
    image: torch.Tensor
    name: str
    inner: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        assert isinstance(self.name, str), "the user's checks are for single observations"


class Step(NamedTuple):
    state: torch.Tensor
    step_number: int


def observation(value: float) -> Observation:
    return Observation(torch.full((2,), value), f"n{value}", {"a": torch.tensor(value)})


def test_nested_tensors_are_stacked_leaf_by_leaf() -> None:
    values = [observation(1.0), observation(2.0)]
    made = stack(values, signature_of(values[0]))
    assert type(made) is Observation
    assert made.image.tolist() == [[1, 1], [2, 2]]
    assert vars(made)["name"] == ["n1.0", "n2.0"]  # a list here, not the declared `str`
    assert made.inner["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(3),
        torch.tensor(3.5),
        (torch.ones(2), "text"),
        {"a": torch.ones(2), "b": (torch.zeros(3), None)},
        Step(torch.ones(2), 3),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("count", [1, 3])
def test_splitting_undoes_stacking(value: Any, count: int) -> None:
    rows = split(stack([value] * count, signature_of(value)), count, "f")
    for row in rows:
        assert all(map(torch.equal, _tensors(row), _tensors(value)))
        assert len(_tensors(row)) == len(_tensors(value))
        assert type(row) is type(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, tuple | list)
        else []
    )
    return [tensor for part in parts for tensor in _tensors(part)]


@pytest.mark.parametrize(
    "value",
    [
        3,
        "text",
        None,
        [1, 2],
        {"a": 1},
        (),
        torch.Size([2]),
        collections.defaultdict(list, a=[1]),
        np.ones(2),
    ],
)
def test_what_holds_no_tensor_arrives_as_a_list(value: Any) -> None:
    (left, right) = stack([value, value], signature_of(value))
    assert left is right is value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.int64)),
        (torch.ones(2), torch.ones(2, device="meta")),
        (torch.ones(2), [torch.ones(2)]),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}),
        ((torch.ones(2),), [torch.ones(2)]),
        ((torch.ones(2), 1), (torch.ones(2), torch.ones(1))),
        (torch.ones(2), 2),
    ],
)
def test_what_does_not_go_together(one: Any, other: Any) -> None:
    assert signature_of(one) != signature_of(other)
    assert signature_of(one) == signature_of(one)


def test_values_that_are_not_stacked_may_differ() -> None:
    assert signature_of((torch.ones(2), 1)) == signature_of((torch.zeros(2), "text"))


def test_results_of_every_form() -> None:
    assert split(None, 2, "f") == [None, None]
    assert split([1, 2], 2, "f") == [1, 2]
    assert split(np.arange(4).reshape(2, 2), 2, "f")[1].tolist() == [2, 3]
    assert split((torch.arange(2), [3, 4], None), 2, "f") == [(0, 3, None), (1, 4, None)]
    assert split({"a": [1, 2]}, 2, "f") == [{"a": 1}, {"a": 2}]
    assert split({}, 2, "f") == [{}, {}]


@pytest.mark.parametrize(
    "value", [torch.ones(1), torch.ones(3), torch.tensor(1.0), [1], np.array(1), ([1, 2], [1])]
)
def test_too_few_or_too_many_results_are_an_error(value: Any) -> None:
    with pytest.raises(UsageError, match=r"f returned (. results|one number) for a batch of 2"):
        split(value, 2, "f")


# Fixed sizes


sizes: list[tuple[int, int]] = []


@batched(max_size=6, pad_to=[2, 6])
def padded(x: torch.Tensor, names: list[str]) -> torch.Tensor:
    sizes.append((len(x), len(names)))
    return x * 2


def test_a_batch_is_filled_up_to_a_fixed_size() -> None:
    assert padded(torch.ones(3), "a").tolist() == [2, 2, 2]
    assert sizes == [(2, 2)]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_size": 0},
        {"max_wait": -1.0},
        {"min_size": 0},
        {"min_size": 65},
        {"min_size": "some"},
        {"pad_to": [4, 2]},
        {"pad_to": [32]},
        {"cuda_graph": True},
        {"max_queue": 3},
        {"when_full": "explode"},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=f"batched: .*{next(iter(settings)).removeprefix('pad_to')}"
    ):
        batched(**settings)(padded)


def test_only_a_function_can_be_batched() -> None:
    with pytest.raises(UsageError, match="decorates a function, not int"):
        batched(3)  # type: ignore[call-overload]


def test_a_dataclass_is_split_inside() -> None:
    stacked = stack([observation(1), observation(2)], signature_of(observation(1)))
    first, second = split(stacked, 2, "f")
    assert (type(first), first.name, second.name) == (Observation, "n1", "n2")
    assert second.image.tolist() == [2, 2]
    assert second.inner["a"].item() == 2

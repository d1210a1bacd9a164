"""Containers of many small tensors and arrays: everything arrives as it would one by one."""

from __future__ import annotations

import copyreg
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from telegrad.wire import codec
from telegrad.wire.codec import MANY
from telegrad.wire.frames import MAX_BUFFERS
from tests.wire.travel import assert_same, trip, weight

COUNT = 3 * MANY
TENSOR_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.float8_e4m3fn,
)
ARRAY_DTYPES = (
    "f4",
    "f8",
    "f2",
    "i8",
    "u1",
    "?",
    "c16",
    ">f8",
    "M8[s]",
    "U3",
    [("a", "f4"), ("b", "i2")],
)


@dataclass
class Sample:
    value: Tensor


class Pair(NamedTuple):
    left: Tensor
    right: Any


def is_stacked(value: Any) -> bool:
    return codec.encode(value)[0][0] != pickle.PROTO[0]


def tensors(count: int = COUNT, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full(shape, number % 2).to(dtype) for number in range(count)]


# Values


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1, 1, 1), (0,), (2000,)])
@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
def test_tensors_of_every_dtype_arrive_with_all_their_bits(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    size = dtype.itemsize * torch.Size(shape).numel()
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(COUNT)]
    if dtype is torch.bool:
        sent = [each % 2 for each in sent]
    values = [each.view(dtype).view(shape) for each in sent]
    for arrived, value in zip(trip(values), values, strict=True):
        assert_same(arrived, value)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,), (2000,)])
@pytest.mark.parametrize("dtype", ARRAY_DTYPES, ids=str)
def test_arrays_of_every_dtype_arrive_with_all_their_bits(
    dtype: Any, shape: tuple[int, ...]
) -> None:
    sent = [
        np.arange(np.prod(shape, dtype=int)).astype("i4").astype(dtype).reshape(shape)
        for _ in range(COUNT)
    ]
    for arrived, value in zip(trip(sent), sent, strict=True):
        assert arrived.dtype == value.dtype
        assert arrived.shape == value.shape
        assert arrived.tobytes() == value.tobytes()
        assert arrived.flags.writeable


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mixture_arrives_as_it_was(data: st.DataObject) -> None:
    thing: st.SearchStrategy[Any] = st.one_of(
        st.builds(
            lambda shape, dtype: torch.randn(shape).to(dtype),
            st.lists(st.integers(0, 3), max_size=2),
            st.sampled_from(TENSOR_DTYPES[:-2]),
        ),
        st.builds(lambda n: np.arange(n, dtype="f4"), st.integers(0, 3)),
        st.builds(lambda: torch.randn(3, 4).t()),
        st.builds(lambda: torch.randn(8)[::2]),
        st.builds(lambda: torch.ones(2, requires_grad=True)),
        st.integers(),
        st.text(),
    )
    parts = data.draw(st.lists(thing, min_size=1, max_size=20))
    value = data.draw(st.lists(st.sampled_from(parts), min_size=1, max_size=60))
    arrived = trip([parts[0], *value])[1:]
    assert len(arrived) == len(value)
    for left, right in zip(arrived, value, strict=True):
        if isinstance(right, Tensor):
            assert_same(left, right)
            assert left.stride() == right.stride()
        elif isinstance(right, np.ndarray):
            assert left.tobytes() == right.tobytes()
            assert (left.dtype, left.shape) == (right.dtype, right.shape)
        else:
            assert left == right
    for i, one in enumerate(value):  # what was one object is one object
        for j, other in enumerate(value):
            if isinstance(one, Tensor | np.ndarray):
                assert (arrived[i] is arrived[j]) == (one is other)


@pytest.mark.parametrize(
    "container",
    [
        list,
        tuple,
        lambda things: dict(enumerate(things)),
        lambda things: OrderedDict(enumerate(things)),
        lambda things: defaultdict(list, enumerate(things)),
        lambda things: [[thing] for thing in things],
        lambda things: [{"a": {"b": thing}} for thing in things],
        lambda things: [Sample(thing) for thing in things],
        lambda things: [Pair(thing, number) for number, thing in enumerate(things)],
        lambda things: {"kwargs": {"inner": list(things)}},
    ],
)
def test_containers_keep_their_type_and_are_stacked(container: Callable[[Any], Any]) -> None:
    value = container(tensors(COUNT, 2))
    arrived = trip((value,))[0]
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value)
    assert is_stacked((value,))


@pytest.mark.parametrize(
    "value", [torch.ones(1), (torch.ones(1),), [1] * 1000, (1, "a"), ["a"] * 100, [None] * 50]
)
def test_a_message_with_few_tensors_is_a_pickle_as_before(value: Any) -> None:
    assert not is_stacked(value)
    assert repr(trip(value)) == repr(value)


def test_self_referential_and_deep_containers_are_looked_at_for_a_bounded_time() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    arrived = trip(loop)
    assert arrived[1] is arrived
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    assert trip(deep) == deep


def test_a_hundred_thousand_tensors_arrive() -> None:
    sent = list(torch.arange(100_000).unsqueeze(1).unbind())
    arrived = trip(sent)
    assert torch.equal(torch.cat(arrived), torch.arange(100_000))


def test_more_shapes_than_there_can_be_stacks_arrive() -> None:
    sent = [torch.ones(number) for number in range(1, 400)] + [
        np.ones(number) for number in range(1, 400)
    ]
    assert [len(each) for each in trip(sent)] == [len(each) for each in sent]


def test_there_are_never_more_buffers_than_a_frame_has_room_for() -> None:
    large = [torch.zeros(codec.OUT_OF_BAND // 4) for _ in range(MAX_BUFFERS + 5)]
    blocks = [
        torch.ones(1024, dtype=dtype) for dtype in (torch.float32, torch.int32) for _ in range(40)
    ]
    body, buffers = codec.encode([*blocks, *large])
    assert len(buffers) <= MAX_BUFFERS
    arrived = codec.decode(body, [bytearray(buffer) for buffer in buffers])
    assert all(
        torch.equal(left, right) for left, right in zip(arrived, [*blocks, *large], strict=True)
    )


# Identity and memory


def test_an_object_that_occurs_twice_arrives_once() -> None:
    one, array = torch.ones(1), np.ones(1)
    arrived = trip([[one, array] for _ in range(COUNT)])
    assert len({id(part) for pair in arrived for part in pair}) == 2


@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(1), lambda: torch.zeros(2, 2), lambda: torch.tensor(0.0)]
)
def test_each_tensor_has_memory_and_a_version_of_its_own(make: Callable[[], Tensor]) -> None:
    arrived = trip([make() for _ in range(COUNT)])
    arrived[1].add_(1)
    assert [float(each.sum()) for each in arrived].count(0.0) == COUNT - 1
    assert arrived[0]._version == 0
    assert len({each.untyped_storage().data_ptr() for each in arrived}) == COUNT
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in arrived)


def test_writing_to_what_arrived_leaves_the_sender_and_other_arrays_alone() -> None:
    sent = [np.zeros(2) for _ in range(COUNT)]
    arrived = trip(sent)
    arrived[3][:] = 7
    assert sum(float(each.sum()) for each in arrived) == 14
    assert not any(each.any() for each in sent)


# What is not plain


def test_strides_attributes_and_laziness_are_kept_among_plain_tensors() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t()
    named = torch.ones(1)
    named.label = "weight"  # type: ignore[attr-defined]
    negative = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    conjugate = torch.tensor([1 + 2j]).conj()
    odd = [
        transposed,
        named,
        negative,
        conjugate,
        torch.ones(3).to_sparse(),
        torch.ones(1, device="meta"),
    ]
    arrived = trip([*tensors(COUNT, 1), *odd])[COUNT:]
    assert arrived[0].stride() == transposed.stride()
    assert arrived[1].label == "weight"
    assert arrived[2].tolist() == negative.tolist()
    assert arrived[3].tolist() == conjugate.tolist()
    assert arrived[4].is_sparse
    assert arrived[5].is_meta


def test_negative_and_conjugate_views_are_stacked_with_their_values() -> None:
    negative = [torch.tensor([1 + 2j]).conj().imag for _ in range(COUNT)]
    assert negative[0].is_neg()
    lazy = [torch.tensor([1 + 2j]).conj() for _ in range(COUNT)]
    assert [each.item() for each in trip(negative)] == [-2.0] * COUNT
    assert [each.item() for each in trip(lazy)] == [1 - 2j] * COUNT
    assert not any(each.is_conj() for each in trip(lazy))


def test_parameters_and_gradients_stay_what_they_are() -> None:
    parameters = [
        nn.Parameter(torch.ones(2), requires_grad=number % 2 == 0) for number in range(COUNT)
    ]
    computed = [torch.ones(1, requires_grad=True) * 2 for _ in range(COUNT)]
    arrived = trip([parameters, computed])
    for left, right in zip(arrived[0] + arrived[1], parameters + computed, strict=True):
        assert_same(left, right)


def test_a_subclass_of_an_array_and_a_read_only_array_stay_what_they_are() -> None:
    frozen = np.ones(1)
    frozen.flags.writeable = False
    odd = [
        np.ma.masked_array([1.0], [True]),
        frozen,
        np.asfortranarray(np.ones((2, 2))),
        np.ones(4)[::2],
    ]
    arrived = trip([*[np.ones(1) for _ in range(COUNT)], *odd])[COUNT:]
    assert isinstance(arrived[0], np.ma.MaskedArray)
    assert not arrived[1].flags.writeable
    assert arrived[2].flags.f_contiguous
    assert arrived[3].tolist() == [1.0, 1.0]


def test_metadata_of_a_dtype_is_kept() -> None:
    described = np.ones(1, np.dtype("f8", metadata={"unit": "m"}))
    arrived = trip([*[np.ones(1) for _ in range(COUNT)], described])
    assert arrived[-1].dtype.metadata == {"unit": "m"}


def test_a_registered_reducer_for_arrays_is_used() -> None:
    def as_text(array: Any) -> Any:
        return str, (f"array of {array.size}",)

    copyreg.pickle(np.ndarray, as_text)
    try:
        assert trip([np.ones(2) for _ in range(COUNT)]) == ["array of 2"] * COUNT
    finally:
        del copyreg.dispatch_table[np.ndarray]


def test_values_that_need_code_are_stacked_too() -> None:
    sent: list[Any] = [*tensors(COUNT, 1), lambda: 5]
    arrived = trip(sent)
    assert arrived[-1]() == 5
    assert all(
        torch.equal(left, right) for left, right in zip(arrived[:-1], sent[:-1], strict=True)
    )
    assert trip(sent, by_value=True)[-1]() == 5


def test_a_stack_is_small() -> None:
    assert weight(tensors(1000, 1)) < 9_000


def test_what_does_not_fit_into_a_stack_is_sent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_MAX_ITEMS", 4)
    sent = [torch.full((2,), number) for number in range(COUNT)]
    body, _ = codec.encode(sent)
    assert body[0] != pickle.PROTO[0]
    assert [each.tolist() for each in trip(sent)] == [[number] * 2 for number in range(COUNT)]

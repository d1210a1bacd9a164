"""Values on the wire: containers, classes, modules, code; and what happens to those that cannot
travel.
"""

from __future__ import annotations

import collections
import copyreg
import datetime
import enum
import fractions
import functools
import operator
import pathlib
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from telegrad.errors import SerializationError
from telegrad.wire import codec
from tests.wire.travel import trip, weight


class Colour(enum.Enum):
    RED = "red"


class Point(NamedTuple):
    x: float
    y: Tensor


@dataclass(frozen=True)
class Batch:
    inputs: Tensor
    labels: dict[str, Tensor] = field(default_factory=dict)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


# Plain values


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**200),
        1.5,
        2j,
        "Größe 大 \ud800",
        b"bytes" * 1000,
        bytearray(b"array" * 1000),
        (),
        [1, [2, [3]]],
        {"a": {1: (2, 3)}},
        {1, 2},
        frozenset({3}),
        range(3),
        slice(1, 2),
        ...,
        Colour.RED,
        int,
        operator.add,
        torch.relu,
        Tensor.add,
        pathlib.PurePosixPath("/a/b"),
        fractions.Fraction(1, 3),
        datetime.timedelta(seconds=1),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        collections.deque([1, 2], maxlen=2),
        collections.Counter("aab"),
        types.SimpleNamespace(a=1),
        torch.float32,
        torch.device("cpu"),
        torch.Size([1, 2]),
        torch.strided,
        torch.channels_last,
    ],
    ids=repr,
)
def test_a_plain_value_arrives_equal_and_of_its_type(value: Any) -> None:
    received = trip(value)
    assert received == value
    assert type(received) is type(value)


def test_tensors_inside_user_classes() -> None:
    batch = trip(Batch(torch.arange(3), {"y": torch.ones(2)}))
    assert torch.equal(batch.inputs, torch.arange(3))
    assert torch.equal(batch.labels["y"], torch.ones(2))
    point = trip(Point(1.0, torch.ones(2)))
    assert isinstance(point, Point)
    assert torch.equal(point.y, torch.ones(2))
    assert torch.equal(trip(Slotted(torch.ones(2))).value, torch.ones(2))


def test_a_value_that_contains_itself() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    received = trip(loop)
    assert received[1] is received


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(
        lambda size, dtype: torch.arange(size).to(dtype),
        st.integers(0, 10) | st.just(3000),
        st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool]),
    )
    | st.builds(lambda size: np.arange(size) * 1.5, st.integers(0, 10) | st.just(3000))
)
structures = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Slotted, inner)
        | st.builds(types.SimpleNamespace, part=inner)
    ),
    max_leaves=15,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, Slotted):
        return same(one.value, other.value)
    if isinstance(one, types.SimpleNamespace):
        return same(vars(one), vars(other))
    return bool(one == other)


@settings(deadline=None, max_examples=100)
@given(structures, st.booleans())
def test_any_nested_structure_arrives_equal(value: Any, by_value: bool) -> None:
    assert same(trip(value, by_value=by_value), value)


# numpy


@pytest.mark.parametrize(
    "array",
    [
        np.arange(10),
        np.arange(10_000.0),
        np.asfortranarray(np.arange(10_000.0).reshape(100, 100)),
        np.arange(10_000).reshape(100, 100)[::2, ::3],
        np.zeros(()),
        np.zeros((3, 0)),
        np.array(["a", "bc"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.float32(1.5),
    ],
    ids=[
        "small",
        "large",
        "fortran",
        "strided",
        "scalar",
        "empty",
        "text",
        "records",
        "dates",
        "number",
    ],
)
def test_numpy_arrays_arrive_equal_and_writable(array: Any) -> None:
    received = trip(array)
    assert received.dtype == array.dtype
    assert np.array_equal(received, array)
    if isinstance(received, np.ndarray) and received.size:
        received.flat[0] = received.flat[-1]


def test_large_arrays_leave_the_pickle() -> None:
    _, buffers = codec.encode([np.zeros(10_000), torch.zeros(10_000)])
    assert [buffer.nbytes for buffer in buffers] == [80_000, 40_000]


def test_small_buffers_stay_in_the_pickle() -> None:
    _, buffers = codec.encode([torch.zeros(codec.OUT_OF_BAND, dtype=torch.uint8), torch.zeros(100)])
    assert [buffer.nbytes for buffer in buffers] == [codec.OUT_OF_BAND]


# Modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(7))
        self.activation: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, tokens: Tensor) -> Tensor:
        return self.activation(self.head(self.embedding(tokens)))


def test_a_whole_module_arrives_and_computes_the_same() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)
    ).eval()
    received = trip(model)
    inputs = torch.randn(2, 3, 4, 4)
    assert torch.equal(received(inputs), model(inputs))
    assert not received.training
    assert all(isinstance(parameter, nn.Parameter) for parameter in received.parameters())


def test_tied_weights_stay_tied() -> None:
    received = trip(Tied())
    assert received.head.weight is received.embedding.weight
    assert received.steps == 7
    assert len(list(received.parameters())) == 1


def test_frozen_parameters_stay_frozen_and_gradients_stay_at_home() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model(torch.ones(2)).sum().backward()
    received = trip(model)
    assert [parameter.requires_grad for parameter in received.parameters()] == [True, False]
    assert all(parameter.grad is None for parameter in received.parameters())


def test_a_module_with_a_lambda_inside() -> None:
    model = Tied()
    model.activation = lambda outputs: outputs * 2
    tokens = torch.tensor([1, 2])
    assert torch.equal(trip(model)(tokens), model(tokens))


def test_a_state_dict_arrives_whole() -> None:
    model = Tied()
    received = trip(model.state_dict())
    assert list(received) == list(model.state_dict())
    model.load_state_dict(received)


# Code that travels


def test_lambdas_closures_and_partials() -> None:
    factor = torch.tensor(3.0)

    def scale(value: float) -> Tensor:
        return value * factor

    assert trip(lambda value: value + 1)(2) == 3
    assert trip(scale)(2.0) == 6.0
    assert trip(functools.partial(scale, 2.0))() == 6.0
    assert trip({"inside": [lambda: 5]})["inside"][0]() == 5


def test_large_tensors_in_a_closure_leave_the_pickle_too() -> None:
    weights = torch.ones(100_000)
    body, buffers = codec.encode(lambda: weights.sum() + 1)
    assert [buffer.nbytes for buffer in buffers] == [400_000]
    assert codec.decode(body, [bytearray(buffer) for buffer in buffers])() == 100_001


def test_local_classes_and_their_instances() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = torch.zeros(1)

        def add(self) -> Tensor:
            self.count += 1
            return self.count

    counter = trip(Counter())
    assert counter.add() == 1
    assert trip(Counter)().add() == 1
    assert trip(counter.add)() == 2


def main_function() -> Callable[[int], int]:
    """A function as a script defines it. This process's `__main__` does not have it."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def of_main(value):\n    return value * 7", namespace)
    return namespace["of_main"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_value", [True, False])
def test_a_function_of_main_travels_with_its_code_where_main_is_another(by_value: bool) -> None:
    assert trip(main_function(), by_value=by_value)(6) == 42


def test_by_value_leaves_importable_code_where_it_is() -> None:
    assert trip(same, by_value=True) is same
    assert trip(Point, by_value=True) is Point


# Reducers of users


class Celsius:
    def __init__(self, degrees: float) -> None:
        self.degrees = degrees
        self.lock = threading.Lock()


def reduce_celsius(value: Celsius) -> tuple[type[Celsius], tuple[float]]:
    return Celsius, (value.degrees,)


@pytest.fixture
def celsius_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, Celsius, reduce_celsius)


@pytest.mark.usefixtures("celsius_registered")
@pytest.mark.parametrize("by_value", [True, False])
def test_reducers_registered_with_copyreg_are_honoured_however_late(by_value: bool) -> None:
    assert trip([Celsius(21.5)], by_value=by_value)[0].degrees == 21.5


@pytest.mark.parametrize("by_value", [True, False])
def test_reducers_can_be_registered_for_our_messages_alone(by_value: bool) -> None:
    class Secretive(Celsius):
        pass

    codec.register(Secretive, lambda value: (Celsius, (value.degrees + 1,)))
    assert trip(Secretive(1.0), by_value=by_value).degrees == 2.0
    assert Secretive not in copyreg.dispatch_table


# What cannot travel


class Locked:
    def __init__(self) -> None:
        self.fine = torch.ones(1)
        self.lock = threading.Lock()

    def use(self) -> None:
        with self.lock:
            pass


module_lock = threading.Lock()
default_lock = lambda lock=module_lock: lock  # noqa: E731


def closure_over_a_lock() -> Callable[[], bool]:
    lock = threading.Lock()
    return lambda: not lock.locked()


class Refuses:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class HandsOff(Refuses):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("hands off")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        (threading.Lock(), "", "lock"),
        ([1, threading.Lock()], "[1]", "lock"),
        (({"model": Locked()},), "[0]['model'].lock", "lock"),
        ((1, {"a": [2, (3, threading.Lock())]}), "[1]['a'][1][1]", "lock"),
        ({1: (number for number in (1, 2))}, "[1]", "generator"),
        (closure_over_a_lock(), "<closure>.lock", "lock"),
        ([types.SimpleNamespace(hook=closure_over_a_lock())], "[0].hook<closure>.lock", "lock"),
        (default_lock, "<default>.lock", "lock"),
        (lambda: [module_lock for _ in (1,)], "<global>.module_lock", "lock"),
        (Locked().use, ".__self__.lock", "lock"),
        (functools.partial(print, 1, end=threading.Lock()), ".keywords['end']", "lock"),
        ([Slotted(threading.Lock())], "[0]", "Slotted"),
        ((nn.Linear(1, 1), Locked()), "[1].lock", "lock"),
    ],
    ids=[
        "itself",
        "list",
        "attribute",
        "deep",
        "generator",
        "closure",
        "hook",
        "default",
        "global",
        "method",
        "partial",
        "slots",
        "beside a module",
    ],
)
def test_the_error_says_where_the_culprit_stands(value: Any, path: str, kind: str) -> None:
    with pytest.raises(SerializationError) as caught:
        codec.encode(value)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path or 'the value'} of type {kind} cannot be sent: ")
    assert caught.value.__cause__ is not None


def test_the_culprit_in_a_module_is_found() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].__dict__["lock"] = threading.Lock()
    with pytest.raises(SerializationError, match="lock cannot be sent") as caught:
        codec.encode({"model": model})
    assert caught.value.path == "['model']._modules['0'].lock"


@pytest.mark.parametrize(
    "error",
    [
        TypeError("no"),
        ValueError("no"),
        RuntimeError("no"),
        OSError("no"),
        KeyError("no"),
        RecursionError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_reducer_raises_becomes_a_serialization_error(error: Exception) -> None:
    with pytest.raises(SerializationError):
        codec.encode({"a": [Refuses(error)]})


def test_an_object_that_does_not_like_to_be_looked_at() -> None:
    with pytest.raises(SerializationError, match="cannot be sent: no"):
        codec.encode([HandsOff(TypeError("no"))])


@pytest.mark.parametrize("by_value", [True, False])
def test_a_value_that_is_nested_too_deeply(by_value: bool) -> None:
    with pytest.raises(SerializationError, match="nested too deeply"):
        codec.encode(nested(100_000), by_value=by_value)


def test_a_failure_leaves_the_codec_as_it_was() -> None:
    with pytest.raises(SerializationError):
        codec.encode([torch.ones(100_000), threading.Lock()])
    assert torch.equal(trip(torch.ones(3)), torch.ones(3))


def test_an_unpicklable_reduce_that_names_no_part() -> None:
    with pytest.raises(SerializationError) as caught:
        codec.encode([Refuses(TypeError("never"))])
    assert (caught.value.path, "never" in str(caught.value)) == ("[0]", True)


class RefusingDict(dict[str, int]):
    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("never")


class RefusingList(list[int]):
    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("never")


@pytest.mark.parametrize("value", [RefusingDict(a=1), RefusingList([1, 2])], ids=["dict", "list"])
def test_a_value_whose_parts_could_be_sent_is_named_itself(value: Any) -> None:
    with pytest.raises(SerializationError) as caught:
        codec.encode({"inner": value})
    assert caught.value.path == "['inner']"


def test_the_path_to_a_part_is_not_endless() -> None:
    value: Any = threading.Lock()
    for _ in range(100):
        value = [value]
    with pytest.raises(SerializationError, match="list cannot be sent") as caught:
        codec.encode(value)
    assert caught.value.path == "[0]" * 20


# Weight


def test_a_small_call_is_a_small_message() -> None:
    assert weight((1, "two", [3.0])) < 60


_atoms = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)


@given(_atoms | st.lists(_atoms | st.lists(_atoms).map(tuple), max_size=16).map(tuple))
def test_numbers_and_texts_are_encoded_as_they_would_be_with_everything_else(value: Any) -> None:
    body = codec.encode_small(value)
    assert body is not None
    decoded = codec.decode(body)
    assert decoded == value
    assert type(decoded) is type(value)


class Metre(float):
    pass


@pytest.mark.parametrize(
    "value",
    [Metre(1), Point(1.0, torch.ones(1)), [1], (1, Metre(1)), ((1, [2]),), (torch.ones(1),)],
)
def test_what_a_reducer_may_have_a_say_in_is_not_encoded_as_a_number(value: Any) -> None:
    assert codec.encode_small(value) is None


@pytest.mark.parametrize("shape", [(), (1,), (64,), (3, 1, 2), (1,) * 8], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64], ids=str
)
def test_a_small_tensor_needs_no_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    body = codec.encode_small(tensor)
    assert body is not None
    for received in (codec.decode(body), codec.decode(memoryview(body))):
        assert received.dtype == dtype
        assert received.shape == shape
        assert torch.equal(received, tensor)
        received.zero_()  # its memory is its own
    assert torch.equal(codec.decode(body), tensor)


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.unit = "m"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, requires_grad=True),
        nn.Parameter(torch.ones(1), requires_grad=False),
        torch.ones(2, 3).t(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(1000),
        torch.empty(0),
        torch.empty(1, device="meta"),
        torch.ones(2).to_sparse(),
        torch.ones((1,) * 9),
        with_attribute(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}",
)
def test_a_tensor_that_is_not_small_or_not_plain_is_pickled(tensor: torch.Tensor) -> None:
    assert codec.encode_small(tensor) is None


def test_long_tuples_are_no_atoms() -> None:
    assert codec.encode_small(tuple(range(1000))) is None
    assert trip(tuple(range(1000))) == tuple(range(1000))

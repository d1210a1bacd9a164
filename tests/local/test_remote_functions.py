"""Which functions are sent by number, which by value, and what they are called."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import operator
import pickle
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from telegrad.client import requests
from telegrad.client.requests import FunctionTable, defined_in_main
from telegrad.messages.remote_functions import describe


def plain(value: int) -> int:
    return value


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@wrapped
def decorated(value: int) -> int:
    return value


class Model:
    @staticmethod
    def fixed() -> str:
        return "fixed"

    @classmethod
    def make(cls) -> Model:
        return cls()

    def run(self) -> str:
        return "run"

    class Inner:
        @staticmethod
        def deep() -> str:
            return "deep"

    def __call__(self) -> str:
        return "called"


@dataclass(frozen=True)
class Shift:
    """A callable that says of itself that it never changes."""

    pickles_by_reference = True
    by: int

    def __call__(self, value: int) -> int:
        return value + self.by


class Unhashable(type):
    __hash__ = None  # type: ignore[assignment]


class OfUnhashable(metaclass=Unhashable):
    pass


BY_NUMBER = [
    plain,
    decorated,
    Model,
    Model.fixed,
    Model.run,
    Model.Inner.deep,
    abs,
    math.sqrt,
    operator.add,
    dict.fromkeys,
    str.upper,
    torch.add,
    torch.relu,
    torch.Tensor.add,
    torch.nn.functional.softmax,
    torch.nn.Linear,
    int,
]


@pytest.mark.parametrize("function", BY_NUMBER, ids=describe)
def test_what_pickles_by_reference_gets_a_number_and_a_definition(function: Any) -> None:
    numbers = FunctionTable()
    found = numbers.find(function)
    assert found is not None
    number, definition = found
    assert number == 1
    assert pickle.loads(definition) == function
    assert numbers.find(function) == found


def test_numbers_are_given_out_in_turn_and_stay() -> None:
    numbers = FunctionTable()
    first = [numbers.find(function) for function in BY_NUMBER]
    assert [number for number, _ in filter(None, first)] == list(range(1, len(BY_NUMBER) + 1))
    assert [numbers.find(function) for function in reversed(BY_NUMBER)] == first[::-1]
    assert repr(numbers) == f"<FunctionTable {len(BY_NUMBER)} functions>"


def test_a_callable_that_never_changes_may_say_so() -> None:
    numbers = FunctionTable()
    found = numbers.find(Shift(1))
    assert found is not None
    assert pickle.loads(found[1])(5) == 6
    assert numbers.find(Shift(1)) == found != numbers.find(Shift(2))


def test_each_agent_has_a_table_of_its_own() -> None:
    one, other = FunctionTable(), FunctionTable()
    one.find(abs)
    assert one.find(plain) != other.find(plain)


def local_function() -> Any:
    def inside() -> None:
        return

    return inside


def renamed() -> Any:
    """A function whose name leads to another one."""

    def imposter(value: int) -> int:
        return value

    imposter.__qualname__ = imposter.__name__ = "plain"
    return imposter


@pytest.mark.parametrize(
    "function",
    [
        lambda: 1,
        local_function(),
        renamed(),
        Model().run,
        Model.make,
        Model(),
        functools.partial(plain, 1),
        [1, 2].append,
        "text".upper,
        torch.ones(1).add,
        torch.nn.Linear(1, 1),
        OfUnhashable,
    ],
    ids=[
        "lambda",
        "local",
        "renamed",
        "bound",
        "class method",
        "instance",
        "partial",
        "list method",
        "str method",
        "tensor method",
        "module",
        "unhashable",
    ],
)
def test_what_may_change_between_two_calls_gets_none(function: Any) -> None:
    numbers = FunctionTable()
    assert numbers.find(function) is None
    assert numbers.find(function) is None
    assert repr(numbers) == "<FunctionTable 0 functions>"


def test_threads_that_add_a_function_at_once_get_one_entry() -> None:
    table = FunctionTable()
    functions: list[Any] = [abs, plain, math.sqrt, math.cos, math.sin, Model.run]
    start = threading.Barrier(4)

    def find_all() -> list[Any]:
        start.wait()
        return [table.find(function) for function in functions]

    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        results = [future.result() for future in [executor.submit(find_all) for _ in range(4)]]
    assert all(entries == results[0] for entries in results)
    assert len({function_id for function_id, _ in results[0]}) == len(functions)


def test_a_full_table_still_knows_what_it_has_and_takes_nothing_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "MAX_FUNCTIONS", 2)
    numbers = FunctionTable()
    assert numbers.find(abs) is not None
    assert numbers.find(plain) is not None
    assert numbers.find(math.sqrt) is None
    assert numbers.find(plain) is not None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (plain, "plain"),
        (Model.run, "Model.run"),
        (Model().run, "Model.run"),
        (Model, "Model"),
        (abs, "abs"),
        (torch.add, "add"),
        (functools.partial(plain, 1), "functools.partial(<function plain at"),
    ],
    ids=["function", "method", "bound", "class", "builtin", "torch", "partial"],
)
def test_a_function_has_a_name_for_people(function: Any, name: str) -> None:
    assert name in describe(function)


def test_functions_of_main_are_known_by_their_module() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("def of_main(): pass", namespace)
    assert defined_in_main(namespace["of_main"])
    assert not defined_in_main(plain)
    assert not defined_in_main(functools.partial(plain))

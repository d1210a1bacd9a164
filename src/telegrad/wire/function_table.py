"""Which functions a connection may call by number.

A function that pickles by reference is sent once per connection with a number of the sender's choosing, and by that
number from then on. What pickles by value (lambdas, closures, bound methods) may change between two calls, so it is
never numbered. The sender's numbers are one table per agent; which of them a connection has heard is that
connection's own set. Both tables only grow, up to `MAX_FUNCTIONS`.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

MAX_FUNCTIONS = 1 << 14
# a class with this attribute makes hashable callables that never change
BY_REFERENCE = "pickles_by_reference"
Function = Callable[..., Any]


class FunctionTable:
    """The sender's table: function -> (number, definition)."""

    def __init__(self) -> None:
        self._known: dict[Function, tuple[int, bytes]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<FunctionTable {len(self._known)} functions>"

    def find(self, function: Function) -> tuple[int, bytes] | None:
        """Number and definition of a function that may be numbered, else None."""
        try:
            return self._known[function]
        except KeyError:
            return self._add(function) if _by_reference(function) else None
        except TypeError:
            return None  # not hashable

    def _add(self, function: Function) -> tuple[int, bytes] | None:
        try:
            definition = pickle.dumps(function, 5)
        except Exception:
            return None  # not importable under its name: the codec sends it by value
        with self._lock:
            if len(self._known) >= MAX_FUNCTIONS:
                return None
            return self._known.setdefault(function, (len(self._known) + 1, definition))


def _by_reference(function: Function) -> bool:
    if isinstance(function, BuiltinFunctionType):
        return isinstance(function.__self__, ModuleType | type | None)
    return isinstance(function, FunctionType | MethodDescriptorType | type) or hasattr(
        type(function), BY_REFERENCE
    )


def defined_in_main(function: Function) -> bool:
    return getattr(function, "__module__", None) == "__main__"


def describe(function: Function) -> str:
    """The name of a function for people."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(name) if name else repr(function)

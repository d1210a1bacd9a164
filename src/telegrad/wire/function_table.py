"""Function ids: a function that is called often is sent once per connection and named by its id.

A function that is pickled by reference is sent with an id that the sender chooses. Later calls on
this connection send only the id. What is pickled by value (lambdas, closures, bound methods) may
change between two calls, so it never gets an id.

State: one `FunctionTable` for each sending agent. It only grows, up to `MAX_FUNCTIONS`. It needs
no lock, because `dict.setdefault` and `next` of an `itertools.count` are atomic: if two threads add
a function at the same time, both get the entry of the first, and one id stays unused. Which ids a
connection has already sent is state of that connection.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import Any

MAX_FUNCTIONS = 1 << 14
# A class with this attribute has instances that are callable, hashable and never change.
BY_REFERENCE = "pickles_by_reference"
Function = Callable[..., Any]


class FunctionTable:
    """The functions of a sender: function -> (function id, pickled function)."""

    def __init__(self) -> None:
        self._entries: dict[Function, tuple[int, bytes]] = {}
        self._ids = itertools.count(1)

    def __repr__(self) -> str:
        return f"<FunctionTable {len(self._entries)} functions>"

    def find(self, function: Function) -> tuple[int, bytes] | None:
        """Return the id and the pickle of a function; None if it cannot have an id."""
        try:
            return self._entries[function]
        except KeyError:
            return self._add(function) if _is_pickled_by_reference(function) else None
        except TypeError:
            return None  # not hashable

    def _add(self, function: Function) -> tuple[int, bytes] | None:
        try:
            definition = pickle.dumps(function, 5)
        except Exception:
            return None  # it cannot be imported by its name: the codec sends it by value
        function_id = next(self._ids)
        if function_id > MAX_FUNCTIONS:
            return None
        return self._entries.setdefault(function, (function_id, definition))


def _is_pickled_by_reference(function: Function) -> bool:
    if isinstance(function, BuiltinFunctionType):
        return isinstance(function.__self__, ModuleType | type | None)
    return isinstance(function, FunctionType | MethodDescriptorType | type) or hasattr(
        type(function), BY_REFERENCE
    )


def defined_in_main(function: Function) -> bool:
    """Return whether a function is defined in `__main__`, which other processes cannot import."""
    return getattr(function, "__module__", None) == "__main__"


def describe(function: Function) -> str:
    """Return the name of a function for messages and logs."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(name) if name else repr(function)

"""Functions that peers call here: which ones they may call, and how long each takes.

State: the durations in `ServedFunction` are statistics; a race loses a sample. `_exposed` grows
while modules are imported. `FunctionRegistry._served` grows up to `MAX_FUNCTIONS`, by atomic
operations of the dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from telegrad.errors import SerializationError, error_text
from telegrad.messages.device_routes import ANY_DEVICE_MARK
from telegrad.messages.remote_functions import (
    ASYNC_MARK,
    is_internal,
    is_trusted,
    served_form,
)
from telegrad.wire.function_table import MAX_FUNCTIONS, Function, describe

P = ParamSpec("P")
T = TypeVar("T")

_exposed: set[Function] = set()


def expose(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that workers with ``Config(only_registered=True)`` may be asked to run."""
    _exposed.add(function)
    return function


class ServedFunction:
    """A function that peers call here, and how long it takes."""

    __slots__ = (
        "any_device",
        "function",
        "internal",
        "is_deferred",
        "must_run",
        "name",
        "reply_may_wait",
        "run",
        "seconds",
    )

    def __init__(self, function: Function) -> None:
        self.function = function
        self.run = served_form(function)
        self.name = describe(function)
        self.is_deferred = getattr(self.run, ASYNC_MARK, None) is not None
        self.internal = is_internal(function)
        self.any_device = hasattr(function, ANY_DEVICE_MARK)
        # even if its caller no longer waits
        self.must_run = bool(getattr(function, "must_run", False))
        # a moment, until the worker has less to do
        self.reply_may_wait = bool(getattr(function, "answer_may_wait", False))
        self.seconds = -1.0  # a moving average; negative: never run

    def __repr__(self) -> str:
        return f"<ServedFunction {self.name} {self.seconds * 1e6:.0f} us>"

    def add_duration(self, seconds: float) -> None:
        """Update the moving average of the seconds that a call takes."""
        average = self.seconds
        self.seconds = seconds if average < 0 else average + (seconds - average) * 0.25


class FunctionRegistry:
    """The functions that peers have called on one agent."""

    def __init__(self, only_registered: bool) -> None:
        self._only_registered = only_registered
        self._served: dict[Function, ServedFunction] = {}

    def __repr__(self) -> str:
        return f"<FunctionRegistry of {len(self._served)} functions>"

    def find(self, function: Function) -> ServedFunction:
        """Return the `ServedFunction` of `function`, which all connections share."""
        served = self._served.get(function)
        if served is None:
            served = ServedFunction(function)
            if len(self._served) < MAX_FUNCTIONS:
                served = self._served.setdefault(function, served)
        return served

    def is_allowed(self, function: Function | None) -> bool:
        """Return whether peers may call `function`; None: a function that is sent by value."""
        if not self._only_registered:
            return True
        try:
            return function in _exposed or is_trusted(function)
        except TypeError:  # not hashable, so it was never exposed
            return False


class UndecodableFunction:
    """Stand for a function whose definition could not be received or unpickled. Calling it raises.

    It keeps the reason as text, because the exception would keep the message alive that it was
    raised for.
    """

    def __init__(self, error: BaseException) -> None:
        self._reason = f"{type(error).__name__}: {error_text(error)}"
        self.__qualname__ = "a function that this worker does not have"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SerializationError(
            f"this worker cannot find the function: {self._reason}. "
            "The RPC pickler does not serialize functions that are importable on the caller: "
            "the same module must be importable here and hold the function under the same name"
        )

"""Functions that peers call here: how they are marked, and what is known of them.

State: the figures of a `ServedFunction` are statistics: races lose a sample. `_trusted` grows while modules are
imported.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol, TypeVar

import torch.futures

from telegrad.errors import as_exception
from telegrad.futures import Future
from telegrad.messages.routes import ANY_DEVICE_MARK
from telegrad.wire.function_table import Function, describe

F = TypeVar("F", bound=Callable[..., Any])

ASYNC_MARK = "_wrapped_async_rpc_function"
_SERVED_MARK = "_runs_for_peers"
_INTERNAL_MARK = "_internal_to_telegrad"


class Promise(Protocol):
    """A value that will be there: less than a future, and less to make."""

    def listen(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(self)` when the value is there, or at once if it is."""

    def value(self) -> Any:
        """The value; raises what there is instead."""


class DeferredReply:
    """What a function returns whose value is that of a future or promise: like `async_execution`, call by call.

    `given_up()` is called if the caller no longer waits: it cancelled, its deadline passed, or it is gone.
    """

    __slots__ = ("_value", "given_up")

    def __init__(
        self, value: torch.futures.Future[Any] | Promise, given_up: Callable[[], None] | None = None
    ) -> None:
        self._value = value
        self.given_up = given_up

    @property
    def future(self) -> torch.futures.Future[Any]:
        """The value as a future."""
        if isinstance(self._value, torch._C.Future):
            return self._value
        future: Future[Any] = Future()
        self._value.listen(lambda promise: _keep(promise, future))
        self._value = future
        return future

    def listen(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(done)` when the value is there; `done.value()` returns or raises it."""
        if isinstance(self._value, torch._C.Future):
            self._value.add_done_callback(callback)
        else:
            self._value.listen(callback)


def _keep(promise: Promise, future: Future[Any]) -> None:
    try:
        future._settle(promise.value(), None)
    except BaseException as error:
        future._settle(None, as_exception(error))


def serve_as(function: Function, served: Function) -> None:
    """When a peer calls `function`, run `served` instead, which may return a `DeferredReply`."""
    setattr(function, _SERVED_MARK, served)


def served_form(function: Function) -> Function:
    """What runs when a peer calls `function`, which may be a bound method."""
    served = getattr(function, _SERVED_MARK, None)
    if served is None:
        return function
    instance = getattr(function, "__self__", None)
    return served if instance is None else MethodType(served, instance)


_trusted: set[Any] = set()


def trusted(function: F) -> F:
    """A decorator for functions and classes of Telegrad that serve even those who may call only what is registered.

    They are known by identity, so nobody can send one of their own that claims to be ours.
    """
    _trusted.add(function)
    return function


def is_trusted(function: Any) -> bool:
    return function in _trusted or type(function) in _trusted


def internal(function: F) -> F:
    """A decorator for functions of Telegrad itself: their calls do not count as work of the user."""
    setattr(function, _INTERNAL_MARK, True)
    return trusted(function)


class ServedFunction:
    """A function that peers call here, and how long it takes."""

    __slots__ = (
        "anywhere",
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
        self.internal = hasattr(function, _INTERNAL_MARK)
        self.anywhere = hasattr(function, ANY_DEVICE_MARK)
        # even if its caller no longer waits
        self.must_run = bool(getattr(function, "must_run", False))
        self.reply_may_wait = bool(
            getattr(function, "answer_may_wait", False)
        )  # a moment, until the worker has less to do
        self.seconds = -1.0  # a moving average; negative: never run

    def __repr__(self) -> str:
        return f"<ServedFunction {self.name} {self.seconds * 1e6:.0f} us>"

    def took(self, seconds: float) -> None:
        known = self.seconds
        self.seconds = seconds if known < 0 else known + (seconds - known) * 0.25

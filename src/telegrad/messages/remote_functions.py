"""Marks on a function that control how calls from peers are served.

The marks are attributes of the function, so they are known wherever the function is.
`DeferredReply` is what a function returns whose result is not available yet.

State: `_trusted` grows while modules are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Protocol, TypeVar

import torch.futures

from telegrad.futures import Future
from telegrad.wire.function_table import Function

F = TypeVar("F", bound=Callable[..., Any])

ASYNC_MARK = "_wrapped_async_rpc_function"
_SERVED_MARK = "_runs_for_peers"
_INTERNAL_MARK = "_internal_to_telegrad"

_trusted: set[Any] = set()


class Promise(Protocol):
    """A value that is not there yet. It costs less than a future."""

    def listen(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(self)` when the value is available, or at once if it is."""

    def value(self) -> Any:
        """Return the value, or raise the error that was set instead."""


class DeferredReply:
    """Reply with the value of a future or promise once it is there. A function may return this.

    `on_abandoned()` is called if the caller no longer waits: it cancelled the call, its deadline
    has passed, or it was lost.
    """

    __slots__ = ("_value", "on_abandoned")

    def __init__(
        self,
        value: torch.futures.Future[Any] | Promise,
        on_abandoned: Callable[[], None] | None = None,
    ) -> None:
        self._value = value
        self.on_abandoned = on_abandoned

    @property
    def future(self) -> torch.futures.Future[Any]:
        """The value as a future."""
        if isinstance(self._value, torch._C.Future):
            return self._value
        future: Future[Any] = Future()
        self._value.listen(future._complete_from)
        self._value = future
        return future

    def listen(self, callback: Callable[[Any], None]) -> None:
        """Call `callback(done)` when the value is available; `done.value()` returns or raises
        it.
        """
        if isinstance(self._value, torch._C.Future):
            self._value.add_done_callback(callback)
        else:
            self._value.listen(callback)


def serve_as(function: Function, served: Function) -> None:
    """When a peer calls `function`, run `served` instead, which may return a `DeferredReply`."""
    setattr(function, _SERVED_MARK, served)


def served_form(function: Function) -> Function:
    """Return what runs when a peer calls `function`, which may be a bound method."""
    served = getattr(function, _SERVED_MARK, None)
    if served is None:
        return function
    instance = getattr(function, "__self__", None)
    return served if instance is None else MethodType(served, instance)


def trusted(function: F) -> F:
    """Decorate a function or class of Telegrad that is served also with `only_registered`.

    Trusted functions are compared by identity, so a peer cannot send one of its own that claims to
    be trusted.
    """
    _trusted.add(function)
    return function


def is_trusted(function: Any) -> bool:
    """Return whether `function`, or its class, is marked with `trusted`."""
    return function in _trusted or type(function) in _trusted


def internal(function: F) -> F:
    """Decorate a function of Telegrad itself: its calls do not count as work of the user."""
    setattr(function, _INTERNAL_MARK, True)
    return trusted(function)


def is_internal(function: Function) -> bool:
    """Return whether `function` is marked with `internal`."""
    return hasattr(function, _INTERNAL_MARK)

"""`async_execution`: a decorator for functions that return a future instead of a value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from telegrad.messages.remote_functions import ASYNC_MARK

F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["async_execution"]


def async_execution(function: F) -> F:
    """Decorate a function that returns a `Future`. Its caller gets the value of that future.

    No thread of the callee waits for the future. The decorator may be above or below
    `@staticmethod` and `@classmethod`.

    >>> import torch
    >>> @async_execution
    ... def later(x: int) -> torch.futures.Future[int]:
    ...     future: torch.futures.Future[int] = torch.futures.Future()
    ...     future.set_result(x + 1)
    ...     return future
    """
    if isinstance(function, staticmethod | classmethod):
        return type(function)(async_execution(function.__func__))
    try:
        setattr(function, ASYNC_MARK, function)
    except AttributeError:  # a builtin has no attributes to set
        return async_execution(_wrap(function))
    return function


def _wrap(function: F) -> F:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]

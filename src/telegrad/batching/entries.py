"""`Entry`: one call of a batched function, from its arrival to its answer.

State: `_outcome` is set once, and `_listeners` are told of it; both under `_answering`, for they may meet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from telegrad.agent.scope import Scope, current_scope
from telegrad.batching.stacking import Shape, shape_of
from telegrad.deadline import Deadline
from telegrad.errors import TelegradError

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent

_NOTHING = object()
_answering = threading.Lock()


class Surroundings(NamedTuple):
    """What a caller has set around its call and the function sees."""

    grad: bool
    inference: bool
    scope: Scope | None  # its autograd context, for one

    @contextmanager
    def restored(self) -> Iterator[None]:
        token = current_scope.set(self.scope)
        try:
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
                yield
        finally:
            current_scope.reset(token)


def surroundings() -> Surroundings:
    """Those of the running call. Calls with different ones are never mixed."""
    return Surroundings(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), current_scope.get())


class Entry:
    """A call that does not run at once. `queued` is True until it is taken or leaves."""

    __slots__ = (
        "_listeners",
        "_outcome",
        "agent",
        "args",
        "arrived",
        "bucket",
        "caller",
        "deadline",
        "kwargs",
        "priority",
        "queued",
        "receiver",
        "shape",
        "surroundings",
    )

    def __init__(
        self,
        agent: Agent | None,
        caller: str | int,
        deadline: Deadline | None,
        receiver: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.agent = agent
        self.caller = caller  # the name of a worker, or the number of a thread of this process
        self.deadline = deadline
        self.receiver = receiver
        self.args = args
        self.kwargs = kwargs
        self.priority = 0.0
        self.queued = False
        self.shape: tuple[Shape, Shape] | None = None
        self.bucket: Hashable = None  # equal for calls that may run together
        self._outcome: Any = _NOTHING
        self._listeners: list[Callable[[Entry], None]] = []

    def prepare(self) -> None:
        """Find out what a call that has to wait needs."""
        self.arrived = time.monotonic()
        self.surroundings = surroundings()
        self.shape = self.find_shape()
        self.bucket = self.shape, self.surroundings

    def find_shape(self) -> tuple[Shape, Shape]:
        args = tuple([shape_of(value) for value in self.args])
        return args, tuple([(name, shape_of(value)) for name, value in self.kwargs.items()]) if self.kwargs else ()

    def expired(self, now: float) -> bool:
        return self.deadline is not None and self.deadline.at <= now

    def settle(self, outcome: Any) -> None:
        """Answer with a value or, if it is an exception, a failure."""
        with _answering:
            self._outcome = outcome
            listeners = self._listeners
        for listener in listeners:
            listener(self)

    def listen(self, callback: Callable[[Entry], None]) -> None:
        """Call `callback(self)` when the answer is there; see `Promise`."""
        with _answering:
            answered = self._outcome is not _NOTHING
            if not answered:
                self._listeners.append(callback)
        if answered:
            callback(self)

    def value(self) -> Any:
        """The answer; raises what there is instead."""
        outcome = self._outcome
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, BaseException):  # what ends a thread here must not end the caller's
            raise TelegradError(f"the batch was ended by {type(outcome).__name__}: {outcome}")
        return outcome

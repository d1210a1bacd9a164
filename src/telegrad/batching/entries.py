"""`Entry`: one call of a batched function, from its arrival to its answer."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from telegrad.agent.scope import Scope, current_scope
from telegrad.batching.stacking import Shape, shape_of
from telegrad.deadline import Deadline
from telegrad.errors import TelegradError
from telegrad.futures import Future

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent


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
        "agent",
        "args",
        "arrived",
        "caller",
        "deadline",
        "future",
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
        self.future: Future[Any] | None = None

    def prepare(self) -> None:
        """Find out what a call that has to wait needs."""
        self.arrived = time.monotonic()
        self.surroundings = surroundings()
        self.shape = self.find_shape()
        self.future = Future()

    @property
    def bucket(self) -> Hashable:
        """Equal for calls that may run together; once it is prepared."""
        return self.shape, self.surroundings

    def find_shape(self) -> tuple[Shape, Shape]:
        args = tuple([shape_of(value) for value in self.args])
        return args, tuple([(name, shape_of(value)) for name, value in self.kwargs.items()]) if self.kwargs else ()

    def expired(self, now: float) -> bool:
        return self.deadline is not None and self.deadline.at <= now

    def settle(self, result: Any) -> None:
        """Complete the future, which runs the callbacks: with a value or, if it is an exception, a failure."""
        assert self.future is not None
        if isinstance(result, Exception):
            self.future._settle(None, result)
        elif isinstance(result, BaseException):  # what ends a thread here must not end the caller's
            self.future._settle(None, TelegradError(f"the batch was ended by {type(result).__name__}: {result}"))
        else:
            self.future._settle(result, None)

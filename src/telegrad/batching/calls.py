"""`BatchedCall`: one call of a batched function, from its arrival to its answer.

State: `_outcome` is set once, and `_listeners` are told of it; both under `_completion_lock`, for they may meet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from telegrad.batching.stacking import Signature, signature_of
from telegrad.deadline import Deadline
from telegrad.errors import TelegradError
from telegrad.messages.scope import current_scope

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

T = TypeVar("T")
R = TypeVar("R")

_DEVICES = ("cpu", "cuda")  # that autocast knows of separately
_NOT_COMPLETE = object()
_completion_lock = threading.Lock()


class CallerState:
    """What a caller has set around its call and the function sees: modes of torch, and context variables.

    An autograd context is one of the variables. Those of two callers are equal if they are the same objects.
    """

    __slots__ = ("_context", "_modes", "_variables")

    def __init__(self) -> None:
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast()
        self._context = copy_context()
        self._variables = {variable: id(value) for variable, value in self._context.items()}
        if self._context.get(current_scope) is None:  # set to None or not set at all
            self._variables.pop(current_scope, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CallerState):
            return NotImplemented
        return self._modes == other._modes and self._variables == other._variables

    def __hash__(self) -> int:
        return hash((self._modes, frozenset(self._variables.items())))

    def run(self, function: Callable[[T], R], argument: T) -> R:
        """Call a function as if the caller did."""
        return self._context.run(self._run_in_modes, function, argument)

    def _run_in_modes(self, function: Callable[[T], R], argument: T) -> R:
        grad, inference, (cache, devices) = self._modes
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for device, dtype, now in zip(_DEVICES, devices, _autocast()[1], strict=True):
                if dtype != now:
                    enabled = dtype is not None
                    mode = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
                    stack.enter_context(mode)
            return function(argument)


def _autocast() -> tuple[bool, tuple[torch.dtype | None, ...]]:
    """Return whether autocast caches, and the type that it casts to on each device where it is on."""
    on = [
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in _DEVICES
    ]
    return torch.is_autocast_cache_enabled(), tuple(on)


class BatchedCall:
    """A call that does not run at once. `queued` is True until it is taken or leaves."""

    __slots__ = (
        "_listeners",
        "_outcome",
        "args",
        "arrival_time",
        "batch_key",
        "caller",
        "caller_state",
        "deadline",
        "kwargs",
        "priority",
        "queued",
        "receiver",
        "runtime",
        "signature",
    )

    def __init__(
        self,
        runtime: AgentRuntime | None,
        caller: str | int,
        deadline: Deadline | None,
        receiver: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.runtime = runtime
        self.caller = caller  # the name of a worker, or the number of a thread of this process
        self.deadline = deadline
        self.receiver = receiver
        self.args = args
        self.kwargs = kwargs
        self.priority = 0.0
        self.queued = False
        self.signature: tuple[Signature, Signature] | None = None
        self.batch_key: Hashable = None  # equal for calls that may run together
        self._outcome: Any = _NOT_COMPLETE
        self._listeners: list[Callable[[BatchedCall], None]] = []

    def prepare(self) -> None:
        """Find out what a call that has to wait needs."""
        self.arrival_time = time.monotonic()
        self.caller_state = CallerState()
        self.signature = self.find_signature()
        self.batch_key = self.signature, self.caller_state

    def find_signature(self) -> tuple[Signature, Signature]:
        args = tuple([signature_of(value) for value in self.args])
        return args, tuple(
            [(name, signature_of(value)) for name, value in self.kwargs.items()]
        ) if self.kwargs else ()

    def has_expired(self, now: float) -> bool:
        return self.deadline is not None and self.deadline.at <= now

    def complete(self, outcome: Any) -> None:
        """Answer with a value or, if it is an exception, a failure."""
        with _completion_lock:
            self._outcome = outcome
            listeners = self._listeners
        for listener in listeners:
            listener(self)

    def listen(self, callback: Callable[[BatchedCall], None]) -> None:
        """Call `callback(self)` when the answer is there; see `Promise`."""
        with _completion_lock:
            answered = self._outcome is not _NOT_COMPLETE
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

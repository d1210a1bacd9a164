"""`BatchedCall`: one call of a batched function that waits for its batch.

State: `_outcome` is set once, and then the `_listeners` are called. Both are changed under
`_completion_lock`, because a listener may be added while the call completes.
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
from telegrad.messages.call_scope import current_scope

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

T = TypeVar("T")
R = TypeVar("R")

_DEVICES = ("cpu", "cuda")  # the devices with an autocast mode of their own
_NOT_COMPLETE = object()
_completion_lock = threading.Lock()


class CallerState:
    """The modes of torch and the context variables under which a caller made its call.

    A distributed autograd context is one of the context variables. The states of two callers are
    equal if their variables have the same objects as values.
    """

    __slots__ = ("_context", "_modes", "_variables")

    def __init__(self) -> None:
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _autocast()
        self._context = copy_context()
        self._variables = {variable: id(value) for variable, value in self._context.items()}
        if self._context.get(current_scope) is None:  # None and not set mean the same
            self._variables.pop(current_scope, None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CallerState):
            return NotImplemented
        return self._modes == other._modes and self._variables == other._variables

    def __hash__(self) -> int:
        return hash((self._modes, frozenset(self._variables.items())))

    def run(self, function: Callable[[T], R], argument: T) -> R:
        """Return `function(argument)`, called under this state."""
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
    """Return whether autocast caches casts, and its dtype for each device, None where it is off."""
    on = [
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in _DEVICES
    ]
    return torch.is_autocast_cache_enabled(), tuple(on)


class BatchedCall:
    """A call that does not run at once.

    `queued` is True from the time it is queued until a batch includes it or it is removed. It
    implements `Promise`.
    """

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
        self.caller = caller  # the name of a worker, or the id of a thread of this process
        self.deadline = deadline
        self.receiver = receiver
        self.args = args
        self.kwargs = kwargs
        self.priority = 0.0
        self.queued = False
        self.signature: tuple[Signature, Signature] | None = None
        self.batch_key: Hashable = None  # equal for calls that may run in one batch
        self._outcome: Any = _NOT_COMPLETE
        self._listeners: list[Callable[[BatchedCall], None]] = []

    def prepare(self) -> None:
        """Determine what the queue needs to know about this call."""
        self.arrival_time = time.monotonic()
        self.caller_state = CallerState()
        self.signature = self.find_signature()
        self.batch_key = self.signature, self.caller_state

    def find_signature(self) -> tuple[Signature, Signature]:
        """Return the signatures of the positional arguments and of the keyword arguments."""
        args = tuple([signature_of(value) for value in self.args])
        if not self.kwargs:
            return args, ()
        return args, tuple([(name, signature_of(value)) for name, value in self.kwargs.items()])

    def has_expired(self, now: float) -> bool:
        """Return whether the deadline of the call has passed."""
        return self.deadline is not None and self.deadline.at <= now

    def complete(self, outcome: Any) -> None:
        """Complete the call with a value, or with an exception as its failure."""
        with _completion_lock:
            self._outcome = outcome
            listeners = self._listeners
        for listener in listeners:
            listener(self)

    def listen(self, callback: Callable[[BatchedCall], None]) -> None:
        """Call `callback(self)` when the call has completed; see `Promise`."""
        with _completion_lock:
            completed = self._outcome is not _NOT_COMPLETE
            if not completed:
                self._listeners.append(callback)
        if completed:
            callback(self)

    def value(self) -> Any:
        """Return the value of the completed call, or raise its exception."""
        outcome = self._outcome
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(
            outcome, BaseException
        ):  # such as SystemExit, which must not end the thread of the caller
            raise TelegradError(f"{type(outcome).__name__} ended the batch: {outcome}")
        return outcome

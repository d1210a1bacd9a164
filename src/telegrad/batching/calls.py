"""The calls of a batch: `BatchedCall`, and how the arguments of many calls become those of one.

A `BatchedCall` is one call of a batched function that waits for its batch.

`stack` makes one argument of those of many calls; `split` makes one result for each call of the
common one. Tensors are stacked along a new first dimension. Tuples, lists, dicts and dataclasses
that contain tensors keep their structure, and each leaf is stacked. Other values become a list with
one item for each call. Calls can be stacked if their arguments have equal signatures
(`signature_of`). All operations on tensors are differentiable.

State of a `BatchedCall`: `_outcome` is set once, and then the `_listeners` are called. Both are
changed under `_completion_lock`, because a listener may be added while the call completes.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from telegrad import plurals
from telegrad.current import Deadline
from telegrad.errors import TelegradError, UsageError
from telegrad.messages.call_scope import current_scope

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


Signature = tuple[Any, ...]
_NOT_STACKED: Signature = ()  # the signature of values that contain no tensor
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
_DEVICES = ("cpu", "cuda")  # the devices with an autocast mode of their own
_NOT_COMPLETE = object()
_completion_lock = threading.Lock()


def signature_of(value: Any) -> Signature:
    """Return a value that is equal for values that can be stacked with each other."""
    kind = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.device, value.layout
    if kind in (tuple, list) or _is_namedtuple(value):
        signatures: Signature = tuple([signature_of(item) for item in value])
    elif kind is dict:
        signatures = tuple([(key, signature_of(item)) for key, item in value.items()])
        if all(signature == _NOT_STACKED for _, signature in signatures):
            return _NOT_STACKED
    elif _is_dataclass(value):
        signatures = tuple(
            [signature_of(getattr(value, field.name)) for field in dataclasses.fields(value)]
        )
    else:
        return _NOT_STACKED
    return (
        (kind, *signatures)
        if any(signature != _NOT_STACKED for signature in signatures)
        else _NOT_STACKED
    )


def stack(values: Sequence[Any], signature: Signature) -> Any:
    """Stack values that have this signature into one."""
    first = values[0]
    if signature == _NOT_STACKED:
        return list(values)
    if isinstance(first, torch.Tensor):
        return first.unsqueeze(0) if len(values) == 1 else torch.stack(list(values))
    _, *signatures = signature
    if isinstance(first, dict):
        return {key: stack([value[key] for value in values], inner) for key, inner in signatures}
    if isinstance(first, tuple | list):
        items = [
            stack([value[index] for value in values], inner)
            for index, inner in enumerate(signatures)
        ]
        return type(first)(*items) if _is_namedtuple(first) else type(first)(items)
    names = [field.name for field in dataclasses.fields(first)]
    return _copy_dataclass(
        first,
        {
            name: stack([getattr(value, name) for value in values], inner)
            for name, inner in zip(names, signatures, strict=True)
        },
    )


def split(value: Any, count: int, name: str, rows: int | None = None) -> list[Any]:
    """Split what the function `name` returned for a batch into `count` results.

    A tensor, array or list is split along its first dimension; tuples, dicts and dataclasses of
    those are split inside; None is the result of every call. The results for padding are dropped if
    the batch was padded to `rows` rows.
    """
    if isinstance(value, torch.Tensor):
        _check(value.shape[0] if value.dim() else None, rows or count, name)
        return [value[0]] if count == 1 else list(value.unbind(0)[:count])
    if isinstance(value, list | np.ndarray):
        has_rows = isinstance(value, list) or value.ndim > 0
        _check(len(value) if has_rows else None, rows or count, name)
        return list(value[:count])
    if value is None:
        return [None] * count
    if isinstance(value, dict):
        columns = [split(item, count, name, rows) for item in value.values()]
        return [dict(zip(value, row, strict=True)) for row in _rows(columns, count)]
    if isinstance(value, tuple):
        columns = [split(item, count, name, rows) for item in value]
        return [
            type(value)(*row) if _is_namedtuple(value) else row for row in _rows(columns, count)
        ]
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        columns = [split(getattr(value, each), count, name, rows) for each in names]
        return [
            _copy_dataclass(value, dict(zip(names, row, strict=True)))
            for row in _rows(columns, count)
        ]
    raise UsageError(
        f"{name} returned {type(value).__name__} for a batch of {plurals.count(count, 'call')}. "
        "A batched function must return a tensor, array or list with one result for each call, "
        "a tuple, dict or dataclass of those, or None"
    )


def _rows(columns: list[list[Any]], count: int) -> list[tuple[Any, ...]]:
    """Return the transpose of `columns`, which has `count` rows."""
    return list(zip(*columns, strict=True)) if columns else [()] * count


def _check(length: int | None, rows: int, name: str) -> None:
    """Raise if a result does not have `rows` rows. `length` is None for one without dimensions."""
    if length is None:
        raise UsageError(
            f"{name} returned one number for a batch of {plurals.count(rows, 'row')}: return one "
            "for each, in the first dimension"
        )
    if length != rows:
        raise UsageError(
            f"{name} returned {length} results for a batch of {plurals.count(rows, 'row')}: "
            "return one for each"
        )


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _copy_dataclass(example: Any, fields: dict[str, Any]) -> Any:
    """Return a dataclass of the type of `example` with other field values.

    Its `__init__` and `__post_init__` are not called: they may reject batches.
    """
    made = object.__new__(type(example))
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


@dataclasses.dataclass(frozen=True)
class Versioned(Generic[T_co]):
    """The reply of a batched policy, with the version of the weights that it was computed with."""

    value: T_co
    version: int


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
        "is_versioned",
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
        self.is_versioned = False  # the caller gets the version with the result
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

"""`batched`: the decorator for functions that run concurrent calls together.

`Batching` holds what the decorator knows about a function. The calls of a method wait in a queue of
its object, those of a plain function in a queue of the agent. Objects and agents are referenced
weakly, so a queue does not keep its owner alive.

State of a `Batching`: `_queues` by the id of their owner; entries are added under `_lock` and
removed when the owner is deleted. `_retired` has the metrics of queues that were removed, and
`_retired_metrics` their sum, under `_metrics_lock`. It is not `_lock`, because a thread that holds
that may delete an owner.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

import torch

from telegrad.agent import Agent
from telegrad.batching.calls import BatchedCall, Versioned
from telegrad.batching.execution import BatchExecutor
from telegrad.batching.metrics import QueueMetrics, Statistics
from telegrad.batching.queue import NOT_ALONE, BatchQueue
from telegrad.batching.scheduler import BatchOptions
from telegrad.current import current_deadline, thread_state
from telegrad.errors import ArgumentTypeError, UsageError
from telegrad.messages.remote_functions import (
    ASYNC_MARK,
    DeferredReply,
    Function,
    describe,
    serve_as,
)
from telegrad.runtime import active_runtime

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")


class Batching:
    """The queues and metrics of one batched function: `function.batching`."""

    def __init__(self, function: Function, options: BatchOptions) -> None:
        self.options = options
        self.wrapper: Function = function
        self.versioned: Function = function  # like `wrapper`; its callers get the version, too
        self._function = function
        self._queues: dict[int, tuple[weakref.ref[Any], BatchQueue]] = {}
        self._receiver_types: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
        self._last_receiver_type: type | None = None  # the latest type that was found
        self._retired: collections.deque[QueueMetrics] = collections.deque()
        self._retired_metrics = QueueMetrics()
        self._lock, self._metrics_lock = threading.Lock(), threading.Lock()

    def __repr__(self) -> str:
        return f"<Batching of {describe(self._function)}: {self.statistics()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the function and its options, without the queues.

        This is used for a function that is sent by value, because it cannot be imported.
        """
        state = {"wrapper": self.wrapper, "versioned": self.versioned}
        return Batching, (self._function, self.options), state

    def statistics(self, of: object = None) -> Statistics:
        """Return the statistics of one object or agent, or the totals if `of` is None."""
        if of is not None:
            queue = self._queue_of(of._runtime if isinstance(of, Agent) else of)
            return queue.metrics.snapshot(len(queue))
        total, waiting = QueueMetrics(), 0
        with self._metrics_lock:
            self._add_retired()
            total.merge(self._retired_metrics)
        for _, queue in list(self._queues.values()):
            total.merge(queue.metrics)
            waiting += len(queue)
        return total.snapshot(waiting)

    def call(self, is_versioned: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function in this process and wait for its result."""
        outcome = self.serve(is_versioned, *args, **kwargs)
        if type(outcome) is not DeferredReply:
            return outcome
        if getattr(self.wrapper, ASYNC_MARK, None) is not None:
            return outcome.future
        deadline = current_deadline()
        try:
            return outcome.future.result(None if deadline is None else max(deadline.left(), 0))  # type: ignore[attr-defined]
        except BaseException:
            assert outcome.on_abandoned is not None
            outcome.on_abandoned()
            raise

    def serve(self, is_versioned: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Run or queue a call of a peer. Return its result or a `DeferredReply`.

        The result is `Versioned` if the caller asks for the version.
        """
        if is_versioned and self.options.version is None:
            name = describe(self._function)
            raise UsageError(f"{name} has no version: pass `version` to telegrad.batched")
        runtime = active_runtime()
        if args and (type(args[0]) is self._last_receiver_type or self._is_receiver(args[0])):
            receiver, rest = args[:1], args[1:]
            queue = self._queue_of(args[0])
        else:
            receiver, rest = (), args
            queue = self._queue_of(runtime)
        current = thread_state.call
        caller = (current and current.caller) or threading.get_ident()
        result = queue.try_run_alone(runtime, caller, receiver, rest, kwargs, is_versioned)
        if result is not NOT_ALONE:
            return result
        call = BatchedCall(runtime, caller, current_deadline(), receiver, rest, kwargs)
        call.is_versioned = is_versioned
        if self.options.priority is not None:
            call.priority = self.options.priority(*args, **kwargs)
        return queue.submit(call)

    def _is_receiver(self, first: Any) -> bool:
        """Return whether the first argument is the object or class whose method this is."""
        kind, wrappers = type(first), (self.wrapper, self.versioned)
        if kind is torch.Tensor:
            return False
        if isinstance(first, type):
            functions = [getattr(value, "__func__", None) for value in _attributes(first)]
            return any(value is wrapper for value in functions for wrapper in wrappers)
        known = self._receiver_types.get(kind)
        if known is None:
            known = self._receiver_types[kind] = any(
                value is wrapper for value in _attributes(kind) for wrapper in wrappers
            )
        if known:
            self._last_receiver_type = kind
        return known

    def _queue_of(self, owner: AgentRuntime | object | None) -> BatchQueue:
        """Return the queue of an object or agent, or of this process if it is None."""
        if owner is None:
            owner = self
        found = self._queues.get(id(owner))
        if found is not None and found[0]() is owner:
            return found[1]
        with self._lock:
            found = self._queues.get(id(owner))
            if found is None or found[0]() is not owner:
                found = self._queues[id(owner)] = self._weak_reference(owner), self._make_queue()
        return found[1]

    def _add_retired(self) -> None:
        """Under the lock of the metrics: add those of removed queues to their sum."""
        while self._retired:
            self._retired_metrics.merge(self._retired.popleft())

    def _make_queue(self) -> BatchQueue:
        is_deferred = getattr(self.wrapper, ASYNC_MARK, None) is not None
        return BatchQueue(BatchExecutor(self._function, self.options, is_deferred), self.options)

    def _weak_reference(self, owner: object) -> weakref.ref[Any]:
        """Return a weak reference that removes the queue of `owner` when it is deleted."""
        key, this = id(owner), weakref.ref(self)

        def remove_queue(gone: weakref.ref[Any]) -> None:
            batching = this()
            found = None if batching is None else batching._queues.get(key)
            if batching is not None and found is not None and found[0] is gone:
                del batching._queues[key]
                batching._retired.append(found[1].metrics)
                if batching._metrics_lock.acquire(blocking=False):
                    try:
                        batching._add_retired()
                    finally:
                        batching._metrics_lock.release()

        try:
            return weakref.ref(owner, remove_queue)
        except TypeError:
            raise UsageError(
                f"{describe(self._function)} has a queue for each object, which needs a weak "
                f"reference to it, but {type(owner).__name__} does not support weak references: "
                "add '__weakref__' to its __slots__"
            ) from None


def _attributes(kind: type) -> list[Any]:
    """Return the attributes of a class and of its bases."""
    return [value for base in kind.__mro__ for value in vars(base).values()]


# Types of decorated functions. The function takes and returns batches; its callers pass and get
# single elements. A tensor stays a tensor, and a result `list[R]` becomes `R`. The type system
# cannot express that a parameter `list[T]` becomes `T` while its name is kept, so the parameters of
# such functions are not checked.


class BatchedFunction(Protocol[P, R_co]):
    """Type of a batched function or method whose callers pass what it declares, such as tensors."""

    __name__: str
    __qualname__: str

    @property
    def batching(self) -> Batching: ...
    @property
    def versioned(self) -> Callable[P, Versioned[R_co]]: ...
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __get__(self, instance: None, owner: type, /) -> BatchedFunction[P, R_co]: ...
    @overload
    def __get__(
        self: BatchedFunction[Concatenate[S, Q], R_co], instance: S, owner: type[S], /
    ) -> BatchedFunction[Q, R_co]: ...
    @overload
    def __get__(self, instance: object, owner: type, /) -> BatchedFunction[P, R_co]: ...


class BatchedListFunction(Protocol[R_co]):
    """Type of a batched function with parameters that are lists, or of a batched class method."""

    __name__: str
    __qualname__: str

    @property
    def batching(self) -> Batching: ...
    @property
    def versioned(self) -> Callable[..., Versioned[R_co]]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> R_co: ...
    def __get__(self, instance: object, owner: type, /) -> BatchedListFunction[R_co]: ...


if TYPE_CHECKING:
    # One of the first three parameters accepts a list, or the first one is a class.
    _TakesList = (
        Callable[Concatenate[list[Any], ...], R]
        | Callable[Concatenate[Any, list[Any], ...], R]
        | Callable[Concatenate[Any, Any, list[Any], ...], R]
        | Callable[Concatenate[type[Any], ...], R]
    )


class BatchDecorator(Protocol):
    """Type of `batched(...)` with settings."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: _TakesList[list[R]], /
    ) -> BatchedListFunction[R]: ...
    @overload
    def __call__(self, function: _TakesList[R], /) -> BatchedListFunction[R]: ...
    @overload
    def __call__(self, function: Callable[P, list[R]], /) -> BatchedFunction[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> BatchedFunction[P, R]: ...


def _options(settings: dict[str, Any]) -> BatchOptions:
    """Return the options that `batched` was given."""
    known = [field.name for field in dataclasses.fields(BatchOptions)]
    for name in settings:
        if name not in known:
            raise ArgumentTypeError(f"batched has no option {name!r}; it has {', '.join(known)}")
    sizes = settings.get("pad_to", ())
    if not isinstance(sizes, Iterable):
        raise ArgumentTypeError(f"batched: pad_to is a list of sizes, not {sizes!r}")
    return BatchOptions(**{**settings, "pad_to": tuple(sizes)})


@overload
def batched(  # type: ignore[overload-overlap]
    function: _TakesList[list[R]], /
) -> BatchedListFunction[R]: ...
@overload
def batched(function: _TakesList[R], /) -> BatchedListFunction[R]: ...
@overload
def batched(function: Callable[P, list[R]], /) -> BatchedFunction[P, R]: ...
@overload
def batched(function: Callable[P, R], /) -> BatchedFunction[P, R]: ...
@overload
def batched(
    *,
    max_size: int = 64,
    max_wait: float | None = None,
    min_size: int | Literal["all"] = 1,
    pad_to: Sequence[int] = (),
    cuda_graph: bool = False,
    max_queue: int | None = None,
    when_full: Literal["wait", "reject"] = "wait",
    priority: Callable[..., float] | None = None,
    retry_alone: bool = True,
    version: Callable[..., int] | None = None,
) -> BatchDecorator: ...
def batched(function: Any = None, /, **settings: Any) -> Any:
    """Run concurrent calls of a function together, as one call with stacked arguments.

    Callers call the function with single arguments and get single results. The function gets the
    arguments of all calls stacked and returns one result for each call. A batch of at most
    `max_size` calls starts when the previous one is over; `docs/batching.md` explains the settings.

    >>> import torch
    >>> @batched(max_size=32)
    ... def double(x: torch.Tensor) -> torch.Tensor:
    ...     return 2 * x  # of shape [n, ...]
    >>> double(torch.tensor([1, 2]))
    tensor([2, 4])
    >>> double.batching.statistics().sizes
    {1: 1}
    """
    if function is None:
        return functools.partial(batched, **settings)
    if isinstance(function, staticmethod | classmethod):
        return type(function)(batched(function.__func__, **settings))
    if not callable(function):
        raise UsageError(f"batched decorates a function, not {type(function).__name__}")
    options = _options(settings)
    batching = Batching(function, options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return batching.call(False, *args, **kwargs)

    @functools.wraps(function)
    def call_versioned(*args: Any, **kwargs: Any) -> Any:
        return batching.call(True, *args, **kwargs)

    call_versioned.__qualname__ += ".versioned"  # where pickle finds it
    batching.wrapper, batching.versioned = call, call_versioned
    call.batching = call_versioned.batching = batching  # type: ignore[attr-defined]
    call.versioned = call_versioned  # type: ignore[attr-defined]
    serve_as(call, functools.partial(batching.serve, False))
    serve_as(call_versioned, functools.partial(batching.serve, True))
    return call

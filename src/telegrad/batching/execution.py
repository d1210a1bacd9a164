"""Run a batch: stack the arguments of its calls, run the function and split its result.

The result is a list with one outcome for each call; an exception in the list is raised for the
caller of that call. If a batch of several calls raises, each of them runs again alone (unless
`retry_alone` is False), so that one bad input does not fail the other calls.

While a thread runs a batch, it has a `BatchRole`: before the batch blocks in a wait that Telegrad
knows of, its queue starts the next batch. `current_caller` returns the worker that made all calls
of the batch, or None if there are several. `current_deadline` returns the latest deadline of the
calls.

The option `version` is called before each batch. It may change the weights, so no other batch
starts while it waits for something.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from telegrad import thread_roles
from telegrad.batching.calls import (
    BatchedCall,
    CallerState,
    Versioned,
    signature_of,
    split,
    stack,
)
from telegrad.batching.cuda_graphs import CudaGraphs
from telegrad.batching.scheduler import BatchOptions
from telegrad.current import Deadline, thread_state
from telegrad.errors import InternalError, UsageError
from telegrad.messages.remote_functions import Function, describe
from telegrad.scheduling.executor import apply_torch_num_threads

Finish = Callable[[list[Any]], None]


class BatchExecutor:
    """Run a batched function with stacked arguments."""

    def __init__(self, function: Function, options: BatchOptions, is_deferred: bool) -> None:
        self.name = describe(function)
        self.is_deferred = is_deferred  # the function returns a future
        if options.cuda_graph and is_deferred:
            raise UsageError(
                f"batched: cuda_graph does not support {self.name}, which returns a future"
            )
        self._function = function
        self._graphs = CudaGraphs(function, self.name) if options.cuda_graph else None
        self._options = options
        self._rows_for_one = options.padded_size(1)

    def run_one(
        self,
        receiver: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_versioned: bool,
    ) -> Any:
        """Return the result of one call, run on this thread. Raise what the function raises."""
        rows = self._rows_for_one
        version = None if self._options.version is None else self._find_version(receiver)
        batch = [
            value.unsqueeze(0)
            if rows == 1 and type(value) is torch.Tensor
            else _repeat(value, rows)
            for value in args
        ]
        if kwargs or self._graphs is not None:
            value = self._invoke(
                receiver, batch, {name: _repeat(each, rows) for name, each in kwargs.items()}
            )
        else:
            value = self._function(*receiver, *batch)
        if rows == 1 and type(value) is list and len(value) == 1:
            outcome = value[0]
        else:
            (outcome,) = split(value, 1, self.name, rows)
        if isinstance(outcome, Exception):
            raise outcome
        return _with_version(outcome, version) if is_versioned else outcome

    def run(self, batch: list[BatchedCall]) -> list[Any]:
        """Return the outcome of each call."""
        try:
            version = self._find_version(batch[0].receiver)
            value = self._call_in_caller_state(batch)
        except Exception as error:
            if not self._should_retry(batch):
                return self._fail_all(batch, error)
            return [self._retry_alone(call, len(batch), error) for call in batch]
        return self._split(value, version, batch)

    def run_deferred(self, batch: list[BatchedCall], finish: Finish) -> None:
        """Run a function that returns a future; call `finish(outcomes)` when it completes."""
        try:
            version = self._find_version(batch[0].receiver)
            future = self._call_in_caller_state(batch)
            if not isinstance(future, torch._C.Future):
                raise UsageError(
                    f"{self.name} must return a torch.futures.Future, "
                    f"but returned {type(future).__name__}"
                )
        except Exception as error:
            self._retry_deferred(batch, error, finish)
            return

        def complete(done: torch.futures.Future[Any]) -> None:
            try:
                value = done.value()
            except Exception as error:
                self._retry_deferred(batch, error, finish)
            else:
                finish(self._split(value, version, batch))

        future.add_done_callback(complete)

    def _call_in_caller_state(self, batch: list[BatchedCall]) -> Any:
        """Call the function under the modes and context variables of the callers."""
        caller_state = batch[0].caller_state  # equal for all calls of a batch
        if caller_state == CallerState():
            return self._call_function(batch)
        return caller_state.run(self._call_function, batch)

    def _call_function(self, batch: list[BatchedCall]) -> Any:
        """Call the function with the stacked arguments of a batch, padded if necessary."""
        first = batch[0]
        args_signature, kwargs_signature = first.signature or first.find_signature()
        if self._options.pad_to:
            batch = batch + [batch[-1]] * (self._options.padded_size(len(batch)) - len(batch))
        args = [
            stack([call.args[i] for call in batch], signature)
            for i, signature in enumerate(args_signature)
        ]
        kwargs = {
            name: stack([call.kwargs[name] for call in batch], signature)
            for name, signature in kwargs_signature
        }
        return self._invoke(first.receiver, args, kwargs)

    def _invoke(
        self, receiver: tuple[Any, ...], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if self._graphs is not None:
            return self._graphs(receiver, args, kwargs)
        apply_torch_num_threads()
        return self._function(*receiver, *args, **kwargs)

    def _find_version(self, receiver: tuple[Any, ...]) -> int | None:
        """Return the version that the next batch is computed with; None without `version`.

        While `version` waits, for example for new weights, the queue does not start another batch,
        which would use weights that are being changed.
        """
        if self._options.version is None:
            return None
        role = thread_roles.current_role()
        thread_roles.set_role(role.outer if isinstance(role, BatchRole) else role)
        try:
            version = self._options.version(*receiver)
        finally:
            thread_roles.set_role(role)
        if not isinstance(version, int):
            raise UsageError(
                f"the version of {self.name} must be a number, not {type(version).__name__}"
            )
        return version

    def _split(self, value: Any, version: int | None, batch: list[BatchedCall]) -> list[Any]:
        """Return the outcome of each call; if `value` cannot be split, the error for all."""
        size = len(batch)
        try:
            outcomes = split(value, size, self.name, self._options.padded_size(size))
        except Exception as error:
            return [error] * size
        if version is None:
            return outcomes
        return [
            _with_version(outcome, version) if call.is_versioned else outcome
            for call, outcome in zip(batch, outcomes, strict=True)
        ]

    def _should_retry(self, batch: list[BatchedCall]) -> bool:
        return len(batch) > 1 and self._options.retry_alone

    def _fail_all(self, batch: list[BatchedCall], error: Exception) -> list[Any]:
        """Return the error as the outcome of every call."""
        if len(batch) > 1:
            _add_note(error, f"{self.name} raised this for a batch of {len(batch)} calls.")
        return [error] * len(batch)

    def _retry_alone(self, call: BatchedCall, size: int, error: Exception) -> Any:
        """Return the outcome of a call of a failed batch, run again alone."""
        return self._add_retry_note(self.run([call])[0], size, error)

    def _retry_deferred(self, batch: list[BatchedCall], error: Exception, finish: Finish) -> None:
        """Run each call of a failed batch alone; call `finish` when all have completed."""
        if not self._should_retry(batch):
            finish(self._fail_all(batch, error))
            return
        outcomes: list[Any] = [None] * len(batch)
        missing = [len(batch)]
        lock = threading.Lock()

        def collect(index: int, outcome: Any) -> None:
            outcomes[index] = self._add_retry_note(outcome, len(batch), error)
            with lock:
                missing[0] -= 1
                last = not missing[0]
            if last:
                finish(outcomes)

        for index, call in enumerate(batch):
            self.run_deferred([call], lambda outcome, index=index: collect(index, outcome[0]))  # type: ignore[misc]

    def _add_retry_note(self, outcome: Any, size: int, error: Exception) -> Any:
        """Return the outcome; if it is an exception, say that the call was run again."""
        if isinstance(outcome, Exception):
            _add_note(
                outcome,
                f"{self.name} raised {type(error).__name__} for a batch of {size} calls. "
                "This call was run again alone and raised this exception.",
            )
        return outcome


def _with_version(outcome: Any, version: int | None) -> Any:
    """Return what the caller of `function.versioned` gets for an outcome."""
    if version is None or isinstance(outcome, BaseException):
        return outcome
    return Versioned(outcome, version)


def _repeat(value: Any, rows: int) -> Any:
    """Return `value` stacked `rows` times."""
    return stack([value] * rows, signature_of(value))


def _add_note(error: Exception, note: str) -> None:
    """Add a note as `BaseException.add_note` does, which Python 3.10 does not have.

    The attribute `__notes__` is sent to the caller with the exception.
    """
    error.__dict__.setdefault("__notes__", []).append(note)


class PausableQueue(Protocol):
    """The part of `BatchQueue` that `BatchRole` uses."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class BatchRole:
    """The role of a thread that runs a batch; see `telegrad.thread_roles.ThreadRole`.

    `outer` is the role that the thread had before.
    """

    __slots__ = ("_queue", "outer")

    def __init__(self, queue: PausableQueue) -> None:
        self._queue = queue
        self.outer: thread_roles.ThreadRole | None = None

    def pause(self) -> None:
        self._queue.pause()
        if self.outer is not None:
            self.outer.pause()

    def pause_when_needed(self) -> thread_roles.DelayedPause | None:
        self._queue.pause()
        return None if self.outer is None else self.outer.pause_when_needed()

    def resume(self) -> None:
        if self.outer is not None:
            self.outer.resume()
        self._queue.resume()

    def begin_backpressure(self) -> None:
        self._queue.pause()
        if self.outer is not None:
            self.outer.begin_backpressure()

    def end_backpressure(self) -> None:
        if self.outer is not None:
            self.outer.end_backpressure()
        self._queue.resume()

    def has_pending_messages(self) -> bool:
        return False  # this thread reads nothing before the batch is over

    def run_when_drained(self, key: Hashable, job: Callable[[], None]) -> None:
        raise InternalError("a thread that runs a batch cannot defer work")

    def run_at(self, key: Hashable, when: float, job: Callable[[], None]) -> bool:
        return self.outer is not None and self.outer.run_at(key, when, job)


@contextlib.contextmanager
def running_batch(role: BatchRole, batch: list[BatchedCall]) -> Iterator[None]:
    """Give this thread the role, runtime, caller and deadline of a batch inside the block."""
    before = thread_state.runtime, thread_state.call
    thread_state.runtime = batch[0].runtime
    thread_state.call = _CurrentBatch(_common_caller(batch), _latest_deadline(batch))
    role.outer = thread_roles.set_role(role)
    try:
        yield
    finally:
        thread_roles.set_role(role.outer)
        thread_state.runtime, thread_state.call = before


class _CurrentBatch(NamedTuple):
    """The batch that a thread runs, as its `CurrentCall`."""

    caller: str | None
    deadline: Deadline | None
    outcome: str = ""


def _common_caller(batch: list[BatchedCall]) -> str | None:
    """Return the worker that made all calls; None if there are several or it is no worker."""
    caller = batch[0].caller
    same = isinstance(caller, str) and all(call.caller == caller for call in batch)
    return caller if same else None  # type: ignore[return-value]


def _latest_deadline(batch: list[BatchedCall]) -> Deadline | None:
    """Return the latest deadline; None if a call has none."""
    latest = batch[0].deadline
    for call in batch:
        if call.deadline is None or latest is None:
            return None
        latest = max(latest, call.deadline)
    return latest

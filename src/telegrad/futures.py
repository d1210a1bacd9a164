"""`Future`: a `torch.futures.Future` with `await`, cancellation and a timeout for waiting.

The value is also stored in torch's own future, so `torch.futures.wait_all`, `collect_all` and
isinstance checks work. `wait` blocks here and not in C++, so Ctrl-C can interrupt it, and a thread
of Telegrad can hand over its duty before it blocks (`thread_roles.py`). Callbacks are kept and run
here, too: those of torch's future discard the exception of a signal handler, and each operation of
torch's future lets another thread take the interpreter lock.

State: a future is completed at most once, in two steps. `_settle` stores the outcome. A reply, a
deadline, a cancellation and a lost peer may try to do so at the same time: the first call wins, and
the others return False. `_announce` wakes those who wait, then runs the callbacks, so a callback
may block until a thread that waited for the future goes on. The event loop settles several futures
before it announces them. `_settled`, `_announced`, `_cancelled`, `_error`, `_completed`,
`_callbacks` and `_callers` are changed under `_lock`, one lock for all futures, which is held only
for assignments.

The exception of a call is stored in `_error`. Raising it adds a traceback, whose frames often refer
to the future: a reference cycle, which the garbage collector of Python can free. It cannot see
references inside torch's future, so that one gets a copy of the exception without the traceback.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import torch.futures

from telegrad import thread_roles
from telegrad.errors import (
    CallCancelled,
    CallTimeout,
    SerializationError,
    as_exception,
    error_text,
)
from telegrad.locks import new_lock
from telegrad.timeouts import time_limit

T = TypeVar("T")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
_log = logging.getLogger(__name__)


Callback = Callable[[Any], object]


class CompletionListener(Protocol):
    """An object that is notified of the outcome of a call: a `Future`, or one without waiting.

    `_settle` stores the first outcome and returns False for later ones. After it, `_announce` must
    be called, which may run code of the user; `_try_complete` does both. The connection that sends
    the call sets `_on_cancel`, and `_device_copies`, the copies between devices that the result
    needs. `_callback_codes` identifies the code that runs when the call is complete.
    """

    _device_copies: Sequence[Any]
    _on_cancel: Callable[[], None] | None

    @property
    def _callback_codes(self) -> tuple[Hashable, ...]: ...
    def done(self) -> bool: ...
    def _settle(self, value: Any, error: Exception | None) -> bool: ...
    def _announce(self) -> None: ...
    def _try_complete(self, value: Any, error: Exception | None) -> bool: ...


class CompletedSource(Protocol[S_co]):
    """A future, or another object with an outcome, that is complete."""

    def value(self) -> S_co:
        """Return the result, or raise the exception."""


class Future(torch.futures.Future[T]):
    """The result of a call that may not be complete.

    >>> future: Future[int] = Future()
    >>> future.set_result(2)
    >>> future.then(lambda done: done.wait() + 1).result(timeout=1)
    3
    """

    _settled = False
    _announced = False
    _cancelled = False
    _on_cancel: Callable[[], None] | None = None  # tells the callee
    _completed: thread_roles.OneShotEvent | None = None  # made by the first thread that waits
    _callers = 0  # how many remote callers wait for this future
    _result: Any = None
    _error: Exception | None = None
    _device_copies: Sequence[Any] = ()  # copies between devices that write tensors of the result
    _on_devices = False
    _callbacks: tuple[tuple[Callback, Hashable], ...] = ()  # each with what identifies its code

    def __init__(self, *, devices: Sequence[int | str | torch.device] | None = None) -> None:
        """Make a future that is not complete.

        `devices` are the CUDA devices that the result may be on. As with torch's futures, the
        streams of those who wait and of callbacks are synchronized with the result.
        """
        torch._C.Future.__init__(self, [torch.device(device) for device in devices or ()])
        if devices:  # pragma: gpu
            self._on_devices = True

    def wait(self) -> T:
        """Block until the call is complete. Return its result, or raise its exception.

        CUDA tensors in the result are ready for use.
        """
        if not self.done():
            self._block(None)
        if self._on_devices and self._error is None:  # pragma: gpu
            result: T = torch._C.Future.wait(self)
            return result
        return self.value()

    def value(self) -> T:
        """Return the result of a complete call, or raise its exception."""
        if self._error is not None:
            raise self._error
        for device_copy in self._device_copies:
            device_copy.wait_on_current_stream()  # pragma: gpu
        if not self._announced and not self.done():
            return super().value()  # raises torch's error
        result: T = self._result
        return result

    def result(self, timeout: float | None = None) -> T:
        """Like `wait`, but raise `TimeoutError` after `timeout` seconds. The call goes on."""
        self._block_until_done(timeout)
        return self.wait()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception of the call; None if it returned. Block like `result`."""
        self._block_until_done(timeout)
        return self._error

    def cancel(self) -> bool:
        """Complete the future with `CallCancelled` and cancel the call at the callee.

        Return False if the future is already complete.
        """
        if not self._try_complete(None, CallCancelled("the call was cancelled")):
            return False
        if self._on_cancel is not None:
            self._on_cancel()
        return True

    @property
    def is_call(self) -> bool:
        """Whether this is the result of a remote call, which `cancel` cancels."""
        return self._on_cancel is not None

    def add_caller(self) -> None:
        """Count a remote caller that waits for this future, which a served function returned."""
        with _lock:
            self._callers += 1

    def remove_caller(self) -> bool:
        """Stop counting a remote caller. Return True if no other one waits."""
        with _lock:
            self._callers -= 1
            return self._callers == 0

    def cancelled(self) -> bool:
        """Return whether the call was cancelled."""
        return self._cancelled

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """Return a future for the result of `callback(self)`, which runs when this one is complete.

        The callback runs with the context variables of the caller of `then`. As with torch, an
        exception that it raises becomes a `RuntimeError`; the original is its cause.
        """
        if not callable(callback):
            raise TypeError(
                "incompatible function arguments: then() takes a callable, not "
                f"{type(callback).__name__}"
            )
        chained: Future[S] = Future()
        context = contextvars.copy_context()

        def run(done: torch.futures.Future[T]) -> None:
            try:
                value = context.run(callback, done)
            except RuntimeError as error:
                chained._try_complete(None, error)
            except BaseException as error:
                chained._try_complete(None, _as_runtime_error(error))
            else:
                chained._try_complete(value, None)

        self._add_callback(run, _code_of(callback))
        return chained

    def follow(
        self,
        source: torch.futures.Future[S],
        transform: Callable[[S], T] | None = None,
        *,
        cancels_source: bool = False,
    ) -> None:
        """Complete this future when `source` completes: with its value, or with its exception.

        If `transform` is given, the result is `transform(value)`, or the exception that it raises.
        It is not called if the source failed. If this future is complete before, it stays as it is.
        With `cancels_source`, cancelling this future cancels the source.

        >>> source: Future[int] = Future()
        >>> doubled: Future[int] = Future()
        >>> doubled.follow(source, lambda value: 2 * value)
        >>> source.set_result(2)
        >>> doubled.wait()
        4
        """

        def complete(done: torch.futures.Future[S]) -> None:
            self._complete_from(done, transform)

        if cancels_source:
            self._on_cancel = functools.partial(_cancel, source)
        if isinstance(source, Future):
            source._add_callback(complete, _code_of(transform or complete))
        else:
            source.add_done_callback(complete)

    def _complete_from(
        self, source: CompletedSource[S], transform: Callable[[S], T] | None = None
    ) -> None:
        """Complete this future with the outcome of a completed source, as `follow` describes."""
        if isinstance(source, Future) and source._error is not None:
            # Raising the error here would tie it to this frame, which refers to this future.
            self._try_complete(None, source._error)
            return
        try:
            outcome: Any = source.value()
            if transform is not None:
                outcome = transform(outcome)
        except BaseException as error:
            self._try_complete(None, as_exception(error))
        else:
            self._try_complete(outcome, None)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Call `callback(self)` when the future is complete. Callbacks run in order of addition.

        What a callback raises is logged.
        """
        self._add_callback(callback, _code_of(callback))

    def _add_callback(self, callback: Callback, code: Hashable) -> None:
        if self._on_devices:  # pragma: gpu
            super().add_done_callback(callback)  # type: ignore[arg-type]  # on streams of torch's
            return
        with _lock:
            if not self._announced:
                self._callbacks = (*self._callbacks, (callback, code))
                return
        try:
            callback(self)
        except BaseException as error:
            _log_failure(callback, error)

    @property
    def _callback_codes(self) -> tuple[Hashable, ...]:
        return tuple([code for _, code in self._callbacks])

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            yield from self._as_asyncio().__await__()
        return self.wait()

    def _as_asyncio(self) -> asyncio.Future[None]:
        """Return a future of the running asyncio loop that completes with this one."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def wake_in_loop(_: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        def cancel_call(done: asyncio.Future[None]) -> None:
            if done.cancelled():
                self.cancel()

        waiter.add_done_callback(cancel_call)
        self._add_callback(wake_in_loop, wake_in_loop.__code__)
        return waiter

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise SerializationError(
            "a future cannot be sent: send its value, or let a function that "
            "rpc.functions.async_execution decorates return it"
        )

    def set_result(self, result: T) -> None:
        """Complete the future with a result. If it was cancelled, do nothing."""
        self._complete(result, None)

    def set_exception(self, result: Exception) -> None:  # type: ignore[override]
        """Complete the future with an exception. If it was cancelled, do nothing."""
        if not isinstance(result, Exception):
            raise AssertionError(f"{result} is of type {type(result)}, not an Exception.")
        self._complete(None, result)

    def _complete(self, value: Any, error: Exception | None) -> None:
        if not self._try_complete(value, error) and not self._cancelled:
            raise RuntimeError(
                "Attempting to mark a completed Future as complete again. "
                "Note that a Future can only be marked completed once."
            )

    def _try_complete(self, value: Any, error: Exception | None) -> bool:
        """Complete the future. Return False if it was already complete."""
        settled = True
        try:
            settled = self._settle(value, error)
        finally:  # even if a signal handler raised: threads that wait must be woken
            if settled and self.done():
                self._announce()
        return settled

    def _settle(self, value: Any, error: Exception | None) -> bool:
        """Store the outcome. Return False if there is one already.

        The flag is set before the value, so that exactly one of several threads stores it.
        """
        with _lock:
            if self._settled:
                return False
            self._settled = True
            self._cancelled = isinstance(error, CallCancelled)
            self._error = error
            self._result = value
        try:
            if error is not None:
                self._set_unwrap_func(_raise)  # as torch's own `set_exception` does
                value = _copy_without_traceback(error)
        finally:  # even if a signal handler raised
            torch._C.Future.set_result(self, value)
        return True

    def _announce(self) -> None:
        """Wake the threads that wait, then run the callbacks. Further calls do nothing."""
        position, is_first = 0, False
        interrupt: BaseException | None = None
        while True:
            try:
                if not is_first:
                    with _lock:
                        if self._announced:
                            return
                        # from now on, no callback is added
                        is_first = self._announced = True
                if self._completed is not None:
                    self._completed.set()
                callbacks = self._callbacks
                while position < len(callbacks):
                    callback = callbacks[position][0]
                    position += 1
                    try:
                        callback(self)
                    except BaseException as error:
                        _log_failure(callback, error)
                self._callbacks = ()
                break
            except BaseException as error:  # of a signal handler: the rest must run nevertheless
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _completion_event(self) -> thread_roles.OneShotEvent:
        """Return the event that is set when the future completes. There is one for all waits."""
        with _lock:
            event = self._completed or thread_roles.OneShotEvent()
            if self._announced:
                event.is_set = True
            else:
                self._completed = event
            return event

    def _block_until_done(self, timeout: float | None) -> None:
        limit = time_limit(timeout)
        if not self.done() and not self._block(limit):
            raise CallTimeout(f"no result after {timeout} s; the call is still under way")

    def _block(self, timeout: float | None) -> bool:
        """Block until the future is complete. Return False if it is not after `timeout` seconds."""
        role = thread_roles.pause()
        try:
            event = self._completion_event()
            return self.done() or event.wait(timeout)
        finally:
            thread_roles.resume(role)


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """Return the values of all futures. Raise the first exception without waiting for the others.

    `torch.futures.wait_all` does the same with futures of Telegrad after `end_collect_all_early`.

    >>> slow, failed = Future(), Future()
    >>> failed.set_exception(ValueError("not today"))
    >>> wait_all([slow, failed])
    Traceback (most recent call last):
    ValueError: not today
    """
    return [future.wait() for future in collect(futures).wait()]


def end_collect_all_early() -> None:
    """Let `torch.futures.wait_all` and `collect_all` end at the first error of a Telegrad future.

    Torch documents this, but does it only for errors that its C++ code has set. Python code cannot
    set such an error on a future, and the type of the exception would be lost. So this wraps the
    function that both of them call. Lists without a Telegrad future are passed on to torch.
    `init_rpc` calls this. Further calls do nothing.
    """
    with _lock:
        torch_c: Any = torch._C
        if not hasattr(torch_c._collect_all, "ends_early"):
            torch_c._collect_all = _wrap_collect_all(torch_c._collect_all)


def _wrap_collect_all(collect_all: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(collect_all)
    def wrapper(futures: Any) -> Any:
        if isinstance(futures, list | tuple) and any(
            isinstance(future, Future) for future in futures
        ):
            return collect(futures)
        return collect_all(futures)

    wrapper.ends_early = True  # type: ignore[attr-defined]
    return wrapper


def collect(
    futures: Sequence[torch.futures.Future[Any]],
) -> Future[list[torch.futures.Future[Any]]]:
    """Return a future for the list of futures.

    It completes when all of them are complete, or fails as soon as one of them fails.
    """
    collected = list(futures)
    for future in collected:
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"wait_all() and collect_all() take futures, not {type(future).__name__}"
            )
    result: Future[list[torch.futures.Future[Any]]] = Future()
    completed = itertools.count(1)  # its `next` is atomic

    def complete(future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except Exception as error:
            result._try_complete(None, error)
        else:
            if next(completed) == len(collected):
                result._try_complete(collected, None)

    for future in collected:
        future.add_done_callback(complete)
    if not collected:
        result._try_complete(collected, None)
    return result


def _code_of(callback: Callable[..., Any]) -> Hashable:
    """Return a key that is equal for all callbacks made from the same code.

    Code that was slow before is run on another thread, see `client/multiplexed.py`.
    """
    function = getattr(callback, "func", callback)  # the function of a `functools.partial`
    code: Hashable = getattr(function, "__code__", None)
    return code or type(function).__qualname__


def _log_failure(callback: Callback, error: BaseException) -> None:
    """Log what a callback raised. Raise it again if it may be that of a signal handler."""
    if not isinstance(error, Exception) and threading.current_thread() is threading.main_thread():
        raise error
    function = getattr(callback, "func", callback)
    name = getattr(function, "__qualname__", None) or repr(callback)
    _log.error("a callback of a future failed: %s", name, exc_info=error)


def _cancel(future: torch.futures.Future[Any]) -> None:
    """Cancel a future of Telegrad; torch's own futures cannot be cancelled."""
    if isinstance(future, Future):
        future.cancel()


def _raise(error: Exception) -> None:
    raise error


def _copy_without_traceback(error: Exception) -> Exception:
    """Return a copy of an exception without its traceback; the exception if it cannot be copied."""
    try:
        copied: Exception = copy.copy(error)
        if type(copied) is not type(error):
            return error
    except BaseException:  # code of the user copies it, which may raise anything
        return error
    cause = error.__cause__
    # A cause with a traceback could be part of a cycle through torch, which is never freed.
    if cause is not None and cause.__traceback__ is None:
        copied.__cause__ = cause
    return copied


def _as_runtime_error(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"{type(error).__name__}: {error_text(error)}")
    wrapped.__cause__ = error
    return wrapped


_lock = new_lock()

"""`Future`: a `torch.futures.Future` that can also be awaited, cancelled and waited for with a time limit.

The value lives in torch's own future, so `torch.futures.wait_all`, `collect_all` and isinstance checks work. Waiting is
done here, not in C++: it can be interrupted by Ctrl-C, and a thread of ours hands its work over before it blocks.

State: completed at most once; whoever completes it runs the callbacks. `_settle` decides races between a reply,
a deadline, a cancellation and a lost peer: the first wins, the others are told so by its return value. What a call
raised is kept in `_error`: raising it ties it to the frames it passes, which often hold the future, and that knot only
Python's garbage collector can undo. torch, into which it cannot look, gets a copy.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import itertools
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import torch.futures

from telegrad import blocking
from telegrad.errors import CallCancelled, CallTimeout, as_exception, text_of

T = TypeVar("T")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class CompletionListener(Protocol):
    """What is told how a call ended. The first who tells is believed."""

    _arrivals: Sequence[Any]
    _on_cancel: Callable[[], None] | None

    @property
    def _callbacks(self) -> tuple[Hashable, ...]: ...
    def done(self) -> bool: ...
    def _settle(self, value: Any, error: Exception | None) -> bool: ...


class CompletedSource(Protocol[S_co]):
    """A future or the like that is complete."""

    def value(self) -> S_co:
        """Return the result, or raise the exception."""


class Future(torch.futures.Future[T]):
    """The result of a call that is under way.

    >>> future: Future[int] = Future()
    >>> future.set_result(2)
    >>> future.then(lambda done: done.wait() + 1).result(timeout=1)
    3
    """

    _settled = False
    _cancelled = False
    _on_cancel: Callable[[], None] | None = None
    _gate: blocking.OneShotEvent | None = None
    _callers = 0
    _error: Exception | None = None
    _arrivals: Sequence[Any] = ()  # copies between devices that bring tensors of the result
    _on_devices = False
    _callbacks: tuple[Hashable, ...] = ()  # the code that runs when the result is there

    def __init__(self, *, devices: Sequence[int | str | torch.device] | None = None) -> None:
        """`devices`: CUDA devices that the result may lie on. Whoever waits, and callbacks, use it in stream order."""
        torch._C.Future.__init__(self, [torch.device(device) for device in devices or ()])
        if devices:
            self._on_devices = True

    def wait(self) -> T:
        """Block until the result is there; raises what the call raised. CUDA tensors in it are ready for use."""
        if not self.done():
            self._block(None)
        if self._on_devices and self._error is None:
            result: T = torch._C.Future.wait(self)
            return result
        return self.value()

    def value(self) -> T:
        """The result, which must be there; raises what the call raised."""
        if self._error is not None:
            raise self._error
        for arrival in self._arrivals:
            arrival.join()
        return super().value()

    def result(self, timeout: float | None = None) -> T:
        """Like `wait`, but raises `TimeoutError` after `timeout` seconds. The call itself goes on."""
        if not self.done() and not self._block(timeout):
            raise CallTimeout(f"no result after {timeout} s; the call is still under way")
        return self.wait()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call raised, or None if it returned; waits like `result`."""
        if not self.done() and not self._block(timeout):
            raise CallTimeout(f"no result after {timeout} s; the call is still under way")
        return self._error

    def cancel(self) -> bool:
        """Stop waiting for the result and tell the callee that nobody wants it. False if it is already there."""
        if not self._settle(None, CallCancelled("the call was cancelled")):
            return False
        if self._on_cancel is not None:
            self._on_cancel()
        return True

    @property
    def is_call(self) -> bool:
        """Is this the result of a call, which cancelling stops?"""
        return self._on_cancel is not None

    def join(self) -> None:
        """One more caller waits for this future, which a function answered with."""
        with _settling:
            self._callers += 1

    def leave(self) -> bool:
        """A caller gave up. True if it was the last, so that nobody waits any more."""
        with _settling:
            self._callers -= 1
            return self._callers == 0

    def cancelled(self) -> bool:
        return self._cancelled

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """A future for what `callback` makes of this one. It runs in the context of the caller of `then`.

        What it raises arrives as a `RuntimeError`, as with torch; the original is its cause.
        """
        if not callable(callback):
            raise TypeError(
                f"incompatible function arguments: then() takes a callable, not {type(callback).__name__}"
            )
        chained: Future[S] = Future()
        context = contextvars.copy_context()

        turns = itertools.count()  # whose `next` is atomic

        def run(done: torch.futures.Future[T]) -> None:
            try:
                if next(turns):
                    return
                value = context.run(callback, done)
            except RuntimeError as error:
                chained._settle(None, error)
            except BaseException as error:
                chained._settle(None, _as_runtime_error(error))
            else:
                chained._settle(value, None)

        self._add_callback(run, _code_of(callback))
        # see `_block`: torch may have swallowed what a signal handler raised
        if self.done() and not chained.done():
            run(self)
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
    ) -> bool:
        """Complete this future with the outcome of a completed source, as `follow` describes."""
        if isinstance(source, Future) and source._error is not None:
            # Raising the error here would tie it to this frame, which refers to this future.
            return self._settle(None, source._error)
        try:
            outcome: Any = source.value()
            if transform is not None:
                outcome = transform(outcome)
        except BaseException as error:
            return self._settle(None, as_exception(error))
        return self._settle(outcome, None)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Call `callback(self)` when the result is there, in the order in which callbacks were added."""
        self._add_callback(callback, _code_of(callback))

    def _add_callback(
        self, callback: Callable[[torch.futures.Future[T]], None], code: Hashable
    ) -> None:
        self._callbacks = (*self._callbacks, code)
        super().add_done_callback(callback)

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            yield from self._as_asyncio().__await__()
        return self.wait()

    def _as_asyncio(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def settled(_: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        def cancelled(done: asyncio.Future[None]) -> None:
            if done.cancelled():
                self.cancel()

        waiter.add_done_callback(cancelled)
        super().add_done_callback(settled)
        return waiter

    def set_result(self, result: T) -> None:
        """Complete the future. If everybody who waited has given up and it was cancelled, nothing happens."""
        self._complete(result, None)

    def set_exception(self, result: Exception) -> None:  # type: ignore[override]
        if not isinstance(result, Exception):
            raise AssertionError(f"{result} is of type {type(result)}, not an Exception.")
        self._complete(None, result)

    def _complete(self, value: Any, error: Exception | None) -> None:
        if not self._settle(value, error) and not self._cancelled:
            raise RuntimeError(
                "Attempting to mark a completed Future as complete again. "
                "Note that a Future can only be marked completed once."
            )

    def _settle(self, value: Any, error: Exception | None) -> bool:
        """Complete once; True if this was the completion. The flag is set before the value: races have one winner."""
        with _settling:
            if self._settled:
                return False
            self._settled = True
            self._cancelled = isinstance(error, CallCancelled)
            self._error = error
        try:
            if error is not None:
                self._set_unwrap_func(_raise)  # as torch's own `set_exception` does
                value = _twin(error)
        finally:  # whatever was raised meanwhile: whoever waits must be woken
            torch._C.Future.set_result(self, value)
        return True

    def _completion(self) -> blocking.OneShotEvent:
        """Return a gate that opens when the result is there; made once, however often somebody waits."""
        with _settling:
            gate = self._gate
            if gate is not None:
                return gate
            gate = self._gate = blocking.OneShotEvent()
        super().add_done_callback(lambda _: gate.open())
        return gate

    def _block(self, timeout: float | None) -> bool:
        role = blocking.pause()
        try:
            gate = self._completion()
            # If the result came meanwhile, this thread has opened the gate itself, inside torch, where an exception of
            # a signal handler is swallowed: so ask.
            return self.done() or gate.wait(timeout)
        finally:
            blocking.resume(role)


def wait_all(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """The values of all of them. As soon as one fails, its error is raised, and the others are not waited for.

    `torch.futures.wait_all` does the same with futures of Telegrad after `end_collect_all_early`.

    >>> slow, failed = Future(), Future()
    >>> failed.set_exception(ValueError("not today"))
    >>> wait_all([slow, failed])
    Traceback (most recent call last):
    ValueError: not today
    """
    return [future.wait() for future in _collect(futures).wait()]


def end_collect_all_early() -> None:
    """Let `torch.futures.wait_all` and `collect_all` end with the first error of a future of Telegrad.

    Torch's promise that and keep it for errors that its C++ code has set. No function of torch lets Python set such an
    error on a future, and its type would be lost. So the function beneath both is wrapped; lists without a future of
    Telegrad go on to torch. `init_rpc` calls this; more than once does no harm.
    """
    with _settling:
        engine: Any = torch._C
        if not hasattr(engine._collect_all, "ends_early"):
            engine._collect_all = _ending_early(engine._collect_all)


def _ending_early(collect_all: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(collect_all)
    def collect(futures: Any) -> Any:
        if isinstance(futures, list | tuple) and any(
            isinstance(future, Future) for future in futures
        ):
            return _collect(futures)
        return collect_all(futures)

    collect.ends_early = True  # type: ignore[attr-defined]
    return collect


def _collect(
    futures: Sequence[torch.futures.Future[Any]],
) -> Future[list[torch.futures.Future[Any]]]:
    """Return a future for the list of them. It completes when all have, or fails when the first one fails."""
    collected = list(futures)
    for future in collected:
        if not isinstance(future, torch._C.Future):
            raise TypeError(
                f"wait_all() and collect_all() take futures, not {type(future).__name__}"
            )
    decided: Future[list[torch.futures.Future[Any]]] = Future()
    arrivals = itertools.count(1)  # whose `next` is atomic

    def arrived(future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except Exception as error:
            decided._settle(None, error)
        else:
            if next(arrivals) == len(collected):
                decided._settle(collected, None)

    for future in collected:
        future.add_done_callback(arrived)
    if not collected:
        decided._settle(collected, None)
    return decided


def _code_of(callback: Callable[..., Any]) -> Hashable:
    """Return what all callbacks have in common that were made by one piece of code."""
    function = getattr(callback, "func", callback)  # of a `functools.partial`
    code: Hashable = getattr(function, "__code__", None)
    return code or type(function).__qualname__


def _cancel(future: torch.futures.Future[Any]) -> None:
    """Cancel a future of Telegrad; torch's own futures cannot be cancelled."""
    if isinstance(future, Future):
        future.cancel()


def _raise(error: Exception) -> None:
    raise error


def _twin(error: Exception) -> Exception:
    """The same error without the frames that it passed."""
    try:
        twin: Exception = copy.copy(error)
        if type(twin) is not type(error):
            return error
    except BaseException:  # its class defines how it is copied, and that may raise anything
        return error
    cause = error.__cause__
    # one with frames would never be freed from within torch
    if cause is not None and cause.__traceback__ is None:
        twin.__cause__ = cause
    return twin


def _as_runtime_error(error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    wrapped.__cause__ = error
    return wrapped


_settling = threading.Lock()

"""`Instrument`: a tool that follows the calls of this process, made and served.

While there is an instrument, methods of `AgentRuntime` and `ServerConnection` are replaced by ones
that begin and end a `Span` for each call. Without one, the methods are the original ones, so
nothing is slower. Calls of Telegrad itself have no spans.

State: `_instruments` is replaced under `_lock`. A connection's calls whose functions returned a
future have their spans in `_deferred` until they are answered; the thread that removes an entry
ends the span.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple, Protocol

import torch

from telegrad.client.peers import WorkerAddress
from telegrad.current import ServedCall
from telegrad.errors import TelegradError
from telegrad.futures import Future
from telegrad.group.membership import WorkerInfo
from telegrad.messages.remote_functions import Function, describe, is_internal
from telegrad.runtime import AgentRuntime
from telegrad.server.connection import ReplyingConnection, ServerConnection
from telegrad.wire.frames import Frame

__all__ = ["CallInfo", "Instrument", "Span", "add", "remove"]


class CallInfo(NamedTuple):
    """A call from `caller` to `callee`. `mode` is sync, async or remote; at the callee, serve."""

    mode: str
    function: str
    caller: str
    callee: str


class Span(Protocol):
    """A call in progress."""

    def leave(self) -> None:
        """The thread that began the call goes on with something else. Called once, there."""

    def end(self, outcome: str, error: BaseException | None) -> None:
        """The call has ended, on any thread: "ok", or the type of an error. Called once, last."""


class Instrument(Protocol):
    """A tool that follows calls. Its methods must not raise."""

    def made(self, call: CallInfo) -> Span:
        """Begin a call that this thread makes."""

    def served(self, call: CallInfo, frame: Frame) -> Span:
        """Begin a call that this thread serves."""


_lock = threading.Lock()
_instruments: tuple[Instrument, ...] = ()
_deferred: dict[int, list[Span]] = {}  # by the id of the `ServedCall`
_originals: tuple[tuple[type, str, Any], ...] = (
    (AgentRuntime, "invoke", AgentRuntime.invoke),
    (AgentRuntime, "send", AgentRuntime.send),
    (ServerConnection, "_run", ServerConnection._run),
    (ReplyingConnection, "_mark_answered", ReplyingConnection._mark_answered),
)


def add(instrument: Instrument) -> None:
    """Let an instrument follow the calls of this process."""
    with _lock:
        _use((*_instruments, instrument))


def remove(instrument: Instrument) -> None:
    """Undo `add`. Calls that wait for a future end with the outcome unknown."""
    with _lock:
        _use(tuple(each for each in _instruments if each is not instrument))


def _use(instruments: tuple[Instrument, ...]) -> None:
    global _instruments  # noqa: PLW0603 - it is state of the process, as are the methods
    _instruments = instruments
    wrappers = (_invoke, _send, _run, _mark_answered)
    for (owner, name, original), wrapper in zip(_originals, wrappers, strict=True):
        setattr(owner, name, wrapper if instruments else original)
    if not instruments:
        for spans in [_deferred.pop(key) for key in list(_deferred)]:
            _end(spans, None, "unknown")


# The methods that replace the original ones

_original_invoke, _original_send, _original_run, _original_mark = (each[2] for each in _originals)


@functools.wraps(AgentRuntime.invoke)
def _invoke(
    self: AgentRuntime, to: WorkerAddress, function: Function, *args: Any, **kwargs: Any
) -> Any:
    spans = _begin_made(self, to, function, "sync")
    error: BaseException | None = None
    try:
        return _original_invoke(self, to, function, *args, **kwargs)
    except BaseException as failure:
        error = failure
        raise
    finally:
        _leave(spans)
        _end(spans, error)


@functools.wraps(AgentRuntime.send)
def _send(
    self: AgentRuntime,
    to: WorkerAddress,
    function: Function,
    args: Any,
    kwargs: Any,
    timeout: Any,
    listener: Any,
    internal: bool = False,
    *rest: Any,
    **options: Any,
) -> None:
    spans = [] if internal else _begin_made(self, to, function, "async")
    try:
        _original_send(
            self, to, function, args, kwargs, timeout, listener, internal, *rest, **options
        )
    except BaseException as error:
        _leave(spans)
        _end(spans, error)
        raise
    _leave(spans)
    if spans and isinstance(listener, Future):
        listener.add_done_callback(lambda done: _end(spans, _error_of(done)))
    else:
        _end(spans, None)  # a creation of `remote`: when it has been sent


@functools.wraps(ServerConnection._run)
def _run(self: ServerConnection, frame: Frame, function: Any, call: ServedCall, loop: Any) -> None:
    if call.internal:
        _original_run(self, frame, function, call, loop)
        return
    info = CallInfo("serve", call.function, call.caller, self._runtime.name)
    spans = [each.served(info, frame) for each in _instruments]
    try:
        _original_run(self, frame, function, call, loop)
    except BaseException as error:
        _leave(spans)
        _end(spans, error)
        raise
    _leave(spans)
    _deferred[id(call)] = spans
    if call.outcome:  # else a future will answer it
        _end_deferred(call)


@functools.wraps(ReplyingConnection._mark_answered)
def _mark_answered(self: ReplyingConnection, call: ServedCall, outcome: str) -> None:
    _original_mark(self, call, outcome)
    _end_deferred(call)


def _end_deferred(call: ServedCall) -> None:
    spans = _deferred.pop(id(call), None)
    if spans is not None:
        _end(spans, None, call.outcome)


# Spans


def _begin_made(
    runtime: AgentRuntime, to: WorkerAddress, function: Function, mode: str
) -> list[Span]:
    if is_internal(function):
        return []
    # The function of `refs.remote` has the user's function as an attribute.
    created = getattr(function, "creating_function", None)
    if created is not None:
        mode, function = "remote", created
    callee = to.name if isinstance(to, WorkerInfo) else str(to)
    if isinstance(to, int):
        try:
            callee = runtime.get_worker_info(to).name
        except TelegradError:
            callee = f"rank {to}"  # the call itself raises the error
    info = CallInfo(mode, describe(function), runtime.name, callee)
    return [each.made(info) for each in _instruments]


def _leave(spans: list[Span]) -> None:
    for span in reversed(spans):
        span.leave()


def _end(spans: list[Span], error: BaseException | None, outcome: str = "ok") -> None:
    for span in spans:
        span.end(type(error).__name__ if error is not None else outcome, error)


def _error_of(done: torch.futures.Future[Any]) -> BaseException | None:
    try:
        done.value()
    except BaseException as error:
        return error
    return None

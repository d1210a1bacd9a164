"""Exceptions in messages: the type, the arguments, the attributes, and the traceback as text.

An exception that cannot be rebuilt by the receiver becomes a `RemoteError` with the name of its
type and its traceback. Code of the user runs when an exception is formatted, pickled or unpickled.
Whatever that code raises is caught here.
"""

from __future__ import annotations

import pickle
import traceback
from types import TracebackType
from typing import Any

from telegrad.errors import RemoteError, RemoteTraceback, TelegradError, error_text
from telegrad.wire.codec import decode, encode

_MAX_MESSAGE = 1 << 14  # characters of the message of an exception in its text and traceback


def encode_failure(error: BaseException, worker: str, call: str) -> bytes:
    """Return the body of a FAILURE frame. `worker` and `call` say where the error was raised."""
    text = error_text(error)
    if len(text) > _MAX_MESSAGE:
        text = f"{text[:_MAX_MESSAGE]}... ({len(text)} characters)"
    return pickle.dumps(
        (_type_name(error), text, remote_traceback(error), worker, call, _pack(error)), 5
    )


def encode_failure_name(error: BaseException, worker: str, call: str) -> bytes:
    """Return a small body that only names the type of the exception.

    Use it if the body from `encode_failure` cannot be sent. This runs no code of the user.
    """
    text = "the exception itself could not be sent: it is too large, or it cannot be pickled"
    return pickle.dumps((_type_name(error), text, text, worker, call, None), 5)


def _type_name(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")


def decode_failure(body: bytes | memoryview) -> Exception:
    """Return the exception to raise in the caller. Its cause is the remote traceback."""
    type_name, message, traceback_text, worker, call, packed = pickle.loads(body)
    error = _unpack(packed)
    if error is None:
        error = RemoteError(
            f"{type_name} on worker {worker!r} in {call}: {message}",
            type_name=type_name,
            traceback_text=traceback_text,
            peer=worker,
        )
    if isinstance(error, TelegradError) and error.peer is None:
        error.peer, error.call = worker, error.call or call
    error.__cause__ = RemoteTraceback(f"On worker {worker!r}, in {call}:\n{traceback_text}")
    return error


def remote_traceback(error: BaseException) -> str:
    """Return the traceback as text, without the frames of Telegrad above the user's first frame."""
    trace = error.__traceback__
    while trace is not None and _is_internal(trace):
        trace = trace.tb_next
    try:
        message = str(error)
        # Formatting a very long message would take seconds. The exception itself is sent whole.
        if len(message) > _MAX_MESSAGE:
            frames = "".join(traceback.format_tb(trace))
            shortened = f"{message[:_MAX_MESSAGE]}... ({len(message)} characters)"
            title = "Traceback (most recent call last):"
            return f"{title}\n{frames}{_type_name(error)}: {shortened}"
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    except BaseException as failure:  # raised by code of the user, such as `__str__`
        reason = f"<its traceback could not be formatted: {type(failure).__name__}>"
        return f"{_type_name(error)}: {reason}"


def _is_internal(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith("telegrad.")


def _pack(error: BaseException) -> tuple[bytes, list[bytes]] | None:
    """Return the pickled exception and its buffers; None if it cannot be sent."""
    if not isinstance(error, Exception):
        return None  # a remote SystemExit or KeyboardInterrupt must not end the calling program
    try:
        has_own_reduce = type(error).__reduce__ is not BaseException.__reduce__
        value = error if has_own_reduce else (type(error), error.args, error.__dict__)
        body, buffers = encode(value)
    except BaseException:  # raised by code of the user that pickles it
        return None
    return body, [bytes(buffer) for buffer in buffers]


def _unpack(packed: tuple[bytes, list[bytes]] | None) -> Exception | None:
    """Return the exception; None if it was not sent or cannot be rebuilt."""
    if packed is None:
        return None
    try:
        value = decode(packed[0], [bytearray(buffer) for buffer in packed[1]])
        error = value if isinstance(value, Exception) else _rebuild(*value)
    except BaseException:
        # Its class cannot be imported or cannot be rebuilt. The text describes the exception.
        return None
    return error


def _rebuild(cls: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """Make an exception without calling an `__init__` of the user.

    The parameters of such an `__init__` may differ from `args`.
    """
    has_builtin_init = cls.__init__ in (Exception.__init__, BaseException.__init__) or not hasattr(
        cls.__init__, "__code__"
    )
    error = cls(*args) if has_builtin_init else cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error

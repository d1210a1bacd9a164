"""Exceptions that cross a connection: the type, its args and its attributes, and where it was raised, as text.

What cannot be rebuilt on the other side becomes a `RemoteError` with the name of the type and the traceback.
"""

from __future__ import annotations

import pickle
import traceback
from types import TracebackType
from typing import Any

from telegrad.errors import RemoteError, RemoteTraceback, TelegradError, text_of
from telegrad.wire.codec import decode, encode

_LONGEST_MESSAGE = 1 << 14  # characters of a message that a traceback shows


def encode_failure(error: BaseException, worker: str, call: str) -> bytes:
    """Return a failure as bytes."""
    text = text_of(error)
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[:_LONGEST_MESSAGE]}... ({len(text)} characters)"
    return pickle.dumps(
        (_name(error), text, remote_traceback(error), worker, call, _pack(error)), 5
    )


def encode_name_of_failure(error: BaseException, worker: str, call: str) -> bytes:
    """Return a failure as few bytes, without running code of the user: for when `encode_failure` cannot be sent."""
    text = "the exception itself could not be sent: it is too large, or it cannot be pickled"
    return pickle.dumps((_name(error), text, text, worker, call, None), 5)


def _name(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")


def decode_failure(body: bytes | memoryview) -> Exception:
    """The exception to raise here; its cause is the remote traceback."""
    name, message, text, worker, call, packed = pickle.loads(body)
    error = _unpack(packed)
    if error is None:
        error = RemoteError(
            f"{name} on worker {worker!r} in {call}: {message}",
            type_name=name,
            traceback_text=text,
            peer=worker,
        )
    if isinstance(error, TelegradError) and error.peer is None:
        error.peer = worker
    error.__cause__ = RemoteTraceback(f"On worker {worker!r}, in {call}:\n{text}")
    return error


def remote_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on: ours are of no use to them."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    try:
        message = str(error)
        # the exception itself travels whole; formatting this would take seconds
        if len(message) > _LONGEST_MESSAGE:
            frames = "".join(traceback.format_tb(trace))
            start = message[:_LONGEST_MESSAGE]
            return f"Traceback (most recent call last):\n{frames}{_name(error)}: {start}... ({len(message)} characters)"
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    except BaseException as failure:  # of code of the user, such as `__str__`
        return f"{_name(error)}: <its traceback could not be formatted: {type(failure).__name__}>"


def _is_ours(trace: TracebackType) -> bool:
    return str(trace.tb_frame.f_globals.get("__name__", "")).startswith("telegrad.")


def _pack(error: BaseException) -> tuple[bytes, list[bytes]] | None:
    """How to rebuild the exception, or None if it cannot travel."""
    if not isinstance(error, Exception):
        return None  # SystemExit or KeyboardInterrupt over there must not end the program here
    try:
        custom = type(error).__reduce__ is not BaseException.__reduce__
        body, buffers = encode(error if custom else (type(error), error.args, error.__dict__))
    except BaseException:  # of the user's code that pickles it
        return None
    return body, [bytes(buffer) for buffer in buffers]


def _unpack(packed: tuple[bytes, list[bytes]] | None) -> Exception | None:
    if packed is None:
        return None
    try:
        value = decode(packed[0], [bytearray(buffer) for buffer in packed[1]])
        error = value if isinstance(value, Exception) else _rebuild(*value)
    except BaseException:
        # its class is not importable here, or cannot be rebuilt: the text says what it was
        return None
    return error


def _rebuild(cls: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """Make the exception without running an `__init__` of the user's, whose signature may differ from its args."""
    plain = cls.__init__ in (Exception.__init__, BaseException.__init__) or not hasattr(
        cls.__init__, "__code__"
    )
    error = cls(*args) if plain else cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error

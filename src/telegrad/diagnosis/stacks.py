"""Python stacks of all threads of this process, with the call that each of them serves."""

from __future__ import annotations

import linecache
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

from telegrad.current import ServedCall
from telegrad.server.connection import ServerConnection

# The methods that have the call that a thread serves as a local variable.
_SERVE: set[CodeType] = {ServerConnection.handle.__code__, ServerConnection._execute.__code__}
_MAX_FRAMES = 200  # of one thread; the innermost are kept


def stacks() -> list[dict[str, Any]]:
    """Return the threads of this process. The frames of a thread are in order, innermost last.

    It stops no thread, and is as of one moment only if the interpreter has its lock.
    """
    names = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue  # the thread that answers
        thread = names.get(ident)
        call = served_call(frame)
        found.append(
            {
                "thread": thread.name if thread is not None else f"thread {ident}",
                "id": thread.native_id if thread is not None else None,
                "main": thread is threading.main_thread(),
                "daemon": thread is not None and thread.daemon,
                "serves": None if call is None else _describe(call),
                "frames": _frames(frame),
            }
        )
    return sorted(found, key=lambda each: (not each["main"], str(each["thread"])))


def _frames(innermost: FrameType) -> list[dict[str, Any]]:
    frames: list[dict[str, Any]] = []
    frame: FrameType | None = innermost
    while frame is not None and len(frames) < _MAX_FRAMES:
        code, line = frame.f_code, frame.f_lineno or 0
        name = getattr(code, "co_qualname", code.co_name)
        frames.append(
            {
                "file": code.co_filename,
                "line": line,
                "function": name,
                "text": linecache.getline(code.co_filename, line).strip(),
            }
        )
        frame = frame.f_back
    return frames[::-1]


def served_call(innermost: FrameType) -> ServedCall | None:
    """Return the innermost call that a thread serves."""
    frame: FrameType | None = innermost
    while frame is not None:
        if frame.f_code in _SERVE:
            call = frame.f_locals.get("call")
            return call if hasattr(call, "outcome") else None  # it is set last
        frame = frame.f_back
    return None


def _describe(call: ServedCall) -> dict[str, Any]:
    return {
        "function": call.function,
        "caller": call.caller,
        "id": call.call_id,
        "age": time.monotonic() - call.received_at,
    }

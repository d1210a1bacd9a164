"""Remote calls in profiles of `torch.profiler.profile`.

While a profile runs in this process, each call is a range such as ``telegrad.call#f(w0 -> w1)`` on
the thread that makes it, and ``telegrad.serve#f(w0 -> w1)`` on the thread that serves it. (torch's
RPC has no ranges in such profiles, and its tests look for names such as ``rpc_async#``.) The range
of an asynchronous call ends when it has been sent. A profile shows the thread that started it. With
``profile_all_threads`` in its `experimental_config`, it shows the threads that serve calls, too.

torch has no list of listeners for the start of a profile, so `enable` wraps the two functions that
torch calls then. State: `_profiles`, the number of profiles that run, under `_lock`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

from telegrad.telemetry import instruments
from telegrad.telemetry.instruments import CallInfo, Span
from telegrad.wire.frames import Frame

__all__ = ["enable"]

_VERBS = {"sync": "call", "async": "submit", "remote": "create", "serve": "serve"}
_lock = threading.Lock()
_profiles = 0


class _Range:
    """A range of the profile."""

    def __init__(self, call: CallInfo) -> None:
        record: Any = profiler.record_function
        self._range = record(
            f"telegrad.{_VERBS[call.mode]}#{call.function}({call.caller} -> {call.callee})"
        )
        self._range.__enter__()

    def leave(self) -> None:
        self._range.__exit__(None, None, None)

    def end(self, outcome: str, error: BaseException | None) -> None:
        """Do nothing: a range ends on the thread on which it began."""


class _Kineto:
    """Follows calls while a profile runs."""

    def made(self, call: CallInfo) -> Span:
        return _Range(call)

    def served(self, call: CallInfo, frame: Frame) -> Span:
        return _Range(call)


_kineto = _Kineto()


def enable() -> None:
    """Show remote calls in profiles of this process from now on. Agents call this."""
    module: Any = profiler
    with _lock:
        start = getattr(module, "_run_on_profiler_start", None)
        if start is None or getattr(start, "shows_remote_calls", False):
            return  # another torch, or done already
        module._run_on_profiler_start = _counting(start, 1)
        module._run_on_profiler_stop = _counting(module._run_on_profiler_stop, -1)


def _counting(function: Callable[[], None], change: int) -> Callable[[], None]:
    def run() -> None:
        global _profiles
        function()
        with _lock:
            before, _profiles = _profiles, max(_profiles + change, 0)
            if not before and _profiles:
                instruments.add(_kineto)
            elif before and not _profiles:
                instruments.remove(_kineto)

    run.shows_remote_calls = True  # type: ignore[attr-defined]
    return run

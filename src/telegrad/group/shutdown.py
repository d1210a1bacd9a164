"""Graceful shutdown: no worker leaves while a call of any worker is in progress."""

from __future__ import annotations

import time
from typing import Any, Protocol

from telegrad.group.collectives import Collectives

_POLL = (0.001, 0.05)
# seconds for a last round even if the time is up, so that the missing workers can be named
_MIN_ROUND = 0.1


class ShutdownRuntime(Protocol):
    """What a graceful shutdown needs from its agent."""

    calls_made: int
    collectives: Collectives

    def has_calls_in_progress(self) -> bool: ...


def wait_for_group(runtime: ShutdownRuntime, names: list[str], until: float | None) -> set[str]:
    """Wait until no worker of the group has a call in progress. Return the missing workers.

    In each round every worker drains and reports how many calls it has made, until the totals no
    longer change. One round is not enough: a worker that has drained may be called again by one
    that has not, and then make calls itself.
    """
    missing: set[str] = set()
    previous: dict[str, Any] | None = None
    while True:
        drain(runtime, until)
        left = None if until is None else max(until - time.monotonic(), _MIN_ROUND)
        result = runtime.collectives.gather(runtime.calls_made, names, left, "shutdown")
        missing |= {*result.lost, *result.late}
        if result.late or result.values == previous:
            return missing
        previous = result.values


def drain(runtime: ShutdownRuntime, until: float | None) -> None:
    """Wait until no call of a user is in progress here, neither made nor served."""
    pause = _POLL[0]
    while runtime.has_calls_in_progress() and (until is None or time.monotonic() < until):
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL[1])

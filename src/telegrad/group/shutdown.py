"""Graceful shutdown: no worker leaves while a call of any worker is in progress."""

from __future__ import annotations

import hashlib
import time
from typing import Protocol

from telegrad.group.collectives import SHUTDOWN, Collectives, GatherResult

_POLL = (0.001, 0.05)
# seconds for a last round even if the time is up, so that the missing workers can be named
_MIN_ROUND = 0.1


class ShutdownRuntime(Protocol):
    """What a graceful shutdown needs from its agent."""

    collectives: Collectives

    @property
    def calls_made(self) -> int: ...
    def has_calls_in_progress(self) -> bool: ...


def wait_for_group(runtime: ShutdownRuntime, names: list[str], until: float | None) -> set[str]:
    """Wait until no worker of the group has a call in progress. Return the missing workers.

    In each round every worker drains and reports how many calls it has made, until the totals no
    longer change. One round is not enough: a worker that has drained may be called again by one
    that has not, and then make calls itself. A worker also reports which totals it saw in the round
    before. So all of them end with the same round, also if one of them has restarted meanwhile and
    is in its first.
    """
    previous = ""
    while True:
        drain(runtime, until)
        left = None if until is None else max(until - time.monotonic(), _MIN_ROUND)
        value = (runtime.calls_made, previous)
        result = runtime.collectives.gather(value, names, left, SHUTDOWN)
        if result.late:
            return {*result.lost, *result.late}
        previous, is_last = result.values
        if is_last:
            return {*result.lost}


def summarize(result: GatherResult) -> tuple[str, bool]:
    """Return a digest of the totals of a round, and whether all saw it in the round before.

    The leader makes it, so that no other worker gets the totals of all.
    """
    calls = sorted((name, made) for name, (made, _) in result.values.items())
    totals = (sorted(result.reports), calls)
    digest = hashlib.sha256(repr(totals).encode()).hexdigest()
    return digest, all(seen == digest for _, seen in result.values.values())


def drain(runtime: ShutdownRuntime, until: float | None) -> None:
    """Wait until no call of a user is in progress here, neither made nor served."""
    pause = _POLL[0]
    while runtime.has_calls_in_progress() and (until is None or time.monotonic() < until):
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL[1])

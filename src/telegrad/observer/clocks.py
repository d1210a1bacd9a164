"""Align the clocks of workers by the calls between them.

The observer knows the clock of another machine only as well as a request to a worker there is fast.
Calls tell more, because a call is served between its start and end: the callee received it after
its caller started it, and had finished it before the caller got the reply. So each call limits the
difference of two clocks from both sides. With these limits, no call of a trace is served outside of
the time in which it was made.

Workers of one machine share a clock, so the limits are those of clocks, not of workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from telegrad.observer.group import ClockOffset, WorkerReply

Interval = tuple[float, float]
_ROUNDS = 8  # limits reach clocks that so many calls after each other connect


def refined_offsets(
    offsets: dict[str, ClockOffset], replies: Sequence[WorkerReply]
) -> dict[str, ClockOffset]:
    """Return the offsets by worker, limited by the calls in the histories of the workers."""
    clocks = {name: offset.clock for name, offset in offsets.items()}
    ranges = {
        offset.clock: (offset.seconds - offset.error, offset.seconds + offset.error)
        for offset in offsets.values()
    }
    differences = _differences(clocks, replies)
    for _ in range(_ROUNDS):
        before = dict(ranges)
        for (caller, callee), (low, high) in differences.items():
            _limit(ranges, callee, _sum(ranges[caller], (low, high)))
            _limit(ranges, caller, _sum(ranges[callee], (-high, -low)))
        if ranges == before:
            break
    return {
        name: ClockOffset(sum(ranges[clock]) / 2, (ranges[clock][1] - ranges[clock][0]) / 2, clock)
        for name, clock in clocks.items()
    }


def _differences(
    clocks: dict[str, str], replies: Sequence[WorkerReply]
) -> dict[tuple[str, str], Interval]:
    """Return by how much the clock of callees is ahead of that of callers, for pairs of clocks."""
    found: dict[tuple[str, str], Interval] = {}
    for caller, callee, low, high in _pairs(replies):
        if caller in clocks and callee in clocks and clocks[caller] != clocks[callee]:
            key = clocks[caller], clocks[callee]
            known = found.get(key, (-math.inf, math.inf))
            found[key] = max(known[0], low), min(known[1], high)
    return found


def _pairs(replies: Sequence[WorkerReply]) -> Iterator[tuple[str, str, float, float]]:
    """Yield the calls that both sides have recorded: caller, callee, and the limits."""
    served = {
        (call["peer"], reply.worker.name, call["id"]): call
        for reply in replies
        for call in _calls(reply, "served")
    }
    for reply in replies:
        for made in _calls(reply, "made"):
            key = reply.worker.name, made["peer"], made["id"]
            if key in served:
                call = served[key]
                yield key[0], key[1], call["end"] - made["end"], call["received"] - made["start"]


def _calls(reply: WorkerReply, direction: str) -> list[dict[str, Any]]:
    calls = [] if reply.value is None else reply.value["calls"]
    # only these were answered by the callee
    return [
        call
        for call in calls
        if call["direction"] == direction and call["outcome"] in ("ok", "failed")
    ]


def _sum(first: Interval, second: Interval) -> Interval:
    return first[0] + second[0], first[1] + second[1]


def _limit(ranges: dict[str, Interval], clock: str, limits: Interval) -> None:
    """Limit the range of a clock, unless the limits contradict it.

    They do if a worker was restarted, so that its calls are not those that its callers mean.
    """
    low, high = ranges[clock]
    low, high = max(low, limits[0]), min(high, limits[1])
    if low <= high:
        ranges[clock] = low, high

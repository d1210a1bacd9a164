"""The recent past of a worker as values of JSON: its recorded calls and events, and latencies."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from telegrad.current import ServedCall
from telegrad.diagnosis.calls import MADE, SERVED, function_name, parent_of
from telegrad.recorder import FlightRecorder, MadeCall

Json = dict[str, Any]
OK = "ok"
_MIN_SECONDS = 1.0  # a rate is not that of a shorter time


def recorded_calls(recorder: FlightRecorder, since: float = 0.0) -> list[Json]:
    """Return the calls that ended after `since`, a time of `time.monotonic`."""
    calls = (_describe(call) for call in recorder.calls())
    return [call for call in calls if call["end"] >= since]


def recorded_events(recorder: FlightRecorder, since: float = 0.0) -> list[Json]:
    """Return the events that ended after `since`."""
    return [
        {"kind": event.kind, "start": event.at, "seconds": event.seconds, **event.fields}
        for event in recorder.events()
        if event.at + event.seconds >= since
    ]


def _describe(call: MadeCall | ServedCall) -> Json:
    if isinstance(call, ServedCall):
        returned = call.returned_at or call.answered_at or call.received_at
        return {
            "direction": SERVED,
            "id": call.call_id,
            "peer": call.caller,
            "function": call.function,
            "received": call.received_at,
            "start": call.started_at or call.received_at,
            "returned": returned,
            "end": max(call.answered_at, returned),
            "timeout": call.timeout_ms / 1000 or None,
            "request_bytes": call.request_bytes,
            "reply_bytes": call.reply_bytes,
            "outcome": call.outcome,
            "internal": call.internal,
        }
    return {
        "direction": MADE,
        "id": call.call_id,
        "peer": call.peer,
        "function": function_name(call),
        "start": call.started_at,
        "end": call.ended_at,
        "timeout": call.timeout,
        "request_bytes": call.request_bytes,
        "reply_bytes": call.reply_bytes,
        "outcome": call.outcome,
        "internal": call.internal,
        "parent": parent_of(call),
    }


def latencies(calls: list[Json], now: float, since: float) -> list[Json]:
    """Return rate, p50, p99 and so on of the calls since `since`, by direction, function and peer.

    `calls` are all calls since then. The time of a made call is until its reply, that of a served
    call until its function returned. `queued` is the time from the arrival of a call to the start
    of its function.
    """
    groups: defaultdict[tuple[str, str, str, bool], list[Json]] = defaultdict(list)
    for call in calls:
        groups[call["direction"], call["function"], call["peer"], call["internal"]].append(call)
    seconds = max(now - since, _MIN_SECONDS)
    rows = [
        {
            "direction": direction,
            "function": function,
            "peer": peer,
            "internal": internal,
            **_summary(group, seconds),
        }
        for (direction, function, peer, internal), group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["per_second"])


def totals(calls: list[Json], now: float, since: float) -> Json:
    """Return the same of all calls of the user that were made, and of all that were served."""
    seconds = max(now - since, _MIN_SECONDS)
    found: Json = {}
    for direction in (MADE, SERVED):
        group = [call for call in calls if call["direction"] == direction and not call["internal"]]
        found[direction] = _summary(group, seconds) if group else None
    return found


def _summary(calls: list[Json], seconds: float) -> Json:
    times = sorted(each.get("returned", each["end"]) - each["start"] for each in calls)
    queued = sorted(each["start"] - each.get("received", each["start"]) for each in calls)
    return {
        "calls": len(calls),
        "per_second": len(calls) / seconds,
        "failed": sum(each["outcome"] != OK for each in calls),
        "p50": percentile(times, 0.5),
        "p99": percentile(times, 0.99),
        "longest": times[-1],
        "queued_p50": percentile(queued, 0.5),
        "queued_p99": percentile(queued, 0.99),
        "request_bytes": sum(each["request_bytes"] for each in calls),
        "reply_bytes": sum(each["reply_bytes"] for each in calls),
    }


def percentile(ordered: list[float], fraction: float) -> float:
    """Return the smallest of the sorted values that is not below `fraction` of them."""
    return ordered[max(math.ceil(len(ordered) * fraction) - 1, 0)]

"""What the page shows of a group, made of the snapshots of its workers. Pure functions.

Lists are cut off, so that a group of any size makes a page of bounded size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]

MAX_CALLS = 100  # of one worker, and in all
MAX_FUNCTIONS = 200  # the same
MAX_WAITS = 200
_COUNTERS = ("owned_objects", "held_objects", "autograd_contexts", "cuda_bytes_lent")
_FREQUENT = ("backward", "batch", "round")  # events that are no news


def worker_view(snapshot: Json, before: Json | None) -> Json:
    """Return what the page shows of one worker. `before` is its snapshot of a moment ago."""
    worker, shared = snapshot["worker"], snapshot["shared_memory"]
    statistics = snapshot["statistics"]
    calls = [call for call in snapshot["calls"] if not call["internal"]]
    served = [call for call in calls if call["direction"] == "served"]
    queued = sum(call["state"] == "queued" for call in served)
    functions = [row for row in snapshot["latencies"] if not row["internal"]]
    return {
        **{name: worker[name] for name in ("host", "pid", "program", "python", "uptime")},
        "resident": worker["resident_bytes"],
        "cpu": _cpu(worker, before),
        "shared": shared["segment_bytes"],
        "blocks": shared["blocks_sent"] + shared["blocks_received"],
        **{name: statistics.get(name, 0) for name in _COUNTERS},
        "made": len(calls) - len(served),
        "running": len(served) - queued,
        "queued": queued,
        "totals": snapshot["totals"],
        "executor": snapshot["executor"],
        "lost": snapshot["lost"],
        "peers": [
            {name: peer[name] for name in ("name", "state", "transport", "reason")}
            for peer in snapshot["peers"]
        ],
        "calls": calls[:MAX_CALLS],
        "call_count": len(calls),
        "functions": functions[:MAX_FUNCTIONS],
        "function_count": len(functions),
        "shards": _rows(snapshot, "parameter_servers"),
        "batches": _rows(snapshot, "batching"),
        "scalars": snapshot["scalars"],
    }


def _cpu(worker: Json, before: Json | None) -> float | None:
    """Return the processors that a worker has used since its last snapshot."""
    if before is None:
        return None
    seconds = worker["monotonic"] - before["worker"]["monotonic"]
    used = worker["cpu_seconds"] - before["worker"]["cpu_seconds"]
    return used / seconds if seconds > 0 else None


def _rows(snapshot: Json, section: str) -> list[Json]:
    """Return the rows of a section of a layer above; none if the worker could not make it."""
    found = snapshot.get(section)
    return found if isinstance(found, list) else []


def new_events(snapshot: Json, since: float) -> list[Json]:
    """Return what has happened since `since`, a time of the worker's clock, with usual times."""
    worker = snapshot["worker"]
    shift = worker["time"] - worker["monotonic"]
    return [
        {
            "at": event["start"] + shift,
            "kind": event["kind"],
            "peer": str(event.get("peer", "")),
            "text": _event_text(event),
        }
        for event in snapshot["events"]
        if event["start"] > since and event["kind"] not in _FREQUENT
    ]


def _event_text(event: Json) -> str:
    left_out = ("kind", "peer", "start", "seconds")
    fields = {name: value for name, value in event.items() if name not in left_out and value != ""}
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def rows_of(views: Mapping[str, Json], name: str, by: str, limit: int) -> list[Json]:
    """Return the rows under `name` of all workers, those with the largest `by` first."""
    rows = [{"worker": worker, **row} for worker, each in views.items() for row in each[name]]
    return sorted(rows, key=lambda row: -row[by])[:limit]


def without_rows(view: Json | None) -> Json | None:
    """Return the view of a worker without what `rows_of` collects."""
    left_out = ("calls", "functions")
    return view and {name: value for name, value in view.items() if name not in left_out}


def finite(value: Any) -> Any:
    """Return a value of JSON in which None replaces numbers that JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(each) for each in value]
    return value

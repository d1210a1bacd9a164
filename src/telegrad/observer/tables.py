"""Text of at most 80 columns about a running group: status and stacks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from telegrad.observer.group import WorkerReply
from telegrad.plurals import count

Json = dict[str, Any]
WIDTH = 80
_MAX_CALLS = 30
_MAX_LATENCIES = 20
_MAX_WAITS = 30
_MAX_SCALARS = 30
_COUNTERS = ("owned_objects", "held_objects", "autograd_contexts", "cuda_bytes_lent")
_START = ("Thread._bootstrap", "Thread.run")  # functions of the standard library


def status_text(snapshot: Json, internal: bool = False) -> str:
    """Return the text of `telegrad status`. `internal` shows also the calls of Telegrad itself."""
    answering = [each for each in snapshot["workers"] if each["snapshot"] is not None]
    moment = time.strftime("%H:%M:%S", time.localtime(snapshot["time"]))
    total = len(snapshot["workers"])
    verb = "answers" if 1 in (len(answering), total) else "answer"
    head = f"group {snapshot['group']}: {len(answering)} of {count(total, 'worker')} {verb}"
    parts = [
        f"{head:<{WIDTH - len(moment)}}{moment}",
        _workers(snapshot["workers"]),
        _calls(answering, internal),
        _waits(snapshot),
        _latencies(answering, internal),
        _memory(answering),
        _batches(answering),
        _shards(answering),
        _scalars(answering),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def stacks_text(replies: Sequence[WorkerReply], idle: bool = False) -> str:
    """Return the stacks of all workers. `idle` shows also threads of Telegrad that wait."""
    return "\n".join(line for reply in replies for line in _stack_lines(reply, idle)) + "\n"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that fits `WIDTH` columns. Columns whose name begins with > are right-aligned.

    The widest columns are shortened if it does not fit.
    """
    if not rows:
        return ""
    names = [column.removeprefix(">") for column in columns]
    widths = [max(map(len, cells)) for cells in zip(names, *rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > WIDTH:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in (names, *rows):
        cells = [
            f"{_shorten(cell, width):{'>' if column.startswith('>') else '<'}{width}}"
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(([title] if title else []) + lines)


def _workers(workers: list[Json]) -> str:
    rows = []
    for each in workers:
        found = each["snapshot"]
        if found is None:
            rows.append([str(each["rank"]), each["name"], "-", "", "", "", "", each["problem"]])
            continue
        calls = [call for call in found["calls"] if not call["internal"]]
        served = [call for call in calls if call["direction"] == "served"]
        queued = [call for call in served if call["state"] == "queued"]
        rows.append(
            [
                str(each["rank"]),
                each["name"],
                str(found["worker"]["pid"]),
                str(len(calls) - len(served)),
                str(len(served) - len(queued)),
                str(len(queued)),
                _rate(sum(row["per_second"] for row in found["latencies"])),
                _activity(calls),
            ]
        )
    columns = [">RANK", "WORKER", ">PID", ">MADE", ">SERVED", ">QUEUED", ">CALLS/S", "OLDEST CALL"]
    return table("", columns, rows)


def _activity(calls: list[Json]) -> str:
    """Return what a worker does: its oldest call."""
    if not calls:
        return "no call in progress"
    oldest = max(calls, key=lambda call: call["age"])
    return f"{_label(oldest)} {_seconds(oldest['age'])}"


def _label(call: Json) -> str:
    return f"{call['function']} {'on' if call['direction'] == 'made' else 'for'} {call['peer']}"


def _entries(workers: list[Json], key: str, internal: bool) -> list[tuple[str, Json]]:
    """Return the entries under `key` in the snapshots, each with the name of its worker."""
    return [
        (each["name"], entry)
        for each in workers
        for entry in each["snapshot"][key]
        if internal or not entry["internal"]
    ]


def _calls(workers: list[Json], internal: bool) -> str:
    calls = _entries(workers, "calls", internal)
    calls.sort(key=lambda pair: -pair[1]["age"])
    rows = [
        [
            name,
            f"{call['direction']} {_label(call)}",
            call["state"],
            _seconds(call["age"]),
            "" if call["deadline"] is None else _seconds(call["deadline"]),
            "" if call["parent"] is None else f"{call['parent'][2]} for {call['parent'][0]}",
        ]
        for name, call in calls[:_MAX_CALLS]
    ]
    title = f"Calls in progress: {len(calls)}"
    return table(title, ["WORKER", "CALL", "STATE", ">AGE", ">LEFT", "MADE BY"], rows)


def _waits(snapshot: Json) -> str:
    rows = []
    circles = [set(circle) for circle in snapshot["cycles"]]
    silent = {each["name"] for each in snapshot["workers"] if each["snapshot"] is None}
    for wait in snapshot["waits"][:_MAX_WAITS]:
        in_circle = any({wait["waiter"], wait["target"]} <= circle for circle in circles)
        notes = ["CYCLE"] if in_circle else []
        notes += ["does not answer"] if wait["target"] in silent else []
        rows.append(
            [
                f"{wait['waiter']} -> {wait['target']}",
                wait["what"],
                "" if wait["age"] is None else _seconds(wait["age"]),
                wait["parent"],
                ", ".join(notes),
            ]
        )
    text = table("Who waits for whom", ["WAITS FOR", "WHAT", ">AGE", "MADE BY", "NOTE"], rows)
    lines = [f"cycle: {' -> '.join([*circle, circle[0]])}" for circle in snapshot["cycles"]]
    return "\n".join([text, *lines])


def _latencies(workers: list[Json], internal: bool) -> str:
    found = _entries(workers, "latencies", internal)
    found.sort(key=lambda pair: -pair[1]["per_second"])
    rows = [
        [
            name,
            f"{row['direction']} {row['function']}",
            row["peer"],
            _rate(row["per_second"]),
            _seconds(row["p50"]),
            _seconds(row["p99"]),
            _seconds(row["queued_p99"]) if row["direction"] == "served" else "",
            _bytes((row["request_bytes"] + row["reply_bytes"]) / row["calls"]),
            str(row["failed"] or ""),
        ]
        for name, row in found[:_MAX_LATENCIES]
    ]
    columns = ["WORKER", "CALL", "PEER", ">CALLS/S", ">P50", ">P99", ">QUEUED", ">SIZE", ">FAILED"]
    return table("Recent calls", columns, rows)


def _memory(workers: list[Json]) -> str:
    rows = []
    for each in workers:
        found = each["snapshot"]
        shared = found["shared_memory"]
        objects, held, contexts, lent = (found["statistics"].get(name, 0) for name in _COUNTERS)
        rows.append(
            [
                each["name"],
                _bytes(found["worker"]["resident_bytes"]),
                _bytes(shared["segment_bytes"]),
                f"{shared['blocks_sent']} ({_bytes(shared['block_bytes'])})",
                str(shared["blocks_received"]),
                str(objects),
                str(held),
                str(contexts),
                _bytes(lent),
            ]
        )
    names = ["SHARED", "SENT", "RECEIVED", "OBJECTS", "HELD", "CONTEXTS", "GPU LENT"]
    columns = ["WORKER", ">RESIDENT", *(f">{name}" for name in names)]
    return table("Memory and references", columns, rows)


def _batches(workers: list[Json]) -> str:
    rows = [
        [
            each["name"],
            row["function"],
            str(row["batches"]),
            f"{row['mean_size']:.1f}",
            str(row["waiting"]),
            _seconds(row["mean_queue_time"]),
            _seconds(row["mean_batch_time"]),
        ]
        for each in workers
        for row in _section(each, "batching")
    ]
    columns = ["WORKER", "FUNCTION", ">BATCHES", ">MEAN SIZE", ">WAITING", ">QUEUE", ">RUN"]
    return table("Batched functions", columns, rows)


def _shards(workers: list[Json]) -> str:
    rows = [
        [
            each["name"],
            row["shard"],
            str(row["version"]),
            f"{len(row['waiting'])} of {len(row['trainers'])}",
            ", ".join(f"{name} {value}" for name, value in sorted(row["staleness"].items())),
        ]
        for each in workers
        for row in _section(each, "parameter_servers")
    ]
    columns = ["WORKER", "SHARD", ">VERSION", ">WAITING", "STALENESS"]
    return table("Parameter servers", columns, rows)


def _scalars(workers: list[Json]) -> str:
    rows = [
        [each["name"], name, str(last["step"]), _value(last["value"])]
        for each in workers
        for name, last in sorted(each["snapshot"]["scalars"].items())
    ]
    return table("Reported values", ["WORKER", "NAME", ">STEP", ">VALUE"], rows[:_MAX_SCALARS])


def _section(worker: Json, name: str) -> list[Json]:
    """Return the rows of a section; none if the worker could not make it in time."""
    found = worker["snapshot"].get(name)
    return found if isinstance(found, list) else []


def _stack_lines(reply: WorkerReply, idle: bool) -> Iterator[str]:
    if reply.value is None:
        yield f"=== {reply.worker.name}: {reply.problem}"
        return
    worker = reply.value["worker"]
    yield f"=== {worker['name']}: process {worker['pid']} on {worker['host']}"
    left_out = 0
    for thread in reply.value["threads"]:
        if not idle and is_idle(thread):
            left_out += 1
            continue
        serves = thread["serves"]
        note = ""
        if serves is not None:
            note = f", serves {serves['function']} for {serves['caller']} {_seconds(serves['age'])}"
        yield f"--- {thread['thread']}{note}"
        for frame in thread["frames"]:
            if frame["function"].startswith(_START):
                continue
            yield f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}'
            if frame["text"]:
                yield f"    {frame['text']}"
    if left_out:
        yield f"--- {left_out} waiting threads of Telegrad (--all shows them)"


def is_idle(thread: Json) -> bool:
    """Return whether a thread belongs to Telegrad and waits for work."""
    innermost = thread["frames"][-3:]
    return bool(
        (
            thread["thread"].startswith("telegrad-")
            and thread["serves"] is None
            and any("/telegrad/scheduling/" in frame["file"] for frame in innermost)
        )
        or any(frame["function"].endswith("Listener._accept_one") for frame in innermost)
    )


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def _seconds(value: float) -> str:
    """Return a duration in a unit that fits it."""
    size = abs(value)
    if size >= 1:
        return f"{value:.1f} s"
    return f"{value * 1e3:.1f} ms" if size >= 1e-3 else f"{value * 1e6:.1f} us"


def _bytes(value: float) -> str:
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def _value(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"

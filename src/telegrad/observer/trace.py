"""A trace of the last seconds of all workers, in the format of Chrome and Perfetto.

Each worker is a process of the trace. Its calls that overlap are in different rows. An arrow goes
from a call to where it was served. All times are on the clock of the observer: workers on its
machine share its clock, and for others `Group.clock_offsets` says how much theirs differ, and
`clocks` limits that by the calls between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from telegrad.observer.clocks import refined_offsets
from telegrad.observer.group import ClockOffset, Group, WorkerReply
from telegrad.timeouts import duration

Json = dict[str, Any]
_KINDS = ("made", "served", "events")
_ROWS_PER_KIND = 1000


def collect_trace(group: Group, window: float, timeout: float) -> Json:
    """Return the trace of the last `window` seconds of a group."""
    window = duration(window, "window", positive=True)
    offsets = group.clock_offsets(timeout)
    replies = group.ask("history", timeout, window=window)
    return chrome_trace(replies, refined_offsets(offsets, replies))


def chrome_trace(replies: Sequence[WorkerReply], offsets: dict[str, ClockOffset]) -> Json:
    """Return the histories of workers as one trace."""
    by_worker = {
        reply.worker.name: [] if reply.value is None else _spans(reply, offsets)
        for reply in replies
    }
    spans = [span for own in by_worker.values() for span in own]
    origin = min((span.start for span in spans), default=0.0)
    events: list[Json] = []
    for reply in replies:
        own = by_worker[reply.worker.name]
        _assign_rows(own)
        events += _names(reply, own)
        events += [span.event(origin) for span in own]
    return {
        "traceEvents": [*events, *_flows(spans, origin)],
        "displayTimeUnit": "ms",
        "otherData": {
            reply.worker.name: reply.problem or _clock(offsets.get(reply.worker.name))
            for reply in replies
        },
    }


class _TraceSpan:
    """One call or event of a worker."""

    def __init__(
        self, reply: WorkerReply, kind: str, label: str, start: float, end: float, fields: Json
    ) -> None:
        self.worker = reply.worker.name
        self.rank = reply.worker.rank
        self.kind = kind
        self.start = start
        self.end = max(end, start)
        self.fields = fields
        self.row = 0
        self._label = label

    def place(self, origin: float) -> Json:
        """Return the row and the time of this span."""
        row = _KINDS.index(self.kind) * _ROWS_PER_KIND + self.row
        return {"pid": self.rank, "tid": row, "ts": _microseconds(self.start - origin)}

    def event(self, origin: float) -> Json:
        return {
            "ph": "X",
            "name": self._label,
            "cat": self.kind,
            "dur": _microseconds(self.end - self.start),
            "args": self.fields,
            **self.place(origin),
        }


def _spans(reply: WorkerReply, offsets: dict[str, ClockOffset]) -> list[_TraceSpan]:
    """Return the calls and events of a worker, on the clock of the observer, by their start."""
    name, value = reply.worker.name, reply.value
    shift = offsets[name].seconds if name in offsets else 0.0
    now = value["worker"]["monotonic"]
    spans = []
    for call in [*value["calls"], *(_unfinished(call, now) for call in value["in_progress"])]:
        preposition = "on" if call["direction"] == "made" else "for"
        label = f"{call['function']} {preposition} {call['peer']}"
        start, end = call.get("received", call["start"]) - shift, call["end"] - shift
        fields = {key: field for key, field in call.items() if field is not None}
        spans.append(_TraceSpan(reply, call["direction"], label, start, end, fields))
    for event in value["events"]:
        start = event["start"] - shift
        spans.append(
            _TraceSpan(reply, "events", event["kind"], start, start + event["seconds"], event)
        )
    return sorted(spans, key=lambda span: (span.start, -span.end))


def _unfinished(call: Json, now: float) -> Json:
    """Return a call in progress in the form of one that has ended now."""
    fields = {key: call[key] for key in ("direction", "peer", "function", "internal", "parent")}
    return {
        **fields,
        "id": call["call_id"],
        "start": now - call["age"],
        "end": now,
        "outcome": f"in progress ({call['state']})",
    }


def _assign_rows(spans: list[_TraceSpan]) -> None:
    """Give spans of one kind that overlap different rows."""
    for kind in _KINDS:
        free_at: list[float] = []
        for span in spans:
            if span.kind != kind:
                continue
            free = (row for row, until in enumerate(free_at) if until <= span.start)
            span.row = next(free, len(free_at))
            if span.row == len(free_at):
                free_at.append(0.0)
            free_at[span.row] = span.end


def _names(reply: WorkerReply, spans: list[_TraceSpan]) -> list[Json]:
    rank = reply.worker.rank
    label = reply.worker.name + (f" ({reply.problem})" if reply.problem else "")
    return [
        _metadata("process_name", rank, 0, name=label),
        _metadata("process_sort_index", rank, 0, sort_index=rank),
        *(
            _metadata("thread_name", rank, index * _ROWS_PER_KIND, name=kind)
            for index, kind in enumerate(_KINDS)
            if any(span.kind == kind for span in spans)
        ),
    ]


def _metadata(kind: str, process: int, row: int, /, **fields: Any) -> Json:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": fields}


def _flows(spans: list[_TraceSpan], origin: float) -> list[Json]:
    """Return an arrow for each call that both its caller and its callee have recorded."""
    served = {
        (span.fields["peer"], span.worker, span.fields["id"]): span
        for span in spans
        if span.kind == "served"
    }
    arrows: list[Json] = []
    for span in spans:
        if span.kind != "made":
            continue
        target = served.get((span.worker, span.fields["peer"], span.fields["id"]))
        if target is not None:
            arrow = {"name": "call", "cat": "call", "id": len(arrows)}
            arrows.append({**arrow, "ph": "s", **span.place(origin)})
            arrows.append({**arrow, "ph": "f", "bp": "e", **target.place(origin)})
    return arrows


def _clock(offset: ClockOffset | None) -> str:
    return "clock unknown" if offset is None else f"clock +-{offset.error * 1e6:.0f} us"


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)

"""Who waits for whom: an edge for each call, gather or round that a worker waits for.

If w0 waits for w1, a wait of w1 may be the reason: that of the very call which w0 waits for, or one
outside of all served calls. A barrier or gather outside of all served calls is no reason for a
call: a server waits in `shutdown` while it serves. So each wait leads to others, and waits that
lead to each other in a circle are a cycle. A cycle is not always a deadlock: a worker that calls
another, which calls it back, is in a cycle and goes on. If the calls of a cycle are old, it may be
a deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

_GATHER = "_report"  # the call that a participant of a barrier or gather makes to its leader
MIN_AGE = 0.5  # seconds: younger calls make no cycle
_MAX_WAITS = 200  # the oldest, among which cycles are searched


class _Reply(Protocol):
    @property
    def worker(self) -> Any: ...
    @property
    def value(self) -> Any: ...


class Wait(NamedTuple):
    """`waiter` waits for `target` to do `what`."""

    waiter: str
    target: str
    what: str
    age: float | None = None
    parent: str = ""  # the function that made the call, and for whom it runs
    call_id: int = 0
    parent_call: tuple[str, int] | None = None  # the caller and the id of the call that made it
    is_gather: bool = False  # a barrier, a gather or a shutdown


def waits(replies: Sequence[_Reply]) -> list[Wait]:
    """Return who waits for whom, oldest first."""
    found: list[Wait] = []
    for reply in replies:
        if reply.value is None:
            continue
        name, snapshot = reply.worker.name, reply.value
        for call in snapshot["calls"]:
            if call["direction"] == "made" and call["state"] != "abandoned":
                found += _call(name, call)
        for gather in snapshot["gathers"]:
            found += [
                Wait(name, each, gather["operation"], is_gather=True) for each in gather["missing"]
            ]
        found += _rounds(name, snapshot.get("parameter_servers"))
    return sorted(found, key=lambda wait: -(wait.age or 0.0))


def _call(name: str, call: dict[str, Any]) -> list[Wait]:
    is_gather = call["internal"] and call["function"] == _GATHER
    if call["internal"] and not is_gather:
        return []
    if is_gather and call["peer"] == name:
        return []  # the leader waits for those that are missing
    parent = call["parent"]
    what = "barrier or gather" if is_gather else call["function"]
    made_by = f"{parent[2]} for {parent[0]}" if parent else ""
    parent_call = (parent[0], parent[1]) if parent else None
    age, call_id = call["age"], call["call_id"]
    return [Wait(name, call["peer"], what, age, made_by, call_id, parent_call, is_gather)]


def _rounds(name: str, shards: Any) -> list[Wait]:
    """Return the trainers that a server waits for: others have reported, these have not."""
    if not isinstance(shards, list):
        return []
    return [
        Wait(name, trainer, f"a step of {shard['shard']}")
        for shard in shards
        if shard["waiting"]
        for trainer in sorted({*shard["trainers"]} - {*shard["waiting"]})
    ]


def cycles(found: Sequence[Wait], min_age: float = MIN_AGE) -> list[list[str]]:
    """Return the workers of each cycle, in the order in which they wait.

    Waits that are younger than `min_age` seconds do not count.
    """
    old = [wait for wait in found if wait.age is None or wait.age >= min_age][:_MAX_WAITS]
    circles: list[list[str]] = []
    for wait in old:
        path = _path_back(wait, old)
        if path is not None:
            names = list(dict.fromkeys(each.waiter for each in path))
            if not any(set(names) == set(circle) for circle in circles):
                circles.append(names)
    return circles


def _path_back(start: Wait, found: Sequence[Wait]) -> list[Wait] | None:
    """Return the shortest path of waits that leads from a wait to itself."""
    paths, seen = [[start]], set()
    while paths:
        path = paths.pop(0)
        for wait in found:
            if not _leads_to(path[-1], wait):
                continue
            if wait is start:
                if len(path) > 1:
                    return path
            elif id(wait) not in seen:
                seen.add(id(wait))
                paths.append([*path, wait])
    return None


def _leads_to(first: Wait, second: Wait) -> bool:
    if first.target != second.waiter:
        return False
    if first.call_id and second.parent_call not in (None, (first.waiter, first.call_id)):
        return False
    is_call = bool(first.call_id) and not first.is_gather
    return not (is_call and second.is_gather and second.parent_call is None)

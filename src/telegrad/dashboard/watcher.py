"""`GroupWatcher`: asks the workers of a group again and again, while a page is open.

Each worker has a thread of its own, so one that does not answer delays no other. Another thread
looks for workers that have joined or restarted; the members that workers know are added as well.
No worker is asked while no page is open.

A worker is `alive` if it answers; `dead` if its address refuses connections, as after the end of
its process; otherwise `silent`: it may be frozen, busy, or cut off.

State, under `_changed`: the newest incarnation of each worker, what it answered last and some
history, recent events, and when somebody last looked. `_replaced` has incarnations that are no
longer asked.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

from telegrad.config import Config
from telegrad.dashboard import view
from telegrad.errors import TelegradError
from telegrad.observer import Group, WorkerReply
from telegrad.observer.connection import Credentials, WorkerConnection
from telegrad.observer.graph import cycles, waits
from telegrad.observer.group import ObservedWorker
from telegrad.observer.trace import collect_trace

Json = dict[str, Any]
Discover = Callable[[], Group]

ALIVE, SILENT, DEAD, UNKNOWN = "alive", "silent", "dead", "unknown"
_INTERVAL = 1.0  # seconds between two requests to one worker
_DEAD_INTERVAL = 5.0  # the same for one that has ended
_DISCOVER_INTERVAL = 3.0
_LOOKING = 6.0  # seconds after which nobody looks any more
_FIRST_ANSWERS = 1.5  # seconds that the first look waits for answers
_WINDOW = 10.0  # seconds of which rates and latencies are shown
_HISTORY = 300  # points
_EVENTS = 300


class _Watched:
    """One worker, and what is known of it."""

    def __init__(self, worker: ObservedWorker) -> None:
        self.worker = worker
        self.state = UNKNOWN
        self.problem = ""
        self.snapshot: Json | None = None  # the last that it sent
        self.view: Json | None = None
        self.series: Json = {}
        self.answered_at = 0.0  # of `time.monotonic`, as below
        self.asked_at = self.tried_at = 0.0
        self.last_event = float("-inf")  # on the clock of the worker
        self.history: collections.deque[list[Any]] = collections.deque(maxlen=_HISTORY)


class GroupWatcher:
    """Keep what the workers of a group last said. `discover` attaches to the group."""

    def __init__(
        self, discover: Discover, config: Config, timeout: float = 2.0, group: Group | None = None
    ) -> None:
        self._discover = discover
        self._credentials = Credentials(config)
        self._timeout = timeout
        self._changed = threading.Condition()
        self._requests = threading.Lock()
        self._group = ""
        self._workers: dict[str, _Watched] = {}
        self._replaced: set[str] = set()
        self._events: collections.deque[Json] = collections.deque(maxlen=_EVENTS)
        self._event_count = 0
        self._problem = ""
        self._looked_at = self._training_looked_at = float("-inf")
        self._closed = False
        self._threads: list[threading.Thread] = []
        if group is not None:
            self._adopt(group)
        self._start(self._keep_discovering, "discovery")

    def __repr__(self) -> str:
        return f"<GroupWatcher of {self._group}: {', '.join(self._workers)}>"

    def close(self) -> None:
        """Stop asking, and wait for the requests under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    # For the server

    def group_view(self, history: bool = False) -> Json:
        """Return what the page shows."""
        with self._changed:
            self._look()
            now = time.monotonic()
            workers = [
                self._describe(each, now, history)
                for each in sorted(self._workers.values(), key=lambda each: each.worker.rank)
            ]
            replies = [
                WorkerReply(each.worker, each.snapshot)
                for each in self._workers.values()
                if each.state == ALIVE
            ]
            views = {
                each.worker.name: each.view
                for each in self._workers.values()
                if each.state == ALIVE and each.view is not None
            }
            events = list(self._events)
            problem, group = self._problem, self._group
        found = waits(replies)
        return {
            "group": group,
            "problem": problem,
            "time": time.time(),
            "window": _WINDOW,
            "workers": workers,
            "calls": view.rows_of(views, "calls", "age", view.MAX_CALLS),
            "functions": view.rows_of(views, "functions", "per_second", view.MAX_FUNCTIONS),
            "waits": [wait._asdict() for wait in found[: view.MAX_WAITS]],
            "cycles": cycles(found),
            "events": events,
        }

    def training_view(self) -> Json:
        """Return the values that workers have reported."""
        with self._changed:
            self._training_looked_at = time.monotonic()
            self._look()
            return {
                "workers": [
                    {"name": each.worker.name, "state": each.state, "series": each.series}
                    for each in sorted(self._workers.values(), key=lambda each: each.worker.rank)
                    if each.series
                ]
            }

    def stacks(self) -> list[WorkerReply]:
        """Ask all workers for their stacks."""
        with self._requests, self._attached() as group:
            return group.ask("stacks", self._timeout)

    def trace(self, seconds: float) -> Json:
        """Return a trace of the last seconds."""
        with self._requests, self._attached() as group:
            return collect_trace(group, seconds, self._timeout)

    def _attached(self) -> Group:
        with self._changed:
            workers = [each.worker for each in self._workers.values()]
            return Group(self._group, workers, self._credentials)

    def _look(self) -> None:
        """Note that somebody looks. The first look waits a moment for answers."""
        now = time.monotonic()
        was_looked_at, self._looked_at = self._is_looked_at(), now
        if was_looked_at:
            return
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: (
                self._closed
                or (
                    bool(self._workers)
                    and all(each.tried_at >= now for each in self._workers.values())
                )
            ),
            _FIRST_ANSWERS,
        )

    def _is_looked_at(self) -> bool:
        return time.monotonic() - self._looked_at < _LOOKING

    def _describe(self, each: _Watched, now: float, history: bool) -> Json:
        described = {
            "name": each.worker.name,
            "rank": each.worker.rank,
            "incarnation": each.worker.incarnation,
            "state": each.state,
            "problem": each.problem,
            "answered": now - each.answered_at if each.answered_at else None,
            "view": view.without_rows(each.view),
            "last": each.history[-1] if each.history else None,
        }
        if history:
            described["history"] = list(each.history)
        return described

    # Workers

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=f"telegrad-dashboard-{name}", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _adopt(self, group: Group) -> None:
        """Add the workers of a group. Another group replaces this one when it has ended."""
        with self._changed:
            if group.name != self._group:
                if any(each.state == ALIVE for each in self._workers.values()):
                    return
                self._group = group.name
                self._replaced.update(each.worker.incarnation for each in self._workers.values())
                self._workers.clear()
            for worker in group.workers:
                self._add(worker)
            self._changed.notify_all()

    def _add(self, worker: ObservedWorker) -> None:
        known = self._workers.get(worker.name)
        if worker.incarnation in self._replaced or self._closed:
            return
        if known is not None:
            if known.worker.incarnation == worker.incarnation or known.state == ALIVE:
                return
            self._replaced.add(known.worker.incarnation)
            self._note("dashboard", "restarted", worker.name, "it has a new process")
        watched = self._workers[worker.name] = _Watched(worker)
        self._start(lambda: self._watch(watched), worker.name)

    def _watch(self, watched: _Watched) -> None:
        connection = WorkerConnection(watched.worker.addresses, self._credentials, self._group)
        try:
            while self._wait_for_turn(watched):
                try:
                    snapshot = connection.request("snapshot", self._timeout, window=_WINDOW)
                    self._answered(watched, snapshot)
                    if time.monotonic() - self._training_looked_at < _LOOKING:
                        watched.series = connection.request("scalars", self._timeout)["series"]
                except TelegradError as error:
                    self._failed(watched, str(error))
                except (LookupError, TypeError, ValueError, ArithmeticError) as error:
                    self._failed(watched, f"its answer is not understood: {error!r}")
        finally:
            connection.close()

    def _wait_for_turn(self, watched: _Watched) -> bool:
        """Wait until this worker is to be asked. Return False if it never is again."""

        def over() -> bool:
            return self._closed or watched.worker.incarnation in self._replaced

        with self._changed:
            interval = _DEAD_INTERVAL if watched.state == DEAD else _INTERVAL
            until = watched.asked_at + interval
            while not over():
                left = until - time.monotonic()
                if left <= 0 and self._is_looked_at():
                    watched.asked_at = time.monotonic()
                    return True
                self._changed.wait(left if left > 0 else None)
            return False

    def _answered(self, watched: _Watched, snapshot: Json) -> None:
        found = view.worker_view(snapshot, watched.snapshot)
        events = view.new_events(snapshot, watched.last_event)
        served = snapshot["totals"]["served"]
        point = [
            time.time(),
            sum(row["per_second"] for row in snapshot["latencies"] if not row["internal"]),
            None if served is None else served["p99"],
            found["resident"],
            found["cpu"],
        ]
        members = [
            ObservedWorker(
                str(each["name"]),
                int(each["rank"]),
                str(each["incarnation"]),
                tuple(map(str, each["addresses"])),
            )
            for each in snapshot["members"]
        ]
        with self._changed:
            if watched.state in (SILENT, DEAD):
                self._note("dashboard", "answers again", watched.worker.name, "")
            watched.snapshot, watched.view = snapshot, found
            watched.state, watched.problem = ALIVE, ""
            watched.answered_at = watched.tried_at = time.monotonic()
            watched.history.append(point)
            starts = [event["start"] for event in snapshot["events"]]
            watched.last_event = max([watched.last_event, *starts])
            for event in events:
                self._note(
                    watched.worker.name, event["kind"], event["peer"], event["text"], event["at"]
                )
            for member in members:
                self._add(member)
            self._changed.notify_all()

    def _failed(self, watched: _Watched, problem: str) -> None:
        state = DEAD if problem.startswith("ended") else SILENT
        with self._changed:
            if state != watched.state:
                kind = "is dead" if state == DEAD else "does not answer"
                self._note("dashboard", kind, watched.worker.name, problem)
            watched.state, watched.problem = state, problem
            watched.tried_at = time.monotonic()
            self._changed.notify_all()

    def _note(self, worker: str, kind: str, peer: str, text: str, at: float | None = None) -> None:
        self._event_count += 1
        moment = time.time() if at is None else at
        event = {"at": moment, "worker": worker, "kind": kind, "peer": peer, "text": text}
        self._events.append({"id": self._event_count, **event})

    # Discovery

    def _keep_discovering(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_looked_at())
                if self._closed:
                    return
            problem = ""
            try:
                with self._discover() as group:
                    self._adopt(group)
            except TelegradError as error:
                problem = str(error)
            with self._changed:
                self._problem = "" if self._workers else problem
                self._changed.wait_for(lambda: self._closed, _DISCOVER_INTERVAL)

"""`Diagnosis`: what one worker tells about itself, and its answers to observers.

`snapshot` is the one source of the command line, the metrics and whatever shows a worker. Layers
above add sections with `AgentRuntime.add_report`. Their functions may take locks, so they run on a
thread of their own, and a section that is not there after `_PATIENCE` seconds says so. The rest of
a snapshot takes only locks that are never held for long.

State: `_collecting`, the thread that runs the sections of layers above, under `_lock`.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from telegrad.client.peers import PeerTable
from telegrad.diagnosis.calls import CallInProgress, calls_to, made_calls, served_calls
from telegrad.diagnosis.history import Json, latencies, recorded_calls, recorded_events, totals
from telegrad.diagnosis.stacks import stacks
from telegrad.errors import UsageError, error_text
from telegrad.group.collectives import Collectives
from telegrad.group.endpoint import LocalEndpoint
from telegrad.group.failure_detector import FailureDetector
from telegrad.group.membership import Directory, Member
from telegrad.recorder import FlightRecorder, MadeCall
from telegrad.scalars import ScalarLog
from telegrad.scheduling.event_loops import EventLoops
from telegrad.scheduling.executor import Executor, ThreadPool
from telegrad.server.listener import Listener
from telegrad.transport.sockets import clock_id

WINDOW = 10.0  # seconds: rates and latencies are those of the calls that ended since
_PATIENCE = 0.5  # seconds to wait for the sections of layers above

Report = Callable[[], Any]


class DiagnosisRuntime(Protocol):
    """What diagnosis needs of the agent."""

    name: str
    group: str
    world_size: int | None
    closing: bool
    local_member: Member
    directory: Directory
    peers: PeerTable
    listener: Listener
    executor: Executor
    threads: ThreadPool
    event_loops: EventLoops
    endpoint: LocalEndpoint
    collectives: Collectives
    failures: FailureDetector
    recorder: FlightRecorder
    scalars: ScalarLog

    def connecting_calls(self) -> list[MadeCall]: ...
    def statistics(self) -> dict[str, int]: ...
    def reports(self) -> dict[str, Report]: ...


class Diagnosis:
    """Describe one agent."""

    def __init__(self, runtime: DiagnosisRuntime) -> None:
        self._runtime = runtime
        self._opened = time.monotonic()
        self._lock = threading.Lock()
        self._collecting: _Sections | None = None

    def __repr__(self) -> str:
        return f"<Diagnosis of {self._runtime.name!r}>"

    def calls(self) -> list[CallInProgress]:
        """Return the calls in progress, made and served, oldest first."""
        runtime = self._runtime

        def made() -> Iterator[tuple[MadeCall, str]]:
            yield from ((call, "connecting") for call in runtime.connecting_calls())
            yield from calls_to(runtime.peers.all())

        found = [*made_calls(made()), *served_calls(runtime.listener.connections)]
        return sorted(found, key=lambda call: -call.age)

    def snapshot(self, window: float = WINDOW) -> Json:
        """Return the state of this worker as values of JSON.

        Rates and latencies are those of the last `window` seconds.
        """
        now, runtime = time.monotonic(), self._runtime
        history = recorded_calls(runtime.recorder, now - window)
        since = max(now - window, self._opened)
        if runtime.recorder.is_full and history:  # it may have forgotten some of this time
            since = max(since, min(call["end"] for call in history))
        return {
            "worker": self.identity(),
            "members": self.members(),
            "calls": [dataclasses.asdict(call) for call in self.calls()],
            "latencies": latencies(history, now, since),
            "totals": totals(history, now, since),
            "events": recorded_events(runtime.recorder, now - window),
            "scalars": runtime.scalars.latest(),
            "gathers": runtime.collectives.waiting(),
            "peers": [peer.describe() for peer in runtime.peers.all()],
            "lost": runtime.failures.lost_names(),
            "executor": {
                "running": runtime.executor.running,
                "queued": runtime.executor.active - runtime.executor.running,
                "limit": runtime.executor.limit,
            },
            "event_loops": [loop.describe() for loop in runtime.event_loops],
            "shared_memory": {
                **runtime.endpoint.allocator.describe(),
                "blocks_received": runtime.endpoint.mappings.blocks_in_use,
            },
            **self._sections(),
        }

    def identity(self) -> Json:
        """Return who and where this worker is, and what its clocks say."""
        runtime, member = self._runtime, self._runtime.local_member
        return {
            "name": runtime.name,
            "rank": member.rank,
            "incarnation": member.incarnation,
            "group": runtime.group,
            "world_size": runtime.world_size,
            "host": socket.gethostname(),
            "clock": clock_id(),
            "pid": os.getpid(),
            "program": sys.argv[0] if sys.argv else "",
            "python": platform.python_version(),
            "resident_bytes": _resident_bytes(),
            "cpu_seconds": time.process_time(),
            "uptime": time.monotonic() - self._opened,
            "monotonic": time.monotonic(),
            "time": time.time(),
        }

    def members(self) -> list[Json]:
        """Return the workers of the group that have not left, as this worker knows them."""
        return [
            {
                "name": member.name,
                "rank": member.rank,
                "incarnation": member.incarnation,
                "addresses": list(member.addresses),
            }
            for member in self._runtime.directory.members(refresh=False)
        ]

    def answer(self, request: Json) -> Any:
        """Answer an observer. Raise `UsageError` if the request is none of these."""
        operation, now = request.get("operation"), time.monotonic()
        since = now - float(request.get("window", WINDOW))
        if operation == "clock":
            return {"monotonic": now, "clock": clock_id()}
        if operation == "members":
            return {"worker": self.identity(), "members": self.members()}
        if operation == "snapshot":
            return self.snapshot(now - since)
        if operation == "stacks":
            return {"worker": self.identity(), "threads": stacks()}
        if operation == "history":
            return {
                "worker": self.identity(),
                "calls": recorded_calls(self._runtime.recorder, since),
                "events": recorded_events(self._runtime.recorder, since),
                "in_progress": [dataclasses.asdict(call) for call in self.calls()],
            }
        if operation == "scalars":
            return {"worker": self.identity(), "series": self._runtime.scalars.series()}
        raise UsageError(f"unknown operation {operation!r}")

    def _sections(self) -> Json:
        """Return the sections of layers above; one that blocks is replaced by a sentence."""
        runtime = self._runtime
        with self._lock:
            sections = self._collecting
            if sections is None or sections.done.is_set():
                reports = {"statistics": runtime.statistics, **runtime.reports()}
                sections = self._collecting = _Sections(reports)
                runtime.threads.start(sections.collect)
        sections.done.wait(_PATIENCE)
        return sections.results()


class _Sections:
    """The sections of one snapshot, filled by a thread of their own."""

    def __init__(self, reports: dict[str, Report]) -> None:
        self._reports = reports
        self._results: Json = {}
        self.done = threading.Event()

    def collect(self) -> None:
        try:
            for name, report in self._reports.items():
                try:
                    self._results[name] = report()
                except Exception as error:
                    self._results[name] = {"error": f"{type(error).__name__}: {error_text(error)}"}
        finally:
            self.done.set()

    def results(self) -> Json:
        missing = {"error": f"no answer within {_PATIENCE} s: a lock is held"}
        return {name: self._results.get(name, missing) for name in self._reports}


def _resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0

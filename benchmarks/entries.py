"""The participants of a run: the peers, and the machine itself in the same rounds."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.group import CASE_LIMIT_S, Group, ask
from benchmarks.namespaces import Host
from benchmarks.peers import PeerSpec, installed
from benchmarks.processes import Worker, WorkerError, WorkerLost, stop, summary
from benchmarks.progress import say
from benchmarks.suite import MACHINE, Case


class PeerEntry:
    """A peer in the run: its group, restarted after a failure, and its remaining cases."""

    def __init__(self, spec: PeerSpec, cases: list[Case], hosts: Sequence[Host] = ()) -> None:
        self.name = spec.name
        self.spec = spec
        self.cases = {case.name: case for case in cases if spec.builtin or not case.builtin}
        self.callers = max((case.callers + case.helpers for case in self.cases.values()), default=1)
        self.hosts = hosts
        self.group: Group | None = Group(spec, self.callers, hosts)
        self.versions = self.group.versions

    def run(self, case: Case, seconds: float) -> dict[str, float]:
        if self.group is None:
            raise WorkerLost("could not be restarted")
        try:
            return self.group.run(case, seconds)
        except (WorkerError, WorkerLost):
            self.restart()
            raise

    def drop(self, case: Case) -> None:
        self.cases.pop(case.name, None)

    def restart(self) -> None:
        assert self.group is not None
        self.group.end()
        self.group = None
        try:
            self.group = Group(self.spec, self.callers, self.hosts)
        except (WorkerError, WorkerLost):
            self.cases = {}  # it cannot be restarted

    def close(self) -> None:
        if self.group is not None:
            self.group.close()


class MachineEntry:
    """The limits of the machine, measured in the same rounds."""

    name = MACHINE

    def __init__(self, cases: list[Case], prefix: tuple[str, ...] = ()) -> None:
        self.cases = {case.name: case for case in cases}
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        log = Path(self.folder.name, "machine.log")
        self.worker = Worker(sys.executable, log, prefix=prefix)

    def run(self, case: Case, seconds: float) -> dict[str, float]:
        answer: dict[str, float] = ask(
            [self.worker], CASE_LIMIT_S, "limit", case.loop, seconds, dict(case.params)
        )[0]
        return answer

    def drop(self, case: Case) -> None:
        self.cases.pop(case.name, None)

    def close(self) -> None:
        stop([self.worker])
        self.folder.cleanup()


Entry = PeerEntry | MachineEntry


def start_peers(
    specs: Sequence[PeerSpec],
    cases: list[Case],
    stack: ExitStack,
    run: dict[str, Any],
    hosts: Sequence[Host] = (),
) -> list[Entry]:
    """Start the peers that are installed, until `stack` ends. Record them, and the others, in `run`."""
    entries: list[Entry] = []
    for spec in specs:
        try:
            if not installed(spec):
                raise WorkerError(f"{spec.package} is not installed in {Path(spec.python).name}")
            entry = PeerEntry(spec, cases, hosts)
        except (WorkerError, WorkerLost) as error:
            say(f"{spec.name}: skipped: {error}")
            run["skipped"][spec.name] = summary(error)
            continue
        stack.callback(entry.close)
        entries.append(entry)
        run["peers"][spec.name] = entry.versions
        say(f"{spec.name}: {entry.versions}")
    return entries

"""Follow a run of a learner and its actors: its records, workers to kill, a plot and a page.

The learner appends one `StepRecord` for each version to a file, which the command follows. A file
and no queue, because a process that is killed while it writes to a queue leaves the queue locked. A
record is one short `write`, so it is there or not. A learner that was restarted writes the record
of its checkpoint again; the command ignores records that it has.

State of an `ActorLearnerReport`: only the thread of `following` adds records and events while the
training runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from telegrad import plurals
from telegrad.cli.progress import COLOURS, WIDTH, Draw, write_page

try:
    from rich import box
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
except ImportError:  # print lines
    Live = None  # type: ignore[assignment,misc]

__all__ = ["ActorLearnerReport", "ActorRecord", "Kill", "StepRecord", "append", "following"]

_POLL = 0.01  # seconds between two looks at the file
_LINES = 20  # that are printed without a live view
_LEARNER = "learner0"


class ActorRecord(NamedTuple):
    """What an actor contributed to a step: with which version, and how much older that was."""

    version: int
    staleness: int
    mean_return: float
    pid: int
    used: bool = True  # False: it was too old


class StepRecord(NamedTuple):
    """The step that made a version. `mean_return` is that of the version before it."""

    version: int
    mean_return: float
    env_steps: int
    pid: int
    actors: dict[str, ActorRecord]

    @classmethod
    def parse(cls, line: str) -> StepRecord:
        """Return the record that a line contains."""
        version, mean_return, env_steps, pid, actors = json.loads(line)
        found = {name: ActorRecord(*each) for name, each in actors.items()}
        return cls(version, mean_return, env_steps, pid, found)


def append(path: Path, record: StepRecord) -> None:
    """Add a record to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(record) + "\n").encode())
    finally:
        os.close(descriptor)


class Kill(NamedTuple):
    """Kill a worker as soon as a version is published."""

    worker: str
    version: int

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Return the kill that an option such as ``actor1:30`` asks for, for argparse."""
        worker, _, version = text.partition(":")
        worker = _LEARNER if worker == "learner" else worker
        if not worker or not version.isdecimal() or int(version) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not like actor1:30 or learner:60")
        return cls(worker, int(version))


class _WorkerKilled(NamedTuple):
    version: int
    seconds: float
    worker: str


class ActorLearnerReport:
    """The progress of a learner and its actors. Use it as a context manager around the training."""

    def __init__(self, title: str, versions: int, actors: int, kills: Sequence[Kill] = ()) -> None:
        self.title = title
        self.records: list[StepRecord] = []
        self.kills: list[_WorkerKilled] = []  # that were carried out
        self._versions = versions
        self._planned = sorted(kills, key=lambda kill: kill.version)
        self._actors = [f"actor{number}" for number in range(actors)]
        self._newest: dict[str, ActorRecord] = {}
        self._pids: dict[str, int] = {}
        self._killed: set[int] = set()
        self._times: list[float] = []
        self._started = time.monotonic()
        self._live: Any = None
        if Live is not None and sys.stdout.isatty():
            self._live = Live(console=Console(), get_renderable=self._view, refresh_per_second=4)

    def __enter__(self) -> ActorLearnerReport:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def recent_return(self, count: int = 10) -> float:
        """Return the mean return of the last steps; NaN if there are none."""
        returns = [record.mean_return for record in self.records[-count:]]
        return sum(returns) / len(returns) if returns else float("nan")

    def add(self, record: StepRecord) -> None:
        """Add a record, show it, and carry out what is planned for its version."""
        if self.records and record.version <= self.records[-1].version:
            return
        self.records.append(record)
        self._times.append(time.monotonic() - self._started)
        self._newest.update(record.actors)
        self._pids[_LEARNER] = record.pid
        self._pids.update({name: actor.pid for name, actor in record.actors.items()})
        if self._live is None and record.version % max(self._versions // _LINES, 1) == 0:
            self._print(
                f"version {record.version:4}  return {self.recent_return():5.1f}  "
                f"staleness {self._mean_staleness(record):.1f}  {self._speed():7,.0f} steps/s"
            )
        for kill in [kill for kill in self._planned if kill.version <= record.version]:
            self._carry_out(kill)

    def _carry_out(self, kill: Kill) -> None:
        pid = self._pids.get(kill.worker)
        if pid is None or pid in self._killed:
            return  # its replacement has not reported yet: with the next record
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, signal.SIGKILL)
        self._killed.add(pid)
        self._planned.remove(kill)
        event = _WorkerKilled(self.records[-1].version, self._times[-1], kill.worker)
        self.kills.append(event)
        self._print(f"version {event.version:4}  killed {kill.worker}")

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line)
            return
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    # What is shown

    def _speed(self) -> float:
        """Return the steps of the environments per second, of the last records."""
        recent = self.records[-10:]
        seconds = self._times[-1] - (self._times[-11] if len(self._times) > 10 else 0.0)
        return sum(record.env_steps for record in recent) / max(seconds, 1e-9)

    @staticmethod
    def _mean_staleness(record: StepRecord) -> float:
        stalenesses = [actor.staleness for actor in record.actors.values()]
        return sum(stalenesses) / max(len(stalenesses), 1)

    def _max_staleness(self) -> int:
        actors = [actor for record in self.records for actor in record.actors.values()]
        return max((actor.staleness for actor in actors), default=0)

    def _kills_of(self, worker: str) -> int:
        return sum(event.worker == worker for event in self.kills)

    def _view(self) -> Any:
        """Return a table of the workers over a bar of the versions, in 60 columns."""
        table = Table(title=self.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in ("worker", "version", "staleness", "return", "kills"):
            table.add_column(name, justify="left" if name == "worker" else "right")
        version = self.records[-1].version if self.records else 0
        kills = str(self._kills_of(_LEARNER))
        table.add_row(_LEARNER, str(version), "", f"{self.recent_return():.1f}", kills)
        for name in self._actors:
            newest = self._newest.get(name)
            cells = ["", "", ""]
            if newest is not None:
                cells = [str(newest.version), str(newest.staleness), f"{newest.mean_return:.1f}"]
            table.add_row(name, *cells, str(self._kills_of(name)))
        return Group(table, ProgressBar(total=self._versions, completed=version, width=WIDTH))

    def write(self, folder: Path) -> list[Path]:
        """Write a plot, if matplotlib is installed, and a page. Return the files."""
        return write_page(folder, self.title, self._summary(), self._plots(), self._table())

    def _summary(self) -> str:
        learner_kills = self._kills_of(_LEARNER)
        actor_kills = plurals.count(len(self.kills) - learner_kills, "kill")
        return (
            f"Mean return {self.recent_return():.1f} of the last 10 versions, "
            f"after version {self.records[-1].version} and {self._times[-1]:.1f} s, including the "
            f"start of the workers. {actor_kills} of actors, "
            f"{plurals.count(learner_kills, 'kill')} of the learner."
        )

    def _table(self) -> list[list[str]]:
        rows = [["actor", "batches", "too old", "versions", "mean staleness", "max", "kills"]]
        for name in self._actors:
            found = [record.actors[name] for record in self.records if name in record.actors]
            staleness = [each.staleness for each in found]
            versions = f"{found[0].version} to {found[-1].version}" if found else ""
            rows.append(
                [
                    name,
                    f"{len(found):,}",
                    f"{sum(not each.used for each in found):,}",
                    versions,
                    f"{sum(staleness) / max(len(staleness), 1):.2f}",
                    str(max(staleness, default=0)),
                    str(self._kills_of(name)),
                ]
            )
        return rows

    def _plots(self) -> list[Draw]:
        """Return functions that draw the return, the staleness and the versions over time."""
        versions = [record.version for record in self.records]
        colours = dict(zip(self._actors, itertools.cycle(COLOURS), strict=False))
        colours[_LEARNER] = "black"

        def returns(axis: Any) -> None:
            axis.plot(versions, [each.mean_return for each in self.records], color="black")
            for worker in dict.fromkeys(event.worker for event in self.kills):
                for number, event in enumerate(
                    each for each in self.kills if each.worker == worker
                ):
                    label = f"{worker} killed" if not number else None
                    axis.axvline(event.version, color=colours[worker], linestyle=":", label=label)
            axis.set(title="mean return of an episode", xlabel="version", ylim=(0, None))
            if self.kills:
                axis.legend(frameon=False, loc="lower right")

        def staleness(axis: Any) -> None:
            for name in self._actors:
                found = [record for record in self.records if name in record.actors]
                axis.plot(
                    [record.version for record in found],
                    [record.actors[name].staleness for record in found],
                    ".",
                    markersize=4,
                    color=colours[name],
                    label=name,
                )
            axis.set(
                title="staleness (versions)",
                xlabel="version",
                ylim=(-0.3, self._max_staleness() + 1),
            )
            axis.yaxis.get_major_locator().set_params(integer=True)
            axis.legend(frameon=False, loc="upper left")

        def progress(axis: Any) -> None:
            axis.plot(self._times, versions, color="black")
            for event in self.kills:
                axis.axvline(event.seconds, color=colours[event.worker], linestyle=":")
            axis.set(title="version", xlabel="seconds", xlim=(0, None), ylim=(0, None))

        return [returns, staleness, progress]


@contextlib.contextmanager
def following(path: Path, report: ActorLearnerReport) -> Iterator[None]:
    """Add the records of a file to a report, during the block and at its end."""
    done = threading.Event()

    def follow() -> None:
        with path.open() as file:
            ended = False
            while not ended:
                ended = done.wait(_POLL)
                for line in file:
                    report.add(StepRecord.parse(line))

    path.write_text("")
    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

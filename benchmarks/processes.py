"""The processes of a benchmark: start them, send commands with a time limit, and end them by pid.

A `Worker` is a child process in its own session, so that all processes that it starts can be found
and ended with it. It runs in the interpreter of its peer. Commands and answers are plain values
over a `multiprocessing` pipe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from telegrad import openmp

ROOT = Path(__file__).resolve().parent.parent
STOP_LIMIT_S = 20.0
LOG_LINES = 40
DUMP_S = 0.5
PROGRAM = "import {}, runpy; runpy.run_module('benchmarks.worker', run_name='__main__')"
PR_SET_PDEATHSIG = 1


class WorkerError(Exception):
    """A command failed in the worker. The message contains the worker's traceback."""


class WorkerLost(Exception):
    """The worker died or did not answer within the time limit. It takes no more commands."""


def summary(error: Exception) -> str:
    """Return one line: the last line of a traceback, or the reason why a process was lost."""
    return str(error).strip().splitlines()[0 if isinstance(error, WorkerLost) else -1]


class Worker:
    """A child process and the pipe to it. Not thread-safe: only one thread may use it."""

    def __init__(
        self,
        python: str,
        log: Path,
        package: str = "torch",
        environment: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        """Start the process. It imports `package` first, as a program that uses it does.

        `prefix` is the beginning of its command line, such as that of a `namespaces.Host`.
        """
        self.log = log
        self.pipe, theirs = Pipe()
        variables = {**os.environ, **(environment or {}), "PYTHONPATH": import_path()}
        if package == "telegrad":
            openmp.limit_spinning(variables)  # as the command line does for its workers
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, python, "-c", PROGRAM.format(package), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,
            )
        theirs.close()

    def __repr__(self) -> str:
        return f"<Worker pid={self.process.pid} exit={self.process.poll()}>"

    def send(self, command: str, *args: Any) -> None:
        try:
            self.pipe.send((command, *args))
        except OSError as error:
            raise WorkerLost("the process has ended") from error

    def answer(self, deadline: float) -> Any:
        """Return the answer to the last command. Wait until `deadline` (monotonic clock)."""
        try:
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                raise WorkerLost("no answer within the time limit")
            ok, value = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerLost("the process died") from error
        if not ok:
            raise WorkerError(value)
        return value

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def dump_stacks(self) -> None:
        """Make the process write the stacks of its threads to its log."""
        self._signal(signal.SIGUSR1)

    def end(self) -> None:
        """End the process and all processes of its session, whatever their state."""
        self._signal(signal.SIGKILL)
        for pid in session_pids(self.process.pid):
            _send_signal(pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"-- {self.log.name}, exit status {self.process.poll()}", *lines])

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            _send_signal(self.process.pid, number)


def stop(workers: list[Worker]) -> None:
    """Let the workers leave together, then end those that did not leave."""
    deadline = time.monotonic() + STOP_LIMIT_S
    for worker in workers:
        worker.resume()
        try:
            worker.send("stop")
        except WorkerLost:
            pass
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
    for worker in workers:
        worker.end()


def last_words(workers: list[Worker]) -> str:
    """Return the last output of each worker, with the stacks of those that still run."""
    for worker in workers:
        worker.dump_stacks()
    time.sleep(DUMP_S)
    return "\n".join(worker.last_words() for worker in workers)


def session_pids(session: int) -> list[int]:
    """Return all running processes of a session."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if (stat := _stat(pid)) and int(stat[3]) == session]


def with_descendants(pids: list[int]) -> list[int]:
    """Return these processes and all their descendants."""
    parents = {
        int(entry): int(stat[1])
        for entry in os.listdir("/proc")
        if entry.isdigit() and (stat := _stat(int(entry)))
    }
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time of these processes so far, without processes that have ended."""
    stats = [stat for pid in pids if (stat := _stat(pid))]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def import_path() -> str:
    """Return a path on which this checkout is imported, installed or not."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), str(ROOT / "src"), *([inherited] if inherited else [])])


def prepare_environment() -> None:
    """Set what processes that this one starts need, whichever library they use.

    Their OpenMP threads sleep as soon as those of workers that `telegrad launch` starts. Otherwise
    the threads of one process occupy the cores that another one needs.
    """
    os.environ["PYTHONPATH"] = import_path()
    openmp.limit_spinning(os.environ)


def die_with_parent() -> None:
    """End this process when its parent ends, even if the parent is killed or this is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _send_signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

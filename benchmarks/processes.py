"""The processes of a benchmark: started, given commands with a time limit each, and always ended, by their own pid.

A `Worker` is a child process in a session of its own, so that what it starts in turn can be found
and ended with it. It lives in the interpreter its peer is installed in; commands and answers are
plain values over a `multiprocessing` pipe.
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

ROOT = Path(__file__).resolve().parent.parent
STOP_LIMIT_S = 20.0
LOG_LINES = 40
DUMP_S = 0.5
PROGRAM = "import {}, runpy; runpy.run_module('benchmarks.worker', run_name='__main__')"
PR_SET_PDEATHSIG = 1


class WorkerError(Exception):
    """A command failed in the worker; carries the worker's traceback."""


class WorkerLost(Exception):
    """The worker died or did not answer within the time limit: it takes no more commands."""


def summary(error: Exception) -> str:
    """One line for the file: of a traceback the last one, of a lost process what happened to it."""
    return str(error).strip().splitlines()[0 if isinstance(error, WorkerLost) else -1]


class Worker:
    """One child process and the pipe to it. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        python: str,
        log: Path,
        package: str = "torch",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`package` is the first thing that the process imports, as a program written for it would."""
        self.log = log
        self.pipe, theirs = Pipe()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [python, "-c", PROGRAM.format(package), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {}), "PYTHONPATH": import_path()},
                start_new_session=True,
            )
        theirs.close()

    def __repr__(self) -> str:
        return f"<Worker pid={self.process.pid} exit={self.process.poll()}>"

    def send(self, command: str, *args: Any) -> None:
        try:
            self.pipe.send((command, *args))
        except OSError as error:
            raise WorkerLost("the process is gone") from error

    def answer(self, deadline: float) -> Any:
        """The answer to the last command, waited for until `deadline` (on the monotonic clock)."""
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
        """Has the process write the stacks of its threads to its log."""
        self._signal(signal.SIGUSR1)

    def end(self) -> None:
        """Ends the process and everything in its session, whatever state they are in."""
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
    """Lets the workers leave together, then ends those that did not."""
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
    """What each worker wrote last, with the stacks of those that still live."""
    for worker in workers:
        worker.dump_stacks()
    time.sleep(DUMP_S)
    return "\n".join(worker.last_words() for worker in workers)


def session_pids(session: int) -> list[int]:
    """Every living process of a session."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if (stat := _stat(pid)) and int(stat[3]) == session]


def with_descendants(pids: list[int]) -> list[int]:
    """These processes, those that they started, and so on."""
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
    """CPU time that these processes have used so far; those that are gone count nothing."""
    stats = [stat for pid in pids if (stat := _stat(pid))]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def import_path() -> str:
    """The measured code is this checkout's, installed or not."""
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(ROOT), str(ROOT / "src"), *([inherited] if inherited else [])])


def die_with_parent() -> None:
    """Ends this process with its parent: also when that was killed, and also while this one is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third on; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _send_signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

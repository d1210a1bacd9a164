"""Runs tests, each in a process and a session of its own.

This process has imported torch and the suites and stays single-threaded, so it forks each test:
that takes 0.4 s where a fresh interpreter takes 12. It is the only one that ends processes, and
only those of sessions that it made; should it be killed itself, the kernel ends them
(`sessions.die_with_parent`).
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import cases
import guard
import onetest
import sessions
import suites
import under_test
from catalog import Test
from results import Result

# seconds that PyTorch's own watchdog has for printing stacks, once a test's limit has passed
OVERTIME = 20


@dataclass
class Job:
    test: str
    folder: Path
    pid: int  # and the session's number
    deadline: float
    exit_code: int | None = None

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline

    def ended(self) -> bool:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.exit_code = os.waitstatus_to_exitcode(status)
        return bool(pid)


def preload(names: set[str]) -> None:
    """Import what the tests of these suites need, so that each of them finds it there."""
    for suite in sorted(names):
        if suite in suites.FAULTY and under_test.NAME == "torch":
            continue  # see cases.py
        try:
            getattr(cases, suite)
        except Exception:
            print(f"{suite} cannot be imported; its tests will say why")
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        print(
            f"{threads} threads run after importing {under_test.NAME}: tests forked from here may hang"
        )


def run(
    tests: Sequence[Test], limit: float, at_once: int = 1, foreground: bool = False
) -> Generator[tuple[Result, str], None, None]:
    """Each test's result and output (none in the foreground: it went to the terminal)."""
    waiting, running = deque(enumerate(tests)), list[Job]()
    sessions.adopt_orphans()
    # a short path: unix sockets may be made in it
    root = Path(tempfile.mkdtemp(prefix="cf", dir="/tmp"))
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, test = waiting.popleft()
                running.append(_start(test, root / str(number), limit, foreground))
            for job in [job for job in running if job.ended() or job.over]:
                finished = _finish(job)
                running.remove(job)
                yield finished
            time.sleep(0.02)
    finally:
        for job in running:
            sessions.end(job.pid)
        shutil.rmtree(root, ignore_errors=True)


def _start(test: Test, folder: Path, limit: float, foreground: bool) -> Job:
    folder.mkdir()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _child(test, folder, foreground)
    return Job(test.id, folder, pid, time.monotonic() + limit + OVERTIME)


def _child(test: Test, folder: Path, foreground: bool) -> NoReturn:
    code = 1
    try:
        sessions.die_with_parent()
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not foreground:
            _redirect_output(folder / "log")
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        os.environ[guard.TRIPPED] = str(folder / "tripped")
        result = onetest.run(test)
        (folder / "result").write_text(json.dumps(asdict(result)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect_output(path: Path) -> None:
    log, null = (
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        os.open(os.devnull, os.O_RDONLY),
    )
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)


def _finish(job: Job) -> tuple[Result, str]:
    sessions.end(job.pid)
    result, log = _result(job), _read(job.folder / "log")
    result.tripped = sorted(set(_read(job.folder / "tripped").split()))
    if result.tripped:
        result.status, result.message = (
            "fail",
            "GUARD: torch's own engine was used: " + ", ".join(result.tripped),
        )
    shutil.rmtree(job.folder, ignore_errors=True)
    return result, log


def _result(job: Job) -> Result:
    written = _read(job.folder / "result")
    if written:
        return Result(**json.loads(written))
    if job.exit_code is None:
        return Result(job.test, "timeout", message="did not end by itself")
    return Result(job.test, "crash", message=f"the test's process ended with code {job.exit_code}")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

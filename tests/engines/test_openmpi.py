"""Workers that mpirun starts; one of them is killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.conftest import LIMIT, Start
from tests.engines.waiting import wait_for

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed (Debian: openmpi-bin)"
)
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 3)


def test_the_processes_of_mpirun_know_their_places(
    run: Callable[..., str], worker: tuple[str, str]
) -> None:
    output = run(*MPIRUN, *worker, "calls")
    assert re.findall("worker .*", output) == [
        f"worker worker{rank} Open MPI {rank} 3 {rank} 0" for rank in range(3)
    ]


def test_the_kill_of_a_process_ends_the_calls_to_it(
    start: Start, worker: tuple[str, str], tmp_path: Path
) -> None:
    """Open MPI restarts nothing: it ends the job, unless it is told to go on."""
    recovery = ("--mca", "orte_enable_recovery", 1)
    process = start(*MPIRUN, *recovery, *worker, "wait", tmp_path)
    files = [tmp_path / f"pid{rank}" for rank in range(3)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files), "workers")
    os.kill(int(files[1].read_text()), signal.SIGKILL)
    output, _ = process.communicate(timeout=LIMIT)
    assert output.count("lost worker1") == 2

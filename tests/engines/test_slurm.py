"""Workers in a real Slurm: detection, `telegrad launch --on slurm`, scancel, restart, requeue."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import LIMIT, PROGRAM, Start
from tests.engines.slurm_cluster import SlurmCluster, hindrance
from tests.engines.waiting import wait_for

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if reason := hindrance():
        pytest.skip(reason)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


def launch(
    slurm: SlurmCluster, run: Callable[..., str], logs: Path, *arguments: object
) -> tuple[str, Path]:
    """Submit a job. Return its id and its log."""
    command = (sys.executable, "-m", "telegrad", "launch", "--on", "slurm", "--logs", logs)
    output = run(*command, "--name", "job", *arguments, **slurm.variables)
    match = re.search(r"Submitted batch job (\d+)", output)
    assert match is not None, output
    return match[1], logs / f"job-{match[1]}.log"


def end_of(slurm: SlurmCluster, job: str, log: Path) -> tuple[str, list[str]]:
    """Wait for the end of a job. Return its state and its lines, without the label of srun."""
    states: list[str] = []

    def ended() -> bool:
        described = slurm.command("scontrol", "show", "job", job)
        states[:] = re.findall(r"JobState=(\w+)", described)
        return states[0] in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")

    wait_for(ended, f"end of job {job}", slurm.logs)
    return states[0], [line.partition(": ")[2] or line for line in log.read_text().splitlines()]


def test_the_tasks_of_srun_know_their_places(
    slurm: SlurmCluster, run: Callable[..., str], worker: tuple[str, str]
) -> None:
    output = run("srun", "-n", 3, *worker, "calls", **slurm.variables)
    assert re.findall("worker .*", output) == [
        f"worker worker{rank} Slurm {rank} 3 {rank} 0" for rank in range(3)
    ]


def test_launch_submits_a_job_with_roles(
    slurm: SlurmCluster, run: Callable[..., str], tmp_path: Path
) -> None:
    roles = ("--role", "ps=1", "--role", "trainer=2")
    job, log = launch(slurm, run, tmp_path, *roles, PROGRAM, "calls")
    state, lines = end_of(slurm, job, log)
    assert state == "COMPLETED", lines
    assert [line for line in lines if line.startswith("worker ")] == [
        "worker ps0 Slurm 0 3 0 0",
        "worker trainer0 Slurm 1 3 1 0",
        "worker trainer1 Slurm 2 3 2 0",
    ]


def test_a_killed_task_of_launch_restarts(
    slurm: SlurmCluster, run: Callable[..., str], tmp_path: Path
) -> None:
    job, log = launch(slurm, run, tmp_path, "-n", 2, "--restarts", 1, PROGRAM, "restart", tmp_path)
    victim = tmp_path / "victim"
    wait_for(lambda: victim.exists() and bool(victim.read_text()), "worker1", slurm.logs)
    os.kill(int(victim.read_text()), signal.SIGKILL)
    state, lines = end_of(slurm, job, log)
    assert state == "COMPLETED", lines
    assert {"lost worker1", "life worker1 1", "called Slurm 0", "end worker0", "end worker1"} <= {
        *lines
    }
    assert not [line for line in lines if "shut down without" in line]


def test_scancel_of_a_step_loses_its_worker(
    slurm: SlurmCluster, start: Start, worker: tuple[str, str], tmp_path: Path
) -> None:
    """Two steps of one job form a group; one of them is cancelled."""
    script = tmp_path / "steps.sh"
    script.write_text(
        "export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + SLURM_JOB_ID))\n"
        "export TELEGRAD_WORLD_SIZE=2\n"
        f'TELEGRAD_RANK=1 srun -n 1 --exact "$@" wait {tmp_path} &\n'
        f'TELEGRAD_RANK=0 srun -n 1 --exact "$@" wait {tmp_path}\n'
    )
    process = start("salloc", "-n", 2, "bash", script, *worker, **slurm.variables)
    wait_for(
        lambda: (tmp_path / "pid1").exists() and (tmp_path / "pid0").exists(), "both", slurm.logs
    )
    pid = int((tmp_path / "pid1").read_text())
    variables = Path(f"/proc/{pid}/environ").read_text()
    found = dict(re.findall(r"(SLURM_JOB_ID|SLURM_STEP_ID)=(\d+)", variables))
    slurm.command("scancel", f"{found['SLURM_JOB_ID']}.{found['SLURM_STEP_ID']}")
    output, _ = process.communicate(timeout=LIMIT)
    assert "lost worker1" in output
    assert (tmp_path / "lost0").read_text() == "worker1"


def test_a_requeued_job_starts_again(
    slurm: SlurmCluster, run: Callable[..., str], tmp_path: Path
) -> None:
    """Slurm ends all tasks and runs the job again, with the same id."""
    job, log = launch(
        slurm, run, tmp_path, "-n", 2, "--sbatch=--requeue", PROGRAM, "requeued", tmp_path
    )
    wait_for((tmp_path / "victim").exists, "worker1", slurm.logs)
    slurm.command("scontrol", "requeue", job)
    state, lines = end_of(slurm, job, log)
    assert state == "COMPLETED", lines
    assert "worker worker1 Slurm 1 2 1 1" in lines

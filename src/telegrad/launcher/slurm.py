"""`telegrad launch --on slurm`: a batch script that starts one task for each worker.

The script hosts the store of the group on its node, so that every task may restart: a task whose
program fails runs it again, up to the number of restarts. The secret is in the environment of
sbatch, which Slurm passes on to the tasks, and not in the script.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from telegrad.cluster.roles import format_roles
from telegrad.errors import UsageError
from telegrad.launcher.workers import RESTART_TIMEOUT

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --ntasks={tasks}
#SBATCH --output={logs}/%x-%j.log
{options}
export TELEGRAD_ROLES={roles}
export TELEGRAD_LISTEN="${{TELEGRAD_LISTEN:-0.0.0.0}}"
export TELEGRAD_RESTART_TIMEOUT="${{TELEGRAD_RESTART_TIMEOUT:-{restart_timeout}}}"
port=$((61440 + SLURM_JOB_ID % 4096))
export TELEGRAD_STORE="$(hostname):$port"
{python} -m telegrad.launcher.store "$port" &
trap "kill $!" EXIT

# each task: run the program, and again if it fails
srun --label --kill-on-bad-exit=1 bash -c '
for restart in $(seq 0 {restarts}); do
    export TELEGRAD_RESTART=$((restart + ${{SLURM_RESTART_COUNT:-0}}))
    TELEGRAD_ADVERTISE="${{TELEGRAD_ADVERTISE:-$(hostname)}}" "$@" && exit
    code=$?
done
exit $code' task {command}
"""


def batch_script(
    command: Sequence[str],
    roles: Mapping[str, int],
    *,
    name: str,
    restarts: int = 0,
    logs: Path = Path(),
    gpus: int = 0,
    options: Sequence[str] = (),
) -> str:
    """Return a batch script that runs ``python <command>`` in each worker."""
    all_options = [f"--gpus-per-task={gpus}", *options] if gpus else options
    return _SCRIPT.format(
        name=name,
        tasks=sum(roles.values()),
        logs=logs,
        options="\n".join(f"#SBATCH {option}" for option in all_options),
        roles=shlex.quote(format_roles(roles)),
        restarts=restarts,
        restart_timeout=RESTART_TIMEOUT if restarts else 0,
        python=shlex.quote(sys.executable),
        command=shlex.join([sys.executable, "-u", *command]),
    )


def submit(script: str, environment: Mapping[str, str]) -> str:
    """Submit a batch script. Return what sbatch said, which names the job."""
    try:
        done = subprocess.run(
            ["sbatch"], input=script, env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UsageError("there is no sbatch here; run this on a login node of Slurm") from None
    if done.returncode:
        raise UsageError(f"sbatch refused the job: {done.stderr.strip()}")
    return done.stdout.strip()

"""Run a script in each worker of a job on this host, and report how it ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from telegrad.launcher.elastic import Job, Outcome
from telegrad.launcher.output import Output
from telegrad.launcher.workers import job_environment, workers_of


def run_script(
    command: Sequence[str], roles: int | Mapping[str, int], restarts: int, logs: Path
) -> int:
    """Run ``python <command>`` in each worker. Return the exit code: that of the first failure."""
    workers = workers_of(roles)
    environment = job_environment(os.environ, len(workers), restarts)
    names = [worker.name for worker in workers]
    with Output(names, logs, sys.stdout, sys.stderr) as output:
        job = Job(workers, output, environment, restarts)
        # torch replaces variables in arguments
        arguments = [argument.replace("$", "$$") for argument in ("-u", *command)]
        outcome = job.run(sys.executable, lambda worker: arguments)
    if outcome.failures:
        sys.stderr.write(describe(outcome, output))
    return exit_code(outcome)


def exit_code(outcome: Outcome) -> int:
    """Return the exit code of the job, as a shell shows it."""
    if outcome.signal is not None:
        return 128 + outcome.signal
    if not outcome.failures:
        return 0
    code = outcome.failures[0].exit_code
    return code if code > 0 else 128 - code


def describe(outcome: Outcome, output: Output) -> str:
    """Return a text about the failures: the first, with its last lines, then the others."""
    first, *others = outcome.failures
    lines = [f"\n{first}. Its last lines:"]
    lines += [f"    {line}" for line in output.tail(first.worker.name)]
    lines += [f"after that, {other}" for other in others]
    lines.append(f"the whole output is in {output.folder}")
    return "\n".join(lines) + "\n"

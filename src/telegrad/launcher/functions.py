"""`launch`: run a function in each worker of a job on this host.

Workers are forked from a server that has imported torch, so that they start fast. In a script, a
function travels by its name, and workers import the script without running its main part. A
notebook cannot be imported; what is defined there travels by value (cloudpickle).
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch.multiprocessing as mp

from telegrad.errors import UsageError, WorkerExited
from telegrad.launcher.elastic import Job
from telegrad.launcher.function_worker import Call, run
from telegrad.launcher.output import STDERR, STDOUT, Output
from telegrad.launcher.scripts import describe, exit_code
from telegrad.launcher.workers import Worker, job_environment, workers_of
from telegrad.messages.remote_functions import check_callable

T = TypeVar("T")


def launch(
    function: Callable[..., T],
    roles: int | Mapping[str, int],
    args: Sequence[Any] = (),
    *,
    restarts: int = 0,
    logs: str | Path | None = None,
    show: bool = True,
) -> dict[str, T]:
    """Run `function(*args)` in each worker, on this host. Return the results by worker.

    `roles` is a number of workers, which are named ``worker0``, ``worker1``, ..., or a number for
    each role, as in ``{"ps": 1, "trainer": 4}``. In a worker, `init_rpc` and `Agent` need no
    arguments, and `telegrad.cluster.detect` says which one it is. A worker that fails restarts
    under its name up to `restarts` times; after that, all are ended, and `WorkerExited` tells of
    the first failure. The output of the workers is shown and kept in the folder `logs`.

    In a script, call this under ``if __name__ == "__main__":``.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "a worker imports this script: call launch only under `if __name__ == '__main__':`"
        )
    check_callable(function)
    workers = workers_of(roles)
    folder = Path(tempfile.mkdtemp(prefix="telegrad-") if logs is None else logs)
    environment = {**os.environ, **job_environment(os.environ, len(workers), restarts)}
    shown = (sys.stdout, sys.stderr) if show else (None, None)
    mp.set_forkserver_preload(_imported_by([function, *filter(callable, args)]))
    with Output([worker.name for worker in workers], folder, *shown) as output:
        job = Job(workers, output, environment, restarts, "forkserver", redirect=False)

        def arguments(worker: Worker) -> Sequence[Any]:
            paths = [output.path(worker.name, stream) for stream in (STDOUT, STDERR)]
            return (_call(function, tuple(args)), paths)

        outcome = job.run(run, arguments)
    if outcome.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.signal is not None:
        signal.raise_signal(outcome.signal)
    if outcome.failures:
        first = outcome.failures[0]
        raise WorkerExited(
            describe(outcome, output).strip(),
            peer=first.worker.name,
            exit_code=exit_code(outcome),
            log=str(output.log(first.worker.name)),
        )
    return {name: pickle.loads(result) for name, result in outcome.results.items()}


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """Return a call that a worker can unpickle."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not os.path.isfile(path):  # interactive
        return Call(cloudpickle.dumps((function, args)))
    try:
        pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):  # a lambda, or a local function
        return Call(cloudpickle.dumps((function, None)), args)
    return Call((function, None), args)


def _imported_by(functions: Sequence[Callable[..., Any]]) -> list[str]:
    """Return the modules that the global names of functions come from, for the fork server.

    Not "__main__" itself, which not all versions of Python preload.
    """
    names: set[Any] = set()
    for function in functions:
        for value in getattr(inspect.unwrap(function), "__globals__", {}).values():
            is_module = inspect.ismodule(value)
            names.add(value.__name__ if is_module else getattr(value, "__module__", None))
    own = {"__main__", *(function.__module__ for function in functions)}
    imported = {name for name in names - own if name in sys.modules}
    return sorted({*imported, "torch._dynamo", "telegrad.launcher.function_worker"})

"""`Job`: run the workers of a job, each under an elastic launcher of torch of its own.

Each launcher runs in a thread. It starts its worker, watches it, and restarts it up to a number of
times. A worker that fails more often ends the job: the other launchers stop their workers. A
launcher asks its rendezvous ten times a second whether other nodes wait; that is how it is told.

A signal that ends this process ends all workers first. Its handler only adds an event, because an
exception that a handler raises could interrupt any line.

State: events go from the threads and the handler through `_events` to the thread that runs `run`.
`_stopping` is set once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from telegrad.dashboard import serve_job
from telegrad.launcher.output import STDERR, STDOUT, Output
from telegrad.launcher.workers import Worker

HOST = "127.0.0.1"
_BACKEND = "telegrad"
_POLL = 0.05  # seconds between two looks at a worker
_GRACE = 10  # seconds that a worker may take to end before it is killed
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Failure(NamedTuple):
    """The end of a worker that cannot be restarted again."""

    worker: Worker
    exit_code: int  # negative: the number of a signal

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"{self.worker.name} was ended by {signal.Signals(-self.exit_code).name}"
        return f"{self.worker.name} failed with exit code {self.exit_code}"


class Outcome(NamedTuple):
    """What a job ended with: results by name, failures in their order, the signal that ended it."""

    results: dict[str, Any]
    failures: list[Failure]
    signal: int | None


class Job:
    """The workers of one job on this host."""

    def __init__(
        self,
        workers: Sequence[Worker],
        output: Output,
        environment: Mapping[str, str],
        restarts: int = 0,
        start_method: str = "spawn",
        redirect: bool = True,
    ) -> None:
        self._workers = workers
        self._output = output
        self._environment = dict(environment)
        self._restarts = restarts
        self._start_method = start_method
        self._redirect = redirect
        self._stopping = threading.Event()
        self._events: queue.SimpleQueue[tuple[Worker | None, Any]] = queue.SimpleQueue()

    def run(
        self, entry: Callable[..., Any] | str, args: Callable[[Worker], Sequence[Any]]
    ) -> Outcome:
        """Run a function, or a program, in each worker, with `args(worker)`."""
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        rendezvous = self._environment["TELEGRAD_STORE"] = f"{HOST}:{store.port}"
        with _signals(self._events), _quiet_torch(), self._dashboard(rendezvous):
            threads = [
                threading.Thread(
                    target=self._run_worker,
                    args=(worker, store.port, entry, args(worker)),
                    name=f"telegrad-launch-{worker.name}",
                    daemon=True,
                )
                for worker in self._workers
            ]
            for thread in threads:
                thread.start()
            try:
                return self._supervise()
            finally:
                for thread in threads:
                    thread.join()

    @contextlib.contextmanager
    def _dashboard(self, rendezvous: str) -> Iterator[None]:
        """Serve a dashboard if the environment asks for it, and say where."""
        dashboard = serve_job({**os.environ, **self._environment}, rendezvous)
        if dashboard is None:
            yield
            return
        with dashboard:
            sys.stderr.write(f"dashboard: {dashboard.url}\n")
            yield

    def _supervise(self) -> Outcome:
        """Wait for the ends of all workers. After the first failure, stop the others."""
        results: dict[str, Any] = {}
        failures: list[Failure] = []
        errors: list[BaseException] = []
        ended_by: int | None = None
        while len(results) + len(failures) + len(errors) < len(self._workers):
            worker, event = self._events.get()
            if worker is None:
                ended_by = ended_by or event
            elif isinstance(event, ChildFailedError):
                (failed,) = event.failures.values()
                failures.append(Failure(worker, failed.exitcode))
            elif isinstance(event, BaseException):
                errors.append(event)
            else:
                results[worker.name] = event
                continue
            self._stopping.set()
        unexpected = [error for error in errors if not isinstance(error, SignalException)]
        if unexpected:  # torch could not start a worker
            raise unexpected[0]
        return Outcome(results, failures, ended_by)

    def _run_worker(
        self, worker: Worker, port: int, entry: Callable[..., Any] | str, args: Sequence[Any]
    ) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if callable(entry) else ())
        settings: dict[str, Any] = {}
        if "shutdown_timeout" in {field.name for field in dataclasses.fields(LaunchConfig)}:
            settings["shutdown_timeout"] = _GRACE  # older versions of torch wait for 30 s
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=1,
            run_id=worker.name,
            role=worker.role,
            rdzv_backend=_BACKEND,
            rdzv_configs={"port": port, "stopping": self._stopping},
            max_restarts=self._restarts,
            monitor_interval=_POLL,
            start_method=self._start_method,
            logs_specs=_WorkerLogs(self, worker),
            **settings,
        )
        try:
            results = elastic_launch(config, entry)(*args)
            self._events.put((worker, results[0]))
        except BaseException as error:
            self._events.put((worker, error))

    def prepare(self, worker: Worker, variables: dict[str, str]) -> LogsDest:
        """Complete the environment of a worker that is about to start. Return where it writes."""
        restart = variables["TORCHELASTIC_RESTART_COUNT"]
        if restart != "0":
            self._output.note(worker.name, f"restart {restart} of {self._restarts}")
        variables.update(self._environment)
        variables.update(worker.environment(worker.rank, len(self._workers)))
        variables["TELEGRAD_RESTART"] = restart
        stdout, stderr = (
            self._output.path(worker.name, stream) if self._redirect else ""
            for stream in (STDOUT, STDERR)
        )
        return LogsDest({0: stdout}, {0: stderr}, {}, {}, {0: ""})


class _WorkerLogs(LogsSpecs):
    """Torch asks this, before each start of a worker, where its output goes."""

    def __init__(self, job: Job, worker: Worker) -> None:
        super().__init__()
        self._job = job
        self._worker = worker

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return self._job.prepare(self._worker, envs[0])

    @property
    def root_log_dir(self) -> str:
        return ""


class _WorkerRendezvous(RendezvousHandler):
    """The rendezvous of one launcher with itself. It ends the launcher when the job stops."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._port: int = parameters.config["port"]
        self._stopping: threading.Event = parameters.config["stopping"]

    use_agent_store = True  # this process hosts the store of the group

    def get_backend(self) -> str:
        return _BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._raise_if_stopping()
        address = RendezvousStoreInfo(HOST, self._port)
        return RendezvousInfo(dist.HashStore(), 0, 1, address)

    def num_nodes_waiting(self) -> int:
        self._raise_if_stopping()
        return 0

    def _raise_if_stopping(self) -> None:
        if self._stopping.is_set():
            raise SignalException("the job ends", signal.SIGTERM)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else uses this rendezvous."""

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(_BACKEND, _WorkerRendezvous)


@contextlib.contextmanager
def _signals(events: queue.SimpleQueue[tuple[Worker | None, Any]]) -> Iterator[None]:
    """Turn the signals that end this process into events. Only the main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {
        number: signal.signal(number, lambda number, _: events.put((None, number)))
        for number in _SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Suppress torch's messages about what `Job` reports itself."""
    loggers = [logging.getLogger(f"torch.distributed.{name}") for name in ("elastic", "launcher")]
    handler = logging.NullHandler()
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate

"""The processes of a peer: a callee and its callers, which run for the whole benchmark.

Some peers poll in a loop even when there are no calls, and would slow down the peer that is
measured next. Their processes are stopped with SIGSTOP while another peer is measured. When the
peer itself is measured, only the callers that the case needs are resumed.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from benchmarks.namespaces import INTERFACE, Host
from benchmarks.peers import PeerSpec, Place
from benchmarks.processes import (
    Worker,
    WorkerError,
    WorkerLost,
    cpu_seconds,
    last_words,
    session_pids,
    stop,
)
from benchmarks.suite import Case

START_LIMIT_S = 120.0
CASE_LIMIT_S = 90.0
IDLE_S = 1.0  # CPU time has a resolution of 0.01 s
TOGETHER_S = 0.5  # delay between the command and the common start of all callers of a case


class Group:
    """The callee and the callers of one peer. Only one thread may use it.

    With `hosts`, the process of each rank runs on its own host.
    """

    def __init__(self, spec: PeerSpec, callers: int, hosts: Sequence[Host] = ()) -> None:
        self.spec = spec
        self._hosts = hosts
        self.folder = tempfile.TemporaryDirectory(prefix="bench-")
        self.workers: list[Worker] = []
        self.versions: dict[str, str] = {}
        try:
            with explained(self.workers):
                self._start(callers + 1)
        except BaseException:
            self.end()
            raise

    def __repr__(self) -> str:
        return f"<Group {self.spec.name} {self.workers}>"

    def run(self, case: Case, seconds: float) -> dict[str, float]:
        """Measure one case. Add up the values of callers that run at the same time."""
        with self._awake(case.callers + case.helpers) as workers:
            if case.loop == "idle":
                return idle(workers, seconds)
            params = dict(case.params)
            if case.callers > 1:
                params["start_at"] = time.monotonic() + TOGETHER_S
            callers = workers[1 : 1 + case.callers]
            answers = ask(
                callers, CASE_LIMIT_S + 3 * seconds, "measure", case.loop, seconds, params
            )
            return answers[0] if case.callers == 1 else added(answers)

    @contextmanager
    def _awake(self, others: int) -> Iterator[list[Worker]]:
        workers = self.workers[: others + 1]
        for worker in workers if self.spec.spins else []:
            worker.resume()
        try:
            with explained(workers):
                yield workers
        finally:
            for worker in workers if self.spec.spins else []:
                worker.pause()

    def close(self) -> None:
        """Let every process leave the group, then end the remaining processes."""
        stop(self.workers)
        self.folder.cleanup()

    def end(self) -> None:
        """End every process at once."""
        for worker in self.workers:
            worker.end()
        self.folder.cleanup()

    def _start(self, size: int) -> None:
        folder = Path(self.folder.name)
        for rank in range(size):
            log = folder / f"worker{rank}.log"
            prefix = self._hosts[rank].prefix if self._hosts else ()
            spec = self.spec
            self.workers.append(Worker(spec.python, log, spec.package, spec.environment, prefix))
        port = free_port()
        for rank, worker in enumerate(self.workers):
            place = Place(rank, size, port, self.folder.name)
            if self._hosts:
                address, callee = self._hosts[rank].address, self._hosts[0].address
                place = Place(rank, size, port, self.folder.name, address, callee, INTERFACE)
            worker.send("start", self.spec.adapter, asdict(place))
        answers(self.workers, START_LIMIT_S, fail_fast=True)
        ask(self.workers[1:], START_LIMIT_S, "check", self.spec.builtin)
        self.versions = ask(self.workers[:1], START_LIMIT_S, "versions", self.spec.package)[0]
        if self.spec.spins:
            for worker in self.workers:
                worker.pause()


@contextmanager
def explained(workers: list[Worker]) -> Iterator[None]:
    """Add the last output and the stacks of the workers to a `WorkerLost` error."""
    try:
        yield
    except WorkerLost as lost:
        raise WorkerLost(f"{lost}\n{last_words(workers)}") from lost


def idle(workers: list[Worker], seconds: float) -> dict[str, float]:
    """Return the number of cores that idle processes keep busy."""
    pids = [pid for worker in workers for pid in session_pids(worker.process.pid)]
    begin, used = time.perf_counter(), cpu_seconds(pids)
    time.sleep(max(IDLE_S, seconds))
    return {"value": (cpu_seconds(pids) - used) / (time.perf_counter() - begin), "n": 1}


def ask(workers: list[Worker], limit: float, command: str, *args: Any) -> list[Any]:
    for worker in workers:
        worker.send(command, *args)
    return answers(workers, limit)


def answers(workers: list[Worker], limit: float, fail_fast: bool = False) -> list[Any]:
    """Return the answers of all workers in order.

    Raise an error of a worker when all have answered, but `WorkerLost` at once.
    """
    deadline = time.monotonic() + limit
    values: dict[int, Any] = {}
    errors: list[WorkerError] = []
    waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic())) or list(waiting)
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                values[rank] = workers[rank].answer(deadline)
            except WorkerError as error:
                if fail_fast:  # the others may be waiting for this one
                    raise
                errors.append(error)
    if errors:
        raise errors[0]
    return [values[rank] for rank in range(len(workers))]


def added(values: list[dict[str, float]]) -> dict[str, float]:
    return {key: sum(value[key] for value in values) for key in ("value", "n")}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

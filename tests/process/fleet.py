"""Real worker processes for tests, driven from the test through pipes.

Processes are forked from a server that has already imported torch, so starting one is cheap. Each
joins a group through a file and then does what the test tells it. An exception in a worker is
raised in the test.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed", "telegrad", "tests.process.fleet"]
)

_PATIENCE = 60.0


class Worker:
    """One process."""

    def __init__(self, target: Callable[..., object], *args: Any) -> None:
        self._here, there = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(there, target, args), daemon=True)
        self.process.start()
        there.close()

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function in the process and wait for its result."""
        self.begin(function, *args)
        return self.result()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._here.send((function, args))

    def result(self) -> Any:
        if not self._here.poll(_PATIENCE):
            raise TimeoutError(f"no answer from {self.process}")
        kind, value = self._here.recv()
        if kind == "failed":
            raise AssertionError(f"in the worker:\n{value}")
        return value

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self._here.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _serve(pipe: Connection, start: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Inside the process: start, then run what arrives until the pipe closes."""
    command: tuple[Callable[..., Any], tuple[Any, ...]] = (start, args)
    while True:
        try:
            pipe.send(("done", command[0](*command[1])))
        except Exception:
            pipe.send(("failed", traceback.format_exc()))
        try:
            command = pipe.recv()
        except EOFError:
            return


class Fleet:
    """Workers w0, w1, ... of one group.

    `start` is run first in each process, with its rank, the size and `args`.
    """

    def __init__(self, size: int, start: Callable[..., None], *args: Any) -> None:
        self._start = start
        self._args = args
        self._size = size
        self.workers = [Worker(start, rank, size, *args) for rank in range(size)]
        self._strays: list[Worker] = []

    def __enter__(self) -> Fleet:
        try:
            for worker in self.workers:
                worker.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, rank: int) -> Worker:
        return self.workers[rank]

    def restart(self, rank: int) -> None:
        """A new process for a rank whose process is gone."""
        self._strays.append(self.workers[rank])
        self.workers[rank] = Worker(self._start, rank, self._size, *self._args)
        self.workers[rank].result()

    def close(self) -> None:
        for worker in (*self.workers, *self._strays):
            worker.close()

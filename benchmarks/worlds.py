"""Run a group of workers from start to end, forked from a server that has done the imports."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from benchmarks import remote
from benchmarks.group import free_port
from benchmarks.peers import PEERS, Place, load
from benchmarks.processes import (
    LOG_LINES,
    cpu_seconds,
    die_with_parent,
    prepare_environment,
    with_descendants,
)

BARE = "bare"
LIMIT_S = 120.0
IDLE_S = 1.0


@cache
def forkserver(*preload: str) -> ForkServerContext:
    """Return a context whose server imports torch and these modules once."""
    prepare_environment()  # for the server; workers get the `sys.path` of this process
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "benchmarks.worlds", *preload])
    warm = context.Process(target=int)  # the first process waits for the imports
    warm.start()
    warm.join()
    return context


def _compute() -> None:
    die_with_parent()
    while True:
        pass


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Let this number of processes occupy a core each inside the block."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_compute) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def together(work: Callable[..., None], size: int, *arguments: Any, fresh: bool = False) -> None:
    """Run `work(rank, *arguments)` in `size` processes.

    The processes do not import torch and Telegrad again, unless `fresh`. With `fresh`, they get the
    current environment of this process.
    """
    if not fresh:
        forkserver("torch._dynamo", "telegrad", "telegrad.rpc")
    start: Any = torch.multiprocessing.start_processes
    start(work, arguments, size, start_method="spawn" if fresh else "forkserver")


def stop(processes: Sequence[ForkServerProcess]) -> None:
    """Stop processes until they are `running` again: idle processes of torch RPC use all cores."""
    for process in processes:
        os.kill(process.pid or 0, signal.SIGSTOP)


def resume(processes: Sequence[ForkServerProcess]) -> None:
    """Let stopped processes run."""
    for process in processes:
        os.kill(process.pid or 0, signal.SIGCONT)


@contextlib.contextmanager
def running(processes: Sequence[ForkServerProcess]) -> Iterator[None]:
    """Let stopped processes run inside the block."""
    resume(processes)
    try:
        yield
    finally:
        stop(processes)


def modules(adapter: str) -> list[str]:
    """Return the modules that an adapter imports: its own, and those of its packages."""
    name, _, *shaped = adapter.split(":")
    packages = [module.removesuffix(".rpc") for module in shaped]
    return [
        f"benchmarks.peers.{name}",
        *(f"{each}.{part}" for each in packages for part in ("rpc", "autograd", "optim")),
    ]


class DidNotComeUp(Exception):
    """A worker failed, died or took too long."""


@dataclass
class Child:
    """A worker process and the parent's end of its pipe."""

    process: ForkServerProcess
    pipe: Connection

    def hear(self) -> float:
        """Return the time that the worker reports. Call it when data is available."""
        try:
            ok, value = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise DidNotComeUp("a worker died") from error
        if not ok:
            raise DidNotComeUp(value)
        return float(value)

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


def work(adapter: str | None, place: Place, pipe: Connection) -> None:
    """Run a worker: join, as a caller call the callee once, wait for the measurement, leave."""
    die_with_parent()
    with open(Path(place.folder, "log"), "ab") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    try:
        peer = load(adapter) if adapter else None
        if peer is not None:
            peer.start(place)
        if peer is not None and place.rank:
            peer.call(remote.add)(torch.ones(1), 1)
        pipe.send((True, time.monotonic()))
        pipe.recv()
        if peer is not None:
            peer.stop()
        pipe.send((True, time.monotonic()))
    except Exception:
        pipe.send((False, traceback.format_exc()))


def measure(peer: str, size: int) -> dict[str, float]:
    """Run one group from start to end."""
    adapter = None if peer == BARE else PEERS[peer].adapter
    context = forkserver(*(modules(adapter) if adapter else ()))
    port, folder, children = (
        free_port(),
        tempfile.TemporaryDirectory(prefix="bench-"),
        list[Child](),
    )
    log_file = Path(folder.name, "log")
    begin = time.monotonic()
    try:
        for rank in range(size):
            children.append(spawn(adapter, Place(rank, size, port, folder.name), context))
        up = last(children, begin + LIMIT_S)
        looked_at = look_at([child.process.pid or 0 for child in children], size)
        leave = time.monotonic()
        for child in children:
            child.pipe.send("leave")
        left = last(children, leave + LIMIT_S)
        return {"startup": up - begin, "shutdown": left - leave, **looked_at}
    except (DidNotComeUp, OSError) as error:  # OSError: a worker ended before it was measured
        log = log_file.read_text(errors="replace").splitlines() if log_file.exists() else []
        raise DidNotComeUp("\n".join([*log[-LOG_LINES:], str(error)])) from error
    finally:
        for child in children:
            child.end()
        folder.cleanup()


def last(children: list[Child], deadline: float) -> float:
    """Return the time at which the last worker was ready. Raise the first failure at once."""
    waiting = {child.pipe: child for child in children}
    times = [0.0]
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise DidNotComeUp(
                f"{len(waiting)} of {len(children)} workers were not ready within {LIMIT_S:.0f} s"
            )
        times += [waiting.pop(pipe).hear() for pipe in ready if isinstance(pipe, Connection)]
    return max(times)


def spawn(adapter: str | None, place: Place, context: ForkServerContext) -> Child:
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(adapter, place, theirs), daemon=True)
    process.start()
    theirs.close()
    return Child(process, ours)


def look_at(workers: list[int], size: int) -> dict[str, float]:
    """Return memory and CPU of idle workers and of all processes that they started."""
    pids = with_descendants(workers)
    maps = [memory(pid) for pid in pids]
    begin, used = time.monotonic(), cpu_seconds(pids)
    time.sleep(IDLE_S)
    return {
        "memory": sum(entry["Pss"] for entry in maps) / size,
        "private": sum(entry["Private_Clean"] + entry["Private_Dirty"] for entry in maps) / size,
        "idle": (cpu_seconds(pids) - used) / (time.monotonic() - begin),
    }


def memory(pid: int) -> dict[str, float]:
    """Return the megabytes in /proc/<pid>/smaps_rollup by name."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {
        name.rstrip(":"): int(amount) * 1024 / 1e6 for name, amount, *_ in map(str.split, lines)
    }

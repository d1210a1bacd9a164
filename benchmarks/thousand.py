"""Measure how a group grows: `python -m benchmarks.thousand 10 100 1000`.

The workers are agents in a few processes (`--processes`) that share a TCPStore. They join, call a
tree, lose a tenth of them without a message, and the others shut down. For each number of workers
the script prints one JSON line: the seconds of each phase, and the memory, threads and descriptors
of one worker. `telegrad bench publish` draws docs/benchmarks/workers-N-cores.jsonl.

- join: all agents of a group of fixed size are opened and know the others.
- tree: the first worker calls its children, which call theirs (8 each), and adds up the replies.
- loss: from the end of a tenth of the workers until their parents in the tree know of it.
- shutdown: all others drain, agree and close.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from telegrad import Agent, Config, current_agent

CHILDREN = 8  # of each worker of the tree
LOST_SHARE = 10  # one of so many workers is lost
_SECRET = "7e57" * 16  # a random key, which is not stretched
_PATIENCE = 600.0
_STACK = 256 * 1024  # bytes of a thread's stack


def name_of(rank: int) -> str:
    return f"w{rank}"


def children_of(rank: int, size: int) -> range:
    first = CHILDREN * rank + 1
    return range(min(first, size), min(first + CHILDREN, size))


def lost_ranks(size: int) -> list[int]:
    """Return the workers that are lost: leaves of the tree, from the last one on."""
    return list(range(size - size // LOST_SHARE, size))


def count_tree(rank: int, size: int) -> int:
    """Count the workers below and with this one, by calls to the children."""
    agent = current_agent()
    assert agent is not None
    replies = [
        agent.submit(name_of(child), count_tree, child, size) for child in children_of(rank, size)
    ]
    return 1 + sum(reply.wait() for reply in replies)


class Phases:
    """Let several processes begin and end each phase together, through the store."""

    def __init__(self, store: Any, index: int, processes: int) -> None:
        self._store = store
        self._index = index
        self._processes = processes
        self._count = 0
        self.seconds: dict[str, float] = {}

    def together(self) -> None:
        self._count += 1
        key = f"phase/{self._count}"
        if int(self._store.add(key, 1)) == self._processes:
            self._store.set(f"{key}/all", "1")
        self._store.wait([f"{key}/all"], timedelta(seconds=_PATIENCE))

    def timed(self, name: str, run: Callable[[], object]) -> None:
        """Run a phase, and note the seconds until all processes have ended it."""
        self.together()
        began = time.perf_counter()
        run()
        self.together()
        self.seconds[name] = time.perf_counter() - began
        if self._index == 0:  # a long run shows where it is
            print(f"{name}: {self.seconds[name]:.3f} s", file=sys.stderr, flush=True)


def run_share(port: int, index: int, processes: int, size: int) -> dict[str, Any]:
    """Run the agents of one process through all phases."""
    # The agents of a process share one connection: torch takes longer to open a thousand of them
    # than the agents take to join.
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=_PATIENCE))
    phases = Phases(dist.PrefixStore("phases", store.clone()), index, processes)
    # Hundreds of workers share a core here, so each may be slow.
    config = Config(
        secret=_SECRET,
        transports=("unix",),
        timeout=_PATIENCE,
        join_timeout=_PATIENCE,
        connect_timeout=_PATIENCE,
        heartbeat_timeout=_PATIENCE,
    )
    ranks = range(index, size, processes)
    agents = {
        rank: Agent(
            name_of(rank),
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=size,
            config=config,
        )
        for rank in ranks
    }
    lost_names = {name_of(rank) for rank in lost_ranks(size)}
    noticed = threading.Semaphore(0)
    expected = 0
    for rank, agent in agents.items():
        expected += sum(name_of(child) in lost_names for child in children_of(rank, size))
        agent.on_loss(lambda name, _: noticed.release() if name in lost_names else None)
    before = Usage.now()
    pool = ThreadPoolExecutor(len(agents))

    def everywhere(run: Callable[[Agent], object], some: Any = None) -> None:
        for done in [pool.submit(run, agent) for agent in (some or agents.values())]:
            done.result()

    # As separate processes do: no agent waits for the others before all are registered or join.
    phases.timed("join", lambda: everywhere(lambda agent: agent.open()))
    after_join = Usage.now()

    def call_tree() -> None:
        if 0 in agents:
            assert agents[0].submit(name_of(0), count_tree, 0, size).wait() == size

    phases.timed("tree", call_tree)
    phases.timed("tree again", call_tree)
    after_tree = Usage.now()

    def lose() -> None:
        for rank in lost_ranks(size):
            if rank in agents:
                agents.pop(rank)._runtime.abort()
        for _ in range(expected):
            assert noticed.acquire(timeout=_PATIENCE)

    phases.timed("loss", lose)
    missing: list[tuple[str, ...]] = []
    phases.timed("shutdown", lambda: everywhere(lambda agent: missing.append(agent.shutdown())))
    assert all(set(names) == lost_names for names in missing), missing[:1]
    pool.shutdown()
    return {
        "agents": len(ranks),
        "seconds": phases.seconds,
        "cpu": Usage.now().cpu - before.cpu,
        "after_join": after_join.minus(before),
        "after_tree": after_tree.minus(before),
    }


class Usage:
    """What this process uses."""

    def __init__(self, kilobytes: int, threads: int, descriptors: int, cpu: float) -> None:
        self.kilobytes = kilobytes
        self.threads = threads
        self.descriptors = descriptors
        self.cpu = cpu

    @classmethod
    def now(cls) -> Usage:
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return cls(
            int(status["VmRSS"].split()[0]),
            int(status["Threads"]),
            len(os.listdir("/proc/self/fd")),
            time.process_time(),
        )

    def minus(self, other: Usage) -> dict[str, float]:
        return {
            "kilobytes": self.kilobytes - other.kilobytes,
            "threads": self.threads - other.threads,
            "descriptors": self.descriptors - other.descriptors,
            "cpu": self.cpu - other.cpu,
        }


def measure(size: int, processes: int) -> dict[str, Any]:
    """Run a group of `size` workers in processes of their own; return one line of results."""
    processes = min(processes, size)
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=_PATIENCE))
    command = [sys.executable, "-m", "benchmarks.thousand", "--share"]
    children = [
        subprocess.Popen(
            [*command, f"{store.port},{index},{processes},{size}"], stdout=subprocess.PIPE
        )
        for index in range(processes)
    ]
    try:
        outputs = [child.communicate(timeout=_PATIENCE)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    if any(child.returncode for child in children):
        raise SystemExit(f"a process failed: {[child.returncode for child in children]}")
    shares = [json.loads(output) for output in outputs]

    def per_agent(moment: str, what: str) -> float:
        return round(sum(share[moment][what] for share in shares) / size, 2)

    return {
        "workers": size,
        "processes": processes,
        "seconds": {
            phase: round(max(share["seconds"][phase] for share in shares), 3)
            for phase in shares[0]["seconds"]
        },
        "cpu": round(sum(share["cpu"] for share in shares), 2),
        "after join": {
            what: per_agent("after_join", what) for what in ("kilobytes", "threads", "descriptors")
        },
        "after tree": {
            what: per_agent("after_tree", what) for what in ("kilobytes", "threads", "descriptors")
        },
    }


def raise_limits() -> None:
    """Allow this process and its children as many descriptors as the system permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", type=int, default=[10, 50, 100, 250, 500, 1000])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--share", help=argparse.SUPPRESS)  # of one process
    options = parser.parse_args()
    raise_limits()
    if options.share:
        threading.stack_size(_STACK)
        logging.disable(logging.WARNING)  # every worker logs which ones were lost
        print(json.dumps(run_share(*map(int, options.share.split(",")))))
        return
    for size in options.sizes:
        print(json.dumps(measure(size, options.processes)), flush=True)


if __name__ == "__main__":
    main()

"""Create a million short-lived references; no object may be left, and memory must stay constant.

    python -m benchmarks.soak [--count 1000000]

One of two worker processes creates references to objects on the other and drops them at once. It
prints the number of references, the rate, the resident memory of the owner and the number of
objects that the owner still has.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import telegrad.rpc as rpc
from telegrad.refs.manager import ReferenceManager

STEPS = 10


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def owner_figures() -> tuple[float, dict[str, int]]:
    return resident_mb(), ReferenceManager.of(rpc._get_current_rpc_agent()._runtime).statistics()


def work(rank: int, path: str, count: int) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        soak(count)
    rpc.shutdown()


def soak(count: int) -> None:
    for step in range(STEPS):
        started = time.perf_counter()
        for number in range(count // STEPS):
            rref: rpc.RRef[dict[str, int]] = rpc.remote("worker1", dict)
            if number % 64 == 0:
                rref.to_here()  # limit the number of pending creations
        del rref
        rate = count // STEPS / (time.perf_counter() - started)
        memory, figures = rpc.rpc_sync("worker1", owner_figures)
        print(
            f"{(step + 1) * count // STEPS:>9,} references  {rate:>8,.0f}/s  owner {memory:.0f} MB, "
            f"caller {resident_mb():.0f} MB, {figures['owned_objects']:,} owned",
            flush=True,
        )
    until = time.monotonic() + 30
    while rpc.rpc_sync("worker1", owner_figures)[1]["owned_objects"] and time.monotonic() < until:
        time.sleep(0.05)
    memory, figures = rpc.rpc_sync("worker1", owner_figures)
    print(f"at the end: owner {memory:.0f} MB, {figures}")
    if figures["owned_objects"] or figures["references_of_others"]:
        raise SystemExit("the owner still has objects")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000)
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=work, args=(rank, f"{folder}/store", count)) for rank in range(2)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit(1)


if __name__ == "__main__":
    main()

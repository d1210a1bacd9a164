"""A worker for the tests of engines: ``program.py calls`` and others, see the functions below.

Nothing but the engine says who a worker is.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import telegrad.rpc as rpc
from telegrad import cluster
from telegrad.errors import PeerLost


def who() -> tuple[str, int | None, int | None, int | None, int, int]:
    place = cluster.detect()
    return (
        place.engine,
        place.rank,
        place.world_size,
        place.local_rank,
        place.restart,
        os.getpid(),
    )


def calls() -> None:
    """Rank 0 asks everybody who it is."""
    rpc.init_rpc()
    place = cluster.detect()
    if place.rank == 0:
        for rank in range(place.world_size or 0):
            info = rpc.get_worker_info(rank)
            print("worker", info.name, *rpc.rpc_sync(info, who)[:-1], flush=True)
    rpc.shutdown()


def restart(folder: str, *killed: str) -> None:
    """The last rank, or `killed`, is killed in its first life. In its second it calls another.

    The one that is called waits in its shutdown when the other comes back.
    """
    rpc.init_rpc()
    place = cluster.detect()
    last = (place.world_size or 0) - 1
    victim = int(killed[0]) if killed else last
    other = last if victim == 0 else 0
    name = rpc.get_worker_info().name
    print("life", name, place.restart, flush=True)
    if place.rank == victim:
        if not place.restart:
            signal.pause()
        print("called", *rpc.rpc_sync(other, who)[:2], flush=True)
    elif place.rank == other and not place.restart:
        try:
            rpc.rpc_sync(victim, pause_at, (folder,), timeout=0)
        except PeerLost as error:
            print("lost", error.peer, flush=True)
    rpc.shutdown()
    print("end", name, flush=True)


def restart_all(folder: str) -> None:
    """The last rank is killed, and the engine restarts all workers. Then, do what `calls` does."""
    killed = Path(folder, "victim").exists()
    if killed:
        calls()
        return
    rpc.init_rpc()
    place = cluster.detect()
    if place.rank == 0:
        rpc.rpc_async(1, pause_at, (folder,), timeout=0)
    signal.pause()


def pause_at(folder: str) -> None:
    """Let the test know which process to kill, now that it is called."""
    Path(folder, "victim").write_text(str(os.getpid()))
    signal.pause()


def wait(folder: str) -> None:
    """All wait for a call that does not return. Rank 1 is to be ended."""
    rpc.init_rpc()
    place = cluster.detect()
    Path(folder, f"pid{place.rank}").write_text(str(os.getpid()))
    if place.rank == 1:
        signal.pause()
    try:
        rpc.rpc_sync(1, signal.pause, timeout=0)
    except PeerLost as error:
        Path(folder, f"lost{place.rank}").write_text(error.peer or "")
        print("lost", error.peer, flush=True)
    rpc.shutdown()


def requeued(folder: str) -> None:
    """Wait in the first life of the job. In the second, do what `calls` does."""
    if "SLURM_RESTART_COUNT" in os.environ:
        calls()
        return
    rpc.init_rpc()
    Path(folder, "victim").write_text(str(os.getpid()))
    signal.pause()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

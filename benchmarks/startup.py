"""How long groups of 2 to 32 workers on one machine take to come up and to leave, and the memory of each worker.

    python -m benchmarks.startup
    python -m benchmarks.startup --workers 2,8 --rounds 1 --peers telegrad

Workers are forked from a server that has imported torch and the peers already, so imports are not in the figures. The
clock runs from before the first process is started until every worker has joined the group and had one call to the
callee answered. `bare` is the same without a peer: what the processes alone cost.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

from benchmarks import machine, plots, results
from benchmarks.peers import PEERS, load
from benchmarks.processes import import_path
from benchmarks.suite import Case
from benchmarks.worlds import BARE, DidNotComeUp, forkserver, measure

SHAPED = {"telegrad": "telegrad.rpc", "torch": "torch.distributed.rpc"}
METRICS = {
    "startup": ("until every worker is up", "s"),
    "memory": ("memory per worker (PSS)", "MB"),
    "private": ("private memory per worker", "MB"),
    "idle": ("CPU of all workers together, idle", "cores"),
    "shutdown": ("until every worker has left", "s"),
}


def rounds(options: argparse.Namespace, context: ForkServerContext) -> results.Results:
    figures = results.Results()
    failed: set[tuple[str, int]] = set()
    for size, number, peer in itertools.product(options.workers, range(options.rounds), options.peers):
        if (peer, size) in failed:
            continue
        try:
            measured = measure(peer, size, context)
        except DidNotComeUp as error:
            failed.add((peer, size))
            note(figures, peer, size, str(error))
            continue
        for metric, value in measured.items():
            figures.of(case(metric, size), peer).add({"value": value, "n": 1})
        text = "  ".join(f"{metric} {value:.2f}" for metric, value in measured.items())
        say(f"round {number + 1}  {size:2} workers  {peer:10} {text}")
    return figures


def note(figures: results.Results, peer: str, size: int, error: str) -> None:
    figures.of(case("startup", size), peer).errors.append(error.strip().splitlines()[-1])
    say(f"{peer}: {size} workers did not come up and are not tried again: {error}")


def case(metric: str, size: int) -> Case:
    title, unit = METRICS[metric]
    return Case(f"{metric}/{size:02}", f"{size:2} workers: {title}", unit, metric, callers=size)


def available(peer: str) -> bool:
    if peer == BARE:
        return True
    try:
        load(PEERS[peer].adapter)
        return True
    except Exception as error:
        say(f"{peer}: skipped: {error}")
        return False


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--peers", type=lambda text: text.split(","), default=[*SHAPED, BARE], help="default: all")
    sizes = [2, 4, 8, 16, 32]
    parser.add_argument("--workers", type=lambda text: [int(n) for n in text.split(",")], default=sizes)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/bench/startup.jsonl"), help="default %(default)s")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes are ended on the way out
    sys.path[:0] = import_path().split(os.pathsep)
    options.peers = [peer for peer in options.peers if available(peer)]
    run = machine.heading("startup", rounds=options.rounds)
    lines = rounds(options, forkserver(list(SHAPED.values()))).lines()
    lines.sort(key=lambda line: list(METRICS).index(line["group"]))
    results.write(options.out, run, lines)
    say(results.table(lines))
    say(f"\nmedian of {options.rounds} rounds; written to {options.out}")
    plots.save(options.out)
    return 0


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Measure start-up, shutdown and memory of groups of 2 to 32 workers on one machine.

    python -m benchmarks.startup
    python -m benchmarks.startup --workers 2,8 --rounds 1 --peers telegrad

Workers are forked from a server that has imported torch and the peer, so the figures do not include
imports. The clock starts before the first process starts. It stops when every worker has joined the
group and every caller has received the reply of one call to the callee. `bare` measures the
processes without a peer.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import machine, progress, results
from benchmarks.group import ask
from benchmarks.peers import PEERS, installed
from benchmarks.processes import Worker, WorkerError, WorkerLost, stop, summary
from benchmarks.suite import Case
from benchmarks.worlds import BARE, LIMIT_S

SIZES = [2, 4, 8, 16, 32]
METRICS = {
    "startup": ("until every worker is up", "s"),
    "memory": ("memory per worker (PSS)", "MB"),
    "private": ("private memory per worker", "MB"),
    "idle": ("CPU of all workers together, idle", "cores"),
    "shutdown": ("until every worker has left", "s"),
}
CLEANUP_S = 60.0


class Launcher:
    """The process that starts groups of one peer, in the interpreter of the peer."""

    def __init__(self, peer: str, folder: str) -> None:
        self.peer = peer
        self.log = Path(folder, f"{peer}.log")
        self.worker = self._start()

    def _start(self) -> Worker:
        if self.peer == BARE:
            return Worker(sys.executable, self.log)
        spec = PEERS[self.peer]
        return Worker(spec.python, self.log, spec.package, spec.environment)

    def measure(self, size: int) -> dict[str, float]:
        """Run one group from start to end. After a failure, use a new process for the next."""
        try:
            measured: dict[str, float] = ask(
                [self.worker], 2 * LIMIT_S + CLEANUP_S, "world", self.peer, size
            )[0]
            return measured
        except (WorkerError, WorkerLost):
            self.worker.end()
            self.worker = self._start()
            raise

    def close(self) -> None:
        stop([self.worker])


def rounds(
    options: argparse.Namespace, launchers: list[Launcher], figures: results.Results
) -> None:
    failed: set[tuple[str, int]] = set()
    plan = list(itertools.product(options.workers, range(options.rounds), launchers))
    for step, (size, number, launcher) in enumerate(plan, 1):
        if (launcher.peer, size) in failed:
            continue
        try:
            measured = launcher.measure(size)
        except (WorkerError, WorkerLost) as error:
            failed.add((launcher.peer, size))
            figures.of(case("startup", size), launcher.peer).errors.append(summary(error))
            progress.say(
                f"{launcher.peer}: {size} workers did not start and are not tried again: {error}"
            )
            continue
        for metric, value in measured.items():
            figures.of(case(metric, size), launcher.peer).add({"value": value, "n": 1})
        text = "  ".join(f"{metric} {value:.2f}" for metric, value in measured.items())
        progress.say(
            f"round {number + 1}  {size:2} workers  {launcher.peer:10} {text}", step, len(plan)
        )


def written(figures: results.Results) -> list[dict[str, Any]]:
    return sorted(figures.lines(), key=lambda line: list(METRICS).index(line["group"]))


def case(metric: str, size: int) -> Case:
    title, unit = METRICS[metric]
    return Case(
        f"{metric}/{size:02}",
        f"{size} workers: {title}",
        unit,
        metric,
        callers=size,
        axis="workers",
        at=size,
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=(__doc__ or "").partition("\n")[0]
    )
    default = [*(name for name, spec in PEERS.items() if not spec.on_request), BARE]
    parser.add_argument(
        "--peers", type=lambda text: text.split(","), default=default, help="default: all"
    )
    parser.add_argument(
        "--workers", type=lambda text: [int(n) for n in text.split(",")], default=SIZES
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/startup.jsonl"),
        help="default %(default)s",
    )
    return parser.parse_args(argv)


def hindrance(peer: str) -> str:
    """Return the reason why this peer cannot take part, or an empty string."""
    if peer == BARE:
        return ""
    if not PEERS[peer].forks:
        return "does not work in a process that was forked after its import"
    return "" if installed(PEERS[peer]) else "not installed"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `finally` blocks end the processes
    run = machine.heading("startup", rounds=options.rounds, skipped={})
    figures = results.Results()
    with results.kept(options.out, run, lambda: written(figures)), ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        launchers = []
        for peer in options.peers:
            if reason := hindrance(peer):
                progress.say(f"{peer}: skipped: {reason}")
                run["skipped"][peer] = reason
                continue
            launchers.append(Launcher(peer, folder))
            stack.callback(launchers[-1].close)
        rounds(options, launchers, figures)
    progress.say(results.table(written(figures)))
    progress.say(f"\n{results.footer(options)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

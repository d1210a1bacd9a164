"""The cost of the flight recorder: the time of a call without tensors, with it and without.

    python -m benchmarks.recorder                             # Config.flight_recorder 4096 and 0
    python -m benchmarks.recorder --baseline ../before/src    # this tree and another one

Two processes that call each other are up to 5 % faster or slower than the next two, because memory
and threads are placed differently. So each variant is measured with several pairs of processes,
which are started anew, and within a pair of pairs in turn. The result is the median of the
differences between pairs that ran at the same time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "src"
_CHILD = """
import statistics, sys, time
from multiprocessing import get_context
import torch.distributed as dist
from telegrad import Agent, Config

SECRET = "only for this benchmark"

def serve(path):
    with Agent("callee", store=dist.FileStore(path, 2), rank=1, world_size=2,
               config=Config.from_environment()):
        time.sleep(3600)

def main(path):
    callee = get_context("fork").Process(target=serve, args=(path,), daemon=True)
    callee.start()
    with Agent("caller", store=dist.FileStore(path, 2), rank=0, world_size=2,
               config=Config.from_environment()) as agent:
        for line in sys.stdin:
            times, call, now = [], agent.call, time.perf_counter
            for _ in range(int(line)):
                started = now()
                call("callee", max, 1, 2)
                times.append(now() - started)
            print(statistics.median(times) * 1e6, flush=True)
    callee.kill()

if __name__ == "__main__":
    main(sys.argv[1])
"""


class Variant:
    """A caller and a callee process with one source tree and one size of the recorder."""

    def __init__(self, name: str, source: Path, size: int, folder: Path) -> None:
        self.name = name
        self.rounds: list[float] = []
        path = folder / name.replace(" ", "-")
        environment = {
            **os.environ,
            "PYTHONPATH": str(source),
            "TELEGRAD_SECRET": "only for this benchmark",
            "TELEGRAD_FLIGHT_RECORDER": str(size),
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def measure(self, calls: int) -> float:
        """Return the median time of a call in microseconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{calls}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure_pair(baseline: Path | None, rounds: int, calls: int) -> tuple[float, float]:
    """Return the time of a call in microseconds without and with the recorder."""
    with tempfile.TemporaryDirectory() as folder:
        before = Variant("before", baseline or _SOURCE, 0, Path(folder))
        after = Variant("after", _SOURCE, 4096, Path(folder))
        try:
            for variant in (before, after):
                variant.measure(5000)  # warm up, and fill the recorder
            for index in range(rounds):
                for variant in (before, after) if index % 2 else (after, before):
                    variant.rounds.append(variant.measure(calls))
        finally:
            before.close()
            after.close()
    return statistics.median(before.rounds), statistics.median(after.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--baseline", type=Path, help="src folder of another tree")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=400, help="calls in a round")
    options = parser.parse_args()
    pairs = [
        measure_pair(options.baseline, options.rounds, options.calls) for _ in range(options.pairs)
    ]
    before = statistics.median(pair[0] for pair in pairs)
    differences = sorted(after - before for before, after in pairs)
    low, high = differences[len(pairs) // 4], differences[-1 - len(pairs) // 4]
    middle = statistics.median(differences)
    print(f"without   {before:6.2f} us")
    print(f"with      {statistics.median(pair[1] for pair in pairs):6.2f} us")
    print(f"recorder  {middle:+6.2f} us ({100 * middle / before:+.1f} %)")
    print(f"quartiles of {len(pairs)} pairs: {low:+.2f} us, {high:+.2f} us")


if __name__ == "__main__":
    main()

"""Time the program of PyTorch's tutorial on batch RPC processing, unmodified.

    python -m benchmarks.tutorial --program parameter_server.py --rounds 3

The program is `distributed/rpc/batch/parameter_server.py` of github.com/pytorch/examples, which is
not part of this package. Five trainers compute gradients of ResNet-50 on the GPU and send them
through the CPU to a server, which answers with the new model; there are six rounds. It runs with
`python` and with `telegrad run` in turn. Measured are the seconds of the whole program, and the
milliseconds from one "PS updated model", which the program prints, to the next.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import machine, results
from benchmarks.processes import ROOT, import_path
from benchmarks.suite import Case

DEFAULT = ROOT / "build" / "tutorial" / "parameter_server.py"
SOURCE = "github.com/pytorch/examples, distributed/rpc/batch/parameter_server.py"
MARK = "PS updated model"
LIMIT_S = 120
ENTRIES = {"telegrad": ("-m", "telegrad", "run"), "torch": ()}
PROGRAM = Case("tutorial/program", "the tutorial's program, unmodified", "s", "tutorial")
ROUND = Case("tutorial/round", "one of its rounds", "ms", "tutorial")


class ProgramFailed(Exception):
    """The program ended with an error."""


def measure(entry: str, program: Path) -> tuple[float, float]:
    """Run the program. Return its seconds, and the median of the milliseconds of its rounds."""
    environment = {**os.environ, "PYTHONPATH": import_path(), "PYTHONUNBUFFERED": "1"}
    command = ["timeout", str(LIMIT_S), sys.executable, *ENTRIES[entry], str(program)]
    begin = time.monotonic()
    updates, output = list[float](), list[str]()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if MARK in line:
                updates.append(time.monotonic())
    if process.returncode or len(updates) < 2:
        raise ProgramFailed(f"status {process.returncode}\n{''.join(output[-20:])}")
    gaps = [after - before for before, after in itertools.pairwise(updates)]
    return time.monotonic() - begin, statistics.median(gaps) * 1000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tutorial", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--program", type=Path, default=DEFAULT, help=f"{SOURCE}; default %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each entry")
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/tutorial.jsonl"),
        help="default %(default)s",
    )
    options = parser.parse_args(argv)
    if not options.program.exists():
        parser.error(f"{options.program} does not exist: get {SOURCE}")
    figures = results.Results()
    run = machine.heading("tutorial", rounds=options.rounds)
    with results.kept(options.out, run, figures.lines):
        for number in range(options.rounds):
            for entry in ENTRIES:
                try:
                    seconds, milliseconds = measure(entry, options.program)
                except ProgramFailed as error:
                    figures.of(PROGRAM, entry).errors.append(str(error).splitlines()[-1])
                    print(f"round {number + 1}: {entry} failed: {error}", flush=True)
                    continue
                figures.of(PROGRAM, entry).add({"value": seconds, "n": 1})
                figures.of(ROUND, entry).add({"value": milliseconds, "n": 1})
                print(
                    f"round {number + 1}: {entry} {seconds:.1f} s, {milliseconds:.0f} ms",
                    flush=True,
                )
    print(results.table(figures.lines()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Measure what the pages show of a machine with many cores and a GPU, within a time limit.

    python -m benchmarks.published --out results.jsonl --minutes 8.5
    python -m benchmarks.published --out results.jsonl --parts core,ps     some of them
    telegrad bench publish results.jsonl                                   update the pages

Each pass runs every part with one round. The first pass has every case, and further passes add
rounds until the time is over, so that an interrupted run still has complete results. If the file
exists, its rounds are kept and new ones are added: run it again for more rounds. Compared are only
Telegrad and torch RPC, which need no installation.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, parts, results
from benchmarks.processes import import_path
from benchmarks.progress import say

SLACK = 1.3  # a part is started if the time left is its last time, multiplied by this
END_S = 15.0  # a part that is stopped gets this long to end its processes


@dataclass(frozen=True)
class Part:
    """A program of one round."""

    name: str
    module: str
    arguments: str
    passes: int = 5  # at most this many rounds

    def hindrance(self) -> str:
        """Return the reason why the part cannot run here, or an empty string."""
        if "cuda" in self.arguments and not torch.cuda.is_available():
            return "no CUDA device"
        return next(part for part in parts.PARTS if part.name == self.module).hindrance()


PAIR = "--peers telegrad,torch"
PARTS = (  # the most important first
    Part("core", "core", f"{PAIR} --seconds 0.2"),
    Part("gpu-ps", "gpu", "--only ps --plain --trainers 5", 3),
    Part("gpu-calls", "gpu", "--only calls --plain"),
    Part("tutorial", "tutorial", "", 3),
    Part("ps", "ps", "--trainers 2,4,8 --steps 20", 3),
    Part("cartpole", "cartpole", "--observers 8", 3),
    Part("startup", "startup", "--peers telegrad,torch,bare --workers 4,32"),
    Part("embeddings", "embeddings", "", 3),
    Part("ps-accuracy", "ps_accuracy", "", 3),
    Part("gpu-cartpole", "gpu", "--only cartpole --plain"),
    Part("batch-update", "batch_update", "--device cuda --trainers 5 --steps 6", 3),
    Part("gpu-calls-mps", "gpu", "--only calls --mps", 3),
    Part("gpu-ps-2", "gpu", "--only ps --plain --trainers 2", 1),
)


class Run:
    """The file, its lines, and the time that each part took last."""

    def __init__(self, out: Path, deadline: float) -> None:
        self.out, self.deadline = out, deadline
        self.heading = machine.heading("all", mode="published", rounds=0, parts={}, skipped={})
        self.lines: list[dict[str, Any]] = []
        self.took: dict[str, float] = {}
        if out.exists():
            self.heading, self.lines = results.read(out)
            del self.heading["kind"]

    def write(self) -> None:
        self.heading["rounds"] = max((len(line["rounds"]) for line in self.lines), default=0)
        results.write(self.out, self.heading, self.lines)

    def there_is_time_for(self, part: Part) -> bool:
        left = self.deadline - time.monotonic()
        return left > SLACK * self.took.get(part.name, 0.0) + END_S

    def measure(self, part: Part, folder: Path) -> None:
        """Run one round of the part and add what it wrote, also if it was stopped."""
        out = folder / f"{part.name}.jsonl"
        out.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"benchmarks.{part.module}", *part.arguments.split()]
        begin = time.monotonic()
        program = subprocess.Popen(
            [*command, "--rounds", "1", "--out", str(out)],
            env={**os.environ, "PYTHONPATH": import_path()},
            start_new_session=True,
        )
        try:
            program.wait(max(1.0, self.deadline - END_S - begin))
        except subprocess.TimeoutExpired:
            say(f"{part.name}: the time is over")
        finally:
            stop(program)
            self.took[part.name] = time.monotonic() - begin
            say(f"{part.name}: {self.took[part.name]:.0f} s, status {program.returncode}")
            self.add(part, out)

    def add(self, part: Part, out: Path) -> None:
        if out.exists():
            heading, found = results.read(out)
            self.heading["parts"].setdefault(part.name, heading)
            own = [{**line, "part": part.name} for line in found]
            self.lines = results.with_rounds(self.lines, own)
            self.write()


def stop(program: subprocess.Popen[bytes]) -> None:
    """End the program with Ctrl-C, and then its processes by force."""
    program.send_signal(signal.SIGINT)  # does nothing if it has ended
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


def main(argv: list[str] | None = None) -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published",
        description=(__doc__ or "").partition("\n")[0],
        epilog="parts: " + ", ".join(part.name for part in PARTS),
    )
    parser.add_argument("--out", type=results.out_file, default=Path("build/bench/published.jsonl"))
    parser.add_argument("--minutes", type=float, default=8.5, help="default %(default)s")
    parser.add_argument("--parts", type=lambda text: text.split(","), help="run only these parts")
    options = parser.parse_args(argv)
    known = [part.name for part in PARTS]
    if unknown := set(options.parts or []) - set(known):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    run = Run(options.out, begin + options.minutes * 60)
    chosen = [part for part in PARTS if part.name in (options.parts or known)]
    for part in chosen:
        if reason := part.hindrance():
            say(f"{part.name}: skipped: {reason}")
            run.heading["skipped"][part.name] = reason
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            for number in range(max(part.passes for part in chosen)):
                for part in chosen:
                    if (
                        not part.hindrance()
                        and number < part.passes
                        and run.there_is_time_for(part)
                    ):
                        say(f"-- pass {number + 1}: {part.name}")
                        run.measure(part, Path(folder))
        except KeyboardInterrupt:
            say("interrupted: these are the results so far")
    run.write()
    say(f"{results.table(run.lines)}\n\n{time.monotonic() - begin:.0f} s; written to {options.out}")
    return 0 if run.lines else 1


if __name__ == "__main__":
    raise SystemExit(main())

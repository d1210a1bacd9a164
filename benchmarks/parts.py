"""The parts of the benchmark, and the run of all parts into one file.

A part is a module with `main(argv)`. It runs as a separate program with `--rounds` and `--out`, and
can also be run alone. It runs its entries in turn in every round and writes JSON lines with
`results.write`. The file of a run contains the lines of all its parts.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, namespaces, progress, publish, results, tutorial
from benchmarks.processes import import_path

ROUNDS = 5


@dataclass(frozen=True)
class Part:
    """One program. It runs once for each list of arguments of its mode."""

    name: str  # also the name of its module
    about: str
    full: tuple[str, ...]
    quick: tuple[str, ...] = ()
    needs: str = ""  # a required package besides torch
    from_peers: bool = False  # accepts --peers
    gpu: bool = False

    def hindrance(self) -> str:
        """Return the reason why the part cannot run here, or an empty string."""
        if importlib.util.find_spec(f"benchmarks.{self.name}") is None:
            return "not in this version"
        if self.gpu and not torch.cuda.is_available():
            return "no CUDA device"
        if self.name == "hosts" and (reason := namespaces.hindrance()):
            return reason
        if self.name == "tutorial" and not tutorial.DEFAULT.exists():
            return f"{tutorial.DEFAULT} does not exist: get {tutorial.SOURCE}"
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return ""


PARTS = (
    Part(
        "core",
        "calls, bandwidth, references, distributed autograd, limits",
        ("",),
        ("--quick",),
        from_peers=True,
    ),
    Part(
        "startup",
        "2 to 32 workers: start-up time and memory",
        ("",),
        ("--workers 4 --peers telegrad,torch,bare",),
        from_peers=True,
    ),
    Part(
        "ps",
        "batch-update parameter servers",
        ("--model resnet18 --trainers 1,2,4,8", "--model resnet50 --trainers 2,4 --steps 20"),
    ),
    Part(
        "callers",
        "one callee, 1 to 64 callers",
        ("--callers 1,2,4,8,14,32,64",),
        ("--callers 1,4,8 --rounds 2",),
    ),
    Part(
        "batch_update",
        "phases of the tutorial's ResNet-50 training",
        ("--trainers 2,5",),
        needs="torchvision",
    ),
    Part("ps_accuracy", "time to learn handwritten digits", ("",), needs="sklearn"),
    Part(
        "cartpole",
        "observers that request actions from one policy",
        ("--observers 1,2,4,8,10,16,32",),
    ),
    Part("embeddings", "embedding tables on servers", ("",)),
    Part("hosts", "calls and bandwidth between two hosts, encrypted and plain", ("",)),
    Part("gpu", "CUDA tensors between processes, parameter servers on a GPU", ("",), gpu=True),
    Part(
        "tutorial",
        "PyTorch's tutorial on batch RPC processing, unmodified",
        ("",),
        needs="torchvision",
        gpu=True,
    ),
)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `finally` blocks end the parts
    parts = [part for part in PARTS if part.name in options.parts]
    run = machine.heading(
        "all", mode="full" if options.full else "quick", rounds=options.rounds, parts={}, skipped={}
    )
    lines: list[dict[str, Any]] = []
    with (
        progress.Bars([part.name for part in parts]) as bars,
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
    ):
        for part in parts:
            if reason := part.hindrance():
                bars.line(part.name, f"{part.name}: skipped: {reason}")
                run["skipped"][part.name] = reason
                continue
            bars.begin(part.name)
            try:
                measure(part, options, Path(folder), run, lines, bars)
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the results are written now
                run["interrupted"] = True
                break
            finally:
                bars.end(part.name)
    results.write(options.out, run, lines)
    complete = bool(lines) and "interrupted" not in run and not run.get("failed")
    if not complete:  # otherwise every part has shown its own table
        progress.say(results.table(lines) if lines else "no results")
    progress.say(f"\nwritten to {options.out}")
    if options.publish and complete:
        publish.publish(options.out)
    return 0 if complete else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="telegrad bench",
        description="Measure Telegrad, its peers and the limits of this machine in turn. "
        "Also: telegrad bench report | compare | peers | publish, each with --help.",
        epilog="\n".join(f"  {part.name:11} {part.about}" for part in PARTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--quick",
        action="store_true",
        help="run the most important cases, under three minutes (default)",
    )
    mode.add_argument("--full", action="store_true", help="run all cases, about an hour")
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), help="run only these parts, see below"
    )
    parser.add_argument(
        "--peers", help="run only these peers (separated by commas) in parts with several peers"
    )
    parser.add_argument(
        "--cases",
        help="run only the cases of the part core with these prefixes, separated by commas",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default %(default)s")
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/results.jsonl"),
        help="default %(default)s",
    )
    parser.add_argument(
        "--publish", action="store_true", help="write the results to docs/benchmarks and the README"
    )
    options = parser.parse_args(argv)
    known = [part.name for part in PARTS]
    if unknown := set(options.parts or []) - set(known):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    options.parts = options.parts or [part.name for part in PARTS if options.full or part.quick]
    return options


def measure(
    part: Part,
    options: argparse.Namespace,
    folder: Path,
    run: dict[str, Any],
    lines: list[dict[str, Any]],
    bars: progress.Bars,
) -> None:
    """Run the part. Add its results in the common form, also if it is interrupted."""
    for number, arguments in enumerate(part.full if options.full else part.quick or part.full):
        out = folder / f"{part.name}-{number}.jsonl"
        command = [sys.executable, "-m", f"benchmarks.{part.name}", *arguments.split()]
        command += ["--rounds", str(options.rounds), "--out", str(out)]
        if options.peers and part.from_peers:
            command += ["--peers", options.peers]
        if options.cases and part.name == "core":
            command += ["--cases", options.cases]
        try:
            code = follow(command, part.name, bars)
            if code:
                bars.line(part.name, f"{part.name}: {' '.join(command[2:])}: exit status {code}")
                run.setdefault("failed", []).append(part.name)
        finally:
            if out.exists():
                heading, found = results.read(out)
                run["parts"].setdefault(part.name, heading)
                lines += [{**line, "part": part.name} for line in found]


def follow(command: list[str], name: str, bars: progress.Bars) -> int:
    """Run a program, show its output as it arrives, and always end the program."""
    columns = str(shutil.get_terminal_size().columns)
    environment = {**os.environ, "PYTHONPATH": import_path(), "COLUMNS": columns}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,  # it gets Ctrl-C from this process, and only once
    ) as program:
        assert program.stdout is not None
        try:
            show(program.stdout, name, bars)
        except KeyboardInterrupt:
            program.send_signal(signal.SIGINT)
            show(program.stdout, name, bars)  # until it has written its results
            raise
    return program.returncode


def show(output: Iterable[str], name: str, bars: progress.Bars) -> None:
    """Show the lines, without those about temporary files."""
    for line in output:
        if not line.startswith(("written to ", "plot: ")):
            bars.line(name, line.rstrip())

"""Measure calls, throughput and bandwidth of Telegrad and its peers, interleaved in one run.

    python -m benchmarks.core                                   every installed peer
    python -m benchmarks.core --quick --peers telegrad,torch
    python -m benchmarks.core --cases latency,rate/64 --rounds 9 --out after.jsonl

The caller and the callee of every peer run for the whole benchmark. Each round measures each case
on one peer after the other; the table shows the median over the rounds. Cases that need more
processes follow in separate rounds. `README.md` describes the rows.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import machine, results
from benchmarks.entries import Entry, MachineEntry, PeerEntry, start_peers
from benchmarks.peers import PEERS, PeerSpec
from benchmarks.processes import WorkerError, WorkerLost, summary
from benchmarks.progress import say
from benchmarks.suite import CASES, MACHINE, Case

ROUNDS = 5
FEW = 2  # processes of every peer that run for the whole benchmark
FAILURES = 2  # a case that fails this often on a peer is not tried again
FULL_SECONDS, QUICK_SECONDS = 0.5, 0.1

T = TypeVar("T")


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `finally` blocks end the processes
    cases = chosen(options)
    figures = results.Results()
    run = machine.heading(
        "core", rounds=options.rounds, seconds=options.seconds, peers={}, skipped={}
    )
    try:
        with ExitStack() as stack:
            few = [case for case in cases if case.machine or case.processes <= FEW]
            entries = start(options.peers, few, stack, run)
            if not entries:
                return 1
            rounds(entries, few, options, figures)
        crowd(
            [PEERS[name] for name in run["peers"]],
            [case for case in cases if case not in few],
            options,
            figures,
        )
    except KeyboardInterrupt:
        say("interrupted: these are the results so far")
        run["interrupted"] = True
    lines = figures.lines()
    results.write(options.out, run, lines)
    say(results.table(lines))
    say(f"\n{results.footer(options)}")
    return 0 if any(line["peer"] != MACHINE for line in lines) and "interrupted" not in run else 1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.core", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="shorter loops, fewer cases")
    default = ",".join(name for name, spec in PEERS.items() if not spec.on_request)
    parser.add_argument(
        "--peers", type=names(PEERS), default=default, help=f"from {','.join(PEERS)}"
    )
    parser.add_argument(
        "--cases", type=lambda text: text.split(","), help="run only the cases with these prefixes"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default %(default)s")
    parser.add_argument(
        "--seconds", type=float, help=f"per case, default {FULL_SECONDS}, quick {QUICK_SECONDS}"
    )
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/core.jsonl"),
        help="default %(default)s",
    )
    options = parser.parse_args(argv)
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else FULL_SECONDS)
    return options


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the cases that are selected by name, otherwise those of the mode."""
    if options.cases:
        return [case for case in CASES if case.name.startswith(tuple(options.cases))]
    return [case for case in CASES if case.quick or not options.quick]


def names(known: dict[str, PeerSpec]) -> Callable[[str], list[str]]:
    def peers(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(
                f"unknown cases: {', '.join(unknown)}; known cases: {', '.join(known)}"
            )
        return text.split(",")

    return peers


def start(
    wanted: list[str], cases: list[Case], stack: ExitStack, run: dict[str, Any]
) -> list[Entry]:
    """Start the peers. Report those that do not start, and record them in the run."""
    of_peers = [case for case in cases if not case.machine]
    entries = start_peers([PEERS[name] for name in wanted], of_peers, stack, run)
    if limits := [case for case in cases if case.machine]:
        limits_entry = MachineEntry(limits)
        stack.callback(limits_entry.close)
        entries.append(limits_entry)
    return entries


def rounds(
    entries: list[Entry], cases: list[Case], options: argparse.Namespace, figures: results.Results
) -> None:
    """Run each case on all entries. The first entry changes from round to round."""
    plan = [
        (number, case, entry)
        for number, case in itertools.product(range(options.rounds), cases)
        for entry in turned(entries, number)
        if case.name in entry.cases
    ]
    for step, (number, case, entry) in enumerate(plan, 1):
        if case.name in entry.cases:
            text = measure(entry, case, options.seconds, figures.of(case, entry.name))
            say(f"round {number + 1}  {case.name:26} {entry.name:10} {text}", step, len(plan))


def crowd(
    specs: list[PeerSpec], cases: list[Case], options: argparse.Namespace, figures: results.Results
) -> None:
    """Run the cases that need many processes.

    The processes of all peers together would not fit into memory, so peers start in turn.
    """
    turns = [
        (number, spec)
        for number in range(options.rounds if cases else 0)
        for spec in turned(specs, number)
    ]
    for step, (number, spec) in enumerate(turns, 1):
        able = [case for case in cases if spec.builtin or not case.builtin]
        left = [case for case in able if len(figures.of(case, spec.name).errors) < FAILURES]
        try:
            entry = PeerEntry(spec, left)
        except (WorkerError, WorkerLost) as error:
            for case in left:
                figures.of(case, spec.name).errors.append(summary(error))
            say(f"round {number + 1}  {spec.name} did not start: {error}", step, len(turns))
            continue
        try:
            for case in list(entry.cases.values()):
                text = measure(entry, case, options.seconds, figures.of(case, spec.name))
                say(f"round {number + 1}  {case.name:26} {spec.name:10} {text}", step, len(turns))
        finally:
            entry.close()


def turned(entries: list[T], number: int) -> list[T]:
    first = number % len(entries)
    return entries[first:] + entries[:first]


def measure(entry: Entry, case: Case, seconds: float, series: results.Series) -> str:
    """Add a round to the series and return a text that describes it."""
    try:
        measured = entry.run(case, seconds)
    except (WorkerError, WorkerLost) as error:
        series.errors.append(summary(error))
        if len(series.errors) == FAILURES:
            entry.drop(case)
        return f"failed: {error}"
    series.add(measured)
    return f"{results.number(measured['value'])} {case.unit}"


if __name__ == "__main__":
    sys.exit(main())

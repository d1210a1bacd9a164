"""The sections of docs/performance.md about programs of their own: hosts, callers, backward passes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import publish_charts, results, verdicts

Line = dict[str, Any]

HOSTS = {
    "telegrad": "Telegrad",
    "telegrad plain": "not encrypted",
    "torch": "torch RPC",
    "grpc": "gRPC",
    "ray": "Ray",
}
HOST_LIMITS = (
    "limit/hosts-ping-pong",
    "limit/hosts-1-stream",
    "limit/hosts-4-streams",
    "limit/cipher-both-ends",
)
CALLERS = {"telegrad": "Telegrad", "torch": "torch RPC", "epoll": "plain Python"}


def figures(folder: Path) -> str:
    """Return a section for each result file."""
    return "".join(
        section(path)
        for pattern, section in SECTIONS.items()
        for path in sorted(folder.glob(pattern))
    )


def hosts(path: Path) -> str:
    run, lines = results.read(path)
    cells = {(line["case"], line["peer"]): line for line in lines if line["median"] is not None}
    titles = {line["case"]: line["title"] for line in lines if line["group"].startswith("hosts-")}
    rows = []
    for case, title in titles.items():
        own = [cells.get((case, peer)) for peer in HOSTS]
        rows.append(f"| {title} | {' | '.join(quantity(line) if line else '-' for line in own)} |")
    limits = [line for line in lines if line["case"] in HOST_LIMITS and line["median"] is not None]
    limit_texts = "; ".join(f"{line['title']}: {quantity(line)}" for line in limits)
    charts = {
        name: panel
        for name, panel in publish_charts.charts(path.parent).items()
        if panel.group.startswith("hosts-")
    }
    return f"""
## Between two hosts

The hosts are network namespaces of one machine with {run["machine"]["cores"]} cores
(`python -m benchmarks.hosts`, medians of {results.counted(run["rounds"], "rounds")}, \
{results.measured(run)}). Telegrad and gRPC encrypt their
connections. torch RPC and Ray do not, and neither does Telegrad in the second column
(`TELEGRAD_TLS=off`).

{table(["", *HOSTS.values()], rows)}
{lost(lines)}The limits of that machine: {limit_texts}.

{publish_charts.markdown(charts, "benchmarks/charts")}"""


def lost(lines: list[Line]) -> str:
    """Return a sentence about the cases in which torch RPC is faster."""
    found = [
        verdict.ours["title"]
        for verdict in verdicts.verdicts(lines)
        if verdict.word == "behind" and verdict.theirs["peer"] == "torch"
    ]
    return f"Telegrad is behind torch RPC in: {'; '.join(found)}. " if found else ""


def callers(path: Path) -> str:
    run, lines = read(path)
    rows = []
    for many, in_flight in dict.fromkeys((line["callers"], line["in flight"]) for line in lines):
        here = {
            line["entry"]: statistics.median(line["rounds"])
            for line in lines
            if (line["callers"], line["in flight"]) == (many, in_flight)
        }
        rates = [f"{here[entry]:,.0f}/s" for entry in CALLERS]
        ratio = f"{here['telegrad'] / here['torch']:.1f}x"
        rows.append(f"| {many} | {in_flight} | {' | '.join([*rates[:2], ratio, rates[2]])} |")
    head = ["callers", "in flight", "Telegrad", "torch RPC", "against torch", "plain Python"]
    return f"""
## Many callers of one worker

Each caller is a process that calls a function of a 1-element tensor, with 1 or 64 calls in flight
({run["machine"]["cores"]} cores, `python -m benchmarks.callers`, medians of \
{results.counted(run["rounds"], "rounds")}, {results.measured(run)}). Plain Python is a limit: it reads
all connections on one thread, without deadlines, references or handling of failures.

{table(head, rows)}"""


def backward(path: Path) -> str:
    run, lines = read(path)
    rows, behind = [], []
    for case in dict.fromkeys(line["case"] for line in lines):
        here = {line["entry"]: line for line in lines if line["case"] == case}
        times = {
            key: {
                entry: statistics.median(here[entry][key])
                for entry in ("one process", "telegrad", "torch")
            }
            for key in ("rounds", "whole")
        }
        ratios = {key: overhead(found) for key, found in times.items()}
        if ratios["rounds"] < 1:
            behind.append(case)
        cells = [f"{value * 1e3:.2f} ms" for value in times["rounds"].values()]
        rows.append(f"| {case} | {' | '.join([*cells, *map('{:.2f}x'.format, ratios.values())])} |")
    head = ["", "one process", "Telegrad", "torch RPC", "backward", "with the calls"]
    torch = run["versions"]["torch"].partition("+")[0]
    losses = f" Telegrad is behind in: {', '.join(behind)}." if behind else ""
    return f"""
## Backward passes

The first columns are the times of a backward pass ({run["machine"]["cores"]} cores, torch {torch}, \
one thread in each
process, `python -m benchmarks.backward`, medians of {results.counted(run["rounds"], "rounds")}, \
{results.measured(run)}). The overhead is the time above that
of one process. The last columns are torch's overhead divided by Telegrad's: of the backward pass
alone, and together with the calls before it.{losses}

{table(head, rows)}"""


def overhead(times: dict[str, float]) -> float:
    """Return torch's time above that of one process, divided by Telegrad's."""
    return (times["torch"] - times["one process"]) / (times["telegrad"] - times["one process"])


def spinning(path: Path) -> str:
    run, lines = results.read(path)
    found = {
        line["peer"]: results.number(line["median"])
        for line in lines
        if line["case"] == "ps/resnet18/2-trainers"
    }
    return f"""
## Threads of OpenMP that spin

By default, the OpenMP threads of torch spin for milliseconds after an operation, on cores that other
workers of the host need. `telegrad launch`, `run` and `train` let them sleep soon
(`GOMP_SPINCOUNT=10000`), and the figures of parameter servers on this page were measured so. If you
start your processes in another way, set `GOMP_SPINCOUNT`, or `OMP_NUM_THREADS` as `torchrun` does.

Without it, batch updates of ResNet-18 with 2 trainers on {run["machine"]["cores"]} cores:

| | rounds/s |
|---|---:|
| `telegrad.ps` | {found["telegrad.ps"]} |
| the tutorial's code on `telegrad.rpc` | {found["telegrad"]} |
| the tutorial's code on torch RPC | {found["torch"]} |
"""


def read(path: Path) -> tuple[Line, list[Line]]:
    """Read a file whose lines have dimensions of their own."""
    run, *lines = map(json.loads, path.read_text().splitlines())
    return run, lines


def table(head: list[str], rows: list[str]) -> str:
    """Return a table whose first column are labels, and the others numbers."""
    return "\n".join([f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}", *rows, ""])


def quantity(line: Line) -> str:
    return f"{results.number(line['median'])} {line['unit']}"


SECTIONS = {
    "hosts-*.jsonl": hosts,
    "callers-*.jsonl": callers,
    "backward-*.jsonl": backward,
    "spinning-*.jsonl": spinning,
}

"""The figures of a run: collect them by round, write and read JSON lines, print a table.

A file has one line of kind `run` (machine, versions, date, options) and one line of kind `result`
for every case and peer. A ratio above 1 means better than torch, for rates and for times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.suite import Case

BASELINE = "torch"
DIMENSIONS = (
    "device",
    "model",
    "rows",
    "trainers",
    "servers",
    "observers",
    "callers",
    "in flight",
)  # the parameters of parts with their own entries
USUAL = {"device": "cpu", "servers": 1}  # not shown in titles
UNITS = {
    "callers": "calls/s",
    "ps": "rounds/s",
    "cartpole": "steps/s",
    "embeddings": "rows/s",
    "ps-accuracy": "s",
}


@dataclass
class Series:
    """One case on one peer: a value for each successful round, a message for each failed one."""

    case: Case
    peer: str
    values: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)
    samples: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, measured: dict[str, float]) -> None:
        self.values.append(measured["value"])
        self.samples += int(measured["n"])
        if "p99" in measured:
            self.p99s.append(measured["p99"])

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def p99(self) -> float | None:
        return statistics.median(self.p99s) if self.p99s else None

    def line(self) -> dict[str, Any]:
        case = self.case
        return {
            "kind": "result",
            "case": case.name,
            "title": case.title,
            "group": case.group,
            "peer": self.peer,
            "unit": case.unit,
            "better": "higher" if case.higher_is_better else "lower",
            "callers": case.callers,
            "axis": case.axis,
            "at": case.at,
            "rounds": self.values,
            "median": self.median,
            "min": min(self.values, default=None),
            "max": max(self.values, default=None),
            "p99": self.p99,
            "p99_rounds": self.p99s,
            "samples": self.samples,
            "errors": self.errors,
        }


class Results:
    """All series of a run, in the order in which they were first measured."""

    def __init__(self) -> None:
        self.series: dict[tuple[str, str], Series] = {}

    def of(self, case: Case, peer: str) -> Series:
        return self.series.setdefault((case.name, peer), Series(case, peer))

    def lines(self) -> list[dict[str, Any]]:
        return with_rounds([], [series.line() for series in self.series.values()])


def quotient(value: float, other: float, higher_is_better: bool) -> float:
    """Return how many times better `value` is than `other`; infinity if the divisor is zero."""
    if not higher_is_better:
        value, other = other, value
    return value / other if other else (1.0 if not value else float("inf"))


def write(path: Path, run: dict[str, Any], lines: Iterable[dict[str, Any]]) -> None:
    """Write the file. An interruption leaves the old one or the new one, not a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text("".join(json.dumps(line) + "\n" for line in ({"kind": "run", **run}, *lines)))
    new.replace(path)


@contextlib.contextmanager
def kept(
    path: Path, run: dict[str, Any], lines: Callable[[], list[dict[str, Any]]]
) -> Iterator[None]:
    """Write the results at the end of the block, also if Ctrl-C ends it; then end the program."""
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not lose the results
        run["interrupted"] = True
        if found := lines():
            write(path, run, found)
            raise SystemExit(f"interrupted; the results so far are in {path}") from None
        raise SystemExit("interrupted; there are no results yet") from None
    write(path, run, lines())


def out_file(text: str) -> Path:
    """Return the path of an option `--out`, or refuse it before anything is measured."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        message = f"cannot write {text}: {error.strerror}"
        raise argparse.ArgumentTypeError(message) from error
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}: it is a folder")
    return path


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the run and the results of a file in the common form."""
    try:
        run, *lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    except OSError as error:
        raise SystemExit(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise SystemExit(f"{path} has no results: it is not a file of JSON lines") from None
    return run, [standard(run, line) for line in lines if line["kind"] == "result"]


def merge(paths: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Merge several files of one machine.

    Return the heading of the first file, with the headings of its parts, and all lines.
    """
    (first, lines), *others = [read(path) for path in paths]
    run = {**first, "parts": dict(first.get("parts", {first["benchmark"]: {**first}}))}
    for heading, more in others:
        if heading["machine"] != first["machine"] or heading["versions"] != first["versions"]:
            raise ValueError(
                f"results of different machines or versions: {first['machine']}, {heading['machine']}"
            )
        run["parts"].update(heading.get("parts", {heading["benchmark"]: heading}))
        again = {(line["case"], line["peer"]) for line in more}
        lines = [line for line in lines if (line["case"], line["peer"]) not in again] + more
    return run, lines


def with_rounds(lines: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results with the rounds of a later run of the same cases added."""
    found = {(line["case"], line["peer"]): line for line in lines}
    for line in more:
        key = (line["case"], line["peer"])
        found[key] = added(found[key], line) if key in found else line
    return [compared(line, found.get((line["case"], BASELINE))) for line in found.values()]


def added(line: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    rounds, p99s = line["rounds"] + more["rounds"], line["p99_rounds"] + more["p99_rounds"]
    return {
        **line,
        "rounds": rounds,
        "median": statistics.median(rounds) if rounds else None,
        "min": min(rounds, default=None),
        "max": max(rounds, default=None),
        "p99": statistics.median(p99s) if p99s else None,
        "p99_rounds": p99s,
        "samples": line["samples"] + more["samples"],
        "errors": line["errors"] + more["errors"],
    }


def compared(line: dict[str, Any], baseline: dict[str, Any] | None) -> dict[str, Any]:
    """Return the line with its ratios to the baseline."""

    def ratio(key: str) -> float | None:
        if baseline is None or not line[key] or not baseline[key]:
            return None
        return quotient(line[key], baseline[key], line["better"] == "higher")

    return {**line, "ratio": ratio("median"), "p99_ratio": ratio("p99")}


def standard(run: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with only `entry`, `rounds` and parameters in the common form."""
    if "case" in line:
        return {"axis": "", "at": None, **line}
    values = {**run, **line}
    dimensions = {
        key: values[key] for key in DIMENSIONS if key in values and values[key] != USUAL.get(key)
    }
    words = [
        value if isinstance(value, str) else f"{value} {key}" for key, value in dimensions.items()
    ]
    titles = [
        value if isinstance(value, str) else counted(value, key)
        for key, value in dimensions.items()
    ]
    several = f"{dimensions['servers']} servers" if "servers" in dimensions else ""
    axis = next((key for key, value in dimensions.items() if not isinstance(value, str)), "")
    benchmark, rounds = run["benchmark"], line["rounds"]
    return {
        "kind": "result",
        "case": "/".join([benchmark, *(word.replace(" ", "-") for word in words)]),
        "title": ": ".join(filter(None, [benchmark, ", ".join(titles)])),
        "group": " ".join(
            filter(None, [benchmark, dimensions.get("model"), dimensions.get("device"), several])
        ),
        "peer": line["entry"],
        "unit": values.get("unit", UNITS.get(benchmark, "1/s")),
        "better": values.get("better", "lower" if UNITS.get(benchmark) == "s" else "higher"),
        "callers": 1,
        "axis": axis,
        "at": dimensions.get(axis),
        "rounds": rounds,
        "median": statistics.median(rounds) if rounds else None,
        "min": min(rounds, default=None),
        "max": max(rounds, default=None),
        "p99": None,
        "p99_rounds": [],
        "samples": len(rounds),
        "ratio": None,
        "p99_ratio": None,
        "errors": line.get("errors", []),
    }


def table(lines: list[dict[str, Any]], width: int | None = None) -> str:
    """Return the results as text: median, p99 if there is one, and ratio to torch.

    The cases of the same peers are a table, or a list if the terminal is too narrow for the table.
    """
    width = width or shutil.get_terminal_size().columns
    peers: dict[str, list[str]] = {}
    for line in lines:
        peers.setdefault(line["case"], []).append(line["peer"])
    parts = []
    for entries in dict.fromkeys(map(tuple, peers.values())):
        own = [line for line in lines if tuple(peers[line["case"]]) == entries]
        text = side_by_side(own, entries)
        fits = max(map(len, text.splitlines())) <= width
        parts.append(text if fits else one_below_the_other(own))
    return "\n\n".join(parts)


def footer(options: argparse.Namespace) -> str:
    """Return the lines under the results of a run."""
    rounds = "one round" if options.rounds == 1 else f"median of {options.rounds} rounds"
    return f"{rounds}; 2.00x is twice as good as {BASELINE}\nwritten to {options.out}"


def side_by_side(lines: list[dict[str, Any]], peers: Sequence[str]) -> str:
    cells = {(line["case"], line["peer"]): cell(line) for line in lines}
    rows = [["", "unit", *peers]]
    for name, line in {line["case"]: line for line in lines}.items():
        rows.append([line["title"], line["unit"], *(cells[name, peer] for peer in peers)])
    return aligned(rows)


def one_below_the_other(lines: list[dict[str, Any]]) -> str:
    parts = []
    for name, first in {line["case"]: line for line in lines}.items():
        own = [line for line in lines if line["case"] == name]
        rows = [[f"  {line['peer']}", cell(line)] for line in own]
        parts.append(f"{first['title']} ({first['unit']})\n{aligned(rows)}")
    return "\n".join(parts)


def cell(line: dict[str, Any]) -> str:
    if line["median"] is None:
        return "failed" if line["errors"] else "-"
    text = number(line["median"])
    if line["p99"] is not None:
        text += f" (p99 {number(line['p99'])})"
    if line["ratio"] is not None and line["peer"] != BASELINE:
        text += f" {line['ratio']:.2f}x"
    return text + (" !" if line["errors"] else "")


def counted(number: int, things: str) -> str:
    """Return "1 worker" or "2,000 workers"."""
    word = things.removesuffix("s") if number == 1 else things
    return f"{number:,} {word}"


def measured(run: dict[str, Any]) -> str:
    """Return when a run was measured, with its parts: "on 2026-11-19" or "from ... to ..."."""
    parts = [part for part in (run.get("parts") or {}).values() if "date" in part]
    days = sorted(each["date"][:10] for each in parts or [run])
    return f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}"


def number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    )

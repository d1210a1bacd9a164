"""The charts of the documentation: SVG files in docs/benchmarks/charts, drawn from the result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import plots, results
from benchmarks.plots import Panel

Line = dict[str, Any]

SUMMARY = {  # the cases of the charts of the README
    "latency/no-tensor": "a call without tensors",
    "latency/1MB": "a call with 1 MB, there and back",
    "rate/64-in-flight": "calls, 64 in flight",
    "bandwidth/echo-100MB": "100 MB there and back, each way",
}
SHOWN = "2-cores"  # the machine of the charts of the README


def charts(folder: Path) -> dict[str, Panel]:
    """Return the charts of all result files, by the name of their file."""
    found: dict[str, Panel] = {}
    for path in sorted(folder.glob("results-*-cores.jsonl")):
        machine = path.stem.removeprefix("results-")
        lines = results.read(path)[1]
        if machine == SHOWN:
            found |= summary(lines)
        chosen = (*plots.OVERVIEW, *plots.ON_A_GPU)
        own = [panel for panel in plots.panels(lines) if panel.group in chosen]
        found |= {file_name(machine, panel): panel for panel in own}
        found |= scaling(machine, lines)
    for path in sorted(folder.glob("hosts-*-cores.jsonl")):
        machine = path.stem.removeprefix("hosts-")
        panels = plots.panels(results.read(path)[1])
        found |= {file_name(machine, panel): panel for panel in panels}
    for path in sorted(folder.glob("workers-*-cores.jsonl")):
        found |= growth(path)
    return found


def write(folder: Path) -> None:
    """Draw all charts, and remove those of results that are gone."""
    target = folder / "charts"
    target.mkdir(exist_ok=True)
    panels = charts(folder)
    for path in target.glob("*.svg"):
        if path.name not in panels:
            path.unlink()
    for name, panel in panels.items():
        plots.write(panel, target / name)


def markdown(panels: dict[str, Panel], folder: str) -> str:
    """Return one paragraph with these charts."""
    images = [f"![{panel.title}: {panel.unit}]({folder}/{name})" for name, panel in panels.items()]
    return "\n".join(images) + "\n"


def file_name(machine: str, panel: Panel) -> str:
    words = " ".join([machine, panel.group, panel.axis]).replace(",", "").split()
    return f"{'-'.join(words)}.svg"


def summary(lines: list[Line]) -> dict[str, Panel]:
    """Return a chart for each case of the README, with a bar for each library."""
    found = {}
    for number, (case, heading) in enumerate(SUMMARY.items(), 1):
        own = tuple(line for line in lines if line["case"] == case and line["median"] is not None)
        if own:
            found[f"{SHOWN}-summary-{number}.svg"] = Panel("summary", "", own, heading=heading)
    return found


def scaling(machine: str, lines: list[Line]) -> dict[str, Panel]:
    """Return a chart of `telegrad.ps` with a curve for each number of servers."""
    own = [
        gradients(line)
        for line in lines
        if line["group"].startswith("ps resnet18") and line["peer"] == "telegrad.ps"
    ]
    found = tuple(sorted(own, key=lambda line: int(line["peer"].split()[0])))
    if len({line["peer"] for line in found}) < 2:
        return {}
    title = "gradients of ResNet-18 that the servers use"
    return {f"{machine}-scaling.svg": Panel("scaling", "trainers", found, heading=title)}


def gradients(line: Line) -> Line:
    """Return gradients per second, by number of servers, of a line with rounds per second."""
    servers = int(line["group"].split()[2]) if line["group"].endswith("servers") else 1
    values = {key: line[key] * line["at"] for key in ("median", "min", "max")}
    return {**line, **values, "unit": "1/s", "peer": results.counted(servers, "servers")}


def growth(path: Path) -> dict[str, Panel]:
    """Return the charts of groups of more and more workers (`benchmarks.thousand`)."""
    machine = path.stem.removeprefix("workers-")
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    seconds = [
        amount(run["workers"], phase, value, "s")
        for run in runs
        for phase, value in run["seconds"].items()
    ]
    memory = [
        amount(run["workers"], moment, run[moment]["kilobytes"] / 1000, "MB")
        for run in runs
        for moment in ("after join", "after tree")
    ]
    titles = "time of all workers together", "memory of one worker, without its process"
    return {
        f"{machine}-growth-{number}.svg": Panel("growth", "workers", tuple(lines), heading=title)
        for number, (title, lines) in enumerate(zip(titles, (seconds, memory), strict=True), 1)
    }


def amount(at: int, peer: str, value: float, unit: str) -> Line:
    return {
        "case": f"{peer}/{at}",
        "title": peer,
        "peer": peer,
        "at": at,
        "axis": "workers",
        "median": value,
        "min": value,
        "max": value,
        "unit": unit,
        "better": "lower",
        "rounds": [value],
    }

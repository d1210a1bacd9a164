"""Publish results: write the result file, report, plots, and the figures of the documentation.

    telegrad bench publish build/bench/results.jsonl
    telegrad bench publish build/bench/core.jsonl build/bench/cartpole.jsonl     separate parts
    telegrad bench publish                                                       the pages again

The README has a short table, docs/performance.md all figures, and docs/cuda.md those of a GPU. They are
between two marks and are never edited by hand; a test checks that they match the committed results.
The charts are in docs/benchmarks/charts. Sections of docs/performance.md about programs of their own
are made from the files hosts-*, callers-*, backward-*, spinning-* and workers-* beside the results:
replace these files, and publish. Publishing needs a checkout.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import (
    plots,
    publish_charts,
    publish_gpu,
    publish_programs,
    report,
    results,
    verdicts,
)
from benchmarks.processes import ROOT
from benchmarks.suite import MACHINE

Line = dict[str, Any]

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "performance.md"
CUDA_PAGE = ROOT / "docs" / "cuda.md"
FOLDER = ROOT / "docs" / "benchmarks"
BEGIN, END = "<!-- figures: made by `telegrad bench publish` -->\n", "<!-- end of figures -->\n"
SHOWN = "results-2-cores.jsonl"  # the file whose figures the README and the page show
LIBRARIES = ("telegrad", "torch", "ray", "monarch", "grpc", "rpyc", "moolib")
ROWS = {
    "latency/no-tensor": "synchronous call, no tensor, p50",
    "latency/1-element": "synchronous call, 1-element tensor, Python function, p50",
    "latency/1-element-builtin": "the same with a builtin operator",
    "latency/1MB": "synchronous call, 1 MB there and back, p50",
    "rate/64-in-flight": "calls/s with 64 in flight",
    "rate/4-callers": "calls/s from 4 callers to one callee",
    "bandwidth/echo-100MB": "100 MB there and back, each way",
    "reference/remote-to-here": "`remote()` + `to_here()`, p50",
    "reference/proxied": "call through a reference, p50",
    "churn/objects": "remote objects made and deleted",
    "idle/cpu": "CPU of an idle pair of workers",
    "startup/32": "32 workers until all are up",
    "training/digits": "training with the tutorial's MNIST network on a server",
}
ENTRIES = {  # cases whose entries are implementations, not libraries
    "ps/resnet18/2-trainers": ("parameter server, ResNet-18, 2 trainers", "torch"),
    "cartpole/8-observers": ("CartPole, 8 observers and one policy", "torch.batched"),
    "embeddings/1000000-rows/1-trainers": ("rows of a table of a million x 64, trained", "torch"),
    "ps-accuracy": ("digits until 95 % are right", "torch"),
}
OF_TABLES = {
    "telegrad": "a module on a server, by `telegrad.rpc`",
    "torch": "a module on a server, by torch RPC",
    "telegrad.ps large": "`telegrad.ps`, 100 million rows",
    "telegrad.ps known": "`telegrad.ps`, 100 million rows, none of them new",
}
WAYS = {
    "telegrad": "the tutorial's code on `telegrad.rpc`",
    "torch": "the tutorial's code on torch RPC",
    "one process": "in one process, without copies",
    "telegrad.ps": "`telegrad.ps`",
    "telegrad.batched": "`@telegrad.batched`",
    "telegrad.by_hand": "the tutorial's code on `telegrad.rpc`",
    "telegrad.single": "one by one on `telegrad.rpc`",
    "torch.batched": "the tutorial's code on torch RPC",
    "torch.single": "one by one on torch RPC",
    "moolib.batched": "moolib's queue",
    "limit": "the observers alone, asking nobody",
}
SHORT = {  # the rows of the README: the case, and the entries to compare
    "latency/no-tensor": ("a call without tensors", "telegrad", "torch"),
    "latency/1MB": ("a call with 1 MB there and back", "telegrad", "torch"),
    "rate/64-in-flight": ("calls, 64 in flight", "telegrad", "torch"),
    "bandwidth/echo-100MB": ("100 MB there and back, each way", "telegrad", "torch"),
    "ps/resnet18/2-trainers": ("batch updates of ResNet-18", "telegrad.ps", "torch"),
    "cartpole/8-observers": ("CartPole steps, 8 observers", "telegrad.batched", "torch.batched"),
}
BEHIND = """\
A comparison is listed if another library is better, and the middle halves of the rounds do not
overlap. The largest differences come first.
"""
ABOUT_LIMITS = (
    "The ping-pong sleeps while it waits for each message; a call polls for a moment first, so it can "
    "take less time."
)
LIMITS = ("limit/memcpy-warm", "limit/unix-ping-pong", "limit/unix-ping-pong-c", "limit/digits")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="telegrad bench publish", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="*",
        help="replace the results of a machine with the same number of cores; "
        "without files, write the pages again from the published results",
    )
    publish(*parser.parse_args(argv).files)
    return 0


def publish(*paths: Path) -> None:
    """Merge the files into one that is named after its machine.

    Then write the report, the charts, and the figures of the README and the pages.
    """
    if not README.exists() or not FOLDER.exists():
        raise SystemExit(f"this is not a checkout: {README} or {FOLDER} is missing")
    if paths:
        run, lines = results.merge(paths)
        target = FOLDER / f"results-{run['machine']['cores']}-cores.jsonl"
        results.write(target, {key: value for key, value in run.items() if key != "kind"}, lines)
    publish_charts.write(FOLDER)
    report.main([*(str(file) for file in files()), "--out", str(FOLDER / "index.html")])
    for file, block in blocks(FOLDER).items():
        file.write_text(with_figures(file.read_text(), block))


def blocks(folder: Path) -> dict[Path, str]:
    """Return the pages with figures, and the text between their marks."""
    return {
        README: short_figures(folder),
        PAGE: figures(folder),
        CUDA_PAGE: gpu_figures(folder),
    }


def files() -> list[Path]:
    return sorted(
        FOLDER.glob("results-*-cores.jsonl"), key=lambda path: int(path.stem.split("-")[1])
    )


def with_figures(text: str, block: str) -> str:
    """Return the page with the text between the marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError("the page has no marks for the figures")
    return f"{before}{BEGIN}{block}{END}{after}"


def short_figures(folder: Path) -> str:
    """Return the README's block: a table that compares Telegrad with torch RPC, and charts."""
    run, lines = results.read(folder / SHOWN)
    charts = publish_charts.markdown(publish_charts.summary(lines), "docs/benchmarks/charts")
    return f"Medians {conditions(run, lines)}:\n\n{ratios(lines)}\n{charts}"


def figures(folder: Path) -> str:
    """Return the page's block: summary, charts, tables, where Telegrad is behind."""
    run, lines = results.read(folder / SHOWN)
    summary = publish_charts.markdown(publish_charts.summary(lines), "benchmarks/charts")
    machines = [results.read(path) for path in in_order(folder)]
    return (
        f"Medians {conditions(run, lines)}:\n\n{ratios(lines)}\n{summary}\n## Charts\n"
        f"{''.join(charts(*machine) for machine in machines)}\n## Tables\n"
        f"{''.join(tables(*machine) for machine in machines)}\n## Where Telegrad is behind\n\n{BEHIND}"
        f"{''.join(behind(*machine) for machine in machines)}{publish_programs.figures(folder)}"
    )


def in_order(folder: Path) -> list[Path]:
    """Return the result files, that of the README first."""
    return sorted(folder.glob("results-*.jsonl"), key=lambda path: (path.name != SHOWN, path.name))


def charts(run: dict[str, Any], lines: list[Line]) -> str:
    """Return the charts of one machine."""
    machine = f"{run['machine']['cores']}-cores"
    panels = [panel for panel in plots.panels(lines) if panel.group in plots.OVERVIEW]
    panels.sort(key=lambda panel: plots.OVERVIEW.index(panel.group))
    chosen = {publish_charts.file_name(machine, panel): panel for panel in panels}
    chosen |= publish_charts.scaling(machine, lines)
    images = publish_charts.markdown(chosen, "benchmarks/charts")
    return f"\n### {place(run)}\n\n{images}"


def tables(run: dict[str, Any], lines: list[Line]) -> str:
    """Return the tables of one machine."""
    torch = run["versions"]["torch"].partition("+")[0]
    return (
        f"\n### Figures on {place(run)[3:]}\n\n{run['machine']['cpu']}, torch {torch}; medians of "
        f"{rounds_of(lines)} rounds, measured {results.measured(run)}.\n\n{table(lines)}\n{entries(lines)}{limits(lines)}"
    )


def place(run: dict[str, Any]) -> str:
    return f"On {run['machine']['cores']} cores"


def gpu_figures(folder: Path) -> str:
    """Return the block of the CUDA page: the figures of each machine with a GPU."""
    runs = [results.read(path) for path in sorted(folder.glob("results-*.jsonl"))]
    return "".join(
        publish_gpu.figures(*each) + gpu_charts(*each) for each in runs if each[0]["machine"]["gpu"]
    )


def gpu_charts(run: dict[str, Any], lines: list[Line]) -> str:
    machine = f"{run['machine']['cores']}-cores"
    panels = [panel for panel in plots.panels(lines) if panel.group in plots.ON_A_GPU]
    chosen = {publish_charts.file_name(machine, panel): panel for panel in panels}
    return publish_charts.markdown(chosen, "benchmarks/charts")


def ratios(lines: list[Line]) -> str:
    """Return a table of the most important cases, with torch RPC only."""
    cells = {(line["case"], line["peer"]): line for line in lines if line["median"] is not None}
    rows = [
        f"| {label} | {quantity(cells[case, ours])} | {quantity(cells[case, theirs])} "
        f"| {against(cells, case, ours, theirs)} |\n"
        for case, (label, ours, theirs) in SHORT.items()
        if (case, ours) in cells and (case, theirs) in cells
    ]
    return f"| | Telegrad | torch RPC | ratio |\n|---|---:|---:|---:|\n{''.join(rows)}"


def conditions(run: dict[str, Any], lines: list[Line]) -> str:
    """Return how often and where the shown cases were measured."""
    machine, torch = run["machine"], run["versions"]["torch"].partition("+")[0]
    return f"of {rounds_of(lines)} rounds on one host with {machine['cores']} cores ({machine['cpu']}, torch {torch})"


def table(lines: list[Line]) -> str:
    """Return the most important rows, with a column for each library."""
    cells = {(line["case"], line["peer"]): line for line in lines if line["median"] is not None}
    peers = [peer for peer in LIBRARIES if any((case, peer) in cells for case in ROWS)]
    head = [*map(named, peers), "against torch"]
    rows = [f"| | {' | '.join(head)} |", f"|---|{'---:|' * len(head)}"]
    for case, label in ROWS.items():
        own = [cells.get((case, peer)) for peer in peers]
        if any(own):
            texts = [quantity(line) if line else "-" for line in own]
            rows.append(
                f"| {label} | {' | '.join([*texts, against(cells, case, 'telegrad', 'torch')])} |"
            )
    return "\n".join(rows) + "\n"


def entries(lines: list[Line]) -> str:
    """Return a table for each task, with a row for each implementation."""
    cells = {(line["case"], line["peer"]): line for line in lines if line["median"] is not None}
    found = []
    for case, (label, baseline) in ENTRIES.items():
        ways = WAYS | OF_TABLES if case.startswith("embeddings") else WAYS
        rows = [
            f"| {ways.get(peer, peer)} | {quantity(line)} | {against(cells, case, peer, baseline)} |"
            for (name, peer), line in cells.items()
            if name == case
        ]
        if rows:
            found.append(
                "\n".join([f"| {label} | | against torch |", "|---|---:|---:|", *rows, "\n"])
            )
    return "".join(found)


def against(cells: dict[tuple[str, str], Line], case: str, peer: str, baseline: str) -> str:
    line, other = cells.get((case, peer)), cells.get((case, baseline))
    if (
        line is None
        or other is None
        or peer == baseline
        or not line["median"]
        or line["unit"] == "cores"
    ):
        return ""
    return f"{results.number(results.quotient(line['median'], other['median'], line['better'] == 'higher'))}x"


def limits(lines: list[Line]) -> str:
    own = [
        line
        for line in lines
        if line["peer"] == MACHINE and line["case"] in LIMITS and line["median"] is not None
    ]
    texts = "; ".join(f"{line['title']}: {quantity(line)}" for line in own)
    return f"The limits of that machine: {texts}. {ABOUT_LIMITS}\n" if own else ""


def behind(run: dict[str, Any], lines: list[Line]) -> str:
    """Return a table of every comparison that Telegrad loses; those of one curve are one row."""
    lost = [verdict for verdict in verdicts.verdicts(lines) if verdict.word == "behind"]
    if not lost:
        return f"\n{place(run)}: in none of these cases.\n"
    curves: dict[str, dict[str, list[verdicts.Verdict]]] = {}  # by case, then by library
    for verdict in sorted(lost, key=lambda verdict: verdict.factor):
        ours, peer = verdict.ours, verdict.theirs["peer"]
        case = ours["group"] if ours["axis"] else ours["case"]
        curves.setdefault(case, {}).setdefault(peer, []).append(verdict)
    head = f"| {place(run)} | Telegrad | better | its figure |\n|---|---:|---|---:|\n"
    return f"\n{head}{''.join(loss(curve) for case in curves.values() for curve in case.values())}"


def loss(curve: list[verdicts.Verdict]) -> str:
    """Return a row for comparisons of one curve, with the range in which they are lost."""
    first = curve[0].ours
    amounts = sorted({verdict.ours["at"] for verdict in curve if verdict.ours["axis"]})
    title = first["title"]
    if len(amounts) > 1:
        title = f"{plots.GROUPS.get(first['group'], first['group'])}, {amounts[0]:g} to {amounts[-1]:g} {first['axis']}"
    ours, theirs = ([getattr(verdict, side) for verdict in curve] for side in ("ours", "theirs"))
    return f"| {title} | {span(ours)} | {named(theirs[0]['peer'])} | {span(theirs)} |\n"


def span(lines: list[Line]) -> str:
    low, high = (
        min(lines, key=lambda line: line["median"]),
        max(lines, key=lambda line: line["median"]),
    )
    texts = quantity(low), quantity(high)
    (number, _, unit), (_, _, other) = (text.partition(" ") for text in texts)
    if low["median"] == high["median"]:
        return texts[0]
    return f"{number if unit == other else texts[0]} to {texts[1]}"


def rounds_of(lines: list[Line]) -> str:
    """Return the least and the greatest number of rounds of the shown cases."""
    shown = [
        len(line["rounds"])
        for line in lines
        if line["case"] in (*ROWS, *ENTRIES) and line["rounds"]
    ]
    return " to ".join(map(str, sorted({min(shown), max(shown)}))) if shown else "0"


def named(peer: str) -> str:
    return plots.NAMES.get(peer, peer)


def quantity(line: Line) -> str:
    """Return the median with its unit; times of less than a second in milliseconds."""
    value, unit = line["median"], line["unit"]
    if unit == "s" and value < 1:
        return f"{results.number(value * 1000)} ms"
    if unit.endswith("/s") and unit != "GB/s":
        return f"{results.number(value)}/s"
    return f"{results.number(value)} {unit}"

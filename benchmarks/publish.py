"""Publish results: write the result file, report, plots, and the figures of the documentation.

    telegrad bench publish build/bench/results.jsonl
    telegrad bench publish build/bench/core.jsonl build/bench/cartpole.jsonl     separate parts

The README has a short table, docs/performance.md all figures, and docs/cuda.md those of a GPU. They are
between two marks and are never edited by hand; a test checks that they match the committed results.
Publishing needs a checkout.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import plots, publish_gpu, report, results, verdicts
from benchmarks.processes import ROOT
from benchmarks.suite import MACHINE

Line = dict[str, Any]

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "performance.md"
CUDA_PAGE = ROOT / "docs" / "cuda.md"
FOLDER = ROOT / "docs" / "benchmarks"
BEGIN, END = "<!-- figures: made by `telegrad bench publish` -->\n", "<!-- end of figures -->\n"
SHOWN = "results-2-cores.jsonl"  # the file whose figures the README and the page show
NAMES = {
    "telegrad": "Telegrad",
    "torch": "torch RPC",
    "ray": "Ray",
    "monarch": "Monarch",
    "grpc": "gRPC",
    "rpyc": "RPyC",
}
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
CHART = {  # the cases of the chart of the README
    "latency/no-tensor": "a call\nus, less is better",
    "latency/1MB": "1 MB there and back\nus, less is better",
    "rate/64-in-flight": "64 calls in flight\ncalls/s, more is better",
    "bandwidth/echo-100MB": "100 MB there and back\nGB/s each way, more is better",
}
CHARTS = """\
## Charts

![Four cases, all libraries](benchmarks/summary-2-cores.png)

![All cases on two cores](benchmarks/results-2-cores.png)

![Telegrad and torch RPC on 16 cores](benchmarks/results-16-cores.png)

![Gradients per second with 1 to 8 trainers and 1 to 4 servers](benchmarks/scaling-2-cores.png)
"""
LIMITS = ("limit/memcpy-warm", "limit/unix-ping-pong", "limit/unix-ping-pong-c", "limit/digits")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="telegrad bench publish", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        help="replace the results of a machine with the same number of cores",
    )
    publish(*parser.parse_args(argv).files)
    return 0


def publish(*paths: Path) -> None:
    """Merge the files into one that is named after its machine.

    Then write the report, the plots, and the figures of the README and the page.
    """
    if not README.exists() or not FOLDER.exists():
        raise SystemExit(f"this is not a checkout: {README} or {FOLDER} is missing")
    run, lines = results.merge(paths)
    target = FOLDER / f"results-{run['machine']['cores']}-cores.jsonl"
    results.write(target, {key: value for key, value in run.items() if key != "kind"}, lines)
    plots.save(target, groups=plots.OVERVIEW)
    if target.name == SHOWN:
        summary_chart(results.read(target)[1], FOLDER / "summary-2-cores.png")
    plots.save(target, FOLDER / f"gpu-{run['machine']['cores']}-cores.png", plots.ON_A_GPU)
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
    """Return the README's block: one table that compares Telegrad with torch RPC."""
    run, lines = results.read(folder / SHOWN)
    return f"Medians {conditions(run, lines)}:\n\n{ratios(lines)}"


def figures(folder: Path) -> str:
    """Return the page's block: summary, charts, tables, where Telegrad is behind, other machines."""
    run, lines = results.read(folder / SHOWN)
    others = "".join(
        elsewhere(*results.read(path))
        for path in sorted(folder.glob("results-*.jsonl"))
        if path.name != SHOWN
    )
    return (
        f"Medians {conditions(run, lines)}:\n\n{ratios(lines)}\n{CHARTS}\n"
        f"## Tables\n\n{table(lines)}\n{entries(lines)}{limits(lines)}{behind(lines)}{others}"
    )


def gpu_figures(folder: Path) -> str:
    """Return the block of the CUDA page: the figures of each machine with a GPU."""
    runs = [results.read(path) for path in sorted(folder.glob("results-*.jsonl"))]
    return "".join(publish_gpu.figures(*each) for each in runs if each[0]["machine"]["gpu"])


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


def summary_chart(lines: list[Line], path: Path) -> None:
    """Draw the cases of CHART with a bar for each library, Telegrad's in another colour."""
    cells = {(line["case"], line["peer"]): line for line in lines if line["median"] is not None}
    figure, axes = plots.blank(1, len(CHART), (13, 3.5))
    for axis, (case, title) in zip(axes, CHART.items(), strict=True):
        own = {peer: line for (name, peer), line in cells.items() if name == case}
        names = [peer for peer in [*NAMES, "moolib"] if peer in own]
        medians = [own[peer]["median"] for peer in names]
        colours = ["#d55e00" if peer == "telegrad" else "#9aa5b1" for peer in names]
        bars = axis.barh([named(peer) for peer in names], medians, color=colours)
        axis.bar_label(bars, [results.number(median) for median in medians], padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.set_title(title, fontsize=11)
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.tick_params(left=False)
    figure.savefig(path, dpi=110)


def conditions(run: dict[str, Any], lines: list[Line]) -> str:
    """Return how often and where the shown cases were measured."""
    machine, torch = run["machine"], run["versions"]["torch"].partition("+")[0]
    return f"of {rounds_of(lines)} rounds on one host with {machine['cores']} cores ({machine['cpu']}, torch {torch})"


def table(lines: list[Line]) -> str:
    """Return the most important rows, with a column for each library."""
    cells = {(line["case"], line["peer"]): line for line in lines if line["median"] is not None}
    peers = [
        peer for peer in NAMES | {"moolib": "moolib"} if any((case, peer) in cells for case in ROWS)
    ]
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
    """Return a row for each implementation of a task."""
    cells = {(line["case"], line["peer"]): line for line in lines if line["median"] is not None}
    rows = []
    for case, (label, baseline) in ENTRIES.items():
        for name, peer in cells:
            if name == case:
                ratio = against(cells, case, peer, baseline)
                ways = WAYS | OF_TABLES if case.startswith("embeddings") else WAYS
                rows.append(
                    f"| {label}: {ways.get(peer, peer)} | {quantity(cells[case, peer])} | {ratio} |"
                )
    return "\n".join(["| | | against torch |", "|---|---:|---:|", *rows, "\n"]) if rows else ""


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
    return f"The limits of that machine: {texts}.\n" if own else ""


def behind(lines: list[Line], level: str = "## ") -> str:
    """Return a table of every comparison that Telegrad loses; those of one curve are one row."""
    lost = [verdict for verdict in verdicts.verdicts(lines) if verdict.word == "behind"]
    if not lost:
        return "\nTelegrad is behind in none of these cases.\n"
    curves: dict[str, list[verdicts.Verdict]] = {}
    for verdict in sorted(lost, key=lambda verdict: verdict.factor):
        ours = verdict.ours
        curves.setdefault(ours["group"] if ours["axis"] else ours["case"], []).append(verdict)
    head = "| | Telegrad | better |\n|---|---:|---|\n"
    return f"\n{level}Where Telegrad is behind\n\n{head}{''.join(map(loss, curves.values()))}"


def loss(curve: list[verdicts.Verdict]) -> str:
    """Return a row for comparisons of one curve, with the range in which they are lost."""
    first = curve[0].ours
    peers = dict.fromkeys(verdict.theirs["peer"] for verdict in curve)
    theirs = {
        peer: [verdict.theirs for verdict in curve if verdict.theirs["peer"] == peer]
        for peer in peers
    }
    texts = [f"{named(peer)} {span(own)}" for peer, own in theirs.items()]
    amounts = sorted({verdict.ours["at"] for verdict in curve if verdict.ours["axis"]})
    if len(amounts) < 2:
        return f"| {first['title']} | {quantity(first)} | {', '.join(texts)} |\n"
    title = f"{plots.GROUPS.get(first['group'], first['group'])}, {amounts[0]:g} to {amounts[-1]:g} {first['axis']}"
    ours = span([verdict.ours for verdict in curve])
    return f"| {title} | {ours} | {', '.join(texts)} |\n"


def span(lines: list[Line]) -> str:
    low, high = (
        min(lines, key=lambda line: line["median"]),
        max(lines, key=lambda line: line["median"]),
    )
    if low["median"] == high["median"]:
        return quantity(low)
    return f"{results.number(low['median'])} to {quantity(high)}"


def elsewhere(run: dict[str, Any], lines: list[Line]) -> str:
    """Return a section about another machine: the same tables."""
    machine, torch = run["machine"], run["versions"]["torch"].partition("+")[0]
    return (
        f"\n## On {machine['cores']} cores\n\n{machine['cpu']}, torch {torch}; medians of "
        f"{rounds_of(lines)} rounds.\n\n{table(lines)}\n{entries(lines)}{limits(lines)}{behind(lines, '### ')}"
    )


def rounds_of(lines: list[Line]) -> str:
    """Return the least and the greatest number of rounds of the shown cases."""
    shown = [
        len(line["rounds"])
        for line in lines
        if line["case"] in (*ROWS, *ENTRIES) and line["rounds"]
    ]
    return " to ".join(map(str, sorted({min(shown), max(shown)}))) if shown else "0"


def named(peer: str) -> str:
    return NAMES.get(peer, peer)


def quantity(line: Line) -> str:
    unit = "" if line["unit"].endswith("/s") and line["unit"] != "GB/s" else f" {line['unit']}"
    return f"{results.number(line['median'])}{unit or '/s'}"

"""Draw the results of a run: `python -m benchmarks.plots results.jsonl [picture.png]`.

Cases that differ only in an amount (callers, megabytes, workers, trainers) are drawn as curves over
it; the others are bars. Without matplotlib nothing is drawn.

A chart of the documentation is an SVG file of the width of a telephone. Its colours are those of its
page, dark or light, and its texts stay texts.
"""

from __future__ import annotations

import io
import math
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.suite import MACHINE

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator
except ImportError:  # optional; tables do not need it
    matplotlib = None  # type: ignore[assignment]

__all__ = ["GROUPS", "NAMES", "Panel", "panels", "save", "svg", "write"]

Line = dict[str, Any]

NAMES = {
    "telegrad": "Telegrad",
    "torch": "torch RPC",
    "ray": "Ray",
    "monarch": "Monarch",
    "grpc": "gRPC",
    "rpyc": "RPyC",
    "bare": "processes alone",
    "telegrad.by_hand": "the tutorial on telegrad.rpc",
    "telegrad.single": "one by one, telegrad.rpc",
    "torch.batched": "the tutorial on torch RPC",
    "torch.single": "one by one, torch RPC",
    "moolib.batched": "moolib's queue",
    "limit": "observers alone",
    "telegrad cuda": "CUDA tensors, telegrad.rpc",
    "torch cuda": "CUDA tensors, torch RPC",
    "telegrad.ps large": "telegrad.ps, 100 million rows",
}
TUTORIALS = {"telegrad": "the tutorial on telegrad.rpc", "torch": "the tutorial on torch RPC"}
OF_TUTORIALS = (
    "ps",
    "ps-accuracy",
    "gpu-ps",
    "tutorial",
)  # groups that compare ways to run a tutorial
GROUPS = {
    "latency": "synchronous calls",
    "rate": "asynchronous calls",
    "bandwidth": "bandwidth",
    "containers": "containers of many small things",
    "reference": "remote references",
    "churn": "remote objects made and deleted",
    "backward": "distributed backward pass minus a local one",
    "training": "training with the network on the callee",
    "idle": "CPU used while nothing happens",
    "startup": "time until every worker is up",
    "memory": "memory per worker (PSS)",
    "private": "private memory per worker",
    "shutdown": "time until every worker has left",
    "hosts-latency": "synchronous calls between two hosts",
    "hosts-bandwidth": "bandwidth between two hosts",
    "ps resnet18": "batch updates of ResNet-18",
    "ps resnet50": "batch updates of ResNet-50",
    "ps resnet18 2 servers": "batch updates of ResNet-18, 2 servers",
    "ps resnet18 4 servers": "batch updates of ResNet-18, 4 servers",
    "ps-accuracy": "training until 95 % of the digits are right",
    "embeddings": "rows of a large table, trained",
    "tutorial": "PyTorch's program, unmodified",
    "cartpole": "CartPole, one policy for all observers",
    "gpu-latency": "synchronous calls on one GPU",
    "gpu-bandwidth": "bandwidth on one GPU",
    "gpu-bandwidth-mps": "bandwidth on one GPU, with MPS",
    "gpu-ps": "batch updates of ResNet-50 on one GPU",
    "gpu-cartpole": "CartPole with the policy on one GPU",
    "gpu-ps-mps": "batch updates of ResNet-50 on one GPU, with MPS",
}
LIMITS = {
    "training": ["limit/digits"],
    "latency": ["limit/unix-ping-pong", "limit/unix-ping-pong-c"],
    "bandwidth": ["limit/memcpy-warm", "limit/memcpy-fresh"],
    "hosts-latency": ["limit/hosts-ping-pong"],
    "hosts-bandwidth": ["limit/hosts-1-stream", "limit/hosts-4-streams", "limit/cipher-both-ends"],
}
OVERVIEW = ("latency", "rate", "bandwidth", "training", "startup", "ps resnet18", "cartpole")
ON_A_GPU = (
    "gpu-latency",
    "gpu-bandwidth",
    "gpu-bandwidth-mps",
    "gpu-ps",
    "gpu-ps-mps",
    "gpu-cartpole",
)
AXES = {"in flight": "calls in flight", "MB": "size in MB"}
WIDTH = 4.3  # inches: a telephone; two fit side by side on a page
BAR = 0.19  # inches for each bar
# The colours of Okabe and Ito, which colour-blind people can distinguish, and two darker ones.
COLOURS = {
    "telegrad": "#d55e00",
    "torch": "#0072b2",
    "torch-uv": "#7f74c9",
    "moolib": "#009e73",
    "ray": "#cc79a7",
    "monarch": "#e69f00",
    "grpc": "#56b4e9",
    "rpyc": "#8f7d45",
    "bare": "#858585",
    "one": "#858585",
}
OTHERS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
STYLES = ("-", "--", ":", "-.")
GREY = "#858585"  # visible on white and on black


@dataclass(frozen=True)
class Panel:
    """Results that are drawn together."""

    group: str
    axis: str  # empty for bars
    lines: tuple[Line, ...]
    limits: tuple[Line, ...] = ()
    heading: str = ""

    @property
    def title(self) -> str:
        over = f", by {AXES.get(self.axis, self.axis)}" if self.axis else ""
        return self.heading or f"{GROUPS.get(self.group, self.group)}{over}"

    @property
    def unit(self) -> str:
        first = self.lines[0]
        return f"{first['unit']}, {first['better']} is better"

    @property
    def cases(self) -> list[list[Line]]:
        """Return the lines of each case, and those of the limits."""
        names = dict.fromkeys(line["case"] for line in self.lines)
        return [[line for line in self.lines if line["case"] == name] for name in names]

    @property
    def height(self) -> float:
        """Return the inches that it needs."""
        if self.axis:
            entries = len(in_order(self.lines)) + len(self.limits)
            return 3.1 + 0.2 * math.ceil(entries / legend_columns(self))
        return 0.5 + sum(bars_height(own) for own in [*self.cases, list(self.limits)] if own)


def legend_columns(panel: Panel) -> int:
    names = [name(peer, panel) for peer in in_order(panel.lines)]
    return 1 if max(map(len, [*names, *(line["title"] for line in panel.limits)])) > 20 else 2


def bars_height(lines: list[Line]) -> float:
    return 0.4 + BAR * len(lines)


def panels(lines: list[Line]) -> list[Panel]:
    """Return the panels of the results, in the order of the lines."""
    found = []
    drawn = [
        line
        for line in lines
        if line["peer"] not in (MACHINE, "limit") and line["median"] is not None
    ]
    for group in dict.fromkeys(line["group"] for line in drawn):
        own = [line for line in drawn if line["group"] == group]
        limits = tuple(
            line for line in lines if line["case"] in LIMITS.get(group, []) and line["median"]
        )
        amounts = {
            axis: {line["at"] for line in own if line["axis"] == axis}
            for axis in {line["axis"] for line in own}
        }
        curved = [
            axis
            for axis in dict.fromkeys(line["axis"] for line in own)
            if axis and len(amounts[axis]) > 1
        ]
        found += [
            Panel(group, axis, tuple(line for line in own if line["axis"] == axis), limits)
            for axis in curved
        ]
        rest = tuple(line for line in own if line["axis"] not in curved)
        if rest:
            found.append(Panel(group, "", rest, limits))
    return found


def svg(panel: Panel) -> str:
    """Return the panel as HTML, or an empty string without matplotlib."""
    if matplotlib is None:
        return ""
    figure = Figure(figsize=(WIDTH, panel.height), layout="constrained")
    draw(panel, figure)
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title}):
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    drawn = text.getvalue()[text.getvalue().index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<style.*?</style>", "", drawn, flags=re.DOTALL)  # it would change the page
    drawn = re.sub(r"font: ([^;\"]*?px) [^;\"]*", r"font: \1 system-ui, sans-serif", drawn)
    return (
        drawn.replace("#000000", "currentColor")
        .replace("#333333", "currentColor")
        .replace("<svg ", '<svg fill="currentColor" stroke-linejoin="round" ', 1)
    )


def write(panel: Panel, path: Path) -> None:
    """Write the panel as an SVG file with the colours of the system, dark or light."""
    colours = (
        "<style>:root{color:#1f2328}@media(prefers-color-scheme:dark){:root{color:#e6edf3}}</style>"
    )
    head, _, rest = svg(panel).partition(">")
    lines = f"{head}>{colours}{rest}".splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def save(path: Path, picture: Path | None = None, groups: tuple[str, ...] = ()) -> Path | None:
    """Draw the results of `path` into `picture`, by default in the same folder.

    Return the path of the picture, or None if there is nothing to draw.
    """
    if matplotlib is None:
        print("matplotlib is not installed: no plot")
        return None
    run, lines = results.read(path)
    chosen = [panel for panel in panels(lines) if not groups or panel.group in groups]
    if not chosen:
        return None
    rows = [chosen[i : i + 3] for i in range(0, len(chosen), 3)]
    heights = [max(panel.height for panel in row) for row in rows]
    figure = Figure(figsize=(WIDTH * 3.1, sum(heights) + 0.4), layout="constrained")
    for row, below in zip(
        rows, figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False), strict=True
    ):
        for panel, place in zip(row, below[0].subfigures(1, 3), strict=False):
            draw(panel, place)
    machine = run["machine"]
    figure.suptitle(
        f"{machine['cpu']}, {machine['cores']} cores, {run['date'][:10]}, median of {_rounds(chosen)} rounds"
    )
    picture = picture or path.with_suffix(".png")
    figure.savefig(picture, dpi=110)
    print(f"plot: {picture}")
    return picture


def _rounds(panels: list[Panel]) -> str:
    counts = [len(line["rounds"]) for panel in panels for line in panel.lines if line["median"]]
    return f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])


def draw(panel: Panel, figure: Any) -> None:
    """Draw a panel into a figure, or into a part of one."""
    figure.suptitle(
        f"{panel.title}\n{panel.unit}", x=0.01, ha="left", fontsize=9.5, linespacing=1.3
    )
    if panel.axis:
        curves(figure.subplots(), panel)
        return
    cases = [own for own in [*panel.cases, list(panel.limits)] if own]
    axes = figure.subplots(
        len(cases), 1, squeeze=False, height_ratios=[bars_height(own) for own in cases]
    )
    for axis, own in zip(axes.flat, cases, strict=True):
        bars(axis, panel, own)


def curves(axis: Any, panel: Panel) -> None:
    """Draw the median by amount, with the range of the rounds, up to where the peer failed."""
    peers = in_order(panel.lines)
    for peer in peers:
        own = sorted(
            (line for line in panel.lines if line["peer"] == peer), key=lambda line: line["at"]
        )
        amounts, medians = [line["at"] for line in own], [line["median"] for line in own]
        look = {
            "color": colour(peer, peers),
            "linestyle": style(peer, peers),
            "label": name(peer, panel),
        }
        axis.plot(amounts, medians, marker="o", markersize=4, **look)
        lowest, highest = [line["min"] for line in own], [line["max"] for line in own]
        axis.fill_between(amounts, lowest, highest, color=colour(peer, peers), alpha=0.12)
    for line, dashes in zip(panel.limits, ("--", ":", "-."), strict=False):
        look = {"color": GREY, "linestyle": dashes, "label": line["title"]}
        axis.axhline(line["median"], linewidth=1.2, **look)
    amounts = sorted({line["at"] for line in panel.lines})
    axis.set_xscale("log")
    scale(axis, panel)
    axis.set_xticks(amounts, [f"{amount:g}" for amount in amounts])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(AXES.get(panel.axis, panel.axis), fontsize=8.5)
    axis.tick_params(labelsize=8.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.25)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "frameon": False}
    columns = {"ncols": legend_columns(panel), "columnspacing": 1.2, "handlelength": 2.6}
    axis.legend(fontsize=8.5, **columns, **place)


def bars(axis: Any, panel: Panel, lines: list[Line]) -> None:
    """Draw a bar for each peer of a case, or for each limit of the machine."""
    is_limit = lines[0]["peer"] == MACHINE
    peers = in_order(tuple(lines))
    if not is_limit:
        lines = sorted(lines, key=lambda line: peers.index(line["peer"]))
    labels = [line["title"] if is_limit else name(line["peer"], panel) for line in lines]
    medians = [line["median"] for line in lines]
    colours = [GREY if is_limit else colour(line["peer"], peers) for line in lines]
    drawn = axis.barh(range(len(lines)), medians, 0.78, color=colours)
    axis.bar_label(drawn, [results.number(median) for median in medians], fontsize=8.5, padding=3)
    axis.set_yticks(range(len(lines)), labels, fontsize=8.5)
    axis.invert_yaxis()
    axis.margins(x=0.17)
    axis.xaxis.set_visible(False)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(left=False)
    title = "limits of the machine" if is_limit else lines[0]["title"]
    if len(panel.cases) > 1 or is_limit:
        title = textwrap.fill(title.removesuffix(", minus a local one"), 46)
        axis.set_title(title, fontsize=8.5, loc="left", pad=3, style="italic")


def scale(axis: Any, panel: Panel) -> None:
    """Use a logarithmic scale for curves, unless a figure is zero."""
    if min(line["median"] for line in panel.lines) > 0:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if spread(panel) < 50 else (1,)))
        axis.yaxis.set_minor_formatter(lambda value, _: "")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")


def spread(panel: Panel) -> float:
    """Return the quotient of the greatest and the least figure."""
    medians = [line["median"] for line in panel.lines]
    return float(max(medians) / min(medians))


def name(peer: str, panel: Panel) -> str:
    """Return what readers call a peer in this panel."""
    if panel.group.split()[0] in OF_TUTORIALS and peer in TUTORIALS:
        return TUTORIALS[peer]
    return NAMES.get(peer, peer)


def in_order(lines: tuple[Line, ...]) -> list[str]:
    """Return the peers in the order of `COLOURS`, then the others."""
    known, found = list(COLOURS), list(dict.fromkeys(line["peer"] for line in lines))
    return sorted(found, key=lambda peer: known.index(peer) if peer in known else len(known))


def colour(peer: str, peers: list[str]) -> str:
    """Return the colour of the library. What is no library gets one by its position."""
    known = COLOURS.get(peer) or COLOURS.get(peer.replace(".", " ").split()[0])
    return known or OTHERS[peers.index(peer) % len(OTHERS)]


def style(peer: str, peers: list[str]) -> str:
    """Return the line style: entries of one library differ in it."""
    alike = [each for each in peers if colour(each, peers) == colour(peer, peers)]
    return STYLES[alike.index(peer) % len(STYLES)]


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:3]]
    if not paths:
        sys.exit(__doc__)
    save(paths[0], paths[1] if len(paths) > 1 else None)

"""Draw the results of a run: `python -m benchmarks.plots results.jsonl [picture.png]`.

Cases that differ only in an amount (callers, megabytes, workers, trainers) are drawn as curves over
it; the others are bars. Without matplotlib nothing is drawn.
"""

from __future__ import annotations

import io
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.suite import MACHINE

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:  # optional; tables do not need it
    matplotlib = None  # type: ignore[assignment]

__all__ = ["GROUPS", "Panel", "panels", "save", "svg"]

Line = dict[str, Any]

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
    "startup": "until every worker is up",
    "memory": "memory per worker (PSS)",
    "private": "private memory per worker",
    "shutdown": "until every worker has left",
    "hosts-latency": "synchronous calls between two hosts",
    "hosts-bandwidth": "bandwidth between two hosts",
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
GROUP_WIDTH = 0.84
FAR_APART = 10
# The colours of Okabe and Ito, which colour-blind people can distinguish, and two darker ones.
COLOURS = {
    "telegrad": "#d55e00",
    "torch": "#0072b2",
    "torch-uv": "#332288",
    "moolib": "#009e73",
    "ray": "#cc79a7",
    "monarch": "#e69f00",
    "grpc": "#56b4e9",
    "rpyc": "#7a6a3a",
    "bare": "#8c8c8c",
    "one": "#8c8c8c",
}
STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Panel:
    """Results that are drawn together."""

    group: str
    axis: str  # empty for bars
    lines: tuple[Line, ...]
    limits: tuple[Line, ...] = ()

    @property
    def title(self) -> str:
        first = self.lines[0]
        over = f", by {self.axis}" if self.axis else ""
        return f"{GROUPS.get(self.group, self.group)}{over} ({first['unit']}, {first['better']} is better)"


def panels(lines: list[Line]) -> list[Panel]:
    """Return the panels of the results, in the order of the lines."""
    found = []
    drawn = [line for line in lines if line["peer"] != MACHINE and line["median"] is not None]
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


def blank(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """Return an empty figure and its axes, for parts that draw their own plot."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def svg(panel: Panel) -> str:
    """Return the panel as HTML, or an empty string without matplotlib."""
    if matplotlib is None:
        return ""
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    draw(panel, figure.subplots())
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.group}):
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    drawn = text.getvalue()[text.getvalue().index("<svg") :]
    return (
        drawn.replace("#000000", "currentColor")
        .replace("#333333", "currentColor")
        .replace("<svg ", '<svg fill="currentColor" ', 1)
    )


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
    rows = max(1, (len(chosen) + 1) // 2)
    figure = Figure(figsize=(17, 4 * rows), layout="constrained")
    axes = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axis in axes[len(chosen) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes, chosen, strict=False):
        draw(panel, axis)
    machine = run["machine"]
    figure.suptitle(
        f"{machine['cpu']}, {machine['cores']} cores, {run['date'][:10]}, median of {_rounds(chosen)} rounds"
    )
    picture = picture or path.with_suffix(".png")
    figure.savefig(picture, dpi=80)
    print(f"plot: {picture}")
    return picture


def _rounds(panels: list[Panel]) -> str:
    counts = [len(line["rounds"]) for panel in panels for line in panel.lines if line["median"]]
    return f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])


def draw(panel: Panel, axis: Any) -> None:
    if panel.axis:
        curves(axis, panel)
    else:
        bars(axis, panel)
    limits = sorted(panel.limits, key=lambda line: float(line["median"]))
    for line in limits:
        axis.axhline(line["median"], linestyle=(0, (4, 3)), linewidth=1, color="#808080")
        above = "bottom" if line is limits[-1] else "top"  # two limits may be close to each other
        place = {"xy": (1.005, line["median"]), "xycoords": ("axes fraction", "data"), "va": above}
        axis.annotate(
            wrapped(line["title"]), **place, fontsize=7, color="#808080", annotation_clip=False
        )
    axis.set_title(panel.title, loc="left", fontsize=11, pad=22)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.25)
    handles, labels = axis.get_legend_handles_labels()
    look = {"fontsize": 8, "loc": "lower left", "bbox_to_anchor": (-0.01, 0.995), "frameon": False}
    axis.legend(handles, labels, ncols=len(labels), columnspacing=1.2, handlelength=1.2, **look)


def curves(axis: Any, panel: Panel) -> None:
    """Draw the median by amount, with the range of the rounds, up to where the peer failed."""
    peers = in_order(panel.lines)
    for peer in peers:
        own = sorted(
            (line for line in panel.lines if line["peer"] == peer), key=lambda line: line["at"]
        )
        amounts, medians = [line["at"] for line in own], [line["median"] for line in own]
        axis.plot(
            amounts,
            medians,
            marker="o",
            markersize=4,
            label=peer,
            color=colour(peer),
            linestyle=style(peer, peers),
        )
        axis.fill_between(
            amounts,
            [line["min"] for line in own],
            [line["max"] for line in own],
            color=colour(peer),
            alpha=0.12,
        )
    amounts = sorted({line["at"] for line in panel.lines})
    axis.set_xscale("log")
    scale(axis, panel)
    axis.set_xticks(amounts, [f"{amount:g}" for amount in amounts])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(panel.axis)


def bars(axis: Any, panel: Panel) -> None:
    """Draw bars grouped by case, one colour for each peer, with the error bars of `whiskers`."""
    titles = {line["case"]: line["title"] for line in panel.lines}
    cases, peers = list(titles), in_order(panel.lines)
    width = GROUP_WIDTH / max(1, len(peers))
    for i, peer in enumerate(peers):
        own = [line for line in panel.lines if line["peer"] == peer]
        places = [cases.index(line["case"]) + (i - (len(peers) - 1) / 2) * width for line in own]
        heights = [line["median"] for line in own]
        fill = 1 if style(peer, peers) == STYLES[0] else 0.5
        look = {
            "label": peer,
            "color": colour(peer),
            "alpha": fill,
            "error_kw": {"elinewidth": 0.8},
            "ecolor": "#333333",
        }
        drawn = axis.bar(places, heights, width * 0.92, yerr=whiskers(own), **look)
        axis.bar_label(
            drawn, [results.number(line["median"]) for line in own], fontsize=6, padding=2
        )
    scale(axis, panel)
    axis.set_xticks(range(len(cases)), [wrapped(titles[case]) for case in cases], fontsize=8)
    axis.margins(y=0.12)
    axis.set_xlim(
        -max(1.0, 3 - len(cases)) / 2 - 0.1, len(cases) - 1 + max(1.0, 3 - len(cases)) / 2 + 0.1
    )


def scale(axis: Any, panel: Panel) -> None:
    """Use a logarithmic scale for curves and for bars that differ by a large factor.

    The scale is linear if a figure is zero. Other bars start at zero.
    """
    medians = [line["median"] for line in panel.lines]
    if min(medians) > 0 and (panel.axis or max(medians) >= FAR_APART * min(medians)):
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter(lambda value, _: "")
        if not panel.axis:
            lowest = min([*medians, *(line["median"] for line in panel.limits)])
            axis.set_ylim(bottom=10 ** math.floor(math.log10(lowest * 0.8)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.12g}")


def in_order(lines: tuple[Line, ...]) -> list[str]:
    """Return the peers in the order of `COLOURS`, then the others."""
    known, found = list(COLOURS), list(dict.fromkeys(line["peer"] for line in lines))
    return sorted(found, key=lambda peer: known.index(peer) if peer in known else len(known))


def whiskers(lines: list[Line]) -> list[list[float]]:
    """Return error bars: up to the p99 if there is one, otherwise from worst to best round."""
    below = [0.0 if line["p99"] else line["median"] - line["min"] for line in lines]
    above = [(line["p99"] or line["max"]) - line["median"] for line in lines]
    return [below, [max(0.0, value) for value in above]]


def colour(peer: str) -> str:
    """Return the colour of the library; entries of one library differ in style."""
    return COLOURS.get(peer) or COLOURS.get(peer.replace(".", " ").split()[0], "#7f7f7f")


def style(peer: str, peers: list[str]) -> str:
    alike = [each for each in peers if colour(each) == colour(peer)]
    return STYLES[alike.index(peer) % len(STYLES)]


def wrapped(title: str) -> str:
    return title.replace(", ", ",\n").replace(" on the callee", "\non the callee")


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:3]]
    if not paths:
        sys.exit(__doc__)
    save(paths[0], paths[1] if len(paths) > 1 else None)

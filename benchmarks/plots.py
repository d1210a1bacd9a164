"""One picture of a run: `python -m benchmarks.plots core.jsonl [core.png]`. Without matplotlib nothing is drawn."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.suite import MACHINE

PANELS = {
    "latency": "sync call, p50 with p99 as whisker (us, lower is better)",
    "rate": "calls per second (higher is better)",
    "bandwidth": "bandwidth (GB/s, higher is better)",
    "reference": "remote references, microseconds (lower is better)",
    "backward": "distributed backward pass minus a local one, microseconds (lower is better)",
    "training": "training with the network on the callee, iterations/s (higher is better)",
}
CURVES = {
    "startup": "seconds until every worker is up",
    "memory": "MB per worker (PSS)",
    "private": "MB per worker (private)",
    "idle": "cores busy when all are idle",
    "shutdown": "seconds until every worker has left",
}
LIMITS = {
    "training": ["limit/digits"],
    "latency": ["limit/unix-ping-pong"],
    "bandwidth": ["limit/memcpy-warm", "limit/memcpy-fresh"],
}
GROUP_WIDTH = 0.8
COLOURS = {"telegrad": "C3", "torch": "C0", "torch-uv": "C9", "moolib": "C2", "ray": "C4", "rpyc": "C1", "bare": "C7"}


def save(path: Path, picture: Path | None = None) -> Path | None:
    """Draws the results in `path` beside it, or into `picture`; returns where, or None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no plot")
        return None
    picture = picture or path.with_suffix(".png")
    run, lines = results.read(path)
    figure = startup(lines) if run["benchmark"] == "startup" else core(lines)
    machine = run["machine"]
    figure.suptitle(f"{machine['cpu']}, {machine['cores']} cores, {run['date'][:10]}, median of {run['rounds']} rounds")
    figure.savefig(picture, dpi=110)
    print(f"plot: {picture}")
    return picture


def core(lines: list[dict[str, Any]]) -> Any:
    panels = drawable(PANELS, lines)
    figure, axes = blank(len(panels), 1, (13.0, 4.2 * len(panels)))
    for axis, (group, title) in zip(axes, panels.items(), strict=True):
        bars(axis, [line for line in lines if line["group"] == group])
        limits(axis, [line for line in lines if line["case"] in LIMITS.get(group, [])])
        axis.set_title(title, loc="left")
    return figure


def startup(lines: list[dict[str, Any]]) -> Any:
    """A curve over the number of workers for each peer; a peer's curve ends where it does not come up."""
    panels = drawable(CURVES, lines)
    figure, axes = blank(1, len(panels), (4.6 * len(panels), 4.6))
    for axis, (group, title) in zip(axes, panels.items(), strict=True):
        curves(axis, [line for line in lines if line["group"] == group and line["median"] is not None])
        axis.set_title(title, loc="left", fontsize=10)
    return figure


def drawable(panels: dict[str, str], lines: list[dict[str, Any]]) -> dict[str, str]:
    """The panels that have something to show."""
    return {
        group: title
        for group, title in panels.items()
        if any(line["group"] == group and line["median"] for line in lines)
    }


def blank(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # noqa: PLC0415 - an optional dependency

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).flat if rows * columns else []


def curves(axis: Any, lines: list[dict[str, Any]]) -> None:
    for peer in dict.fromkeys(line["peer"] for line in lines):
        own = sorted((line for line in lines if line["peer"] == peer), key=lambda line: line["callers"])
        axis.errorbar(
            [line["callers"] for line in own],
            [line["median"] for line in own],
            yerr=whiskers(own),
            marker="o",
            capsize=2,
            label=peer,
            color=COLOURS.get(peer),
        )
    axis.set_xscale("log", base=2)
    sizes = sorted({line["callers"] for line in lines})
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_xlabel("workers")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if lines:
        axis.legend(fontsize=8)


def bars(axis: Any, lines: list[dict[str, Any]]) -> None:
    """Bars grouped by case, one colour for each peer, logarithmic."""
    titles = {line["case"]: line["title"] for line in lines}
    cases, peers = list(titles), list(dict.fromkeys(line["peer"] for line in lines if line["peer"] != MACHINE))
    width = GROUP_WIDTH / max(1, len(peers))
    for i, peer in enumerate(peers):
        own = [line for line in lines if line["peer"] == peer and line["median"]]
        places = [cases.index(line["case"]) + (i - (len(peers) - 1) / 2) * width for line in own]
        heights = [line["median"] for line in own]
        look = {"label": peer, "color": COLOURS.get(peer), "capsize": 2}
        drawn = axis.bar(places, heights, width * 0.92, yerr=whiskers(own), **look)
        axis.bar_label(drawn, [results.number(line["median"]) for line in own], fontsize=7, padding=2)
    axis.set_yscale("log")
    axis.set_xticks(range(len(cases)), [wrapped(titles[case]) for case in cases], fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    axis.margins(y=0.15)
    if peers:
        axis.legend(fontsize=8, ncols=len(peers), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def whiskers(lines: list[dict[str, Any]]) -> list[list[float]]:
    """Up to the p99 where there is one, otherwise from the worst to the best round."""
    below = [0.0 if line["p99"] else line["median"] - line["min"] for line in lines]
    above = [(line["p99"] or line["max"]) - line["median"] for line in lines]
    return [below, [max(0.0, value) for value in above]]


def limits(axis: Any, lines: list[dict[str, Any]]) -> None:
    """What the machine itself does, as dashed lines."""
    for line in lines:
        if line["median"]:
            axis.axhline(line["median"], linestyle="--", linewidth=1, color="grey")
            place = {"xy": (1.003, line["median"]), "xycoords": ("axes fraction", "data"), "va": "center"}
            axis.annotate(wrapped(line["title"]), **place, fontsize=7, annotation_clip=False)


def wrapped(title: str) -> str:
    return title.replace(", ", ",\n")


if __name__ == "__main__":
    paths = [Path(argument) for argument in sys.argv[1:3]]
    if not paths:
        sys.exit(__doc__)
    save(*paths)

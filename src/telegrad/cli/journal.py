"""`Journal`: how a training goes, for people: a live view, and afterwards a plot and a report.

The view is a table that changes in place if `rich` is installed and this is a terminal; otherwise a line per entry.
"""

from __future__ import annotations

import base64
import html
import io
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

try:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
except ImportError:  # lines do as well
    Live = None  # type: ignore[assignment,misc]

try:
    from matplotlib.figure import Figure
except ImportError:  # the report does without a plot
    Figure = None  # type: ignore[assignment,misc]

__all__ = ["Entry", "Journal"]

_STYLE = "body{font:15px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:.2em 1em;text-align:right}"


class Entry(NamedTuple):
    """One epoch of one trainer."""

    trainer: str
    epoch: int
    loss: float
    speed: float  # samples per second
    staleness: int = 0
    accuracy: float | None = None

    def cells(self) -> list[str]:
        right = "" if self.accuracy is None else f"{100 * self.accuracy:.2f} %"
        return [self.trainer, str(self.epoch), f"{self.loss:.4f}", f"{self.speed:,.0f}", str(self.staleness), right]

    def __str__(self) -> str:
        trainer, epoch, loss, speed, staleness, right = self.cells()
        line = f"epoch {epoch:>3}  {trainer}  loss {loss}  {speed:>7} samples/s  staleness {staleness}"
        return line + (f"  test accuracy {right}" if right else "")


_COLUMNS = ["trainer", "epoch", "loss", "samples/s", "staleness", "test accuracy"]


class Journal:
    """Use as a context manager around the training; `note` entries as they come."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.entries: list[Entry] = []
        self._started = time.monotonic()
        self._live: Any = None
        if Live is not None and sys.stdout.isatty():
            self._live = Live(console=Console(), get_renderable=self._table, refresh_per_second=4)

    def __enter__(self) -> Journal:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._started
        if self._live is not None:
            self._live.stop()

    @property
    def accuracy(self) -> float:
        """The last that was noted."""
        return next((entry.accuracy for entry in reversed(self.entries) if entry.accuracy is not None), float("nan"))

    def note(self, entry: Entry) -> None:
        self.entries.append(entry)
        if self._live is None:
            sys.stdout.write(f"{entry}\n")
            sys.stdout.flush()

    def write(self, folder: Path) -> list[Path]:
        """A plot, if matplotlib is there, and a report that needs no other file."""
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        picture = ""
        if Figure is not None:
            plot = self._plot()
            (folder / "plot.png").write_bytes(plot)
            written.append(folder / "plot.png")
            picture = f'<p><img alt="loss, accuracy and speed" src="data:image/png;base64,{_text(plot)}">'
        head = "".join(f"<th>{name}" for name in _COLUMNS)
        rows = "".join("<tr>" + "".join(f"<td>{cell}" for cell in entry.cells()) for entry in self.entries)
        title = html.escape(self.title)
        (folder / "report.html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>'
            f"<p>Test accuracy {100 * self.accuracy:.2f} % after {self.seconds:.1f} s, start of the workers included."
            f"{picture}<table><tr>{head}{rows}</table>\n"
        )
        return [*written, folder / "report.html"]

    def _table(self) -> Any:
        table = Table(*_COLUMNS, title=self.title)
        newest = {entry.trainer: entry for entry in self.entries}
        for _, entry in sorted(newest.items()):
            table.add_row(*entry.cells())
        return table

    def _plot(self) -> bytes:
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        axes = figure.subplots(1, 3)
        for name in sorted({entry.trainer for entry in self.entries}):
            mine = [entry for entry in self.entries if entry.trainer == name]
            epochs = [entry.epoch for entry in mine]
            axes[0].plot(epochs, [entry.loss for entry in mine], label=name)
            axes[2].plot(epochs, [entry.speed for entry in mine], label=name)
        tested = [(entry.epoch, entry.accuracy) for entry in self.entries if entry.accuracy is not None]
        axes[1].plot([epoch for epoch, _ in tested], [100 * accuracy for _, accuracy in tested], color="black")
        for axis, title in zip(axes, ("training loss", "test accuracy (%)", "samples/s per trainer"), strict=True):
            axis.set(title=title, xlabel="epoch")
        axes[0].set_yscale("log")
        axes[0].legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()

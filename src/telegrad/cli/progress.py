"""How a training goes, for people: `Progress` is what a trainer says, `TrainingReport` shows it.

The view is a table that changes in place if `rich` is installed and this is a terminal; otherwise a line per epoch and
trainer. Afterwards there are a plot and a report.
"""

from __future__ import annotations

import base64
import html
import io
import sys
import time
from collections.abc import Callable
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

__all__ = ["EpochReport", "Progress", "TrainingReport"]

_MOMENT = 0.5  # seconds between two entries of one epoch
_STYLE = "body{font:15px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:.2em 1em;text-align:right}"


class EpochReport(NamedTuple):
    """One epoch of one trainer, or what there is of it so far."""

    trainer: str
    epoch: int
    loss: float
    speed: float  # samples per second
    staleness: int = 0
    accuracy: float | None = None
    complete: bool = True

    def cells(self) -> list[str]:
        right = "" if self.accuracy is None else f"{100 * self.accuracy:.2f} %"
        return [
            self.trainer,
            str(self.epoch),
            f"{self.loss:.4f}",
            f"{self.speed:,.0f}",
            str(self.staleness),
            right,
        ]

    def line(self, measure: str) -> str:
        trainer, epoch, loss, speed, staleness, right = self.cells()
        line = (
            f"epoch {epoch:>3}  {trainer}  loss {loss}  {speed:>7} samples/s  staleness {staleness}"
        )
        return line + (f"  test {measure} {right}" if right else "")


_COLUMNS = ["trainer", "epoch", "loss", "samples/s", "staleness"]


class Progress:
    """What one trainer reports, from its own process: `note` after each step, `end` after each epoch."""

    def __init__(self, trainer: str, put: Callable[[EpochReport], None]) -> None:
        self._trainer = trainer
        self._put = put
        self._begin(0)

    def __repr__(self) -> str:
        return f"<Progress of {self._trainer}: {self._steps} steps of epoch {self._epoch}>"

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._loss, self._samples, self._steps, self._staleness = 0.0, 0, 0, 0
        self._started = self._said = self._noted = time.perf_counter()

    def note(self, epoch: int, loss: float, samples: int, staleness: int = 0) -> None:
        if epoch != self._epoch:
            self._begin(epoch)
        self._loss += loss
        self._samples += samples
        self._steps += 1
        self._staleness = max(self._staleness, staleness)
        self._noted = time.perf_counter()
        if self._noted - self._said > _MOMENT:
            self._said = self._noted
            self._put(self._entry()._replace(complete=False))

    def end(self, accuracy: float | None = None) -> None:
        """The epoch is over; who knows it says how good the model is on the test data now."""
        self._put(self._entry()._replace(accuracy=accuracy))
        self._begin(self._epoch + 1)

    def _entry(self) -> EpochReport:
        speed = self._samples / max(self._noted - self._started, 1e-9)
        return EpochReport(
            self._trainer, self._epoch, self._loss / max(self._steps, 1), speed, self._staleness
        )


class TrainingReport:
    """Use as a context manager around the training; `note` entries as they come.

    `measure` is what the accuracy of the entries is called, if it is another figure.
    """

    def __init__(self, title: str, measure: str = "accuracy") -> None:
        self.title = title
        self.measure = measure
        self._columns = [*_COLUMNS, f"test {measure}"]
        self.entries: list[EpochReport] = []
        self.seconds = 0.0
        self._newest: dict[str, EpochReport] = {}
        self._started = time.monotonic()
        self._live: Any = None
        if Live is not None and sys.stdout.isatty():
            self._live = Live(console=Console(), get_renderable=self._table, refresh_per_second=4)

    def __enter__(self) -> TrainingReport:
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
        return next(
            (entry.accuracy for entry in reversed(self.entries) if entry.accuracy is not None),
            float("nan"),
        )

    def note(self, entry: EpochReport) -> None:
        self._newest[entry.trainer] = entry
        if not entry.complete:
            return
        self.entries.append(entry)
        if self._live is None:
            sys.stdout.write(f"{entry.line(self.measure)}\n")
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
            picture = f'<p><img alt="loss, {self.measure} and speed" src="data:image/png;base64,{_text(plot)}">'
        head = "".join(f"<th>{name}" for name in self._columns)
        rows = "".join(
            "<tr>" + "".join(f"<td>{cell}" for cell in entry.cells()) for entry in self.entries
        )
        title = html.escape(self.title)
        (folder / "report.html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>'
            f"<p>Test {self.measure} {100 * self.accuracy:.2f} % after {self.seconds:.1f} s, "
            "start of the workers included."
            f"{picture}<table><tr>{head}{rows}</table>\n"
        )
        return [*written, folder / "report.html"]

    def _table(self) -> Any:
        table = Table(*self._columns, title=self.title)
        for _, entry in sorted(self._newest.items()):
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
        tested = [
            (entry.epoch, entry.accuracy) for entry in self.entries if entry.accuracy is not None
        ]
        axes[1].plot(
            [epoch for epoch, _ in tested],
            [100 * accuracy for _, accuracy in tested],
            color="black",
        )
        titles = ("training loss", f"test {self.measure} (%)", "samples/s per trainer")
        for axis, title in zip(axes, titles, strict=True):
            axis.set(title=title, xlabel="epoch")
        axes[0].set_yscale("log")
        axes[0].legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()

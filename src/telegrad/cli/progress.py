"""Progress of a training run: trainers report with `Progress`, and `TrainingReport` shows it.

On a terminal with `rich` installed, it is a table that is updated in place; otherwise one line per
epoch and trainer. After the run, `TrainingReport.write` writes a plot and an HTML report.
"""

from __future__ import annotations

import html
import io
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from telegrad.scalars import report as report_values

try:
    from rich import box
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
except ImportError:  # print lines
    Live = None  # type: ignore[assignment,misc]

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter
except ImportError:  # write the report without a plot
    Figure = None  # type: ignore[assignment,misc]

__all__ = ["COLOURS", "WIDTH", "Draw", "EpochReport", "Progress", "TrainingReport", "write_page"]

WIDTH = 60
_INTERVAL = 0.5  # seconds between two reports within an epoch
_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    ".plots{display:flex;flex-wrap:wrap;gap:1em}.plots svg{flex:1 1 18em;height:auto}"
    ".scroll{overflow-x:auto;margin-top:1em}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #8884}"
    "td:first-child,th:first-child{text-align:left}"
    "@media(max-width:30em){td,th{padding:.2em .3em;font-size:.8rem}}"
)
# The colours of Okabe and Ito, which colour-blind people can distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


Draw = Callable[[Any], None]  # draws one plot into the axes of matplotlib


class EpochReport(NamedTuple):
    """One epoch of one trainer, complete or so far."""

    trainer: str
    epoch: int
    loss: float
    speed: float  # samples per second
    staleness: int = 0
    score: float | None = None  # of the test data, between 0 and 1
    complete: bool = True

    def cells(self) -> list[str]:
        """Return the values as text, in the order of the columns."""
        score = "" if self.score is None else f"{100 * self.score:.2f} %"
        return [
            self.trainer,
            str(self.epoch),
            f"{self.loss:.4f}",
            f"{self.speed:,.0f}",
            str(self.staleness),
            score,
        ]

    def line(self, metric: str) -> str:
        """Return the values as a line of text."""
        trainer, epoch, loss, speed, staleness, score = self.cells()
        line = f"epoch {epoch:>3}  {trainer}  loss {loss}  {speed:>7}/s"
        if self.staleness:
            line = f"{line}  staleness {staleness}"
        return f"{line}  {metric} {score}" if score else line


_COLUMNS = ["trainer", "epoch", "loss", "samples/s", "staleness"]


class Progress:
    """Reports of one trainer, from its own process: `step` and `end_epoch` send them.

    They go to `put`, and with `telegrad.report` to the dashboard. `metric` names the score.
    """

    def __init__(
        self, trainer: str, put: Callable[[EpochReport], None], metric: str = "accuracy"
    ) -> None:
        self._trainer = trainer
        self._put = put
        self._metric = metric
        self._all_steps = 0
        self._begin_epoch(0)

    def __repr__(self) -> str:
        return f"<Progress of {self._trainer}: {self._steps} steps of epoch {self._epoch}>"

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._loss, self._samples, self._steps, self._staleness = 0.0, 0, 0, 0
        self._started = self._last_report = self._last_step = time.perf_counter()

    def step(self, epoch: int, loss: float, samples: int, staleness: int = 0) -> None:
        """Add one training step."""
        if epoch != self._epoch:
            self._begin_epoch(epoch)
        self._loss += loss
        self._samples += samples
        self._steps += 1
        self._all_steps += 1
        report_values(self._all_steps, samples=samples, loss=loss)
        self._staleness = max(self._staleness, staleness)
        self._last_step = time.perf_counter()
        if self._last_step - self._last_report > _INTERVAL:
            self._last_report = self._last_step
            self._put(self._report()._replace(complete=False))

    def end_epoch(self, score: float | None = None) -> None:
        """End the epoch, with the score of the test data if this trainer has computed it."""
        self._put(self._report()._replace(score=score))
        if score is not None:
            report_values(self._all_steps, samples=0, **{self._metric: score})
        self._begin_epoch(self._epoch + 1)

    def _report(self) -> EpochReport:
        speed = self._samples / max(self._last_step - self._started, 1e-9)
        return EpochReport(
            self._trainer, self._epoch, self._loss / max(self._steps, 1), speed, self._staleness
        )


class TrainingReport:
    """The progress of all trainers. Use it as a context manager around the training.

    `metric` is the name of the score, and `epoch_count` the number of epochs that each trainer has.
    """

    def __init__(self, title: str, metric: str = "accuracy", epoch_count: int = 0) -> None:
        self.title = title
        self.metric = metric
        self._epoch_count = epoch_count
        self._columns = [*_COLUMNS, metric]
        self.epochs: list[EpochReport] = []  # complete ones
        self.seconds = 0.0
        self._newest: dict[str, EpochReport] = {}
        self._started = time.monotonic()
        self._live: Any = None
        if Live is not None and sys.stdout.isatty():
            self._live = Live(console=Console(), get_renderable=self._view, refresh_per_second=4)

    def __enter__(self) -> TrainingReport:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._started
        if self._live is not None:
            self._live.stop()

    @property
    def score(self) -> float:
        """The last score that was reported; NaN without one."""
        scores = [report.score for report in self.epochs if report.score is not None]
        return scores[-1] if scores else float("nan")

    def add(self, report: EpochReport) -> None:
        """Add a report and show it."""
        self._newest[report.trainer] = report
        if not report.complete:
            return
        self.epochs.append(report)
        if self._live is None:
            sys.stdout.write(f"{report.line(self.metric)}\n")
            sys.stdout.flush()

    def write(self, folder: Path) -> list[Path]:
        """Write a plot, if matplotlib is installed, and a report. Return the files."""
        reports = sorted(self.epochs, key=lambda report: (report.epoch, report.trainer))
        table = [self._columns, *(report.cells() for report in reports)]
        return write_page(folder, self.title, self._summary(), self._plots(), table)

    def _summary(self) -> str:
        after = f"after {self.seconds:.1f} s, including the start of the workers."
        if math.isnan(self.score):
            return f"Stopped before the first test, {after}"
        return f"Test {self.metric} {100 * self.score:.2f} % {after}"

    def _view(self) -> Any:
        """Return a table of the trainers over a bar of the complete epochs, in 60 columns."""
        table = Table(title=self.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in self._columns:
            table.add_column(name, justify="left" if name == "trainer" else "right")
        for _, report in sorted(self._newest.items()):
            table.add_row(*report.cells())
        total = self._epoch_count * len(self._newest)
        if not total:
            return table
        return Group(table, ProgressBar(total=total, completed=len(self.epochs), width=WIDTH))

    def _plots(self) -> list[Draw]:
        """Return functions that draw the loss, the score and the speed."""

        def lines(axis: Any, value: Callable[[EpochReport], float]) -> None:
            names = sorted({report.trainer for report in self.epochs})
            for name, colour in zip(names, itertools.cycle(COLOURS), strict=False):
                own = [report for report in self.epochs if report.trainer == name]
                epochs = [report.epoch for report in own]
                axis.plot(
                    epochs, [value(report) for report in own], color=colour, label=name, marker="."
                )

        def loss(axis: Any) -> None:
            lines(axis, lambda report: report.loss)
            axis.set(title="training loss", xlabel="epoch", yscale="log")
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
            axis.legend(frameon=False)

        def score(axis: Any) -> None:
            scored = [report for report in self.epochs if report.score is not None]
            percent = [100 * (report.score or 0.0) for report in scored]
            axis.plot([report.epoch for report in scored], percent, color="black", marker=".")
            axis.set(title=f"test {self.metric} (%)", xlabel="epoch")

        def speed(axis: Any) -> None:
            lines(axis, lambda report: report.speed)
            axis.set(title="samples/s per trainer", xlabel="epoch")

        return [loss, score, speed]


def write_page(
    folder: Path, title: str, summary: str, plots: Sequence[Draw], table: Sequence[Sequence[str]]
) -> list[Path]:
    """Write the plots as a picture, if matplotlib is installed, and a page. Return the files.

    The first row of the table has the names of the columns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    drawn = ""
    if Figure is not None:
        picture = folder / "plot.png"
        figure = Figure(figsize=(4 * len(plots), 3.6), layout="constrained")
        for draw, axis in zip(plots, figure.subplots(1, len(plots)), strict=True):
            draw(axis)
        figure.savefig(picture, dpi=110)
        written.append(picture)
        drawn = f'<div class="plots">{"".join(map(_svg, plots))}</div>'
    head = "".join(f"<th>{name}" for name in table[0])
    rows = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in table[1:])
    title = html.escape(title)
    (folder / "report.html").write_text(
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1>"
        f"<p>{summary}"
        f'{drawn}<div class="scroll"><table><tr>{head}{rows}</table></div></html>\n'
    )
    return [*written, folder / "report.html"]


def _svg(draw: Draw) -> str:
    """Return a plot for the page, in which black has the colour of the text."""
    figure = Figure(figsize=(4, 3.2), layout="constrained")
    draw(figure.subplots())
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", transparent=True)
    drawn = text.getvalue()[text.getvalue().index("<svg") :]
    drawn = drawn.replace("#000000", "currentColor")
    return drawn.replace("<svg ", '<svg fill="currentColor" ', 1)

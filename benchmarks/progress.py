"""The output of a running benchmark: lines, with a count if the number of measurements is known.

`benchmarks.parts` shows the lines of all parts as progress bars if `rich` is installed and the
output is a terminal.
"""

from __future__ import annotations

import re
import sys
from typing import Any

try:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column
except ImportError:  # optional; lines are printed instead
    Progress = None  # type: ignore[assignment,misc]

__all__ = ["Bars", "say"]

_COUNT = re.compile(r"\[ *(\d+)/(\d+)\] ")


def say(text: str, step: int = 0, steps: int = 0) -> None:
    """Print one or more lines. `step` of `steps` measurements are done."""
    count = f"[{step:{len(str(steps))}}/{steps}] " if steps else ""
    print(f"{count}{text}", flush=True)


class Bars:
    """A progress bar for each part with its newest line, as a context manager.

    If the output is not a terminal, print the lines.
    """

    def __init__(self, parts: list[str]) -> None:
        self.progress: Any = None
        self.tasks: dict[str, Any] = {}
        if Progress is not None and sys.stdout.isatty():
            columns = (
                TextColumn("{task.description:12}", table_column=Column(no_wrap=True)),
                BarColumn(12, table_column=Column(min_width=12)),
                TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
                TextColumn(
                    "{task.fields[line]}",
                    table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
                ),
            )
            self.progress = Progress(*columns, expand=True)
            self.tasks = {
                part: self.progress.add_task(part, start=False, total=None, line="")
                for part in parts
            }

    def __enter__(self) -> Bars:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def begin(self, part: str) -> None:
        if self.progress is not None:
            self.progress.start_task(self.tasks[part])
        else:
            say(f"-- {part}")

    def line(self, part: str, text: str) -> None:
        if self.progress is None:
            say(text)
            return
        count = _COUNT.match(text)
        if count:
            self.progress.update(
                self.tasks[part],
                completed=int(count[1]),
                total=int(count[2]),
                line=text[count.end() :],
            )
        elif text.startswith("round"):
            self.progress.update(self.tasks[part], line=text)
        else:
            self.progress.console.print(text, markup=False, highlight=False)

    def end(self, part: str) -> None:
        if self.progress is not None:
            self.progress.update(self.tasks[part], total=1, completed=1, line="")
            self.progress.stop_task(self.tasks[part])

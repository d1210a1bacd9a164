"""Values that a training reports, such as its loss: `report`, and `ScalarLog`, which keeps them.

Users call `report`; `ps.Optimizer` adds its version and staleness. `telegrad dashboard` shows the
values. With a directory (`Config.tensorboard`), they are also written for TensorBoard, each worker
as a run of its own.

A series of values takes fixed memory: when it is full, every second point is dropped, and after
that only every second value is added.

State: `_series` and the count of samples, under `_lock`, which is never held long; `_writer`, under
`_writer_lock`, which is held while a file may be written.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from telegrad.current import find_runtime
from telegrad.errors import UsageError

MAX_NAMES = 100
MAX_POINTS = 400  # of one series; even
RATE = "samples/s"
_RATE_SECONDS = 0.5  # over which samples per second are counted, at least
_FLUSH_SECONDS = 10  # after which TensorBoard can read what was written


def report(step: int | None = None, *, samples: int = 0, **values: SupportsFloat) -> None:
    """Report values of a training for `telegrad dashboard` and TensorBoard.

    Values are numbers or tensors with one element. `step` is their place on the axis; without it,
    values of one name are counted. `samples` is the number of samples that were processed since the
    last report; it gives the samples per second.

    >>> from telegrad.testing import LocalCluster
    >>> with LocalCluster(1) as cluster:
    ...     cluster["w0"].call("w0", report, 10, samples=32, loss=0.25)
    ...     cluster["w0"].snapshot()["scalars"]["loss"]["value"]
    0.25
    """
    runtime = find_runtime()
    if runtime is None:
        raise UsageError("there is no agent in this process: call init_rpc or open an Agent first")
    log: ScalarLog = runtime.scalars
    log.report(step, samples, values)


class ScalarLog:
    """The values that one worker has reported, by name."""

    def __init__(self, worker: str, directory: str | None = None) -> None:
        if directory is not None and importlib.util.find_spec("tensorboard") is None:
            raise UsageError(
                "Config.tensorboard is set, but TensorBoard is not installed: "
                "pip install 'telegrad[tensorboard]'"
            )
        self._worker = worker
        self._directory = directory
        self._series: dict[str, _Series] = {}
        self._samples = 0
        self._rate_since: float | None = None
        self._lock = threading.Lock()
        self._writer: Any = None
        self._closed = False
        self._writer_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ScalarLog of {self._worker}: {', '.join(self._series)}>"

    def report(self, step: int | None, samples: int, values: Mapping[str, SupportsFloat]) -> None:
        """Add values of the user. Raise `UsageError` if they are no numbers, or too many names."""
        numbers = {name: _number(name, value) for name, value in values.items()}
        with self._lock:
            new = sorted(numbers.keys() - self._series.keys())
            count = len(self._series) + len(new)
        if count > MAX_NAMES:
            raise UsageError(
                f"a worker may report {MAX_NAMES} values with different names, and {new[0]!r} is "
                "one too many; pass the step as `step`, not in the name"
            )
        self.add(numbers, step, samples)

    def add(
        self,
        values: Mapping[str, float],
        step: int | None = None,
        samples: int = 0,
    ) -> None:
        """Add a value to each of these series, and to no more than `MAX_NAMES` in all."""
        now = time.time()
        written = []
        with self._lock:
            if samples:
                values = {**values, **self._rate(samples, now)}
            for name, value in values.items():
                series = self._series.get(name)
                if series is None:
                    if len(self._series) >= MAX_NAMES:
                        continue
                    series = self._series[name] = _Series()
                place = series.count + 1 if step is None else step
                series.add((place, now, value))
                written.append((name, value, place))
        if self._directory is not None:
            self._write(written, now)

    def latest(self) -> dict[str, dict[str, Any]]:
        """Return the last value of each series as values of JSON. Not finite: None."""
        with self._lock:
            return {
                name: dict(zip(("step", "time", "value"), _json(series.last), strict=True))
                for name, series in self._series.items()
            }

    def series(self) -> dict[str, list[list[Any]]]:
        """Return the points of each series: step, time, value. A value that is not finite is None.

        At most `MAX_POINTS` of a series, and its last.
        """
        with self._lock:
            return {
                name: [_json(point) for point in series.points()]
                for name, series in self._series.items()
            }

    def close(self) -> None:
        """Close the file of TensorBoard."""
        with self._writer_lock:
            writer, self._writer, self._closed = self._writer, None, True
            if writer is not None:
                writer.close()

    def _rate(self, samples: int, now: float) -> dict[str, float]:
        """Count samples. Return the samples per second if enough time has passed."""
        if self._rate_since is None:  # it is unknown when the first ones began
            self._rate_since = now
            return {}
        self._samples += samples
        seconds = now - self._rate_since
        if seconds < _RATE_SECONDS:
            return {}
        rate = self._samples / seconds
        self._samples, self._rate_since = 0, now
        return {RATE: rate}

    def _write(self, values: list[tuple[str, float, int]], now: float) -> None:
        with self._writer_lock:
            if self._closed:
                return
            if self._writer is None:
                self._writer = self._open_writer()
            for name, value, step in values:
                self._writer.add_scalar(name, value, step, now)

    def _open_writer(self) -> Any:
        # it takes a second, and only this needs it
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        name = self._worker if not self._worker.startswith(".") else f"_{self._worker}"
        folder = Path(str(self._directory)) / name
        return tensorboard.SummaryWriter(str(folder), flush_secs=_FLUSH_SECONDS)


class _Series:
    """The values of one name: points at even distances, and the last."""

    __slots__ = ("_points", "_stride", "count", "last")

    def __init__(self) -> None:
        self.count = 0
        self.last = (0, 0.0, 0.0)
        self._points: list[tuple[int, float, float]] = []
        self._stride = 1

    def add(self, point: tuple[int, float, float]) -> None:
        self.last = point
        if self.count % self._stride == 0:
            self._points.append(point)
            if len(self._points) == MAX_POINTS:
                del self._points[1::2]
                self._stride *= 2
        self.count += 1

    def points(self) -> list[tuple[int, float, float]]:
        is_last = (self.count - 1) % self._stride == 0
        return [*self._points, *(() if is_last else (self.last,))]


def _json(point: tuple[int, float, float]) -> list[Any]:
    step, at, value = point
    return [step, at, value if math.isfinite(value) else None]


def _number(name: str, value: Any) -> float:
    try:
        # float() of a tensor that requires a gradient warns
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{name} is not a number: {error}") from None

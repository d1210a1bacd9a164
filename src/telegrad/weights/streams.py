"""Streams of parts: the deltas and snapshots that a worker passes on.

State: that of an `ArrivingStream` is changed under its `_lock`; futures are completed without it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from telegrad.cuda.flat_memory import DeviceHandle
from telegrad.errors import StaleReference
from telegrad.futures import Future
from telegrad.transport.flat_memory import SegmentHandle, SharedMemory
from telegrad.weights import deltas
from telegrad.weights.deltas import Part


class StreamInfo(NamedTuple):
    """A delta from version `base`, or a snapshot (None), as a reader sees it."""

    base: int | None
    version: int


class Stream(Protocol):
    """The parts of a delta or of a snapshot."""

    info: StreamInfo

    def get(self, index: int) -> Part | Future[Part | None] | None:
        """Return a part, None after the last one, or a future if it is not there yet."""


@dataclass(eq=False)
class Image:
    """Memory for one version."""

    contents: Tensor
    handle: SegmentHandle | DeviceHandle | None
    memory: SharedMemory | None
    written: Any = None  # the `torch.cuda.Event` after which it has its values
    version: int = -1
    readers: int = 0
    is_discarded: bool = False
    is_log: bool = False


class ArrivingStream:
    """Parts that become available one after the other, for any number of readers."""

    def __init__(self, info: StreamInfo) -> None:
        self.info = info
        self.nbytes = 0
        self._parts: list[Part] = []
        self._is_complete = False
        self._failure = ""  # why the rest will not arrive
        self._futures: dict[int, Future[Part | None]] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "complete" if self._is_complete else f"{len(self._parts)} parts so far"
        return f"<Stream {self.info.base} -> {self.info.version}, {self.nbytes} bytes, {state}>"

    def get(self, index: int) -> Part | Future[Part | None] | None:
        """Return a part, None after the last one, or a future if it is not there yet."""
        with self._lock:
            if index < len(self._parts):
                return self._parts[index]
            if self._failure:
                raise StaleReference(self._failure)
            if self._is_complete:
                return None
            # All readers that wait for a part get the same future: it is packed once for them.
            return self._futures.setdefault(index, Future())

    def append(self, part: Part) -> None:
        """Add the next part."""
        with self._lock:
            future = self._futures.pop(len(self._parts), None)
            self._parts.append(part)
            self.nbytes += part.nbytes
        if future is not None:
            future.set_result(part)

    def finish(self, failure: str = "") -> None:
        """Note that there are no more parts; with a reason: that the rest will not arrive."""
        with self._lock:
            self._is_complete, self._failure = not failure, failure
            futures = list(self._futures.values())
            self._futures.clear()
        for future in futures:
            if failure:
                future.set_exception(StaleReference(failure))
            else:
                future.set_result(None)


class SnapshotStream:
    """The parts of an image that is complete."""

    def __init__(self, image: Image) -> None:
        self.info = StreamInfo(None, image.version)
        self._image = image
        self._sections = deltas.snapshot_parts(image.contents)

    def get(self, index: int) -> Part | None:
        """Return a part, None after the last one."""
        if index >= len(self._sections):
            return None
        return deltas.snapshot_part(self._image.contents, self._sections[index])


class Pacer:
    """Spreads sent bytes over time."""

    def __init__(self, bandwidth: float | None) -> None:
        self._bandwidth = bandwidth  # bytes per second
        self._next = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> float:
        """Return when so many bytes may be sent, as a time of `time.monotonic`."""
        now = time.monotonic()
        if self._bandwidth is None:
            return now
        with self._lock:
            start = max(self._next, now)
            self._next = start + nbytes / self._bandwidth
            return start

    def give_back(self, nbytes: int) -> None:
        """Note that bytes which were reserved will not be sent."""
        if self._bandwidth is not None:
            with self._lock:
                self._next -= nbytes / self._bandwidth

"""`ChangeLog`: the changes from one version to the next, as workers of one host read them.

Workers whose models hold the older version write only what changed: a few percent of the bytes. A
log has runs, one for each block of the delta in which something changed: the positions of the
changed elements from the beginning of the block, their old values and their new ones. They are not
coded, so a reader writes them with one gather and one scatter. It compares the old values first:
they tell whether the model holds what it should.

A log is in memory of its own, which is shared like that of an image, and is given up if it becomes
larger than a share of the weights: then it is faster to copy all of them.

State of a `ChangeLog`: the thread that makes versions adds runs. `is_complete` and `waiters` are
changed under the lock of the store. After `finish`, the log does not change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from telegrad.cuda.flat_memory import DeviceHandle
from telegrad.transport.flat_memory import SegmentHandle
from telegrad.weights.deltas import Block, Section
from telegrad.weights.integers import Bytes, Integers, Positions
from telegrad.weights.streams import Image

_SHARE = 6  # a log has at most a sixth of the bytes of the weights
_ALIGNMENT = 8


def capacity_of(nbytes: int) -> int:
    """Return the bytes of the memory for a log of weights with `nbytes`."""
    return max(nbytes // _SHARE, 4096)


class LogInfo(NamedTuple):
    """Where a log is: its memory, the offset of its table of runs, and the number of these."""

    handle: SegmentHandle | DeviceHandle | None
    table: int
    runs: int


class Run(NamedTuple):
    """The changes of one block: a range of the image."""

    section: Section
    positions: npt.NDArray[np.uint32]
    old: Integers
    new: Integers


class ChangeLog:
    """The changes from version `base` to `version`, written into the memory of `image`."""

    def __init__(self, image: Image, base: int, version: int) -> None:
        self.image = image
        self.base = base
        self.version = version
        self.is_complete = False
        self.is_given_up = False
        self.waiters: list[Callable[[], None]] = []
        self.used = 0
        self._memory: Bytes = image.contents.numpy()
        self._runs: list[tuple[int, int, int, int, int]] = []

    def __repr__(self) -> str:
        state = "complete" if self.is_complete else "arriving"
        return f"<ChangeLog {self.base} -> {self.version}, {self.used} bytes, {state}>"

    def add_block(self, block: Block) -> None:
        """Add what was found by comparing a block of two images."""
        if not self.is_given_up and block.positions.size:
            self._reserve(block.positions.size, block.section.width)
        if not self.is_given_up and block.positions.size:
            self.add(block.section, block.positions, block.old.take(block.positions), block.values)

    def add(self, section: Section, positions: Positions, old: Integers, new: Integers) -> None:
        """Add the old and new values of elements at ascending positions of a section."""
        if not positions.size or not self._reserve(positions.size, section.width):
            return
        self._runs.append((section.start, section.stop, section.width, positions.size, self.used))
        for values in (positions.astype(np.uint32), old, new):
            data = values.view(np.uint8)
            self._memory[self.used : self.used + data.size] = data
            self.used += _aligned(data.size)

    def add_all(self, section: Section, old: Integers, new: Integers) -> None:
        """Add a section of which all values are given."""
        if not self.is_given_up:
            positions = np.flatnonzero(old != new)
            self.add(section, positions, old.take(positions), new.take(positions))

    def give_up(self) -> None:
        """Note that readers have to copy everything."""
        self.is_given_up = True

    def finish(self) -> None:
        """Write the table of runs."""
        table = np.array(self._runs, np.int64).reshape(-1, 5).reshape(-1).view(np.uint8)
        if self.used + table.size > self._memory.size:
            self.give_up()
        if not self.is_given_up:
            self._memory[self.used : self.used + table.size] = table

    @property
    def info(self) -> LogInfo:
        """What a reader needs to read a complete log."""
        return LogInfo(self.image.handle, self.used, len(self._runs))

    def _reserve(self, count: int, width: int) -> bool:
        """Give up if so many changes of elements of this width do not fit."""
        nbytes = _aligned(4 * count) + 2 * _aligned(width * count)
        if self.used + nbytes > self._memory.size:
            self.give_up()
        return not self.is_given_up


class Changes:
    """What leads from a version that a reader has to the one that it reads."""

    def __init__(self, logs: Sequence[tuple[Tensor, LogInfo]]) -> None:
        self._logs = [(memory.numpy(), info) for memory, info in logs]

    def runs(self) -> Iterator[Run]:
        """Return all runs in order. An element may be in several: of different versions."""
        for memory, info in self._logs:
            table = memory[info.table :][: 40 * info.runs].view(np.int64).reshape(-1, 5)
            for start, stop, width, count, place in table.tolist():
                columns = []
                for size in (4, width, width):
                    columns.append(memory[place : place + size * count].view(f"<u{size}"))
                    place += _aligned(size * count)
                yield Run(Section(start, stop, width), *columns)


class Target(NamedTuple):
    """The elements of a tensor to write, and where they begin in the image."""

    offset: int
    elements: Bytes

    @property
    def end(self) -> int:
        return self.offset + self.elements.size


def write_changes(changes: Changes, targets: Sequence[Target]) -> bool:
    """Write changes into tensors. Return False if one of them does not hold the old values.

    Then some are written, and some not.
    """
    targets = sorted(targets, key=lambda each: each.offset)
    ends = [each.end for each in targets]
    for run in changes.runs():
        for index in range(bisect_right(ends, run.section.start), len(targets)):
            target = targets[index]
            if target.offset >= run.section.stop:
                break
            if not _write(run, target):
                return False
    return True


def _write(run: Run, target: Target) -> bool:
    """Write the part of a run that is in one tensor."""
    (start, stop, width), positions, old, new = run
    if target.offset > start or target.end < stop:
        first = max(0, target.offset - start) // width
        bounds = first, (min(target.end, stop) - start) // width
        here = slice(*np.searchsorted(positions, np.array(bounds, np.uint32)).tolist())
        positions, old, new = positions[here], old[here], new[here]
    if not positions.size:
        return True
    shift = (start - target.offset) // width
    places = positions if not shift else positions + np.int64(shift)
    elements = target.elements.view(f"<u{width}")
    if not np.array_equal(elements.take(places), old):
        return False
    elements[places] = new
    return True


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

"""Where each parameter lies in one flat piece of memory, and how that is divided among servers.

Parameters lie in *runs*: those of one group and one dtype follow each other, each at a multiple of 64 bytes. What is
between them is zero and stays zero. Servers get consecutive ranges of equal size. An optimizer that works element by
element does not care where a range begins, so a parameter may be divided; for others, ranges begin with a parameter.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ALIGNMENT = 64  # a multiple of the size of every element


@dataclass(frozen=True)
class ParameterSlot:
    """Where one parameter lies."""

    number: int
    name: str
    group: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return -(-(self.offset + self.nbytes) // ALIGNMENT) * ALIGNMENT

    def of(self, flat: Tensor) -> Tensor:
        """The parameter inside flat memory, which are bytes."""
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class ParameterPart:
    """Elements `first` up to `last` of a parameter, which lie at `offset` of the range of a server."""

    slot: ParameterSlot
    first: int
    last: int
    offset: int

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * self.slot.dtype.itemsize

    @property
    def is_whole(self) -> bool:
        return self.last - self.first == math.prod(self.slot.shape)

    @property
    def label(self) -> str:
        return self.slot.name if self.is_whole else f"{self.slot.name}[{self.first}:{self.last}]"

    def within(self, run: DtypeRun) -> slice:
        """Return where these elements are among those of the run that they belong to."""
        start = (self.offset - run.offset) // run.dtype.itemsize
        return slice(start, start + self.last - self.first)

    def of(self, flat: Tensor) -> Tensor:
        """These elements inside the memory of the server."""
        return flat[self.offset : self.offset + self.nbytes].view(self.slot.dtype)


@dataclass(frozen=True)
class DtypeRun:
    """Elements of one group and dtype that follow each other in the range of a server."""

    group: int
    dtype: torch.dtype
    offset: int
    nbytes: int
    parts: tuple[ParameterPart, ...]

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype)


@dataclass(frozen=True)
class ServerRange:
    """The range of one server."""

    start: int
    stop: int
    runs: tuple[DtypeRun, ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @cached_property
    def parts(self) -> list[ParameterPart]:
        return [part for run in self.runs for part in run.parts]


class ParameterLayout:
    """The places of all parameters of a model, which come in groups.

    >>> layout = ParameterLayout.of([[(0, "weight", torch.zeros(10, 10)), (1, "bias", torch.zeros(10))]])
    >>> [(slot.name, slot.offset) for slot in layout.slots], layout.nbytes
    ([('weight', 0), ('bias', 448)], 512)
    >>> [(share.start, share.stop, len(share.parts)) for share in layout.divide(2)]
    [(0, 256, 1), (256, 512, 2)]
    """

    def __init__(self, slots: Sequence[ParameterSlot]) -> None:
        self.slots = tuple(slots)
        self.nbytes = slots[-1].end if slots else 0

    @classmethod
    def of(cls, groups: Iterable[Iterable[tuple[int, str, Tensor]]]) -> ParameterLayout:
        """Of the parameters of each group: their numbers, their names, and themselves."""
        known = [(group, *entry) for group, entries in enumerate(groups) for entry in entries]
        slots: list[ParameterSlot] = []
        for group, number, name, each in sorted(
            known, key=lambda entry: (entry[0], str(entry[3].dtype))
        ):
            offset = slots[-1].end if slots else 0
            slots.append(ParameterSlot(number, name, group, each.dtype, tuple(each.shape), offset))
        return cls(slots)

    def divide(self, count: int, whole: bool = False) -> list[ServerRange]:
        """A range for each of `count` servers; `whole` keeps parameters in one piece. Some may be empty."""
        cuts = [self._cut(self.nbytes * number // count, whole) for number in range(count + 1)]
        return [
            ServerRange(start, stop, tuple(self._runs(start, stop)))
            for start, stop in itertools.pairwise(cuts)
        ]

    def _cut(self, offset: int, whole: bool) -> int:
        if not whole:
            return offset // ALIGNMENT * ALIGNMENT
        places = [*(slot.offset for slot in self.slots), self.nbytes]
        after = bisect.bisect_left(places, offset)
        return min(places[max(after - 1, 0) : after + 1], key=lambda place: abs(place - offset))

    def _runs(self, start: int, stop: int) -> Iterable[DtypeRun]:
        inside = [slot for slot in self.slots if slot.offset < stop and slot.end > start]
        for (group, dtype), slots in itertools.groupby(
            inside, key=lambda slot: (slot.group, slot.dtype)
        ):
            together = list(slots)
            first, last = max(together[0].offset, start), min(together[-1].end, stop)
            parts = [_clip(slot, start, stop) for slot in together]
            yield DtypeRun(
                group,
                dtype,
                first - start,
                last - first,
                tuple(part for part in parts if part.nbytes),
            )


def _clip(slot: ParameterSlot, start: int, stop: int) -> ParameterPart:
    first = max(slot.offset, start)
    last = max(min(slot.offset + slot.nbytes, stop), first)
    size = slot.dtype.itemsize
    return ParameterPart(
        slot, (first - slot.offset) // size, (last - slot.offset) // size, first - start
    )

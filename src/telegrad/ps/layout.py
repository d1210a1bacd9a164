"""The layout of a model's parameters in one flat memory, and how it is divided among servers.

Parameters of the same group and dtype are adjacent: they form a *dtype range*. Each parameter
starts at a multiple of 64 bytes; the padding between parameters is zero and stays zero. Servers get
consecutive ranges of equal size. An optimizer that works element by element does not care where a
range begins, so a parameter may be divided between servers. For other optimizers, every range
begins with a parameter.
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

ALIGNMENT = 64  # a multiple of the size of every dtype


@dataclass(frozen=True)
class ParameterSlot:
    """The place of one parameter in the flat memory."""

    index: int  # among the parameters of all groups of the optimizer
    name: str
    group: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The offset at which the next parameter may start."""
        return -(-(self.offset + self.nbytes) // ALIGNMENT) * ALIGNMENT

    def of(self, flat: Tensor) -> Tensor:
        """Return the parameter as a view of flat memory."""
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class ParameterPart:
    """Elements `first` to `last` (exclusive) of a parameter, at `offset` of a server's range."""

    slot: ParameterSlot
    first: int
    last: int
    offset: int

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * self.slot.dtype.itemsize

    @cached_property
    def is_whole(self) -> bool:
        return self.last - self.first == math.prod(self.slot.shape)

    @property
    def label(self) -> str:
        return self.slot.name if self.is_whole else f"{self.slot.name}[{self.first}:{self.last}]"

    def slice_in(self, dtype_range: DtypeRange) -> slice:
        """Return the position of these elements in the dtype range that they belong to."""
        start = (self.offset - dtype_range.offset) // dtype_range.dtype.itemsize
        return slice(start, start + self.last - self.first)

    def of(self, flat: Tensor) -> Tensor:
        """Return these elements as a view of the memory of a server's range."""
        return flat[self.offset : self.offset + self.nbytes].view(self.slot.dtype)


@dataclass(frozen=True)
class DtypeRange:
    """Adjacent elements of one group and dtype in a server's range."""

    group: int
    dtype: torch.dtype
    offset: int
    nbytes: int
    parts: tuple[ParameterPart, ...]

    def of(self, flat: Tensor) -> Tensor:
        """Return the elements as a view of the memory of a server's range."""
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype)


@dataclass(frozen=True)
class ServerRange:
    """The range of the flat memory that one server holds."""

    start: int
    stop: int
    dtype_ranges: tuple[DtypeRange, ...]

    @cached_property
    def nbytes(self) -> int:
        return self.stop - self.start

    @cached_property
    def parts(self) -> list[ParameterPart]:
        return [part for dtype_range in self.dtype_ranges for part in dtype_range.parts]


class ParameterLayout:
    """The slots of all parameters of a model.

    >>> group = [(0, "weight", torch.zeros(10, 10)), (1, "bias", torch.zeros(10))]
    >>> layout = ParameterLayout.of([group])
    >>> [(slot.name, slot.offset) for slot in layout.slots], layout.nbytes
    ([('weight', 0), ('bias', 448)], 512)
    >>> [(each.start, each.stop, len(each.parts)) for each in layout.divide(2)]
    [(0, 256, 1), (256, 512, 2)]
    """

    def __init__(self, slots: Sequence[ParameterSlot]) -> None:
        self.slots = tuple(slots)
        self.nbytes = slots[-1].end if slots else 0

    @classmethod
    def of(cls, groups: Iterable[Iterable[tuple[int, str, Tensor]]]) -> ParameterLayout:
        """Return the layout of parameter groups: index, name and tensor of each parameter."""
        entries = [
            (group, index, name, parameter)
            for group, parameters in enumerate(groups)
            for index, name, parameter in parameters
        ]
        entries.sort(key=lambda entry: (entry[0], str(entry[3].dtype)))
        slots: list[ParameterSlot] = []
        for group, index, name, parameter in entries:
            offset = slots[-1].end if slots else 0
            shape = tuple(parameter.shape)
            slots.append(ParameterSlot(index, name, group, parameter.dtype, shape, offset))
        return cls(slots)

    def divide(self, count: int, whole: bool = False) -> list[ServerRange]:
        """Return a range for each of `count` servers. Some may be empty.

        `whole` does not divide parameters.
        """
        boundaries = [self._boundary(self.nbytes * i // count, whole) for i in range(count + 1)]
        return [
            ServerRange(start, stop, tuple(self._dtype_ranges(start, stop)))
            for start, stop in itertools.pairwise(boundaries)
        ]

    def _boundary(self, offset: int, whole: bool) -> int:
        """Return an offset near `offset` at which a range may begin."""
        if not whole:
            return offset // ALIGNMENT * ALIGNMENT
        starts = [*(slot.offset for slot in self.slots), self.nbytes]
        after = bisect.bisect_left(starts, offset)
        nearest = starts[max(after - 1, 0) : after + 1]
        return min(nearest, key=lambda start: abs(start - offset))

    def _dtype_ranges(self, start: int, stop: int) -> Iterable[DtypeRange]:
        """Yield the dtype ranges between two offsets."""
        inside = [slot for slot in self.slots if slot.offset < stop and slot.end > start]
        for (group, dtype), adjacent in itertools.groupby(
            inside, key=lambda slot: (slot.group, slot.dtype)
        ):
            slots = list(adjacent)
            first, last = max(slots[0].offset, start), min(slots[-1].end, stop)
            clipped = [_clip(slot, start, stop) for slot in slots]
            # a slot whose padding alone is inside has no elements here
            parts = tuple(part for part in clipped if part.nbytes)
            yield DtypeRange(group, dtype, first - start, last - first, parts)


def _clip(slot: ParameterSlot, start: int, stop: int) -> ParameterPart:
    """Return the elements of a parameter between two offsets."""
    first = max(slot.offset, start)
    last = max(min(slot.offset + slot.nbytes, stop), first)
    itemsize = slot.dtype.itemsize
    first_element, last_element = (
        (first - slot.offset) // itemsize,
        (last - slot.offset) // itemsize,
    )
    return ParameterPart(slot, first_element, last_element, first - start)

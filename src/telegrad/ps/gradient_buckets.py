"""Buckets: pieces of a server's range of gradients that are sent separately.

Trainers and servers compute the same buckets from the same range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from telegrad.ps.layout import ServerRange

# bytes: large enough to fill a fast network, small enough that most leave before backward ends
_SIZE = 4 << 20


class GradientBucket(NamedTuple):
    """Elements `first` up to `last` of a run, and the numbers of the parameters that they belong to."""

    number: int
    run: int
    first: int
    last: int
    slots: frozenset[int]

    def of(self, runs: Sequence[Tensor]) -> Tensor:
        return runs[self.run][self.first : self.last]


def divide_into_buckets(share: ServerRange) -> list[GradientBucket]:
    """The buckets of a range. Trainers and servers find the same."""
    found: list[GradientBucket] = []
    for number, run in enumerate(share.runs):
        size = run.dtype.itemsize
        for start in range(run.offset, run.offset + run.nbytes, _SIZE):
            stop = min(start + _SIZE, run.offset + run.nbytes)
            slots = [
                part.slot.number
                for part in run.parts
                if part.offset < stop and part.offset + part.nbytes > start
            ]
            first, last = (start - run.offset) // size, (stop - run.offset) // size
            found.append(GradientBucket(len(found), number, first, last, frozenset(slots)))
    return found

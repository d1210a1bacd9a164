"""Buckets: consecutive elements of a server's gradients that are sent as one message.

Trainers and servers compute the same buckets from the same range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from telegrad.ps.layout import ServerRange

# bytes: large enough for a fast network, small enough that most are sent before backward ends
_SIZE = 4 << 20


class GradientBucket(NamedTuple):
    """Elements `first` to `last` (exclusive) of one of the dtype ranges of a server's range."""

    bucket_index: int
    dtype_range: int  # its index in the server's range
    first: int
    last: int
    parameters: frozenset[int]  # indices of the parameters that the elements belong to

    def of(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the elements of this bucket, given one tensor for each dtype range."""
        return gradients[self.dtype_range][self.first : self.last]


def divide_into_buckets(server_range: ServerRange) -> list[GradientBucket]:
    """Return the buckets of a server's range."""
    buckets: list[GradientBucket] = []
    for index, dtype_range in enumerate(server_range.dtype_ranges):
        itemsize = dtype_range.dtype.itemsize
        end = dtype_range.offset + dtype_range.nbytes
        for start in range(dtype_range.offset, end, _SIZE):
            stop = min(start + _SIZE, end)
            parameters = frozenset(
                part.slot.index
                for part in dtype_range.parts
                if part.offset < stop and part.offset + part.nbytes > start
            )
            first = (start - dtype_range.offset) // itemsize
            last = (stop - dtype_range.offset) // itemsize
            buckets.append(GradientBucket(len(buckets), index, first, last, parameters))
    return buckets

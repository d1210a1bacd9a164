"""Two-dimensional arrays that grow without being copied.

The address space for all rows is reserved at the start; the system allocates pages when they are
first written. If the reservation fails, or there are more rows than reserved, the array is copied
to memory of twice the size.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

# bytes; the address space of a process is several hundred times as large
_MAXIMUM_RESERVATION = 1 << 38
_MINIMUM_ROWS = 1024
# Linux's value, for versions of Python that do not define it
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def reserve_rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Reserve address space for up to `count` rows, possibly for fewer or none."""
    row_nbytes = width * dtype.itemsize
    nbytes = min(count * row_nbytes, _MAXIMUM_RESERVATION)
    with contextlib.suppress(OSError):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
        count = nbytes // row_nbytes
        return flat[: count * row_nbytes].view(dtype).view(count, width)
    return torch.empty(0, width, dtype=dtype)


def grow_rows(rows: Tensor, count: int) -> Tensor:
    """Return an array with the same contents and at least `count` rows.

    >>> rows = reserve_rows(3, 2, torch.float32)
    >>> rows.shape, grow_rows(rows, 3) is rows, grow_rows(rows, 4).shape
    (torch.Size([3, 2]), True, torch.Size([1024, 2]))
    """
    capacity = len(rows)
    if count <= capacity:
        return rows
    larger = rows.new_empty(max(count, 2 * capacity, _MINIMUM_ROWS), rows.shape[1])
    larger[:capacity] = rows
    return larger

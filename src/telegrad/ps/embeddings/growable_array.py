"""Memory for many lines of numbers that grows without being copied: addresses are reserved, pages come when used.

Where the system does not give so many addresses, or there are more lines than were reserved for, memory doubles.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

# bytes to reserve; of the addresses of a process, several hundred times as many can be used
_MOST = 1 << 38
_AT_LEAST = 1024  # lines
# Linux's number, for versions of Python that do not name it
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def reserve_rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Lines for up to `count`, of which none has a page of memory yet; maybe fewer, maybe none."""
    nbytes = min(count * width * dtype.itemsize, _MOST)
    with contextlib.suppress(OSError):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
        count = nbytes // (width * dtype.itemsize)
        return flat[: count * width * dtype.itemsize].view(dtype).view(count, width)
    return torch.empty(0, width, dtype=dtype)


def grow_rows(lines: Tensor, count: int) -> Tensor:
    """The same lines, and room for at least `count` of them.

    >>> lines = reserve_rows(3, 2, torch.float32)
    >>> lines.shape, grow_rows(lines, 3) is lines, grow_rows(lines, 4).shape
    (torch.Size([3, 2]), True, torch.Size([1024, 2]))
    """
    have = len(lines)
    if count <= have:
        return lines
    larger = lines.new_empty(max(count, 2 * have, _AT_LEAST), lines.shape[1])
    larger[:have] = lines
    return larger

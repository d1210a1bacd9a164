"""Warm memory for large buffers that arrive through a socket.

Fresh memory costs a page fault every 4 KB, which is slower than the copy itself. The pool keeps arrays that were used
before and hands one out again once nothing but the pool refers to it: the tensor on it keeps a reference to the array.

State: `_kept`, by size, under `_lock`. An array is free exactly when its reference count says that only the pool has
it.
"""

from __future__ import annotations

import sys
import threading

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def _count_when_idle() -> int:
    """What `getrefcount` says of an array that only a list and a loop over it hold; Python 3.14 counts one less."""
    for array in [np.empty(0, np.uint8)]:
        return sys.getrefcount(array)
    raise AssertionError


_ONLY_THE_POOL = _count_when_idle()


class Pool:
    """Reusable byte arrays of at least `floor` bytes, `limit` bytes in all."""

    def __init__(self, floor: int = 1 << 18, limit: int = 1 << 29) -> None:
        self._floor = floor
        self._limit = limit
        self._kept: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"<Pool {self.nbytes} of {self._limit} bytes kept>"

    def reserve(self, nbytes: int) -> memoryview:
        """Writable memory that belongs to the caller until the last reference to it is gone."""
        if nbytes < self._floor:
            return memoryview(np.empty(nbytes, np.uint8))
        with self._lock:
            for array in self._kept.get(nbytes, ()):
                if sys.getrefcount(array) == _ONLY_THE_POOL:
                    return memoryview(array)
            array = np.empty(nbytes, np.uint8)
            self._keep(array)
        return memoryview(array)

    def _keep(self, array: Bytes) -> None:
        if array.nbytes > self._limit:
            return
        while self.nbytes + array.nbytes > self._limit:
            self._forget_one()
        self._kept.setdefault(array.nbytes, []).append(array)
        self.nbytes += array.nbytes

    def _forget_one(self) -> None:
        size = next(iter(self._kept))
        arrays = self._kept[size]
        self.nbytes -= arrays.pop().nbytes
        if not arrays:
            del self._kept[size]

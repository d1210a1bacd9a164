"""A pool of memory for large buffers that are received through a socket.

Writing to newly allocated memory costs a page fault every 4 KB, which is slower than the copy
itself. The pool keeps memory that has been used and lends it again when it is no longer used.
Each time, it makes a new array over the memory. The received tensor keeps this array alive, and the
pool refers to it weakly.

State: `_buffers` by size, and `nbytes`, both under `_lock`. Memory is free exactly when the last
array made over it is dead. The pool does not look at reference counts: in a free-threaded Python, a
count may be too low while a reference passes from one thread to another.
"""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt

from telegrad.locks import new_lock

Bytes = npt.NDArray[np.uint8]


class _PooledBuffer:
    """Memory of the pool, and the array that was last made over it."""

    __slots__ = ("_bytes", "_lent", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self._bytes: Bytes = np.empty(nbytes, np.uint8)
        self._lent: weakref.ref[Bytes] | None = None
        self.nbytes = nbytes

    def is_free(self) -> bool:
        return self._lent is None or self._lent() is None

    def lend(self) -> memoryview:
        # Made over a memoryview: the slices of an array over an array refer to the inner array,
        # and would not keep the outer one alive.
        array: Bytes = np.frombuffer(memoryview(self._bytes), np.uint8)
        self._lent = weakref.ref(array)
        return memoryview(array)


class BufferPool:
    """Reusable buffers of at least `min_bytes`, with at most `max_bytes` in total."""

    def __init__(self, min_bytes: int = 1 << 18, max_bytes: int = 1 << 29) -> None:
        self._min_bytes = min_bytes
        self._max_bytes = max_bytes
        self._buffers: dict[int, list[_PooledBuffer]] = {}
        self._lock = new_lock()
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"<BufferPool {self.nbytes} of {self._max_bytes} bytes kept>"

    def reserve(self, nbytes: int) -> memoryview:
        """Return writable memory. It belongs to the caller until the last reference is gone."""
        if nbytes < self._min_bytes:
            return memoryview(np.empty(nbytes, np.uint8))
        with self._lock:
            for buffer in self._buffers.get(nbytes, ()):
                if buffer.is_free():
                    return buffer.lend()
            buffer = _PooledBuffer(nbytes)
            self._add(buffer)
            return buffer.lend()

    def _add(self, buffer: _PooledBuffer) -> None:
        if buffer.nbytes > self._max_bytes:
            return
        while self.nbytes + buffer.nbytes > self._max_bytes:
            self._remove_one()
        self._buffers.setdefault(buffer.nbytes, []).append(buffer)
        self.nbytes += buffer.nbytes

    def _remove_one(self) -> None:
        """Remove a buffer of the size that was added first. If it is lent, its user keeps it."""
        size = next(iter(self._buffers))
        buffers = self._buffers[size]
        self.nbytes -= buffers.pop().nbytes
        if not buffers:
            del self._buffers[size]

"""Warm memory for large buffers that arrive through a socket.

Fresh memory costs a page fault every 4 KB, which is slower than the copy itself. The pool keeps memory that was used
before and hands it out again when nobody uses it any more. Each time it hands out a new array over the memory; the
tensor on the memory keeps that array alive, and the pool refers to it weakly.

State: `_kept`, by size, under `_lock`. Memory is free exactly when its last array is dead. Reference counts are not
asked: in a free-threaded Python, a count may be too low while a reference passes from one thread to another.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class _PooledBuffer:
    """Memory that the pool keeps, and the array that was last handed out over it."""

    __slots__ = ("_bytes", "_user", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self._bytes: Bytes = np.empty(nbytes, np.uint8)
        self._user: weakref.ref[Bytes] | None = None
        self.nbytes = nbytes

    def is_free(self) -> bool:
        return self._user is None or self._user() is None

    def hand_out(self) -> memoryview:
        # Over a memoryview: an array over an array passes the original on to its slices, and is not kept by them.
        array: Bytes = np.frombuffer(memoryview(self._bytes), np.uint8)
        self._user = weakref.ref(array)
        return memoryview(array)


class BufferPool:
    """Reusable byte arrays of at least `floor` bytes, `limit` bytes in all."""

    def __init__(self, floor: int = 1 << 18, limit: int = 1 << 29) -> None:
        self._floor = floor
        self._limit = limit
        self._kept: dict[int, list[_PooledBuffer]] = {}
        self._lock = threading.Lock()
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"<BufferPool {self.nbytes} of {self._limit} bytes kept>"

    def reserve(self, nbytes: int) -> memoryview:
        """Writable memory that belongs to the caller until the last reference to it is gone."""
        if nbytes < self._floor:
            return memoryview(np.empty(nbytes, np.uint8))
        with self._lock:
            for memory in self._kept.get(nbytes, ()):
                if memory.is_free():
                    return memory.hand_out()
            memory = _PooledBuffer(nbytes)
            self._keep(memory)
            return memory.hand_out()

    def _keep(self, memory: _PooledBuffer) -> None:
        if memory.nbytes > self._limit:
            return
        while self.nbytes + memory.nbytes > self._limit:
            self._forget_one()
        self._kept.setdefault(memory.nbytes, []).append(memory)
        self.nbytes += memory.nbytes

    def _forget_one(self) -> None:
        size = next(iter(self._kept))
        kept = self._kept[size]
        self.nbytes -= kept.pop().nbytes
        if not kept:
            del self._kept[size]

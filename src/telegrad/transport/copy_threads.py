"""Copies of large buffers on several cores."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

_BYTES_PER_THREAD = 4 << 20  # bytes that are worth a thread of their own in a copy
_MAX_THREADS = 8


def copy_buffer(target: npt.NDArray[np.uint8], source: memoryview) -> None:
    """Copy a buffer, a large one in parts on several cores.

    Not with torch's own threads: after each piece of work they spin for a while, on the cores that the peer needs now.
    """
    array = np.frombuffer(source, np.uint8)
    parts = min(array.nbytes // _BYTES_PER_THREAD, _copy_threads.count)
    if parts < 2:
        np.copyto(target, array)
        return
    step = -(-array.nbytes // parts)
    others = [
        _copy_threads.pool().submit(
            np.copyto, target[start : start + step], array[start : start + step]
        )
        for start in range(step, array.nbytes, step)
    ]
    np.copyto(target[:step], array[:step])
    for other in others:
        other.result()


class _CopyThreads:
    """Threads that copy, made when they are first needed; a forked child makes its own."""

    def __init__(self) -> None:
        self.count = min(len(os.sched_getaffinity(0)) // 2, _MAX_THREADS)
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(self.count, "copier"), os.getpid()
        return self._pool


_copy_threads = _CopyThreads()

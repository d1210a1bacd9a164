"""Copy large buffers on several cores.

Not with torch's threads: after each operation they spin for a while, on cores that the receiver
needs now.

State: the thread pool of the process, created when it is first used. A forked child creates its
own.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

_BYTES_PER_THREAD = 4 << 20  # the least that is worth another thread
_MAX_THREADS = 8


def copy_buffer(target: npt.NDArray[np.uint8], source: memoryview) -> None:
    """Copy `source` to `target`, in parallel if it is large."""
    array = np.frombuffer(source, np.uint8)
    parts = min(array.nbytes // _BYTES_PER_THREAD, _copy_threads.count)
    if parts < 2:
        np.copyto(target, array)
        return
    step = -(-array.nbytes // parts)
    pool = _copy_threads.pool()
    copies = [
        pool.submit(np.copyto, target[start : start + step], array[start : start + step])
        for start in range(step, array.nbytes, step)
    ]
    np.copyto(target[:step], array[:step])  # the first part by this thread
    for copy in copies:
        copy.result()


class _CopyThreads:
    """The threads of this process that copy."""

    def __init__(self) -> None:
        self.count = min(len(os.sched_getaffinity(0)) // 2, _MAX_THREADS)
        self._pool: ThreadPoolExecutor | None = None
        self._process_id = 0

    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process_id != os.getpid():
            self._pool = ThreadPoolExecutor(self.count, "copier")
            self._process_id = os.getpid()
        return self._pool


_copy_threads = _CopyThreads()

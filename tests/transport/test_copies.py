"""Large buffers are copied by several threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from telegrad.transport import shared_memory


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[shared_memory._CopyThreads]:
    """Copy with three threads, on a machine with any number of cores."""
    made = shared_memory._CopyThreads()
    made.count = 3
    monkeypatch.setattr(shared_memory, "_copy_threads", made)
    yield made
    if made._pool is not None:
        made._pool.shutdown()


@pytest.mark.parametrize("extra", [-1, 0, 1, 12345])
def test_every_byte_is_copied(threads: shared_memory._CopyThreads, extra: int) -> None:
    size = 3 * shared_memory._BYTES_PER_THREAD + extra
    source = np.arange(size // 8 + 1, dtype=np.int64).view(np.uint8)[:size]
    target = np.zeros(size, np.uint8)
    shared_memory.copy_buffer(target, memoryview(source))
    assert np.array_equal(source, target)
    assert threads._pool is not None


def test_small_buffers_need_no_thread(threads: shared_memory._CopyThreads) -> None:
    source = np.arange(1000, dtype=np.uint8)
    target = np.zeros(1000, np.uint8)
    shared_memory.copy_buffer(target, memoryview(source))
    assert np.array_equal(source, target)
    assert threads._pool is None


def test_the_threads_are_those_of_this_process(threads: shared_memory._CopyThreads) -> None:
    first = threads.pool()
    assert threads.pool() is first
    threads._process_id -= 1  # as in a forked child, which has the object and no threads
    second = threads.pool()
    assert second is not first
    assert second.submit(abs, -1).result() == 1
    first.shutdown()

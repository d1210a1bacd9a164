"""The pool hands memory out again only when nobody can see it any more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from telegrad.transport.buffer_pool import BufferPool
from telegrad.wire import codec

FLOOR = 1000


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(min_bytes=FLOOR, max_bytes=10 * FLOOR)


def test_memory_is_writable_and_of_the_size_that_was_asked_for(pool: BufferPool) -> None:
    for size in (0, 1, FLOOR - 1, FLOOR, 11 * FLOOR):
        memory = pool.reserve(size)
        assert (memory.nbytes, memory.readonly, memory.format, memory.ndim) == (size, False, "B", 1)
        memory[:] = bytes(size)


def test_memory_that_nobody_holds_is_used_again(pool: BufferPool) -> None:
    first = address(pool.reserve(FLOOR))
    assert address(pool.reserve(FLOOR)) == first
    assert pool.nbytes == FLOOR


def test_memory_that_somebody_holds_is_not_used_again(pool: BufferPool) -> None:
    held = [pool.reserve(FLOOR) for _ in range(5)]
    assert len({address(memory) for memory in held}) == 5
    del held[2]
    again = pool.reserve(FLOOR)
    assert address(again) not in {address(memory) for memory in held}
    assert pool.nbytes == 5 * FLOOR


def test_a_slice_holds_the_memory(pool: BufferPool) -> None:
    whole = pool.reserve(FLOOR)
    start, part = address(whole), whole[10:20]
    del whole
    assert address(pool.reserve(FLOOR)) != start
    del part
    assert address(pool.reserve(FLOOR)) == start


@pytest.mark.parametrize("kind", ["tensor", "view", "numpy", "slice of the array", "storage"])
def test_whatever_sits_on_the_memory_holds_it(pool: BufferPool, kind: str) -> None:
    memory = pool.reserve(4 * FLOOR)
    start = address(memory)
    tensor = torch.frombuffer(memory, dtype=torch.float32)
    array = memory.obj
    assert isinstance(array, np.ndarray)
    part = array[5:]
    del memory, array
    holder: object = {
        "tensor": tensor,
        "view": tensor.view(10, -1)[3:5].t(),
        "numpy": tensor.numpy()[5:],
        "slice of the array": part,
        "storage": tensor.untyped_storage(),
    }[kind]
    del tensor, part
    assert address(pool.reserve(4 * FLOOR)) != start
    del holder
    assert address(pool.reserve(4 * FLOOR)) == start


def test_a_decoded_tensor_holds_its_memory_until_it_dies() -> None:
    pool = BufferPool(FLOOR, max_bytes=1 << 20)
    body, [buffer] = codec.encode(torch.arange(codec.OUT_OF_BAND))
    memory = pool.reserve(buffer.nbytes)
    memory[:] = buffer
    start = address(memory)
    received = codec.decode(body, [memory])
    del memory
    other = pool.reserve(buffer.nbytes)
    other[:] = bytes(buffer.nbytes)
    assert torch.equal(received, torch.arange(codec.OUT_OF_BAND))
    del received
    assert address(pool.reserve(buffer.nbytes)) == start


def test_only_memory_of_the_same_size_is_used_again(pool: BufferPool) -> None:
    first = np.frombuffer(pool.reserve(FLOOR), np.uint8)
    pool.reserve(FLOOR + 1)
    del first
    assert pool.reserve(FLOOR + 1).nbytes == FLOOR + 1


def test_small_memory_is_not_kept(pool: BufferPool) -> None:
    pool.reserve(FLOOR - 1)
    assert pool.nbytes == 0


def test_memory_beyond_the_limit_is_not_kept(pool: BufferPool) -> None:
    pool.reserve(10 * FLOOR + 1)
    assert pool.nbytes == 0
    pool.reserve(10 * FLOOR)
    assert pool.nbytes == 10 * FLOOR


def test_old_memory_makes_room_for_new(pool: BufferPool) -> None:
    for size in range(FLOOR, 10 * FLOOR, 500):
        pool.reserve(size)
        assert pool.nbytes <= 10 * FLOOR
    last = address(pool.reserve(size))
    assert address(pool.reserve(size)) == last


def test_memory_that_the_pool_forgot_stays_valid(pool: BufferPool) -> None:
    held = pool.reserve(6 * FLOOR)
    held[:] = b"x" * (6 * FLOOR)
    pool.reserve(7 * FLOOR)[:] = bytes(7 * FLOOR)
    pool.reserve(6 * FLOOR)[:] = bytes(6 * FLOOR)
    assert held.tobytes() == b"x" * (6 * FLOOR)


def test_the_repr_says_how_much_is_kept(pool: BufferPool) -> None:
    pool.reserve(FLOOR)
    assert repr(pool) == f"<BufferPool {FLOOR} of {10 * FLOOR} bytes kept>"

"""What must hold where Python runs threads in parallel.

With the interpreter lock these tests pass as well.
"""

from __future__ import annotations

import collections
import contextvars
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import telegrad
from telegrad import thread_roles
from telegrad.autograd import hooks
from telegrad.autograd.send_recv import is_shared_node
from telegrad.free_threading import AtomicCounter, CounterTable, has_gil, snapshot
from telegrad.scheduling.executor import ThreadPool
from telegrad.transport.buffer_pool import BufferPool
from tests.conftest import Clusters
from tests.local.gates import PATIENCE

THREADS = 4
inherited: contextvars.ContextVar[str | None] = contextvars.ContextVar("inherited", default=None)
SERVES = """
import sys
import torch
import telegrad, telegrad.autograd, telegrad.optim, telegrad.ps, telegrad.rpc
from telegrad.testing import LocalCluster

with LocalCluster(3, transports=("unix",)) as workers:
    for name in ("w1", "w2"):
        assert workers[name].call("w0", torch.add, torch.ones(1 << 17), 1).sum() == 1 << 18
        assert workers[name].submit("w0", abs, -1).wait() == 1
    count = telegrad.scheduling.event_loops.default_loop_count()
    assert len(list(workers["w0"]._runtime.event_loops)) == min(2, count)
assert not sys._is_gil_enabled()
"""


@pytest.fixture
def transport() -> str:
    return "unix"


def at_once(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run functions on threads that begin at the same moment; return their results."""
    begin = threading.Barrier(len(jobs))
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        begin.wait(PATIENCE)
        results[index] = jobs[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results


@pytest.mark.process
@pytest.mark.skipif(has_gil(), reason="this Python has an interpreter lock")
def test_the_lock_stays_off() -> None:
    command = [sys.executable, "-W", "error", "-c", SERVES]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_threads_do_not_inherit_the_context_of_who_starts_them() -> None:
    found: list[str | None] = []
    done = threading.Event()
    threads = ThreadPool("telegrad-test", lambda: None)

    def note() -> None:
        found.append(inherited.get())
        done.set()

    token = inherited.set("the scope of a call")
    try:
        threads.start(note)
        assert done.wait(PATIENCE)
    finally:
        inherited.reset(token)
        threads.close(PATIENCE)
    assert found == [None]


def test_numbers_of_a_count_are_unique() -> None:
    """Calls are numbered by `itertools.count` without a lock."""
    numbers, each = itertools.count(), 20_000
    found = at_once([lambda: [next(numbers) for _ in range(each)]] * THREADS)
    assert sorted(itertools.chain(*found)) == list(range(THREADS * each))


def test_a_snapshot_of_a_deque_may_be_taken_while_others_append() -> None:
    queue: collections.deque[int] = collections.deque()
    over = threading.Event()

    def append() -> bool:
        for number in range(20_000):
            queue.append(number)
        over.set()
        return True

    def look() -> bool:
        while not over.is_set():
            found = snapshot(queue)
            if found and found != list(range(found[0], found[0] + len(found))):
                return False
            for _ in found:
                queue.popleft()
        return True

    assert at_once([append, look]) == [True, True]


def test_threads_that_call_a_new_peer_at_once_share_one_link(cluster: Clusters) -> None:
    workers = cluster(9)
    for to in range(1, 9):
        peers = at_once([lambda to=to: workers["w0"]._runtime.peers.reach(f"w{to}")] * THREADS)  # type: ignore[misc]
        assert len(set(map(id, peers))) == 1


def test_memory_of_the_pool_has_one_user_at_a_time() -> None:
    pool = BufferPool(min_bytes=64, max_bytes=1 << 20)

    def use(mark: int) -> Callable[[], bool]:
        def run() -> bool:
            for _ in range(2000):
                memory = pool.reserve(64)
                memory[:] = bytes([mark]) * 64
                if memory.tobytes() != bytes([mark]) * 64:
                    return False
            return True

        return run

    assert at_once([use(mark) for mark in range(THREADS)]) == [True] * THREADS


def test_counts_of_several_threads_are_exact() -> None:
    counter, table = AtomicCounter(), CounterTable()

    def count() -> None:
        for number in range(5000):
            counter.increment()
            table.increment(str(number % 3))
            if number % 100 == 0:
                assert counter.value > 0

    at_once([count] * THREADS)
    assert counter.value == counter.value == THREADS * 5000
    assert sum(table.counts().values()) == THREADS * 5000


@telegrad.batched(max_size=2, max_wait=0.0)
def double(values: torch.Tensor) -> torch.Tensor:
    thread_roles.resume(thread_roles.pause())  # the next batch may run now
    return values * 2


def test_calls_in_batches_that_overlap_are_counted_exactly() -> None:
    each = 200
    before = double.batching.statistics()
    at_once([lambda: [double(torch.ones(1)) for _ in range(each)]] * THREADS)
    after = double.batching.statistics()
    assert after.calls - before.calls == THREADS * each
    assert after.batch_time.count == after.batches


class Model:
    @telegrad.batched
    def double(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2


def test_calls_of_deleted_objects_are_counted_exactly() -> None:
    each = 200
    before = Model.double.batching.statistics().calls
    at_once([lambda: [Model().double(torch.ones(1)) for _ in range(each)]] * THREADS)
    assert Model.double.batching.statistics().calls - before == THREADS * each


def test_hooks_that_threads_register_at_once_are_all_called() -> None:
    hooks.record_hooks(is_shared_node)
    tensor, each, called = torch.ones(1, requires_grad=True), 200, AtomicCounter()
    before = hooks.count_foreign_hooks()

    def note(_: torch.Tensor) -> None:
        called.increment()

    at_once([lambda: [tensor.register_hook(note) for _ in range(each)]] * THREADS)
    assert hooks.count_foreign_hooks() - before == THREADS * each
    tensor.sum().backward()
    assert called.value == THREADS * each

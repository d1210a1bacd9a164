"""The executor runs fewer calls at once if they compete for the interpreter lock."""

from __future__ import annotations

import threading
from collections.abc import Callable

from telegrad.scheduling.clock import Clock
from telegrad.scheduling.contention import TRIAL_PAUSE, WINDOW, ContentionControl
from telegrad.scheduling.executor import Executor, ThreadPool
from tests.local.gates import until

TICK = 0.005
LIMIT = 16


def windows(
    contention: ContentionControl,
    count: int,
    finished_at: Callable[[int], int],
    processor_share: float,
    switches_per_second: float,
    limit: int = LIMIT,
) -> list[int]:
    """Return the limits after each of `count` windows in which the calls behave as described.

    `finished_at` is how many calls finish in a window, by the limit.
    """
    limits = []
    for _ in range(count):
        running = min(limit, 10)
        finished = finished_at(limit)
        seconds = WINDOW * TICK * running / max(finished, 1)
        for _ in range(finished):
            contention.add(seconds, processor_share * seconds, int(switches_per_second * seconds))
        for _ in range(WINDOW):
            limit = contention.limit(limit, running)
        limits.append(limit)
    return limits


def test_calls_that_compete_for_the_lock_run_one_after_the_other() -> None:
    # as 10 callers of a small policy on 16 cores: 2,000 calls/s at once, 7,000/s by 2 threads
    limits = windows(ContentionControl(), 6, lambda limit: 20 if limit > 2 else 70, 0.05, 12_000)
    assert limits[0] == 2
    assert limits[1:] == [1] * 5


def test_calls_that_wait_often_keep_their_limit() -> None:
    contention = ContentionControl()
    finished = lambda limit: 10 * min(limit, 10)  # noqa: E731
    limits = windows(contention, 3, finished, 0.1, 10_000)
    assert limits == [2, LIMIT, LIMIT]
    # the next trial comes after a pause, and the one after it after twice that pause
    limits = windows(contention, 4 * TRIAL_PAUSE, finished, 0.1, 10_000)
    first, second = (index for index, limit in enumerate(limits) if limit == 2)
    assert second - first > 3 * first / 2


def test_calls_that_compute_or_sleep_long_are_left_alone() -> None:
    assert set(windows(ContentionControl(), 50, lambda _: 30, 0.9, 12_000)) == {LIMIT}
    assert set(windows(ContentionControl(), 50, lambda _: 30, 0.01, 400)) == {LIMIT}


def test_the_executor_measures_how_its_threads_run() -> None:
    clock = Clock("test")
    threads = ThreadPool("test", lambda: None)
    executor = Executor(threads, LIMIT, LIMIT)
    ended = threading.Event()
    try:

        def wait_often() -> None:
            for _ in range(200):
                threading.Event().wait(1e-6)
            ended.set()

        executor.submit(wait_often)
        assert ended.wait(60.0)
        until(lambda: executor.running == 0)
        contention = executor._contention
        assert contention._finished == 1
        assert contention._switches >= 200
        assert 0.0 <= contention._processor_seconds <= contention._seconds
    finally:
        executor.close()
        threads.close(60.0)
        clock.close()

"""Locks stay free if a signal handler raises while they are taken or released."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import telegrad
from telegrad.locks import new_lock, new_reentrant_lock
from tests.local.gates import PATIENCE

SOURCE = Path(telegrad.__file__).parent
# What threads of the user run: signal handlers run there.
ON_THREADS_OF_USERS = ("transport", "client", "scheduling", "messages", "refs", "futures.py")
INTERRUPTS = 300


class Interrupt(Exception):
    """What the signal handler raises."""


class Alarm:
    """Raises `Interrupt` in this thread once, at some moment after `set`."""

    def __init__(self) -> None:
        self.is_set = False
        self._random = random.Random(1)

    def set(self) -> None:
        self.is_set = True
        signal.setitimer(signal.ITIMER_REAL, self._random.uniform(0.00001, 0.0003))

    def ring(self, *_: object) -> None:
        if self.is_set:
            self.is_set = False
            raise Interrupt


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    before = signal.signal(signal.SIGALRM, alarm.ring)
    yield alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def is_free(lock: Any) -> bool:
    """Return whether another thread can take a lock."""

    def take() -> bool:
        found: bool = lock.acquire(blocking=False)
        if found:
            lock.release()
        return found

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(take).result()


@pytest.mark.parametrize("make", [new_lock, new_reentrant_lock])
def test_a_signal_handler_that_raises_leaves_a_lock_free(
    alarm: Alarm, make: Callable[[], Any]
) -> None:
    lock, taken, interrupts = make(), 0, 0
    while interrupts < INTERRUPTS:
        try:
            try:
                alarm.set()
                while alarm.is_set:
                    with lock:
                        pass
            finally:
                alarm.is_set = False
        except Interrupt:
            interrupts += 1
        if not is_free(lock):
            taken += 1
            lock.release()
    assert taken == 0


@pytest.mark.parametrize("make", [new_lock, new_reentrant_lock])
def test_a_lock_is_released_whatever_its_block_raises(make: Callable[[], Any]) -> None:
    lock = make()
    with pytest.raises(Interrupt):
        with lock:
            raise Interrupt
    assert is_free(lock)


@pytest.mark.parametrize("make", [new_lock, new_reentrant_lock])
def test_a_condition_works_with_a_lock(make: Callable[[], Any]) -> None:
    lock = make()
    changed, done = threading.Condition(lock), False

    def change() -> None:
        nonlocal done
        with lock:
            done = True
            changed.notify_all()

    with ThreadPoolExecutor(1) as pool, lock:
        pool.submit(change)
        assert changed.wait_for(lambda: done, PATIENCE)
    assert is_free(lock)


def test_a_condition_releases_a_reentrant_lock_completely() -> None:
    lock = new_reentrant_lock()
    changed = threading.Condition(lock)

    def change() -> None:
        with lock:
            changed.notify_all()

    with ThreadPoolExecutor(1) as pool, lock, lock:
        pool.submit(change)
        assert changed.wait(PATIENCE)
    assert is_free(lock)


def test_threads_of_users_take_no_other_locks() -> None:
    files = [
        file
        for name in ON_THREADS_OF_USERS
        for file in ([SOURCE / name] if name.endswith(".py") else (SOURCE / name).rglob("*.py"))
    ]
    assert len(files) > 20
    assert not [file for file in files if "threading.Lock()" in file.read_text()]
    assert not [file for file in files if "threading.RLock()" in file.read_text()]

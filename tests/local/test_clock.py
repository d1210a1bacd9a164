"""Timers run periodically, whatever they raise, and the log does not fill with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from telegrad.scheduling.clock import Clock
from tests.local.gates import PATIENCE


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock("test")
    yield clock
    clock.close()


def test_a_failure_that_is_repeated_is_logged_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = iter(["no thread", "no thread", "no thread", "no memory", None, "no memory"])
    done = threading.Event()

    def run() -> None:
        outcome = next(outcomes, "the end")
        if outcome == "the end":
            done.set()
        elif outcome is not None:
            raise RuntimeError(outcome)

    clock.call_every(0.001, run)
    assert done.wait(PATIENCE)
    failures = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert failures == ["no thread", "no memory", "no memory"]

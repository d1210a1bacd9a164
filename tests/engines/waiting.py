from __future__ import annotations

import time
from collections.abc import Callable

LIMIT = 60  # seconds


def wait_for(condition: Callable[[], bool], what: str, logs: Callable[[], str] = str) -> None:
    """Wait until a condition holds. Raise an error with `logs()` if it takes too long."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what}\n{logs()}")
        time.sleep(0.05)

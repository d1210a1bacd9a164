"""Exponential backoff between attempts, for trainers and servers."""

from __future__ import annotations

import time
from collections.abc import Iterator

_FIRST_DELAY = 0.005  # seconds
_LONGEST_DELAY = 0.5
_FACTOR = 1.5


def attempts() -> Iterator[None]:
    """Yield once for each attempt, without end. Sleep between attempts, longer each time."""
    delay = _FIRST_DELAY
    while True:
        yield
        time.sleep(delay)
        delay = min(delay * _FACTOR, _LONGEST_DELAY)

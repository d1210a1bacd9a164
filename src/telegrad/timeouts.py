"""The check of numbers of seconds that a user gives: timeouts, intervals and other durations.

What a public function, a setting or an option is given passes this check once, so clocks, locks and
sockets can compute with it. `LONGEST` is short enough for clocks and locks.
"""

from __future__ import annotations

import math
from typing import SupportsFloat, SupportsIndex

from telegrad.errors import ArgumentTypeError, UsageError

__all__ = ["LONGEST", "LONGEST_POLL", "duration", "time_limit", "torch_limit"]

LONGEST = 1e9
"""Seconds (31 years). Longer durations count as this one."""
LONGEST_POLL = 2e6
"""Seconds (23 days) that one poll, and one operation of a socket, may have at most."""


def duration(
    value: SupportsFloat | SupportsIndex, name: str = "a timeout", *, positive: bool = False
) -> float:
    """Return a number of seconds as a float. Raise `UsageError` if it is not a finite number.

    >>> duration(2), duration(1e300)
    (2.0, 1000000000.0)
    """
    try:
        # `math` does not accept a text, which `float` does
        seconds = min(float(value), LONGEST) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer that is too large for a float
        seconds = LONGEST if value > 0 else -LONGEST  # type: ignore[operator]
    except Exception:  # the value has code of its own
        seconds = math.nan
    if math.isnan(seconds) or (positive and seconds <= 0):
        raise _wrong(value, name, "a positive" if positive else "a finite")
    return seconds


def time_limit(
    timeout: SupportsFloat | SupportsIndex | None,
    name: str = "a timeout",
    *,
    positive: bool = False,
) -> float | None:
    """Return how long to wait, in seconds; None: without limit. A negative limit has passed."""
    if timeout is None:
        return None
    try:
        return duration(timeout, name, positive=positive)
    except UsageError:
        raise _wrong(timeout, name, "a positive" if positive else "a finite", " or None") from None


def torch_limit(timeout: float, name: str = "a timeout") -> float | None:
    """Return a time limit that is given as in torch's API, where 0 means no limit."""
    seconds = duration(timeout, name)
    if seconds < 0:
        raise UsageError(f"{name} is 0 (no limit) or a positive number of seconds, not {timeout}")
    return seconds or None


def _wrong(value: object, name: str, kind: str, alternative: str = "") -> UsageError:
    try:
        shown = repr(value)
    except Exception:
        shown = f"a {type(value).__name__}"
    error = UsageError if isinstance(value, SupportsFloat) else ArgumentTypeError
    return error(f"{name} is {kind} number of seconds{alternative}, not {shown}")

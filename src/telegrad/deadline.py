"""Deadlines: the absolute time at which a call must be over.

A timeout that the user gives becomes a `Deadline` where it enters Telegrad, so it covers all steps
of a call. Clocks of two processes differ, so a message carries the time that is left instead.
"""

from __future__ import annotations

import time
from typing import NamedTuple

_NO_DEADLINE = 0


class Deadline(NamedTuple):
    """A time of the monotonic clock of this process (`time.monotonic`)."""

    at: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline | None:
        """Return the deadline `seconds` from now; None if `seconds` is None."""
        return None if seconds is None else cls(time.monotonic() + seconds)

    @classmethod
    def from_wire(cls, milliseconds: int) -> Deadline | None:
        """Return the deadline for the time that was left when the message was sent."""
        return None if milliseconds == _NO_DEADLINE else cls(time.monotonic() + milliseconds / 1000)

    def left(self) -> float:
        """Return the seconds until the deadline, negative once it has passed."""
        return self.at - time.monotonic()

    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return self.left() <= 0


def to_wire(timeout: float | None) -> int:
    """Return a timeout as whole milliseconds for a frame header.

    0 stands for no timeout, so a very short one becomes 1.
    """
    return _NO_DEADLINE if timeout is None else int(min(max(timeout * 1000, 1), 0xFFFFFFFF))

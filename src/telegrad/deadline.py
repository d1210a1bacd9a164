"""One absolute moment that a call must not outlive. Timeouts become deadlines at the edge and stay deadlines."""

from __future__ import annotations

import time
from typing import NamedTuple

_NEVER_MS = 0


class Deadline(NamedTuple):
    """A moment on the monotonic clock of this process."""

    at: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline | None:
        """The deadline `seconds` from now; None means there is none."""
        return None if seconds is None else cls(time.monotonic() + seconds)

    @classmethod
    def from_wire(cls, milliseconds: int) -> Deadline | None:
        """Read what `to_wire` wrote: the time that was left when the message was sent."""
        return None if milliseconds == _NEVER_MS else cls(time.monotonic() + milliseconds / 1000)

    def left(self) -> float:
        """Seconds until the deadline; negative once it has passed."""
        return self.at - time.monotonic()

    def passed(self) -> bool:
        return self.left() <= 0


def to_wire(timeout: float | None) -> int:
    """A timeout as whole milliseconds for a frame header; 0 stands for none, so anything positive is at least 1."""
    return _NEVER_MS if timeout is None else int(min(max(timeout * 1000, 1), 0xFFFFFFFF))

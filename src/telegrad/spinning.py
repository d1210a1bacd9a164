"""When a thread polls for a message before it sleeps, and for how long.

Waking a thread takes longer than a short call. So a thread that expects a message soon polls for
it, which is called spinning, and yields its core between the polls. If other threads need the core,
this takes longer than sleeping: the thread gets the core back after their turns, which last
milliseconds. So a spin that loses its core ends, and no thread of this process spins for `_REST`
times the time that was lost. A busy host loses about a hundredth of its time in this way.

State of `Spinning`: at most one thread of a process spins; it holds `permit` and assigns
`rest_until`, which any thread reads.
"""

from __future__ import annotations

import os
import time

from telegrad.cores import CORES
from telegrad.locks import new_lock

__all__ = ["SPIN_SECONDS", "spinning", "yield_core"]

# With many cores, nobody needs the core of a thread that spins, and waking a thread takes longer.
SPIN_SECONDS = 0.0006 if CORES >= 8 else 0.0003
_LOST_SECONDS = 0.0001  # a few polls that take longer have lost the core
_REST = 100
_MAX_REST_SECONDS = 1.0
_now = time.monotonic


def yield_core() -> bool:
    """Let other threads run. Return False if the core was lost to them for a while."""
    before = _now()
    os.sched_yield()
    return _now() - before < _LOST_SECONDS


class Spinning:
    """The permission to spin, for all threads of this process."""

    def __init__(self) -> None:
        self.permit = new_lock()
        self.rest_until = 0.0  # no thread begins to spin before this moment

    def __repr__(self) -> str:
        return f"<Spinning rest_until={self.rest_until:.3f}>"

    def is_worthwhile(self, waited_since: float) -> bool:
        """Return True if a message came so soon after this moment that the next wait may spin."""
        return CORES > 1 and _now() - waited_since < SPIN_SECONDS

    def lost_core(self, before: float, now: float) -> bool:
        """Return True, and let this process rest, if the polls between two moments took long."""
        lost = now - before
        if lost < _LOST_SECONDS:
            return False
        self.rest_until = now + min(lost * _REST, _MAX_REST_SECONDS)
        return True


spinning = Spinning()

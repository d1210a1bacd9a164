"""When a thread polls for a message before it sleeps, and for how long.

Waking a thread takes longer than a short call. So a thread that expects a message soon polls for
it, which is called spinning, and yields its core between the polls. If other threads need the core,
this takes longer than sleeping. So a spin that loses its core ends.

Who has got the core shows by how long it was lost. A worker that serves a call on the same core
needs less than a millisecond, and the next wait may spin: nothing has to be woken. Threads that
compute use their whole turns, which last milliseconds. After such a turn no thread of this process
spins for `_REST` times as long, so a busy host loses a thirtieth of its time in this way.

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
_SHORT_WAIT = SPIN_SECONDS + 0.0002  # seconds; it includes the time that waking the thread took
_LOST_SECONDS = 0.0001  # a few polls that take longer have lost the core
_TURN_SECONDS = 0.001  # shorter losses are no turns of threads that compute
_LONGEST_TURN = 0.01  # longer losses: this process was stopped
_REST = 30
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
        return CORES > 1 and _now() - waited_since < _SHORT_WAIT

    def lost_core(self, before: float, now: float) -> bool:
        """Return True if the polls between two moments took long: the core was lost.

        Let this process rest if the core was lost for a turn.
        """
        lost = now - before
        if lost > _TURN_SECONDS:
            self.rest_until = now + min(lost, _LONGEST_TURN) * _REST
        return lost > _LOST_SECONDS


spinning = Spinning()

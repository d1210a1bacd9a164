"""`ContentionControl`: how many calls run at once if they compete for the interpreter lock.

Each short operation of torch releases the interpreter lock and then waits for it. On many cores,
ten calls with many such operations finish at a third of the rate at which one thread runs them one
after the other. Their threads sleep and wake thousands of times per second and use little processor
time. So do threads of calls with many short waits, such as I/O, which gain by running at once.

So if calls look like that, the executor tries a quarter of the limit for `WINDOW` ticks. It keeps
the lower limit, unless fewer calls finish. Then it tries again later.

The `Executor` that has a `ContentionControl` calls it under its lock.
"""

from __future__ import annotations

WINDOW = 2  # ticks for which finished calls are counted
TRIAL_PAUSE, MAX_TRIAL_PAUSE = 32, 4096  # windows after a failed trial, and after many
_CONTENDED_SWITCHES = 2000  # per second of a thread: from then on calls may compete for the lock
_FEWER = 0.7  # a trial has failed if it finishes less than this share of the calls


class ContentionControl:
    """Find the limit of calls at once at which calls that compete for the lock finish fastest."""

    def __init__(self) -> None:
        self._seconds = self._processor_seconds = 0.0  # of the calls that finished in this window
        self._switches = 0  # how often their threads have slept
        self._finished = 0
        self._ticks = 0
        self._before_trial: tuple[int, int] | None = None  # the limit, and how many calls finished
        self._pause, self._windows_left = TRIAL_PAUSE, 0

    def add(self, seconds: float, processor_seconds: float, switches: int) -> None:
        """Count a call that has finished."""
        self._finished += 1
        self._seconds += seconds
        self._processor_seconds += processor_seconds
        self._switches += switches

    def limit(self, limit: int, active: int) -> int:
        """Return the limit that replaces `limit`. Called at each tick; `active` calls run."""
        self._ticks += 1
        if self._ticks < WINDOW:
            return limit
        finished = self._finished
        is_contended = (
            finished > 0
            and self._processor_seconds < self._seconds / 2
            and self._switches > self._seconds * _CONTENDED_SWITCHES
        )
        self._seconds = self._processor_seconds = 0.0
        self._switches = self._finished = self._ticks = 0
        before, self._before_trial = self._before_trial, None
        if before is not None:
            old_limit, old_finished = before
            if finished < _FEWER * old_finished:
                self._windows_left = self._pause
                self._pause = min(2 * self._pause, MAX_TRIAL_PAUSE)
                return max(old_limit, limit)
            self._pause = TRIAL_PAUSE
        if self._windows_left:
            self._windows_left -= 1
        elif is_contended and min(limit, active) > 1:
            self._before_trial = limit, finished
            return max(1, min(limit, active) // 4)
        return limit

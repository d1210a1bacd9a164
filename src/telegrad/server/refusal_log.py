"""`RefusalLog`: log refused connections, but only the first of many.

State: `_since`, `_logged` and `_left_out` describe the current period, under `_lock`.
"""

from __future__ import annotations

import logging
import math
import threading
import time

_log = logging.getLogger(__name__)


class RefusalLog:
    """Log refused connections, but only the first of many: strangers must not fill the disk."""

    PERIOD = 10.0  # seconds
    LINES = 5  # in one period

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = -math.inf
        self._logged = 0
        self._left_out = 0

    def refused(self, worker: str, reason: object) -> None:
        """Log that a worker has closed a connection."""
        self.warning("worker %r closed a connection: %s", worker, reason)

    def warning(self, message: str, *args: object) -> None:
        """Log a warning, unless there were too many in this period."""
        with self._lock:
            now, left_out = time.monotonic(), 0
            if now - self._since > self.PERIOD:
                left_out, self._left_out = self._left_out, 0
                self._since, self._logged = now, 0
            self._logged += 1
            if self._logged > self.LINES:
                self._left_out += 1
                return
        if left_out:
            _log.warning("%d further messages of this kind were left out", left_out)
        _log.warning(message, *args)

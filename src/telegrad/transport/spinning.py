"""How long a thread looks for bytes before it sleeps, and which one may."""

from __future__ import annotations

import os
import threading

CORES = len(os.sched_getaffinity(0))
SPIN_SECONDS = (
    0.0002 if CORES >= 8 else 0.0003
)  # seconds that a thread looks for bytes before it sleeps
CONTENDED_SECONDS = 0.0001  # seconds: if a few looks take longer, others need this core
spin_permit = threading.Lock()  # held by the one thread of this process that waits awake

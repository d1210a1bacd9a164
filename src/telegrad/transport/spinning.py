"""How long a thread polls a socket before it sleeps.

Waking a core that sleeps takes longer than a short call. So a thread whose last message arrived
soon polls for the next one for `SPIN_SECONDS` before it sleeps in the kernel. At most one thread of
a process does so at a time: it holds `spin_permit`.
"""

from __future__ import annotations

import os
import threading

CORES = len(os.sched_getaffinity(0))
SPIN_SECONDS = 0.0002 if CORES >= 8 else 0.0003
CONTENDED_SECONDS = 0.0001  # if a few polls take longer, other threads need this core: stop
spin_permit = threading.Lock()

"""Host the store of a job until this process is ended: ``python -m telegrad.launcher.store PORT``.

A store in a process of its own outlives all workers, so that each of them may restart.
"""

from __future__ import annotations

import signal
import sys

import torch.distributed as dist

if __name__ == "__main__":
    # In a container this is process 1, which the default action of a signal does not end.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    # keeps it open
    store = dist.TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    signal.sigwait(ends)

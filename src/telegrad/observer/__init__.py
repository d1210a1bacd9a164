"""Look at a running group from outside, without joining it.

`attach` finds the workers through the store of the group, the address of one worker, or on this
host. `Group` asks all of them at once, each within a limit of time: a worker that has ended or does
not answer is reported as such. `graph` finds who waits for whom, `trace` makes a trace for
Perfetto, `tables` makes text.

Nothing here imports torch, except to read a store, so that the commands start at once.
"""

from telegrad.observer.discovery import attach
from telegrad.observer.group import Group, WorkerReply

__all__ = ["Group", "WorkerReply", "attach"]

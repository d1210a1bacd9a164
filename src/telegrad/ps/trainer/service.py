"""The remote function that servers call on trainers."""

from __future__ import annotations

from telegrad.messages.remote_functions import trusted
from telegrad.ps.trainer.server_client import LocalClients
from telegrad.runtime import active_runtime


@trusted
def still_trains(trainer: str, server: str) -> bool:
    """Return whether a trainer of this worker takes part. Called by a server that was restarted.

    The trainer rejoins that server, except during a step: the step rejoins by itself, because it
    may wait for another server, and that server for trainers that wait for this one.
    """
    runtime = active_runtime()
    if runtime is None:
        return False
    client = runtime.service(LocalClients).clients.get((trainer, server))
    if client is None:
        return False
    client.rejoin_if_idle()
    return True

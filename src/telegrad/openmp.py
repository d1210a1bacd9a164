"""How long torch's OpenMP threads stay awake when they have nothing to do.

After each parallel operation, GNU OpenMP's threads spin, by default for many milliseconds, in case another follows. If
the process then waits for a worker on the same machine, they spin on the cores that this worker needs to answer: a
network trained on a callee, on 16 cores, took three times as long. A thirtieth of the default still spans the gaps
between the operations of a network.

The library reads the variable when it is loaded, so this works in a process that imports Telegrad before torch, in one
that `telegrad run` started, and in all processes that are spawned later. Whoever has set one of the variables knows
better.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_SPINS = "10000"


def calm(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP threads that start under this environment go to sleep sooner."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)


calm(os.environ)

"""How long torch's OpenMP threads stay awake when they have nothing to do.

After each parallel operation, GNU OpenMP's threads spin, by default for many milliseconds, in case another follows. If
the process then waits for a worker on the same machine, they spin on the cores that this worker needs to answer: a
network trained on a callee, on 16 cores, took three times as long. A thirtieth of the default still spans the gaps
between the operations of a network.

The library reads the variable when it is loaded. `telegrad run` and `telegrad train` set it before they import
torch, and the processes that they start inherit it. A program that starts by itself can set it in its environment.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_SPINS = "10000"


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP threads of processes with this environment sleep sooner, unless it is set already."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)

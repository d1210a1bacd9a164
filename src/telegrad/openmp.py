"""The time that torch's OpenMP threads spin before they sleep.

After each parallel operation, the threads of GNU OpenMP spin, by default for many milliseconds, in
case another operation follows. If the process then waits for a worker on the same machine, they
occupy the cores that this worker needs. On 16 cores, this tripled the time to train a network on a
callee. A thirtieth of the default is still longer than the gaps between operations of a network.

OpenMP reads the environment variable when it is loaded. `telegrad launch`, `telegrad run` and
`telegrad train` set it before torch is imported, and the processes that they start inherit it.
Programs that are started in another way can set it in their environment.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_SPIN_COUNT = "10000"


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Let the OpenMP threads of processes with this environment sleep sooner.

    If the environment already says how they wait, it does not change.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)

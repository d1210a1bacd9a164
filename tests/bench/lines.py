"""Results as a run would write them."""

from __future__ import annotations

from typing import Any

from benchmarks import machine
from benchmarks.results import Results
from benchmarks.suite import Case

LATENCY = Case("latency/x", "a call", "us", "latency")
RATE = Case("rate/x", "calls", "calls/s", "rate", higher_is_better=True)


def lines(
    *series: tuple[Case, str, list[float]], errors: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Return the lines of these cases, peers and rounds; `errors` belong to the last one."""
    figures = Results()
    for case, peer, rounds in series:
        for value in rounds:
            figures.of(case, peer).add({"value": value, "n": 1})
        last = figures.of(case, peer)
    last.errors.extend(errors)
    return figures.lines()


def heading(**options: Any) -> dict[str, Any]:
    return {"kind": "run", **machine.heading("all", rounds=5, **options)}

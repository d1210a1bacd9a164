"""Compare Telegrad with each peer by case: the factor, and whether the spread is smaller."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks import results
from benchmarks.suite import MACHINE
from benchmarks.worlds import BARE

__all__ = ["Verdict", "is_limit", "is_ours", "verdicts"]

Line = dict[str, Any]
# entries that do the same work without an RPC library
LIMITS = (MACHINE, BARE, "one process", "limit")


@dataclass(frozen=True)
class Verdict:
    """One case with the lines of Telegrad and a peer. A `factor` above 1: Telegrad is better."""

    ours: Line
    theirs: Line

    @property
    def factor(self) -> float:
        return results.quotient(
            self.ours["median"], self.theirs["median"], self.ours["better"] == "higher"
        )

    @property
    def word(self) -> str:
        """`ahead`, `behind`, or `even` if the middle halves of the rounds overlap."""
        (low, high), (their_low, their_high) = (
            middle(self.ours["rounds"]),
            middle(self.theirs["rounds"]),
        )
        if low <= their_high and their_low <= high:
            return "even"
        return "ahead" if self.factor > 1 else "behind"

    def __str__(self) -> str:
        return (
            f"{results.number(self.factor)}x"
            if self.ours["median"] and self.theirs["median"]
            else self.word
        )


def verdicts(lines: list[Line]) -> list[Verdict]:
    """Compare every peer with Telegrad's first entry in every common case, in line order."""
    ours: dict[str, Line] = {}
    for line in lines:
        if is_ours(line["peer"]) and line["median"] is not None:
            ours.setdefault(line["case"], line)
    theirs = [line for line in lines if not is_ours(line["peer"]) and not is_limit(line["peer"])]
    return [
        Verdict(ours[line["case"]], line)
        for line in theirs
        if line["median"] is not None and line["case"] in ours
    ]


def middle(rounds: list[float]) -> tuple[float, float]:
    """Return the range of the middle half of the rounds, which excludes outliers."""
    if len(rounds) < 2:
        return rounds[0], rounds[0]
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return low, high


def is_ours(peer: str) -> bool:
    return peer.startswith("telegrad")


def is_limit(peer: str) -> bool:
    return peer in LIMITS

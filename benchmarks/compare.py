"""List the cases that became slower between two result files: `telegrad bench compare OLD NEW`.

A case counts as changed if its median moved by more than the tolerance and the difference of its
rounds is significant: the probability that it is random is below 1 in 100 (exact rank test of Mann
and Whitney). Five rounds on each side are enough; three are too few.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import results

LUCK = 0.01
TOLERANCE = 0.05


@dataclass(frozen=True)
class Change:
    """One case of one peer in both files. A `factor` above 1 is an improvement."""

    case: str
    peer: str
    unit: str
    old: float
    new: float
    factor: float
    verdict: str  # "slower", "faster", "same", "few rounds"

    def row(self) -> list[str]:
        return [
            self.verdict,
            self.case,
            self.peer,
            results.number(self.old),
            results.number(self.new),
            self.unit,
            f"{self.factor:.2f}x",
        ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="telegrad bench compare", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--peer",
        default="telegrad",
        help="prefix of the peers' names; default %(default)s, '' for all",
    )
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="default %(default)s")
    parser.add_argument("--all", action="store_true", help="also show cases that did not change")
    options = parser.parse_args(argv)
    (old_run, old), (new_run, new) = results.read(options.old), results.read(options.new)
    for difference in differences(old_run, new_run):
        print(f"warning: {difference}")
    found = [
        change
        for change in changes(old, new, options.tolerance)
        if change.peer.startswith(options.peer)
    ]
    shown = [change for change in found if options.all or change.verdict in ("slower", "faster")]
    if shown:
        print(
            results.aligned(
                [
                    ["", "case", "peer", "old", "new", "unit", "better"],
                    *(change.row() for change in shown),
                ]
            )
        )
    count = {
        verdict: sum(change.verdict == verdict for change in found)
        for verdict in ("slower", "faster", "same")
    }
    unsure = sum(change.verdict == "few rounds" for change in found)
    print(
        f"{len(found)} compared: {count['slower']} slower, {count['faster']} faster, {count['same']} within the spread"
    )
    if unsure:
        print(f"{unsure} with too few rounds; five on each side are enough")
    lost = missing(old, new, options.peer)
    for case, peer in lost:
        print(f"no longer measured, or failed: {case} {peer}")
    if len(found) == unsure:
        print("no case was measured in both files")
        return 2
    return 1 if count["slower"] or lost else 0


def changes(
    old: list[dict[str, Any]], new: list[dict[str, Any]], tolerance: float = TOLERANCE
) -> list[Change]:
    """Return a change for every case in both files, in the order of the new file."""
    before = {(line["case"], line["peer"]): line for line in old if line["median"] is not None}
    pairs = (
        (before.get((line["case"], line["peer"])), line)
        for line in new
        if line["median"] is not None
    )
    return [change(was, line, tolerance) for was, line in pairs if was is not None]


def change(old: dict[str, Any], new: dict[str, Any], tolerance: float) -> Change:
    higher = new["better"] == "higher"
    factor = results.quotient(new["median"], old["median"], higher)
    # the order of the rounds if the case became slower
    low, high = (new["rounds"], old["rounds"]) if higher else (old["rounds"], new["rounds"])
    if smallest(len(old["rounds"]), len(new["rounds"])) > LUCK:
        verdict = "few rounds"
    elif factor < 1 / (1 + tolerance) and by_luck(low, high) < LUCK:
        verdict = "slower"
    elif factor > 1 + tolerance and by_luck(high, low) < LUCK:
        verdict = "faster"
    else:
        verdict = "same"
    return Change(
        new["case"], new["peer"], new["unit"], old["median"], new["median"], factor, verdict
    )


def missing(
    old: list[dict[str, Any]], new: list[dict[str, Any]], peer: str = ""
) -> list[tuple[str, str]]:
    """Return the cases that were measured in the old file and are missing or failed in the new."""
    failed = {
        (line["case"], line["peer"]) for line in new if line["errors"] or line["median"] is None
    }
    measured = [
        (line["case"], line["peer"])
        for line in old
        if line["median"] is not None and not line["errors"]
    ]
    return [key for key in measured if key in failed and key[1].startswith(peer)]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the differences between the runs that make a comparison unreliable."""
    found = []
    for key in ("machine", "versions"):
        for name in old[key].keys() | new[key].keys():
            if old[key].get(name) != new[key].get(name):
                found.append(f"{name} was {old[key].get(name)} and is {new[key].get(name)}")
    return sorted(found)


def smallest(m: int, n: int) -> float:
    """Return the smallest probability that this number of rounds can give."""
    return 1 / math.comb(m + n, m)


def by_luck(low: list[float], high: list[float]) -> float:
    """Return the probability of the difference if both samples have the same distribution.

    The difference is that the values of `low` are below those of `high`.
    """
    wins = sum((a < b) + 0.5 * (a == b) for a in low for b in high)
    short = math.ceil(len(low) * len(high) - wins)
    return sum(arrangements(len(low), len(high), each) for each in range(short + 1)) / math.comb(
        len(low) + len(high), len(low)
    )


@cache
def arrangements(m: int, n: int, inversions: int) -> int:
    """Return the number of orders of m and n values with exactly this many inversions."""
    if inversions < 0:
        return 0
    if m == 0 or n == 0:
        return int(inversions == 0)
    return arrangements(m - 1, n, inversions - n) + arrangements(m, n - 1, inversions)

"""A case is slower if it exceeds the tolerance and the noise, in the direction of its unit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks import compare, results
from tests.bench.lines import LATENCY, RATE, heading, lines

BEFORE = [100.0, 101.0, 102.0, 103.0, 104.0]


def verdict(case: object, before: list[float], after: list[float], tolerance: float = 0.05) -> str:
    (found,) = compare.changes(
        lines((case, "telegrad", before)),  # type: ignore[arg-type]
        lines((case, "telegrad", after)),  # type: ignore[arg-type]
        tolerance,
    )
    return found.verdict


@pytest.mark.parametrize(("case", "more"), [(LATENCY, "slower"), (RATE, "faster")])
def test_direction(case: object, more: str) -> None:
    doubled = [2 * value for value in BEFORE]
    less = {"slower": "faster", "faster": "slower"}[more]
    assert verdict(case, BEFORE, doubled) == more
    assert verdict(case, doubled, BEFORE) == less


def test_what_lies_within_the_spread_is_the_same() -> None:
    assert verdict(LATENCY, BEFORE, [95.0, 99.0, 120.0, 150.0, 160.0]) == "same"


def test_what_is_certain_but_small_is_the_same() -> None:
    after = [value + 6 for value in BEFORE]
    assert verdict(LATENCY, BEFORE, after, tolerance=0.1) == "same"
    assert verdict(LATENCY, BEFORE, after, tolerance=0.01) == "slower"


def test_three_rounds_say_nothing() -> None:
    assert verdict(LATENCY, BEFORE[:3], [1000.0, 1001.0, 1002.0]) == "few rounds"


def test_luck_is_counted_exactly() -> None:
    """Against all orders in which two and three values can fall."""
    for chosen in itertools.combinations(range(5), 2):
        low = [float(each) for each in chosen]
        high = [float(each) for each in range(5) if each not in chosen]
        wins = sum(a < b for a in low for b in high)
        better = [
            sum(a < b for a in other for b in range(5) if b not in other) >= wins
            for other in itertools.combinations(range(5), 2)
        ]
        assert compare.by_luck(low, high) == pytest.approx(sum(better) / len(better))


def test_the_command_says_what_got_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    results.write(old, heading(), lines((LATENCY, "telegrad", BEFORE), (LATENCY, "torch", BEFORE)))
    results.write(
        new, heading(), lines((LATENCY, "telegrad", [500.0] * 5), (LATENCY, "torch", [900.0] * 5))
    )
    assert compare.main([str(old), str(old)]) == 0
    assert compare.main([str(old), str(new)]) == 1
    last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("slower") and "telegrad" in line for line in last)
    # how fast the peers are is not our regression
    assert not any("torch " in line for line in last)
    assert last[-1] == "1 compared: 1 slower, 0 faster, 0 within the spread"


def test_a_case_that_fails_now_is_a_regression(tmp_path: Path) -> None:
    old, new = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    results.write(old, heading(), lines((LATENCY, "telegrad", BEFORE), (RATE, "telegrad", BEFORE)))
    after = lines((LATENCY, "telegrad", BEFORE), (RATE, "telegrad", []), errors=("boom",))
    results.write(new, heading(), after)
    assert compare.main([str(old), str(new)]) == 1


def test_nothing_to_compare_is_not_a_success(tmp_path: Path) -> None:
    old = tmp_path / "old.jsonl"
    results.write(old, heading(), lines((LATENCY, "telegrad", [1.0])))
    assert compare.main([str(old), str(old)]) == 2

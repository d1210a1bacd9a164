"""A small run from the command line to the page, with processes of Telegrad and of torch RPC."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import telegrad
from benchmarks import compare, report, results
from tests.bench.lines import LATENCY, RATE, lines

PACKAGE = Path(telegrad.__path__[0])


def start_bench(
    *arguments: object, source: Path = PACKAGE.parent
) -> subprocess.CompletedProcess[str]:
    """Run `telegrad bench` with the package that is in the folder `source`."""
    python_path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "telegrad", "bench", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def bench(*arguments: object) -> None:
    done = start_bench(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_checkout_it_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "telegrad").symlink_to(PACKAGE)
    done = start_bench("--help", source=tmp_path)
    assert done.returncode == 2
    assert "git clone" in done.stderr
    assert "pip install -e '.[bench]'" in done.stderr


def test_rounds_of_another_run_are_added() -> None:
    first = lines((LATENCY, "telegrad", [1.0]), (LATENCY, "torch", [4.0]))
    more = lines((LATENCY, "telegrad", [3.0]), (RATE, "telegrad", [5.0]))
    ours, torch, other = results.with_rounds(first, more)
    assert (ours["rounds"], ours["median"], ours["ratio"]) == ([1.0, 3.0], 2.0, 2.0)
    assert (torch["rounds"], other["case"]) == ([4.0], RATE.name)


@pytest.mark.process
@pytest.mark.slow
def test_run_report_and_compare(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    cases, peers = "latency/no-tensor", "telegrad,torch"
    bench("--parts", "core", "--cases", cases, "--peers", peers, "--rounds", 5, "--out", out)
    run, lines = results.read(out)
    assert run["machine"]["cores"] >= 1
    assert set(run["parts"]["core"]["peers"]) == {"telegrad", "torch"}
    assert [(line["case"], line["peer"]) for line in lines] == [
        (cases, "telegrad"),
        (cases, "torch"),
    ]
    for line in lines:
        assert len(line["rounds"]) == 5
        assert line["p99"] >= line["min"] > 0
    assert report.main([str(out), "-o", str(tmp_path)]) == 0
    assert "sync call, no tensor" in (tmp_path / "index.html").read_text()
    assert compare.main([str(out), str(out)]) == 0

"""A small run from the command line to the page, with processes of Telegrad and of torch RPC."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import telegrad
from benchmarks import compare, report, results


def bench(*arguments: object) -> None:
    path = os.pathsep.join(
        [str(Path(telegrad.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "telegrad", "bench", *map(str, arguments)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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

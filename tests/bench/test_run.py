"""A small run from the command line to the page, with processes of Telegrad and of torch RPC."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import telegrad
from benchmarks import results


def bench(*arguments: object) -> str:
    path = os.pathsep.join([str(Path(telegrad.__path__[0]).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "telegrad", "bench", *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
@pytest.mark.slow
def test_run_report_and_compare(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    cases = "latency/no-tensor,limit/unix-ping-pong"
    bench("--parts", "core", "--cases", cases, "--peers", "telegrad,torch", "--rounds", 5, "--out", out)
    run, lines = results.read(out)
    assert run["machine"]["cores"] >= 1
    assert set(run["parts"]["core"]["peers"]) == {"telegrad", "torch"}
    measured = {(line["case"], line["peer"]): line for line in lines if line["median"] is not None}
    assert {("latency/no-tensor", "telegrad"), ("latency/no-tensor", "torch")} <= set(measured)
    for line in measured.values():
        assert len(line["rounds"]) == 5
        assert line["p99"] >= line["min"] > 0
    bench("report", out, "-o", tmp_path / "page.html")
    assert "sync call, no tensor" in (tmp_path / "page.html").read_text()
    assert "0 slower" in bench("compare", out, out)

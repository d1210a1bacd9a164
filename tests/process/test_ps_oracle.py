"""Real processes are killed at random; every acknowledged step counts once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rule", "servers", "kills"), [("sync", 2, 3), ("async", 2, 3)])
def test_a_few_kills(rule: str, servers: int, kills: int) -> None:
    run(rule, servers, kills)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("rule", ["sync", "quorum", "async", "stale"])
def test_hundreds_of_kills(rule: str, servers: int) -> None:
    run(rule, servers, kills=25)


def run(rule: str, servers: int, kills: int) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.process.ps_oracle",
        rule,
        str(servers),
        "--kills",
        str(kills),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps agree" in done.stdout

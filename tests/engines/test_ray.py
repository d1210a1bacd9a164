"""`telegrad launch --on ray` on a local Ray; a worker is killed.

Ray has an environment of its own: TELEGRAD_TEST_RAY is its Python (`make test-engines` makes it).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.engines.conftest import LIMIT, PROGRAM, Start

PYTHON = os.environ.get("TELEGRAD_TEST_RAY", "")
pytestmark = pytest.mark.skipif(
    not Path(PYTHON).is_file(), reason="TELEGRAD_TEST_RAY is not the Python of an environment"
)
VARIABLES = {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def launch(start: Start, program: object, *arguments: object) -> str:
    command = (PYTHON, "-m", "telegrad", "launch", "--on", "ray", "-n", 2, "--restarts", 1)
    process = start(*command, program, *arguments, **VARIABLES)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("weapon", ["kill -9", "ray.kill"])
def test_an_actor_that_is_killed_restarts_under_its_name(
    start: Start, tmp_path: Path, weapon: str
) -> None:
    killer = tmp_path / "killer.py"
    killer.write_text(KILLER)
    output = launch(start, killer, PROGRAM, tmp_path, weapon)
    assert "lost worker1" in output
    assert "life worker1 1" in output
    assert re.search("called  ?0", output)
    assert "end worker0" in output
    assert "end worker1" in output
    assert "shut down without" not in output


# `restart`, with a thread in worker1 that ends its process
KILLER = """
import os, pathlib, signal, sys, threading, time
import ray

program, folder, weapon = sys.argv[1:]
sys.path.insert(0, os.path.dirname(program))
import program as workers

actor = ray.get_runtime_context().current_actor
victim = pathlib.Path(folder, "victim")

def kill():
    while not victim.exists():
        time.sleep(0.05)
    if weapon == "ray.kill":
        ray.kill(actor, no_restart=False)
    else:
        os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1" and not victim.exists():
    threading.Thread(target=kill, daemon=True).start()
workers.restart(folder)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.namespaces import Network, hindrance

LIMIT = 100  # seconds for a job
ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(__file__).with_name("program.py"))
Start = Callable[..., "subprocess.Popen[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)


@pytest.fixture
def environment() -> dict[str, str]:
    """Without what an engine around these tests may have set."""
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "USER")
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "TELEGRAD_JOIN_TIMEOUT": "60",
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Starts a program whose output can be read. It and what it started end with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*command: Any, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def run(start: Start) -> Callable[..., str]:
    """Runs a command to its end and returns its output. It must not fail."""

    def to_end(*command: Any, **variables: str) -> str:
        process = start(*command, **variables)
        output, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, output
        return output

    return to_end


@pytest.fixture
def worker() -> tuple[str, str]:
    """The command of a worker; what it does follows."""
    return sys.executable, PROGRAM


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts."""
    if reason := hindrance():
        pytest.skip(reason)
    with Network(2) as made:
        yield made

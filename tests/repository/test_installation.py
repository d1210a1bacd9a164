"""`pip install` of the wheel in a clean environment, then the first commands in an empty folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

# Neither the checkout nor the environment of the tests may help.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith("COVERAGE")
}


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(
        list(map(str, command)),
        **{"env": ENVIRONMENT, "capture_output": True, "text": True, **options},
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A new environment with nothing in it."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment")
    return tmp_path / "environment"


def install(environment: Path, *arguments: str | Path) -> None:
    """Run `pip install` for the environment: with the pip that is here, or with a new one."""
    python = environment / "bin" / "python"
    if importlib.util.find_spec("pip") is None:
        run(python, "-m", "ensurepip")
        run(python, "-m", "pip", "install", *arguments)
    else:
        run(sys.executable, "-m", "pip", "--python", python, "install", *arguments)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def trained(environment: Path, folder: Path, *arguments: str) -> str:
    """Train in the folder. Return the report."""
    output = run(environment / "bin" / "telegrad", "train", "mnist", *arguments, cwd=folder)
    assert "test accuracy" in output
    (report,) = folder.rglob("report.html")
    return report.read_text()


@pytest.mark.slow
def test_the_installed_command_trains(wheel: Path, environment: Path, empty: Path) -> None:
    """With the dependencies of this environment, because torch takes minutes to install."""
    install(environment, "--no-deps", "--no-index", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    assert (packages / "telegrad" / "__init__.py").exists()
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert "trainer0" in trained(environment, empty, "--epochs", "1", "--trainers", "1")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_an_installation_with_all_dependencies_trains(
    wheel: Path, environment: Path, empty: Path
) -> None:
    """Torch and all other packages come from the index of packages."""
    install(environment, "--quiet", f"telegrad[all] @ {wheel.as_uri()}")
    assert "train" in run(environment / "bin" / "telegrad", "--help", cwd=empty)
    assert "<svg" in trained(environment, empty)

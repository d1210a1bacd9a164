"""The wheel that users install, built once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")  # what a build adds must not appear in the checkout
    for name in ("src", "examples", "benchmarks", "tests/repository"):
        shutil.copytree(ROOT / name, tree / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run([*command, "--directory", out], cwd=tree, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    return built

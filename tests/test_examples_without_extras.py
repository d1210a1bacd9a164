"""The examples say what is missing if the packages of their extra are not installed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEED_EXTRAS = ["batch_update", "cartpole", "ddp_embedding", "mnist", "pipeline", "resnet", "rl"]


@pytest.fixture(autouse=True)
def _without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gymnasium", "matplotlib", "rich", "sklearn", "sklearn.datasets", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", NEED_EXTRAS)
def test_help_needs_no_extras(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize("name", NEED_EXTRAS)
def test_a_missing_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=r"pip install 'telegrad\[examples\]'"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_a_plot_that_cannot_be_written_is_refused_before_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()  # it needs gymnasium
    monkeypatch.setattr(sys, "argv", ["cartpole", "--plot", str(tmp_path / "no" / "plot.png")])
    with pytest.raises(SystemExit, match="cannot write --plot"):
        runpy.run_path(str(EXAMPLES / "cartpole.py"), run_name="__main__")

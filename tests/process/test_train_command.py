"""`telegrad train mnist`: its data, its view, interrupted, resumed."""

from __future__ import annotations

import argparse
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.nn import functional as F

import telegrad
import telegrad.cli
from telegrad.cli import training
from telegrad.cli.progress import EpochReport, TrainingReport
from tests.local.gates import until

pytestmark = pytest.mark.process

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        [str(Path(telegrad.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    ),
    "http_proxy": "http://127.0.0.1:9",  # there is no network for this
    "https_proxy": "http://127.0.0.1:9",
}
LIMIT = 100


def start(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """In a session of its own, so that Ctrl-C, which all of its processes get, does not reach this
    one.
    """
    command = [sys.executable, "-m", "telegrad", "train", "mnist", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, start_new_session=True, **pipes)


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output + errors
    return output


def read_until(process: subprocess.Popen[str], pattern: str) -> None:
    assert process.stdout is not None
    while line := process.stdout.readline():
        if re.match(pattern, line):
            return
    pytest.fail(f"it ended before it wrote {pattern!r}: {process.communicate()}")


def interrupt(process: subprocess.Popen[str], send: Callable[[int, int], None] = os.killpg) -> None:
    send(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, output + errors
    assert errors.strip().splitlines() == ["stopped"]
    until(lambda: not exists(process.pid))


def exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["all processes", "the first process"])
def test_an_interrupted_training_ends_cleanly(
    tmp_path: Path, send: Callable[[int, int], None]
) -> None:
    process = start(
        "--trainers", 1, "--epochs", 100000, "--consistency", "stale:2", "--out", tmp_path
    )
    read_until(process, "epoch")
    interrupt(process, send)
    assert (tmp_path / "report.html").exists()  # of what was trained until then


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = argparse.Namespace(out=tmp_path / "file" / "out")
    with pytest.raises(SystemExit, match="cannot write into --out"):
        training.run(lambda *_: None, options)


def test_a_training_is_resumed_from_checkpoints(tmp_path: Path) -> None:
    options = argparse.Namespace(out=tmp_path, resume=True, checkpoint=None)
    with pytest.raises(SystemExit, match="--resume needs --checkpoint DIR"):
        training.run(lambda *_: None, options)


def test_the_output_fits_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report = TrainingReport("digits, 1 server, 2 trainers", epoch_count=2)
    for trainer in ("trainer0", "trainer1"):
        report.add(EpochReport(trainer, 0, 12.3456, 123456, 12, 0.9876))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    console = Console(width=120, file=io.StringIO())
    console.print(report._view())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 60
    assert all(name in shown for name in ("staleness", "accuracy", "98.76 %"))


def test_the_report_of_a_training_that_was_stopped(tmp_path: Path) -> None:
    report = TrainingReport("digits, 1 server, 1 trainer")
    report.add(EpochReport("trainer0", 0, 1.5, 1000))
    report.write(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "Stopped before the first test" in text
    assert text.count("<svg") == 3
    assert "#000000" not in text  # black would not be seen in dark mode


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT)
def test_a_resumed_training_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    def options(name: str) -> list[Any]:
        folders = ["--checkpoint", tmp_path / name, "--out", tmp_path / "out"]
        return ["--servers", 2, "--epochs", 4, "--every", 10, *folders]

    finish(start(*options("whole")))
    process = start(*options("parts"))
    read_until(process, "epoch +1")
    interrupt(process)
    output = finish(start(*options("parts"), "--resume"))
    assert "epoch   0" not in output
    assert "epoch   3" in output
    for server in range(2):
        whole, parts = (
            newest(tmp_path / name / "default" / f"ps{server}") for name in ("whole", "parts")
        )
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


def newest(folder: Path) -> dict[str, torch.Tensor]:
    versions = [int(each.name) for each in folder.iterdir() if each.name.isdigit()]
    assert max(versions) == 4 * 23  # steps of 4 epochs
    found: dict[str, torch.Tensor] = load_file(
        folder / str(max(versions)) / "parameters.safetensors"
    )
    return found


def test_mnist_from_local_files(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    large = F.interpolate(torch.tensor(images).view(-1, 1, 8, 8) * 15, size=28).to(torch.uint8)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, rows in (("train", slice(0, 1500)), ("t10k", slice(1500, None))):
        pixels, classes = large[rows], torch.tensor(labels[rows]).to(torch.uint8)
        head = struct.pack(">4I", 0x803, len(pixels), 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + pixels.numpy().tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">2I", 0x801, len(pixels)) + classes.numpy().tobytes()
        )
    output = finish(
        start("--data", "mnist", "--folder", tmp_path, "--epochs", 2, "--out", tmp_path / "out")
    )
    assert float(re.findall(r"test accuracy ([\d.]+) %", output)[-1]) > 70
    assert (tmp_path / "out" / "report.html").exists()


def test_without_files_and_network_it_says_so(tmp_path: Path) -> None:
    process = start("--data", "mnist", "--folder", tmp_path, "--out", tmp_path)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    if find_spec("torchvision") is None:
        assert "--data mnist needs torchvision: pip install torchvision" in errors
    else:
        assert f"MNIST is neither in {tmp_path}/MNIST/raw nor" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("example", "extra"),
    [("mnist", "sklearn"), ("resnet", "sklearn"), ("cartpole", "gymnasium")],
)
def test_without_the_extras_it_says_what_to_install(
    tmp_path: Path, example: str, extra: str
) -> None:
    (tmp_path / f"{extra}.py").write_text("raise ImportError('not installed')")

    def train(*arguments: str) -> subprocess.CompletedProcess[str]:
        python_path = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
        return subprocess.run(
            [sys.executable, "-m", "telegrad", "train", example, *arguments],
            env={**ENVIRONMENT, "PYTHONPATH": python_path},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )

    shown = train("--help")
    assert shown.returncode == 0, shown.stderr
    assert "usage" in shown.stdout
    refused = train()
    assert refused.returncode == 1
    assert "pip install 'telegrad[examples]'" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_live_view(tmp_path: Path) -> None:
    """A table with a row per trainer, drawn again and again, if there is a terminal."""
    ours, theirs = pty.openpty()
    process = start("--trainers", 2, "--epochs", 100000, "--out", tmp_path, stdout=theirs)
    os.close(theirs)
    shown = b""
    while not all(word in shown for word in (b"samples/s", b"staleness", b"trainer0", b"trainer1")):
        shown += os.read(ours, 4096)
    interrupt(process)
    os.close(ours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "nowhere"], "cannot be used here"),
        (["--consistency", "perhaps"], "is not one of sync"),
        (["--data", "letters"], "invalid choice"),
        (["--trainers", "0"], "'0' is not a number of at least 1"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, arguments: list[str], message: str) -> None:
    process = start(*arguments)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert message in errors
    assert "Traceback" not in errors


def test_an_unknown_job_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        telegrad.cli.main(["train", "nothing"])
    assert "mnist" in capsys.readouterr().err

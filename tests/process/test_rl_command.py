"""`telegrad train rl`: its games, its view, its kills."""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import telegrad
from examples import rl
from telegrad.cli.actor_learner import (
    ActorLearnerReport,
    ActorRecord,
    Kill,
    StepRecord,
    append,
    following,
)
from tests.local.gates import until

pytestmark = pytest.mark.process
LIMIT = 250


def record(version: int, pid: int, staleness: int = 0) -> StepRecord:
    actors = {
        f"actor{number}": ActorRecord(version - 1, staleness, 20.5, pid) for number in range(2)
    }
    return StepRecord(version, 20.5 + version, 1, os.getpid(), actors)


def test_games_depend_on_seed_and_weights_only() -> None:
    torch.manual_seed(0)
    policy = rl.network()
    first, again = (rl.play(policy, 4, (0, 1, 2), 7) for _ in range(2))
    other = rl.play(policy, 4, (0, 1, 3), 7)
    assert first.version == 7
    assert len(first.states) == len(first.actions) == len(first.returns)
    assert all(torch.equal(*pair) for pair in zip(first[1:4], again[1:4], strict=True))
    assert not torch.equal(first.states[:4], other.states[:4])


def test_a_checkpoint_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    options = argparse.Namespace(seed=3, lr=0.01)
    one, two = rl.Learner(options), rl.Learner(options)
    for learner in (one, two):
        learner.step([rl.play(learner.policy, 4, (3, 0, 0), 0)])
    two.save(tmp_path / "policy.pt")
    two = rl.Learner(argparse.Namespace(seed=4, lr=0.01))
    two.restore(tmp_path / "policy.pt")
    for learner in (one, two):
        learner.step([rl.play(learner.policy, 4, (3, 0, 1), 1)])
    assert one.version == two.version == 2
    expected, actual = one.policy.state_dict(), two.policy.state_dict()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_a_worker_is_killed_at_its_version_and_records_are_counted_once(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        report = ActorLearnerReport("CartPole", 4, 2, [Kill("actor1", 2)])
        path = tmp_path / "records.jsonl"
        with following(path, report):
            append(path, record(1, process.pid))
            until(lambda: len(report.records) == 1)
            assert process.poll() is None
            append(path, record(2, process.pid))
            append(path, record(2, process.pid))
            assert process.wait(20) == -signal.SIGKILL
        assert [each.version for each in report.records] == [1, 2]
        assert [(event.worker, event.version) for event in report.kills] == [("actor1", 2)]
    finally:
        process.kill()
        process.communicate()


def test_the_output_fits_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = ActorLearnerReport("CartPole, 1 learner, 2 actors, seed 0", 3, 2)
    for version in (1, 2):
        report.add(record(version, os.getpid(), staleness=12))
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
    console = Console(width=120, file=io.StringIO())
    console.print(report._view())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 60
    assert all(name in shown for name in ("learner0", "actor1", "staleness", "22.0"))
    report.write(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert text.count("<svg") == 3
    assert "<td>actor1<td>2<td>0<td>0 to 1<td>12.00<td>12<td>0" in text


def test_a_worker_is_killed_again_when_its_replacement_has_reported(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    ]
    try:
        report = ActorLearnerReport("CartPole", 4, 3, [Kill("actor1", 1), Kill("actor1", 2)])
        report.add(record(1, processes[0].pid)._replace(actors={}))  # nothing of actor1 yet
        assert report.kills == []
        for version, pid in ((2, processes[0].pid), (3, processes[0].pid), (4, processes[1].pid)):
            report.add(record(version, pid))
        assert [event.version for event in report.kills] == [2, 4]
        assert [process.wait(20) for process in processes] == [-signal.SIGKILL] * 2
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    report.write(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "2 kills of actors, 0 kills of the learner" in text
    assert text.count("actor1 killed") == 1  # one line of the legend for both


def test_the_live_view(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ActorLearnerReport("CartPole, 1 learner", 3, 3, [Kill("actor7", 1)]) as report:
        report._pids["actor7"] = 1 << 22  # beyond the largest process id: it has ended
        report.add(record(1, os.getpid()))
    shown = capsys.readouterr().out
    assert "killed actor7" in shown
    assert all(name in shown for name in ("CartPole, 1 learner", "learner0", "actor2"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kill", "actor2:3"], "no such worker"),
        (["--kill", "actor1"], "is not like actor1:30"),
        (["--kill", "learner:150"], "ends before"),
        (["--max-staleness", "-1"], "negative"),
        (["--actors", "0"], "at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        rl.main(arguments)
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="cannot write into --out"):
        rl.main(["--out", str(tmp_path / "file" / "out")])


@pytest.mark.soak
@pytest.mark.timeout(3 * LIMIT)
def test_kills_do_not_change_the_policy(tmp_path: Path) -> None:
    def train(name: str, *arguments: Any) -> dict[str, torch.Tensor]:
        source = str(Path(telegrad.__path__[0]).parent)
        command = [sys.executable, "-m", "telegrad", "train", "rl", "--versions", "100"]
        subprocess.run(
            [*command, "--out", str(tmp_path / name), *arguments],
            env={**os.environ, "PYTHONPATH": source},
            timeout=LIMIT,
            check=True,
        )
        state = torch.load(tmp_path / name / "policy.pt", weights_only=False)
        assert state["version"] == 100
        policy: dict[str, torch.Tensor] = state["policy"]
        return policy

    expected = train("whole")
    actual = train("kills", "--kill", "actor1:10", "--kill", "learner:20", "--kill", "actor0:40")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)

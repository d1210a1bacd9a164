"""Values that a training reports: kept in fixed memory, and written for TensorBoard."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import telegrad
from telegrad import ps
from telegrad.errors import UsageError
from telegrad.observer.tables import status_text
from telegrad.scalars import MAX_NAMES, MAX_POINTS, RATE, ScalarLog
from tests.conftest import Clusters


@pytest.fixture
def transport() -> str:
    return "unix"


def report_in_worker(**values: Any) -> None:
    telegrad.report(**values)


def test_a_worker_reports_numbers_and_tensors(cluster: Clusters) -> None:
    workers = cluster(2)
    loss = torch.tensor(0.5, requires_grad=True) * 1
    workers["w0"].report(3, loss=loss, accuracy=1)
    workers["w0"].call("w1", report_in_worker, loss=0.25)
    found = workers["w0"].snapshot()["scalars"]
    assert {name: (each["step"], each["value"]) for name, each in found.items()} == {
        "loss": (3, 0.5),
        "accuracy": (3, 1.0),
    }
    assert workers["w1"].snapshot()["scalars"]["loss"]["step"] == 1
    answer = workers["w0"]._runtime.diagnosis.answer({"operation": "scalars"})
    assert [(step, value) for step, _, value in answer["series"]["loss"]] == [(3, 0.5)]


def test_what_is_no_number_is_named(cluster: Clusters) -> None:
    (agent,) = cluster(1)
    with pytest.raises(UsageError, match="loss is not a number"):
        agent.report(loss="low")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="loss is not a number"):
        agent.report(loss=torch.zeros(2))
    assert agent.snapshot()["scalars"] == {}


def test_without_an_agent_it_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="call init_rpc"):
        telegrad.report(loss=1.0)


def test_a_series_takes_fixed_memory_and_keeps_its_ends() -> None:
    log = ScalarLog("w0")
    for step in range(8 * MAX_POINTS + 1):
        log.add({"loss": float(step)}, step)
    points = log.series()["loss"]
    assert MAX_POINTS // 2 <= len(points) <= MAX_POINTS
    steps = [step for step, _, _ in points]
    assert (steps[0], steps[-1]) == (0, 8 * MAX_POINTS)
    assert len({later - sooner for sooner, later in itertools.pairwise(steps)}) == 1
    assert log.latest()["loss"]["value"] == 8.0 * MAX_POINTS


def test_names_without_end_are_refused_but_stop_no_optimizer() -> None:
    log = ScalarLog("w0")
    log.report(None, 0, {f"loss{number}": 0.0 for number in range(MAX_NAMES)})
    with pytest.raises(UsageError, match="'another' is one too many"):
        log.report(None, 0, {"another": 0.0})
    log.add({"another": 0.0, "loss1": 1.0})
    assert "another" not in log.latest()
    assert log.latest()["loss1"]["value"] == 1.0


def test_values_that_are_not_finite_are_shown_as_such(cluster: Clusters) -> None:
    (agent,) = cluster(1)
    agent.report(loss=math.nan)
    snapshot = agent.snapshot()
    json.dumps(snapshot["scalars"], allow_nan=False)
    state = {"name": "w0", "rank": 0, "problem": "", "snapshot": snapshot}
    text = status_text({"group": "", "time": 0.0, "workers": [state], "waits": [], "cycles": []})
    assert "not finite" in text


def test_samples_give_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.25, 101.0, 101.1])
    monkeypatch.setattr("telegrad.scalars.time.time", lambda: next(times))
    log = ScalarLog("w0")
    for samples in (32, 10, 20, 5):
        log.report(None, samples, {})
    assert [point[1:] for point in log.series()[RATE]] == [[101.0, 30.0]]


def test_an_optimizer_reports_its_version_and_staleness(cluster: Clusters) -> None:
    workers = cluster(2)
    for name in (None, "critic"):
        model = nn.Linear(1, 1)
        with ps.Optimizer(model, servers="w1", lr=0.1, name=name, agent=workers["w0"]) as optimizer:
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    found = workers["w0"].snapshot()["scalars"]
    assert {name: (each["step"], each["value"]) for name, each in found.items()} == {
        "version": (1, 1),
        "staleness": (1, 0),
        "critic/version": (1, 1),
        "critic/staleness": (1, 0),
    }


# TensorBoard


def test_tensorboard_that_is_not_installed_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch, cluster: Clusters
) -> None:
    monkeypatch.setattr("telegrad.scalars.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'telegrad\[tensorboard\]'"):
        cluster(1, tensorboard="somewhere")


def written_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the values that TensorBoard finds in a folder."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(folder))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its dependencies
def test_values_are_written_for_tensorboard(tmp_path: Path, cluster: Clusters) -> None:
    pytest.importorskip("tensorboard")
    workers = cluster(2, tensorboard=str(tmp_path))
    for step in (1, 2, 4):
        workers["w0"].report(step, loss=1 / step)
    workers.close()
    workers["w0"].report(8, loss=0.0)  # too late, and no error
    (folder,) = tmp_path.iterdir()  # the other has reported nothing
    assert folder.name == "w0"
    assert written_in(folder) == {"loss": [(1, 1.0), (2, 0.5), (4, 0.25)]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_folder_of_a_worker_is_in_the_directory(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = ScalarLog("..", str(tmp_path))
    log.add({"loss": 0.5}, 2)
    log.close()
    assert written_in(tmp_path / "_..") == {"loss": [(2, 0.5)]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_optimizer_writes_its_first_and_last_steps(
    tmp_path: Path, cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr("telegrad.ps.trainer.optimizer._REPORT_INTERVAL", 3600.0)
    workers = cluster(2, tensorboard=str(tmp_path))
    model = nn.Linear(1, 1)
    optimizers = [
        ps.Optimizer(model, servers="w1", lr=0.1, name=name, agent=workers["w0"])
        for name in (None, "critic")
    ]
    for step in (1, 2, 3):
        workers["w0"].report(step, loss=1 / step)
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.close()
    workers.close()
    found = written_in(tmp_path / "w0")
    assert found["version"] == found["critic/version"] == [(1, 1.0), (3, 3.0)]

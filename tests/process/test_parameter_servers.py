"""Real processes: killed ones, and the command that trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad
import telegrad.cli
import telegrad.rpc as rpc
from telegrad import Config, ps
from tests.local.gates import until
from tests.process.fleet import Fleet
from tests.ps import training
from tests.ps.training import check_same, model

pytestmark = pytest.mark.process

_here: dict[str, Any] = {}


def join(rank: int, size: int, path: str) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{path}", config=Config(secret="for tests of servers"))
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def begin_training(folder: str, trainers: int) -> str:
    net = model()
    point = ps.Checkpoint(folder, every=1, wait=True)
    _here["net"] = net
    _here["optimizer"] = ps.Optimizer(net, "w0", checkpoint=point, trainers=trainers, lr=0.1, momentum=0.9)
    return repr(_here["optimizer"]._attachments[0])


def train(first: int, last: int, number: int) -> dict[str, torch.Tensor]:
    training.train(_here["optimizer"], _here["net"], range(first, last), [number])
    return {name: value.clone() for name, value in _here["net"].state_dict().items()}


def everywhere(fleet: Fleet, ranks: list[int], function: Any, *args: Any) -> list[Any]:
    for number, rank in enumerate(ranks):
        fleet[rank].begin(function, *args, *([number] if function is train else []))
    return [fleet[rank].result() for rank in ranks]


def test_killed_servers_and_trainers(tmp_path: Path) -> None:
    with Fleet(3, join, str(tmp_path / "store")) as fleet:
        attachments = everywhere(fleet, [1, 2], begin_training, str(tmp_path / "points"), 2)
        assert all("by shared memory" in each for each in attachments)
        everywhere(fleet, [1, 2], train, 0, 3)
        fleet[0].kill()
        for number, rank in enumerate((1, 2)):
            fleet[rank].begin(train, 3, 6, number)
        fleet.restart(0)
        both = [fleet[rank].result() for rank in (1, 2)]
        fleet[1].begin(train, 6, 9, 0)  # waits for the other, which is killed instead
        fleet[2].kill()
        alone = fleet[1].result()
    expected = model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    training.train(optimizer, expected, range(6), [0, 1])
    for state in both:
        check_same(loaded(state), expected)
    training.train(optimizer, expected, range(6, 9), [0])
    check_same(loaded(alone), expected)


def loaded(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    net = model()
    net.load_state_dict(state)
    return net


def test_a_training_that_is_interrupted_ends_cleanly(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(telegrad.__path__[0]).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "telegrad", "train", "mnist", "--trainers", "1", "--epochs", "100000"]
    process = subprocess.Popen(
        [*command, "--consistency", "stale:2", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C, which all of its processes get, does not reach this one
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("epoch")
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 1, output + errors
    assert errors.strip().splitlines()[-1] == "stopped"
    assert "Traceback" not in errors
    until(lambda: not exists(process.pid))


def exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_unknown_job_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        telegrad.cli.main(["train", "nothing"])
    assert "mnist" in capsys.readouterr().err

"""Real processes, killed ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import Config, ps
from tests.process.fleet import Fleet
from tests.ps import training
from tests.ps.training import check_same, model

pytestmark = pytest.mark.process

_here: dict[str, Any] = {}


def join(rank: int, size: int, path: str) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(
        init_method=f"file://{path}", config=Config(secret="for tests of servers")
    )
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def begin_training(folder: str, trainers: int) -> str:
    net = model()
    point = ps.Checkpoint(folder, every=1, wait=True)
    _here["net"] = net
    _here["optimizer"] = ps.Optimizer(
        net, "w0", checkpoint=point, trainers=trainers, lr=0.1, momentum=0.9
    )
    return repr(_here["optimizer"]._clients[0])


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

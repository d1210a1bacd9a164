"""Several servers make each round of the same reports when trainers die during the round."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import ps
from telegrad.futures import Future
from telegrad.ps.messages import PushReply
from telegrad.ps.server.service import ParameterShards
from telegrad.ps.server.shard import ParameterShard
from telegrad.ps.trainer.shard_client import PushRequest, ShardClient
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE, until
from tests.ps import training
from tests.ps.training import check_same, model

Clusters = Callable[..., LocalCluster]


def three(workers: LocalCluster) -> tuple[list[nn.Module], list[ps.Optimizer]]:
    """Trainers on w2, w3 and w4, with servers on w0 and w1."""
    nets: list[nn.Module] = [model() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        made = [
            pool.submit(
                ps.Optimizer, net, ["w0", "w1"], agent=workers[f"w{2 + number}"], trainers=3, lr=0.1
            )
            for number, net in enumerate(nets)
        ]
        return nets, [each.result(PATIENCE) for each in made]


def shards(workers: LocalCluster) -> list[ParameterShard]:
    return [
        workers[server]._runtime.service(ParameterShards).find("default") for server in ("w0", "w1")
    ]


@pytest.mark.parametrize("reached", [["w0"], ["w1"], ["w0", "w1"]], ids=str)
def test_a_trainer_that_dies_between_two_reports_counts_on_no_server(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch, reached: list[str]
) -> None:
    """The trainer has reported to some servers, another one to the second only; kill it then."""
    workers = cluster(5)
    nets, optimizers = three(workers)
    victim, second, third = (optimizer._trainer for optimizer in optimizers)
    reports_to = {victim: reached, second: ["w1"], third: ["w0", "w1"]}
    start = ShardClient.start_push
    unsent: Future[PushReply] = Future()

    def push_to_some(self: ShardClient, *args: Any) -> Future[PushReply]:
        return start(self, *args) if self.server in reports_to[self._trainer] else unsent

    monkeypatch.setattr(ShardClient, "start_push", push_to_some)
    with ThreadPoolExecutor(3) as pool:
        steps = [
            pool.submit(training.train, optimizer, net, range(1), [number])
            for number, (optimizer, net) in enumerate(zip(optimizers, nets, strict=True))
        ]
        held = {
            server: {trainer for trainer, servers in reports_to.items() if server in servers}
            for server in ("w0", "w1")
        }
        lead, follower = shards(workers)
        until(lambda: set(lead.waiting) == held["w0"] and set(follower.waiting) == held["w1"])
        workers.kill("w2")
        assert steps[0].exception(PATIENCE) is not None
        until(lambda: victim not in lead.waiting)
        late = optimizers[1]._clients[0]
        start(late, PushRequest(1, 0, {})).add_done_callback(
            lambda done: unsent.set_result(done.value())
        )
        for step in steps[1:]:
            step.result(PATIENCE)
    expected = model()
    training.train(torch.optim.SGD(expected.parameters(), lr=0.1), expected, range(1), [1, 2])
    for net in nets[1:]:
        check_same(net, expected)

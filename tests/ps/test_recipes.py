"""The two parameter servers of PyTorch's tutorials, written with `telegrad.rpc`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

import telegrad.rpc as rpc
from telegrad import Future, autograd, current_agent
from telegrad.optim import DistributedOptimizer
from telegrad.refs import RRef, remote
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE
from tests.ps import training
from tests.ps.training import check_same, model

Clusters = Callable[..., LocalCluster]


class BatchUpdateServer:
    """Trainers send gradients; when all have, each gets the new model."""

    def __init__(self, trainers: int) -> None:
        self.model = model()
        self.lock = threading.Lock()
        self.future_model: Future[nn.Module] = Future()
        self.trainers, self.updates = trainers, 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for each in self.model.parameters():
            each.grad = torch.zeros_like(each)

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(
        server: RRef[BatchUpdateServer], gradients: list[Tensor]
    ) -> Future[nn.Module]:
        self = server.local_value()
        with self.lock:
            self.updates += 1
            for each, gradient in zip(self.model.parameters(), gradients, strict=True):
                assert each.grad is not None
                each.grad += gradient / self.trainers
            future = self.future_model
            if self.updates == self.trainers:
                self.updates = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.future_model = Future()
                future.set_result(self.model)
        return future


def run_trainer(server: RRef[BatchUpdateServer], number: int) -> nn.Module:
    net: nn.Module = model()
    agent = current_agent()
    assert agent is not None
    for step in range(5):
        training.loss(net, training.batch(step, number)).backward()
        gradients = [each.grad for each in net.parameters()]
        net = agent._runtime.invoke(
            "w0", BatchUpdateServer.update_and_fetch_model, (server, gradients)
        )
    return net


def test_update_and_fetch_model(cluster: Clusters) -> None:
    workers = cluster(4)
    server = RRef(BatchUpdateServer(3), agent=workers["w0"])
    trainers = [
        workers["w0"].submit(f"w{1 + number}", run_trainer, server, number) for number in range(3)
    ]
    expected = model()
    training.train(
        torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), expected, range(5), [0, 1, 2]
    )
    for trainer in trainers:
        check_same(trainer.result(PATIENCE), expected)


class ModelServer:
    """The model lives here; trainers call its forward and learn by distributed autograd."""

    def __init__(self) -> None:
        self.model = model()

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.model(data)
        return result

    def parameter_references(self) -> list[RRef[Tensor]]:
        return [RRef(each) for each in self.model.parameters()]

    def parameters(self) -> list[Tensor]:
        return [each.detach() for each in self.model.parameters()]


def test_the_model_on_the_server(cluster: Clusters) -> None:
    workers = cluster(2)
    server = remote("w1", ModelServer, agent=workers["w0"])
    optimizer = DistributedOptimizer(
        torch.optim.SGD, server.rpc_sync().parameter_references(), lr=0.1
    )
    expected = model()
    local = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(5):
        data = training.batch(step, 0)
        with autograd.context(agent=workers["w0"]) as context_id:
            answer = server.rpc_sync().forward(data)
            autograd.backward(
                context_id, [((answer - data.sum(1, keepdim=True).sin()) ** 2).mean()]
            )
            optimizer.step(context_id)
        training.train(local, expected, range(step, step + 1), [0])
    for mine, its in zip(server.rpc_sync().parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, its.detach())

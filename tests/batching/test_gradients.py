"""Batched calls under distributed autograd: those of one context share batches, others do not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from telegrad import autograd
from telegrad.refs import RRef
from telegrad.testing import LocalCluster
from tests.batching.models import Model, model_on, tensor, waiting
from tests.local.gates import Gate, Log


def test_calls_of_one_context_share_a_batch_and_get_their_gradients(
    cluster: Callable[..., LocalCluster], gate: Gate, log: Log
) -> None:
    w0 = cluster(2)["w0"]
    model = model_on(w0, "w1", log, gate)
    others = model.rpc_async().double(tensor(9))
    gate.wait_for()
    with autograd.context(agent=w0) as context_id:
        inputs = [tensor(number).requires_grad_() for number in range(3)]
        futures = [model.rpc_async().double(each) for each in inputs]
        waiting(Model.double, 3)
        without = w0.submit("w1", torch.add, 1, 1)  # something else under this context
        gate.open()
        losses = [number * future.wait().sum() for number, future in enumerate(futures)]
        autograd.backward(context_id, [torch.stack(losses).sum()])
        gradients = autograd.get_gradients(context_id)
        assert [gradients[each].item() for each in inputs] == [0.0, 2.0, 4.0]
    assert without.wait() == 2
    assert others.wait().item() == 18
    assert [len(batch) for batch in log.entries] == [1, 3]


def train(model: RRef[Model]) -> float:
    """What another trainer does, under a context of its own."""
    x = tensor(1).requires_grad_()
    with autograd.context() as context_id:
        autograd.backward(context_id, [model.rpc_sync().double(x).sum()])
        return autograd.get_gradients(context_id)[x].item()


def test_calls_of_different_contexts_do_not_mix(
    cluster: Callable[..., LocalCluster], gate: Gate, log: Log
) -> None:
    w0 = cluster(3)["w0"]
    model = model_on(w0, "w1", log, gate)
    held = model.rpc_async().double(tensor(0))
    gate.wait_for()
    trainers = [w0.submit(name, train, model) for name in ("w0", "w2")]
    waiting(Model.double, 2)
    gate.open()
    assert [trainer.wait() for trainer in trainers] == [2.0, 2.0]
    held.wait()
    assert [len(batch) for batch in log.entries] == [1, 1, 1]

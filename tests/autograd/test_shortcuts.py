"""Shortcuts: a tensor that is sent back to the worker that it came from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd
from telegrad.agent import Agent
from telegrad.autograd import engine
from telegrad.autograd.gradient_exchange import GradientExchange
from telegrad.autograd.gradient_messages import GradientMessage
from telegrad.autograd.registry import ContextRegistry
from telegrad.testing import LocalCluster
from tests.autograd.functions import new_leaf

COUNT = 5


def tripled(x: Tensor) -> Tensor:
    return (x * 3).tanh()


@pytest.fixture
def transport() -> str:
    return "memory"


class DeliveredMessages:
    """Records the messages of passes that workers receive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[GradientMessage] = []
        receive = engine.BackwardPass.receive

        def noted(this: engine.BackwardPass, peer: str, message: tuple[Any, ...]) -> Any:
            self.messages.append(GradientMessage(*message))
            return receive(this, peer, message)

        monkeypatch.setattr(engine.BackwardPass, "receive", noted)


@pytest.fixture
def delivered(monkeypatch: pytest.MonkeyPatch) -> DeliveredMessages:
    return DeliveredMessages(monkeypatch)


def states_of(call: Any, x: Tensor) -> list[Tensor]:
    states = [x]
    for _ in range(COUNT):
        states.append(call(states[-1]))
    return states[1:]


def test_a_chain_of_calls_to_one_worker_takes_one_message(
    w0: Agent, delivered: DeliveredMessages
) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        states = states_of(lambda state: w0.call("w1", tripled, state), x)
        autograd.backward(context_id, [(torch.stack(states) * 3).sum() + states[2].sum()])
        found = autograd.get_gradients(context_id)[x]
    states = states_of(tripled, x)
    torch.testing.assert_close(
        found, torch.autograd.grad((torch.stack(states) * 3).sum() + states[2].sum(), x)[0]
    )
    assert [len(message.shortcuts) for message in delivered.messages] == [COUNT - 1]


@pytest.mark.parametrize("kind", ["hook", "retain_grad"])
def test_a_gradient_that_is_observed_takes_no_shortcut(
    w0: Agent, delivered: DeliveredMessages, kind: str
) -> None:
    x = new_leaf()
    seen: list[Tensor] = []
    with autograd.context(agent=w0) as context_id:
        states = states_of(lambda state: w0.call("w1", tripled, state), x)
        if kind == "hook":
            states[1].register_hook(seen.append)
        else:
            states[1].retain_grad()
        autograd.backward(context_id, [states[-1].sum()])
        if kind == "retain_grad":
            assert states[1].grad is not None
            seen.append(states[1].grad)
    states = states_of(tripled, x)
    (expected,) = torch.autograd.grad(states[-1].sum(), states[1])
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], expected)
    assert sum(len(message.shortcuts) for message in delivered.messages) == COUNT - 2


def identity(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("first", [0, 1])
def test_first_messages_that_cross(workers: LocalCluster, w0: Agent, first: int) -> None:
    """Both workers have shortcuts, and send their first message before they receive one."""
    w1 = workers["w1"]
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", identity, w0.call("w1", tripled, w0.call("w1", identity, x)))
        z = w0.call("w1", tripled, y)
        loss = (z + y).sum()
        contexts = [ContextRegistry.of(worker._runtime).find(context_id) for worker in (w0, w1)]
        ours, theirs = contexts
        assert ours is not None
        assert theirs is not None
        exchanges = [
            GradientExchange(ours, False, [loss]),
            GradientExchange(theirs, False),
        ]
        peers = [w1._runtime.local_member.incarnation, w0._runtime.local_member.incarnation]
        for this in exchanges:
            this.run()
        queues = [[this.next_message(peer)] for this, peer in zip(exchanges, peers, strict=True)]
        for (message,) in queues:
            assert message is not None
            assert message.shortcuts
            assert not message.has_heard
        turn = first
        while any(queues):
            if queues[1 - turn]:
                message = queues[1 - turn].pop(0)
                if message is not None:
                    exchanges[turn].apply(peers[turn], message)
                    exchanges[turn].run()
                    queues[turn].append(exchanges[turn].next_message(peers[turn]))
            turn = 1 - turn
        assert [this.unanswered for this in exchanges] == [0, 0]
        found = autograd.get_gradients(context_id)[x]
    y = tripled(x)
    torch.testing.assert_close(found, torch.autograd.grad((tripled(y) + y).sum(), x)[0])

"""Several contexts and passes use the same parameters at the same time."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd
from telegrad.agent import Agent
from telegrad.autograd import engine
from telegrad.autograd.gradient_messages import GradientMessage, GradientReply
from telegrad.autograd.registry import ContextRegistry
from telegrad.autograd.send_recv import SentTensor
from telegrad.errors import JoinError
from telegrad.messages.call_scope import current_scope
from telegrad.testing import LocalCluster
from tests.autograd.functions import (
    alone,
    assert_equal,
    assert_released,
    everything,
    new_leaf,
    weigh,
    weigh_along,
    weight,
)


def test_many_contexts_from_many_threads(workers: LocalCluster) -> None:
    """Each thread has its own context on one of the workers; all use the same weights."""

    def train(number: int) -> dict[str, Tensor]:
        agents = [
            workers.agents[number % 4],
            *(agent for agent in workers if agent is not workers.agents[number % 4]),
        ]
        x = new_leaf(number, 1, 2)
        with autograd.context(agent=agents[0]) as context_id:
            y = agents[0].call("w1", weigh_along, ["w2", "w3", "w1"], 0.01 * x)
            autograd.backward(context_id, [(y * y).sum()])
            return everything(agents, context_id, x)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(train, range(40)))
    for number, gradients in enumerate(found):
        x = new_leaf(number, 1, 2)

        def compute(x: Tensor = x) -> Tensor:
            return (weight("w1", weight("w3", weight("w2", weight("w1", 0.01 * x)))) ** 2).sum()

        assert_equal(gradients, alone(compute(), x))
    assert_released(workers)


def test_passes_of_one_context_at_once(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", weigh_along, ["w2"], x)
        losses = [(factor * y).sum() for factor in range(1, 9)]

        def pass_back(loss: Tensor) -> None:
            autograd.backward(context_id, [loss], retain_graph=True)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(pass_back, losses))
        found = everything(workers, context_id, x)
    assert_equal(found, alone(36 * weight("w2", weight("w1", x)).sum(), x))


def test_calls_of_one_context_from_many_threads(workers: LocalCluster, w0: Agent) -> None:
    """Several calls run at the same time, and some of them make further calls."""
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        futures = [
            w0.submit(f"w{1 + n % 3}", weigh_along, [f"w{n % 2}"], x / (n + 1)) for n in range(24)
        ]
        autograd.backward(context_id, [torch.stack([future.wait() for future in futures]).sum()])
        found = everything(workers, context_id, x)

    def compute() -> Tensor:
        return torch.stack(
            [weight(f"w{n % 2}", weight(f"w{1 + n % 3}", x / (n + 1))) for n in range(24)]
        ).sum()

    assert_equal(found, alone(compute(), x))


def test_leaves_are_used_and_sent_by_many_threads() -> None:
    """Torch takes a lock of a leaf and then the GIL.

    So Telegrad must not wait for that lock while it holds the GIL.
    """
    leaf, view = torch.zeros(3, 3, requires_grad=True), torch.zeros(9).view(3, 3).requires_grad_()
    stop, interval = threading.Event(), sys.getswitchinterval()

    def use_them() -> None:
        while not stop.is_set():
            leaf.t()
            view.t()

    threads = [threading.Thread(target=use_them) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(5_000):
            SentTensor(leaf, "somebody").edge()
            SentTensor(view, "somebody").edge()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        for thread in threads:
            thread.join()


# Inside a pass


def new_pass(w0: Agent) -> tuple[engine.BackwardPass, str]:
    """Return a pass on w0 that has a message for w1, as if this thread processed its inbox."""
    context = ContextRegistry.of(w0._runtime).start()
    token = current_scope.set(context)
    y = w0.call("w1", weigh, new_leaf())
    current_scope.reset(token)
    this = engine.BackwardPass(context, (w0._runtime.local_member.incarnation, 1), False, [y.sum()])
    this._busy = True
    return this, w0._runtime.member("w1").incarnation


class AddingLock:
    """A lock that adds a message once, when it is released and no thread processes the inbox."""

    def __init__(self, this: engine.BackwardPass) -> None:
        self._lock, self._this, self._happened = this._lock, this, False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self._this._busy and not self._happened:
            self._happened = True
            assert self._this._enqueue(engine._ReceivedMessage("somebody", None, GradientReply()))


@pytest.mark.parametrize("transport", ["memory"])
def test_one_thread_at_a_time_deals_with_a_pass(w0: Agent) -> None:
    """A message arrives after the thread has left the inbox and before it has sent.

    The thread that added the message processes the inbox from then on.
    """
    this, peer = new_pass(w0)
    this._lock = AddingLock(this)  # type: ignore[assignment]
    assert not this._send([(peer, GradientMessage([], [], []))])
    assert len(this._inbox) == 2


@pytest.mark.parametrize("transport", ["memory"])
def test_a_message_that_cannot_be_sent_fails_the_pass(
    w0: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise JoinError("the group's store does not answer")

    this, peer = new_pass(w0)
    monkeypatch.setattr(w0._runtime, "start", refuse)
    assert this._send([(peer, GradientMessage([], [], [])), (peer, GradientMessage([], [], []))])
    assert [type(received.message) for received in this._inbox] == [JoinError, JoinError]

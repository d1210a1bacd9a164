"""Workers die at planned points: all others get an error, and the next context works."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from telegrad import autograd
from telegrad.agent import Agent
from telegrad.errors import PeerLost
from telegrad.testing import LocalCluster, faults
from tests.autograd.functions import (
    alone,
    assert_equal,
    assert_released,
    everything,
    here,
    is_there,
    new_leaf,
    weigh,
    weigh_along,
    weight,
)
from tests.local.conftest import Background
from tests.local.gates import PATIENCE

_clusters: list[LocalCluster] = []


@pytest.fixture
def w0(workers: LocalCluster) -> Agent:
    _clusters[:] = [workers]
    return workers["w0"]


def survivors(workers: LocalCluster, dead: str) -> list[Agent]:
    return [agent for agent in workers if agent.name != dead]


def check_the_next_context(workers: LocalCluster, dead: str, path: list[str]) -> None:
    """Check that no context is left, and that the next one has the right gradients."""
    alive = survivors(workers, dead)
    assert_released(alive)
    x, first = new_leaf(), alive[0]
    with autograd.context(agent=first) as context_id:
        autograd.backward(context_id, [first.call(path[0], weigh_along, path[1:], x).sum()])
        found = everything(alive, context_id, x)

    def compute() -> Tensor:
        y = x
        for name in path:
            y = weight(name, y)
        return y.sum()

    assert_equal(found, alone(compute(), x))
    assert_released(alive)


@pytest.mark.parametrize("point", ["call", "reply"])
def test_a_worker_dies_during_forward(workers: LocalCluster, w0: Agent, point: str) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w2", weigh, x)
        with faults.inject(faults.kill(point, worker="w1", function="weigh")):
            future = w0.submit("w1", weigh, y)
            assert isinstance(future.exception(PATIENCE), PeerLost)
        with pytest.raises(PeerLost) as caught:
            autograd.backward(context_id, [y.sum()])
        assert caught.value.peer == "w1"
    check_the_next_context(workers, "w1", ["w2", "w3", "w2"])


@pytest.mark.parametrize(
    "path", [["w1"], ["w1", "w2"], ["w2", "w1"], ["w2", "w1", "w3"], ["w2", "w3", "w2", "w1"]]
)
def test_a_worker_dies_between_forward_and_backward(
    workers: LocalCluster, w0: Agent, path: list[str]
) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call(path[0], weigh_along, path[1:], x)
        workers.kill("w1")
        with pytest.raises(PeerLost) as caught:
            autograd.backward(context_id, [y.sum()])
        assert caught.value.peer == "w1"
        assert "'w1' was lost" in str(caught.value)
    check_the_next_context(workers, "w1", ["w2", "w3"])


def weigh_and_kill_in_backward(victim: str, rest: list[str], x: Tensor) -> Tensor:
    """Kill another worker when the gradient arrives.

    If this worker is connected to it, wait until the loss is noticed.
    """
    y, agent, noticed = weigh(x), here(), threading.Event()

    def kill(_: Tensor) -> None:
        agent.on_loss(lambda name, _: noticed.set())
        is_known = any(link.member.name == victim for link in agent._runtime.peers.all())
        _clusters[0].kill(victim)
        assert not is_known or noticed.wait(PATIENCE)

    y.register_hook(kill)
    return weigh_along(rest, y) if rest else y


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["w1"], []),
        (["w1", "w3"], []),
        ([], ["w1"]),
        (["w3"], ["w1"]),
        (["w1"], ["w1"]),
        (["w3", "w1"], ["w3"]),
    ],
)
def test_a_worker_dies_in_the_middle_of_backward(
    workers: LocalCluster, w0: Agent, before: list[str], after: list[str]
) -> None:
    """The victim takes part in the pass later, has done so before, or both."""
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call(before[0], weigh_along, before[1:], x) if before else x
        z = w0.call("w2", weigh_and_kill_in_backward, "w1", after, y)
        with pytest.raises(PeerLost) as caught:
            autograd.backward(context_id, [(z * z).sum()])
        assert caught.value.peer == "w1"
    check_the_next_context(workers, "w1", ["w2", "w3"])


def keep_working(name: str, x: Tensor) -> Tensor:
    """The replies of two workers are needed. The calling thread waits for the other one."""
    left, right = here().submit("w1", weigh, x), here().submit(name, weigh, x)
    return left.wait() * right.wait()


def test_nobody_waits_for_gradients_that_cannot_come(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w2", keep_working, "w3", w0.call("w3", keep_working, "w2", x))
        z = w0.call("w2", weigh_and_kill_in_backward, "w1", [], y)
        with pytest.raises(PeerLost) as caught:
            autograd.backward(context_id, [z.sum()])
        assert caught.value.peer == "w1"
        with pytest.raises(PeerLost):
            autograd.backward(context_id, [w0.call("w3", weigh, x).sum(), z.sum()])
    check_the_next_context(workers, "w1", ["w2", "w3"])


def test_a_worker_that_had_no_tensors_may_die(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w2", weigh, x)
        w0.call("w1", is_there, context_id)
        workers.kill("w1")
        autograd.backward(context_id, [y.sum()])
        found = everything(survivors(workers, "w1"), context_id, x)
    assert_equal(found, alone(weight("w2", x).sum(), x))
    check_the_next_context(workers, "w1", ["w2"])


@pytest.mark.parametrize("point", ["after forward", "in backward"])
def test_the_worker_where_the_context_began_dies(
    workers: LocalCluster, w0: Agent, in_background: Background, point: str
) -> None:
    """The lost worker is w3, and w1 has no connection to it."""
    w3 = workers["w3"]

    def train() -> None:
        with autograd.context(agent=w3) as context_id:
            x = new_leaf()
            if point == "after forward":
                w3.call("w2", weigh_along, ["w1"], x)
                workers.kill("w3")
            else:
                y = w3.call("w2", weigh_and_kill_in_backward, "w3", ["w1"], x)
                autograd.backward(context_id, [y.sum()])

    error = in_background(train).exception(PATIENCE)
    assert error is None or isinstance(error, PeerLost)
    check_the_next_context(workers, "w3", ["w1", "w2"])


def test_a_worker_that_came_back_does_not_know_the_old_context(
    workers: LocalCluster, w0: Agent
) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", weigh, x)
        workers.kill("w1")
        workers.join("w1", 1)
        z = w0.call("w1", weigh, x)
        with pytest.raises(PeerLost):
            autograd.backward(context_id, [(y + z).sum()])
    alive = [workers["w0"], workers["w1"]]
    assert_released(alive)
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", weigh, x).sum()])
        found = everything(alive, context_id, x)
    assert_equal(found, alone(weight("w1", x).sum(), x))


def close_when_the_gradient_comes(x: Tensor) -> Tensor:
    agent = here()

    def leave(_: Tensor) -> None:
        raise SystemError("out of memory")

    assert agent.name == "w1"
    y = weigh(x)
    y.register_hook(leave)
    return y


def test_a_failed_pass_leaves_the_context_usable(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        bad = w0.call("w1", close_when_the_gradient_comes, w0.call("w2", weigh, x))
        with pytest.raises(RuntimeError, match="out of memory"):
            autograd.backward(context_id, [bad.sum()])
    assert_released(workers)
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", weigh, x).sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(weight("w1", x).sum(), x))


def test_many_deaths_in_a_row(workers: LocalCluster, w0: Agent) -> None:
    for victim in ("w3", "w2", "w1"):
        with autograd.context(agent=w0) as context_id:
            y = w0.call(victim, weigh, new_leaf())
            workers.kill(victim)
            with pytest.raises(PeerLost):
                autograd.backward(context_id, [y.sum()])
    assert_released([w0])
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w0", torch.sum, new_leaf())])

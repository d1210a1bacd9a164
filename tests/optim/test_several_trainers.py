"""Several trainers update one model: each gets the gradients of the weights that it used."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd, current_agent, thread_roles
from telegrad.agent import Agent
from telegrad.autograd import shared_parameters
from telegrad.autograd.registry import ContextRegistry
from telegrad.messages.call_scope import current_scope
from telegrad.optim import DistributedOptimizer
from telegrad.refs import RRef, remote
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE, until

inside, go_on = threading.Event(), threading.Event()  # of a forward pass


@pytest.fixture
def transport() -> str:
    return "memory"


class Network(nn.Module):
    """A model that saves weights for backward: as they are, as a view, and inside the graph."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.first).tanh() @ self.second.t() * self.scale).tanh() @ self.first

    def parameter_rrefs(self) -> list[RRef[Any]]:
        return [RRef(parameter) for parameter in self.parameters()]

    def gradients(self, context_id: int) -> list[Tensor]:
        found = autograd.get_gradients(context_id)
        return [found[parameter] for parameter in self.parameters()]

    def forward_in_two_parts(self, x: Tensor) -> Tensor:
        """Use a weight before and after a wait that Telegrad cannot detect."""
        first = x @ self.first
        inside.set()
        assert go_on.wait(PATIENCE)
        return first - x @ self.first

    def forward_through(self, other: str, x: Tensor) -> Tensor:
        """Use a weight before and after a call to another worker."""
        agent = current_agent()
        assert agent is not None
        first = x @ self.first
        agent.call(other, wait_outside)
        return first - x @ self.first

    def spoil(self, x: Tensor) -> Tensor:
        middle = x @ self.first
        saved = middle * self.scale
        middle.add_(1)
        return saved


def gradients_here(x: Tensor, network: Network) -> list[Tensor]:
    return list(torch.autograd.grad(network(x).sum(), list(network.parameters())))


@pytest.fixture
def w0(cluster: Callable[..., LocalCluster]) -> Agent:
    return cluster(2)["w0"]


def optimizers(network: RRef[Network], count: int) -> list[DistributedOptimizer]:
    parameters = network.rpc_sync().parameter_rrefs()
    return [DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5) for _ in range(count)]


def train(network: RRef[Network], x: Tensor, between: Callable[[], None]) -> list[Tensor]:
    """Return the gradients of a trainer that is interrupted between forward and backward."""
    with autograd.context(agent=network._runtime.agent) as context_id:
        loss = network.rpc_sync().forward(x).sum()
        between()
        autograd.backward(context_id, [loss])
        gradients: list[Tensor] = network.rpc_sync().gradients(context_id)
        return gradients


def step(network: RRef[Network], optimizer: DistributedOptimizer, x: Tensor) -> None:
    token = current_scope.set(None)  # this thread acts as another trainer
    try:
        with autograd.context(agent=network._runtime.agent) as context_id:
            autograd.backward(context_id, [network.rpc_sync().forward(x).sum()])
            optimizer.step(context_id)
    finally:
        current_scope.reset(token)


def test_a_step_between_forward_and_backward_changes_no_gradient(w0: Agent) -> None:
    network = remote("w1", Network, agent=w0)
    one, two = optimizers(network, 2)
    local, x = Network(), torch.randn(3, 4, dtype=torch.float64)

    def disturb() -> None:
        for optimizer in (two, one, two):
            step(network, optimizer, x + 1)

    found = train(network, x, disturb)
    for mine, expected in zip(found, gradients_here(x, local), strict=True):
        torch.testing.assert_close(mine, expected)
    for _ in range(3):
        gradients = gradients_here(x + 1, local)
        with torch.no_grad():
            for parameter, gradient in zip(local.parameters(), gradients, strict=True):
                parameter.sub_(0.5 * gradient)
    for mine, expected in zip(network.to_here().parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)  # three steps, one after the other


def test_one_trainer_pays_nothing(w0: Agent) -> None:
    network = remote("w1", Network, agent=w0)
    (alone,) = optimizers(network, 1)
    before = network.rpc_sync().parameter_rrefs()
    step(network, alone, torch.ones(1, 4, dtype=torch.float64))
    addresses = [w0.call("w1", address, each) for each in before]
    step(network, alone, torch.ones(1, 4, dtype=torch.float64))
    assert addresses == [w0.call("w1", address, each) for each in before]
    assert not w0.call("w1", sharing_is_active)


def test_memory_is_replaced_only_while_somebody_needs_it(w0: Agent) -> None:
    network = remote("w1", Network, agent=w0)
    one, two = optimizers(network, 2)
    parameter = network.rpc_sync().parameter_rrefs()[0]
    x = torch.ones(1, 4, dtype=torch.float64)
    step(network, one, x)
    gc.collect()
    address_before = w0.call("w1", address, parameter)
    step(network, two, x)
    assert w0.call("w1", address, parameter) == address_before
    train(network, x, lambda: step(network, two, x))
    assert w0.call("w1", address, parameter) != address_before


def test_other_changes_in_place_are_still_found(w0: Agent) -> None:
    network = remote("w1", Network, agent=w0)
    optimizers(network, 2)
    with autograd.context(agent=w0) as context_id:
        loss = network.rpc_sync().spoil(torch.ones(1, 4, dtype=torch.float64)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            autograd.backward(context_id, [loss])


def test_a_step_does_not_change_what_a_call_computes_with(
    cluster: Callable[..., LocalCluster],
) -> None:
    workers = cluster(2)
    w0, shared = workers["w0"], ContextRegistry.of(workers["w1"]._runtime).shared_parameters
    network = remote("w1", Network, agent=w0)
    _, two = optimizers(network, 2)
    x = torch.ones(1, 4, dtype=torch.float64)
    forget(inside, go_on)
    with ThreadPoolExecutor(1) as pool:
        with autograd.context(agent=w0):
            difference = network.rpc_async().forward_in_two_parts(x)
            assert inside.wait(PATIENCE)
            stepped = pool.submit(step, network, two, x)
            until(lambda: shared._updates == 1)
            go_on.set()
            assert torch.equal(difference.wait(), torch.zeros(1, 4, dtype=torch.float64))
        stepped.result(PATIENCE)


def test_a_step_does_not_wait_for_a_call_that_waits_for_others(
    w0: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this limit the test fails if the step waits for the call.
    monkeypatch.setattr(shared_parameters, "_MAX_WAIT", 2 * PATIENCE)
    network = remote("w1", Network, agent=w0)
    _, two = optimizers(network, 2)
    x = torch.ones(1, 4, dtype=torch.float64)
    forget(inside, go_on)
    with autograd.context(agent=w0):
        difference = network.rpc_async().forward_through("w0", x)
        assert inside.wait(PATIENCE)
        step(network, two, x)
        go_on.set()
        assert difference.wait().abs().max() > 0


def test_trainers_do_not_get_in_each_others_way(w0: Agent) -> None:
    network = remote("w1", Network, agent=w0)
    x = torch.ones(3, 4, dtype=torch.float64)

    def run(optimizer: DistributedOptimizer) -> None:
        for _ in range(60):
            step(network, optimizer, x)

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(run, optimizer) for optimizer in optimizers(network, 4)]:
            each.result(PATIENCE)


def forget(*events: threading.Event) -> None:
    for event in events:
        event.clear()


def wait_outside() -> None:
    inside.set()
    assert go_on.wait(PATIENCE)


def address(parameter: RRef[Tensor]) -> int:
    return parameter.local_value().data_ptr()


def sharing_is_active() -> bool:
    agent = current_agent()
    assert agent is not None
    return ContextRegistry.of(agent._runtime).shared_parameters.active


# `SharedParameters` on threads of this process


@pytest.fixture
def shared() -> shared_parameters.SharedParameters:
    return shared_parameters.SharedParameters()


@pytest.fixture
def parameter(shared: shared_parameters.SharedParameters) -> nn.Parameter:
    """Return a parameter that two optimizers update."""
    parameter = nn.Parameter(torch.ones(3))
    assert "of 0 parameters, not shared" in repr(shared)
    for _ in range(2):
        shared.add_optimizer([parameter])
    assert "of 1 parameters, shared" in repr(shared)
    return parameter


def update(shared: shared_parameters.SharedParameters, parameter: nn.Parameter) -> None:
    with shared.updating():
        shared.before_update([parameter])
        with torch.no_grad():
            parameter.add_(1)


def test_a_call_that_does_not_end_keeps_the_memory_that_it_reads(
    shared: shared_parameters.SharedParameters,
    parameter: nn.Parameter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_parameters, "_MAX_WAIT", 0.01)
    with ThreadPoolExecutor(1) as pool, shared.call():
        read = parameter.data
        pool.submit(update, shared, parameter).result(PATIENCE)
        assert read.tolist() == [1, 1, 1]
        assert parameter.tolist() == [2, 2, 2]
        assert shared._replaced[0][1][0].data_ptr() == read.data_ptr()
    assert shared._replaced == []


def test_a_call_within_a_call_saves_parameters_too(
    shared: shared_parameters.SharedParameters, parameter: nn.Parameter
) -> None:
    with shared.call():
        with shared.call():
            product = parameter * parameter
        update(shared, parameter)  # by the same thread, which reads nothing meanwhile
        assert parameter.tolist() == [2, 2, 2]
    product.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2, 2, 2]  # of the weights that the product was made of


@pytest.mark.parametrize("wait", ["pause", "backpressure"])
@pytest.mark.parametrize("nested", [False, True])
def test_an_update_does_not_wait_for_a_call_that_is_blocked(
    shared: shared_parameters.SharedParameters,
    parameter: nn.Parameter,
    monkeypatch: pytest.MonkeyPatch,
    wait: str,
    nested: bool,
) -> None:
    # With this limit the test fails if the update waits for the call.
    monkeypatch.setattr(shared_parameters, "_MAX_WAIT", 2 * PATIENCE)
    outer = shared_parameters.SharedParameters()
    begin, end = {
        "pause": (thread_roles.pause, thread_roles.resume),
        "backpressure": (thread_roles.begin_backpressure, thread_roles.end_backpressure),
    }[wait]
    with ThreadPoolExecutor(1) as pool, outer.call() if nested else nullcontext(), shared.call():
        role = begin()
        pool.submit(update, shared, parameter).result(PATIENCE)
        assert (len(shared._reading), len(outer._reading)) == (0, 0)
        end(role)
        assert (len(shared._reading), len(outer._reading)) == (1, int(nested))
        assert not thread_roles.has_pending_messages()
        assert not thread_roles.run_at("key", 0.0, print)  # this thread reads no connections
    assert thread_roles.current_role() is None

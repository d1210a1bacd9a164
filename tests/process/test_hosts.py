"""What one machine can do, three hosts can do together. They have nothing but TCP in common."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import gymnasium
import pytest
import torch
from torch import nn

import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc
from benchmarks.namespaces import Network
from telegrad import ps
from telegrad.futures import Future
from telegrad.refs import RRef
from tests.local.gates import until
from tests.process.fleet import Fleet
from tests.process.hosts import everywhere, fleet_on
from tests.ps import training
from tests.ps.training import check_same, model

pytestmark = [pytest.mark.process, pytest.mark.netns]

_here: dict[str, Any] = {}


@pytest.fixture(scope="module")
def fleet(namespaces: None) -> Iterator[Fleet]:
    """Workers w0, w1 and w2, which the tests of this file share."""
    with Network(3) as network, fleet_on(network) as workers:
        yield workers


def test_namespaces_of_killed_processes_are_removed(namespaces: None) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        name = f"telegrad-{ended.pid}-0-host1"
    subprocess.run(["ip", "netns", "add", name], check=True)
    with Network(1) as network:
        assert network.hosts[0].namespace in names_of_namespaces()
        assert name not in names_of_namespaces()
    assert network.hosts[0].namespace not in names_of_namespaces()


def names_of_namespaces() -> list[str]:
    return os.listdir("/var/run/netns")


# Calls


class TwoReasons(Exception):
    """Has more than one argument, which a copy by its text would lose."""


def add(a: Any, b: Any) -> Any:
    return a + b


def fail(*reasons: str) -> None:
    raise TwoReasons(*reasons)


def own_name() -> str:
    return rpc.get_worker_info().name


def call_everybody(size: int) -> list[str]:
    names = []
    for to in range(size):
        names.append(rpc.rpc_sync(to, own_name))
        futures = [rpc.rpc_async(to, add, (number, 1)) for number in range(50)]
        assert [future.wait() for future in futures] == list(range(1, 51))
        with pytest.raises(TwoReasons) as caught:
            rpc.rpc_sync(to, fail, ("first", "zweitens: ä"))
        assert caught.value.args == ("first", "zweitens: ä")
        failed = rpc.rpc_async(to, fail, ("later",))
        with pytest.raises(TwoReasons, match="later"):
            failed.wait()
    return names


def test_calls(fleet: Fleet) -> None:
    assert everywhere(fleet, call_everybody, 3) == [["w0", "w1", "w2"]] * 3


@pytest.mark.parametrize("megabytes", [1, 64])
def test_large_tensors_in_both_directions(fleet: Fleet, megabytes: int) -> None:
    """Of several workers at the same time, with small calls in between."""
    everywhere(fleet, exchange, megabytes << 18)


def exchange(elements: int) -> None:
    own_rank = rpc.get_worker_info().id
    sent = torch.arange(elements, dtype=torch.float32).add_(own_rank)
    pending = [rpc.rpc_async(to, add, (sent, 1.0)) for to in range(3) if to != own_rank]
    assert rpc.rpc_sync((own_rank + 1) % 3, add, (1, 2)) == 3
    sent_again = rpc.rpc_sync((own_rank + 1) % 3, add, (sent, 1.0))
    for received in (sent_again, *(future.wait() for future in pending)):
        assert torch.equal(received, sent + 1.0)


# References


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count


def make_and_lend() -> None:
    """Make an object on w1 and lend it to w2, then drop the reference."""
    counter = rpc.remote("w1", Counter)
    assert counter.rpc_sync().add(1) == 1
    assert rpc.rpc_sync("w2", keep, (counter,)) == 3
    assert counter.rpc_async().add(4).wait() == 7


def keep(counter: RRef[Counter]) -> int:
    _here["counter"] = counter
    return counter.rpc_sync().add(2)


def use_and_drop() -> int:
    result = _here.pop("counter").rpc_sync().add(8)
    gc.collect()
    return int(result)


def references_end() -> None:
    """Wait until this worker owns no object and refers to none."""
    gc.collect()
    until(lambda: set(rpc._rref_context_get_debug_info().values()) == {"0"})


def test_references_outlive_those_who_made_them_and_end(fleet: Fleet) -> None:
    fleet[0].do(make_and_lend)
    fleet[0].do(references_end)
    assert fleet[2].do(use_and_drop) == 15
    everywhere(fleet, references_end)


# Gradients


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def layer_by_way_of(to: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, layer, (x, weight)) * 2


def gradients_over_three_hosts() -> list[torch.Tensor]:
    x, weight = parameters()
    with dist_autograd.context() as context:
        loss = rpc.rpc_sync("w1", layer_by_way_of, ("w2", x, weight)).sum()
        dist_autograd.backward(context, [loss])
        found = dist_autograd.get_gradients(context)
        return [found[x], found[weight]]


def parameters() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(4, 8, generator=generator, requires_grad=True),
        torch.randn(8, 2, generator=generator, requires_grad=True),
    )


def test_gradients_pass_through_all_hosts(fleet: Fleet) -> None:
    found = fleet[0].do(gradients_over_three_hosts)
    x, weight = parameters()
    (layer(x, weight) * 2).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(found, [x.grad, weight.grad])


# Parameter servers


def train_with_server(trainer: int, steps: int) -> dict[str, torch.Tensor]:
    net = model()
    optimizer = ps.Optimizer(net, "w0", trainers=2, lr=0.1, momentum=0.9)
    training.train(optimizer, net, range(steps), [trainer])
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_trainers_on_other_hosts_than_their_server(fleet: Fleet) -> None:
    for trainer, rank in enumerate((1, 2)):
        fleet[rank].begin(train_with_server, trainer, 5)
    states = [fleet[rank].result() for rank in (1, 2)]
    expected = model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    training.train(optimizer, expected, range(5), [0, 1])
    for state in states:
        net = model()
        net.load_state_dict(state)
        check_same(net, expected)


# The tutorial of batched calls: observers ask one policy for actions


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).softmax(2)  # type: ignore[no-any-return]


class Observer:
    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id - 1
        self.env = gymnasium.make("CartPole-v1")

    def run_episode(self, agent: RRef[Agent], steps: int) -> torch.Tensor:
        state, _ = self.env.reset(seed=self.id)
        rewards = torch.zeros(steps)
        for step in range(steps):
            observed = torch.from_numpy(state).float().unsqueeze(0)
            action = rpc.rpc_sync(
                agent.owner(), Agent.select_action_batch, (agent, self.id, observed)
            )
            state, reward, ended, truncated, _ = self.env.step(action)
            rewards[step] = float(reward)
            if ended or truncated:
                state, _ = self.env.reset()
        return rewards


class Agent:
    def __init__(self, world_size: int) -> None:
        self.rref = RRef(self)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.observers = [rpc.remote(rank, Observer) for rank in range(1, world_size)]
        self.states = torch.zeros(len(self.observers), 1, 4)
        self.saved_log_probs: list[torch.Tensor] = []
        self.future_actions: Future[torch.Tensor] = Future()
        self.pending_states = len(self.observers)
        self.lock = threading.Lock()

    @staticmethod
    @rpc.functions.async_execution
    def select_action_batch(agent: RRef[Agent], observer: int, state: torch.Tensor) -> Any:
        self = agent.local_value()
        self.states[observer].copy_(state)
        action = self.future_actions.then(lambda actions: actions.wait()[observer].item())
        with self.lock:
            self.pending_states -= 1
            if self.pending_states == 0:
                self.pending_states = len(self.observers)
                probabilities = self.policy(self.states.clone())
                distribution = torch.distributions.Categorical(probabilities)
                actions = distribution.sample()
                self.saved_log_probs.append(distribution.log_prob(actions).t()[0])
                complete, self.future_actions = self.future_actions, Future()
                complete.set_result(actions)
        return action

    def run_episode(self, steps: int) -> float:
        pending = [each.rpc_async().run_episode(self.rref, steps) for each in self.observers]
        rewards = torch.stack([future.wait() for future in pending]).t()
        loss = -torch.stack(self.saved_log_probs) * rewards / len(pending)
        self.optimizer.zero_grad()
        loss.sum().backward()
        self.optimizer.step()
        self.saved_log_probs = []
        return float(rewards.sum())


def play(episodes: int, steps: int) -> tuple[list[float], bool]:
    """Return the rewards of each episode, and whether the policy has changed."""
    agent = Agent(3)
    before = [each.clone() for each in agent.policy.parameters()]
    rewards = [agent.run_episode(steps) for _ in range(episodes)]
    del agent.rref  # the object that it refers to holds it
    changed = zip(before, agent.policy.parameters(), strict=True)
    return rewards, any(not torch.equal(old, new) for old, new in changed)


def test_batched_actions_for_observers_on_other_hosts(fleet: Fleet) -> None:
    assert fleet[0].do(play, 3, 50) == ([100.0] * 3, True)  # each step of an observer earns 1
    everywhere(fleet, references_end)

"""Functions that workers run in the tests of autograd.

Each worker has one weight, and can keep tensors between calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import telegrad.rpc as rpc
from telegrad import autograd, current_agent
from telegrad.agent import Agent
from telegrad.refs import RRef
from tests.local.gates import Gate, until

weights: dict[str, Tensor] = {}
kept: dict[str, Tensor] = {}


def reset() -> None:
    kept.clear()
    for rank in range(5):
        weights[f"w{rank}"] = torch.linspace(1, 2 + rank, 3, dtype=torch.double).requires_grad_()


def here() -> Agent:
    agent = current_agent()
    assert agent is not None
    return agent


def new_leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers or (0.5, -1.0, 2.0), dtype=torch.double, requires_grad=True)


def weigh(x: Tensor) -> Tensor:
    """Multiply with this worker's weight."""
    return (x * weights[here().name]).tanh()


def weigh_along(path: list[str], x: Tensor) -> Tensor:
    """Multiply with the weight of this worker, and then of each worker in `path`."""
    y = weigh(x)
    return here().call(path[0], weigh_along, path[1:], y) if path else y


def weigh_both(x: Tensor) -> tuple[Tensor, Tensor]:
    return weigh(x), 3 * weigh(x)


def weigh_and_return_to(back: str, x: Tensor) -> Tensor:
    """Call `weigh` on another worker, and apply this worker's weight to the result."""
    return weigh(here().call(back, weigh, x) + x)


def weigh_in_passing(third: str, x: Tensor) -> Tensor:
    """Let another worker compute a result that is not used."""
    here().call(third, weigh, x)
    return 2 * x


def fetch_weighed(rref: RRef[Tensor]) -> Tensor:
    return weigh(rref.to_here())


@rpc.functions.async_execution
def weigh_later(third: str, x: Tensor) -> Any:
    return here().submit(third, weigh, weigh(x)).then(lambda done: weigh(done.wait()))


def keep(name: str, x: Tensor) -> None:
    kept[name] = weigh(x)


def use(name: str, x: Tensor) -> Tensor:
    return kept[name] * x


def fail_with(x: Tensor) -> Tensor:
    raise KeyError(f"no use for {tuple(weigh(x).shape)}")


def hold_and_weigh(gate: Gate, x: Tensor) -> Tensor:
    gate.hold()
    return weigh(x)


def product(parts: Iterable[Tensor]) -> Tensor:
    whole = torch.ones(3, dtype=torch.double)
    for part in parts:
        whole = whole * part
    return whole


def gradient_of_weight(context_id: int) -> Tensor | None:
    """Return the gradient of this worker's weight. Fail if the context has others here."""
    gradients = autograd.get_gradients(context_id)
    found = gradients.pop(weights[here().name], None)
    assert not gradients
    return found


def is_there(context_id: int) -> bool:
    try:
        autograd.get_gradients(context_id)
    except RuntimeError:
        return False
    return True


def everything(agents: Iterable[Agent], context_id: int, *leaves: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all weights, and of leaves on the first worker by their index.

    Fail if there are other gradients.
    """
    first, *others = agents
    found: dict[str, Tensor] = {}
    mine = autograd.get_gradients(context_id)
    for name, leaf in [
        (first.name, weights[first.name]),
        *((str(number), leaf) for number, leaf in enumerate(leaves)),
    ]:
        gradient = mine.pop(leaf, None)
        if gradient is not None:
            found[name] = gradient
    assert not mine
    for agent in others:
        if first.call(agent.name, is_there, context_id):
            gradient = first.call(agent.name, gradient_of_weight, context_id)
            if gradient is not None:
                found[agent.name] = gradient
    return found


def alone(loss: Tensor, *leaves: Tensor) -> dict[str, Tensor]:
    """Return what `everything` returns, for a loss that was computed in one process."""
    loss.backward()  # type: ignore[no-untyped-call]
    named = {**weights, **{str(number): leaf for number, leaf in enumerate(leaves)}}
    found = {name: leaf.grad for name, leaf in named.items() if leaf.grad is not None}
    for leaf in named.values():
        leaf.grad = None
    return found


def weight(name: str, x: Tensor) -> Tensor:
    """Compute what `weigh` computes on a worker, for `alone`."""
    return (x * weights[name]).tanh()


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


def assert_released(agents: Iterable[Agent]) -> None:
    """Wait until no agent has a context."""
    for agent in agents:
        until(lambda agent=agent: agent.statistics().get("autograd_contexts", 0) == 0)  # type: ignore[misc]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(3, 4, dtype=torch.double)
        self.second = nn.Linear(4, 2, dtype=torch.double)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result

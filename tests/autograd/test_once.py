"""Each node of the graph runs once in a pass, and a pass takes linear time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from telegrad import autograd
from telegrad.agent import Agent
from telegrad.autograd.local_graph import LocalGraph
from telegrad.autograd.send_recv import ReceivedGroup, SentTensor, attach_receive_nodes
from telegrad.testing import LocalCluster
from tests.autograd.functions import alone, assert_equal, everything, new_leaf, weigh, weight


@pytest.fixture
def transport() -> str:
    return "memory"


runs: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def fresh_runs() -> None:
    runs.clear()


class Counted(torch.autograd.Function):
    """The identity. It counts the runs of its backward, and fails with a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        runs[ctx.name] += 1
        assert gradients[0].any()
        return gradients[0], None


def counted(name: str, x: Tensor) -> Tensor:
    """Count the runs of a tensor hook, of the hooks of a node, and of a Python function."""
    y: Tensor = Counted.apply(x * 1, name)  # type: ignore[no-untyped-call]
    y.retain_grad()
    y.register_hook(lambda gradient: runs.update([f"{name}: tensor hook {gradient is None}"]))
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda _: runs.update([f"{name}: pre-hook"]))
    y.grad_fn.register_hook(lambda *_: runs.update([f"{name}: post-hook"]))
    return y


def names_of(name: str) -> list[str]:
    return [name, f"{name}: tensor hook False", f"{name}: pre-hook", f"{name}: post-hook"]


def step(x: Tensor, number: int) -> Tensor:
    return weigh(counted(f"step {number}", x))


class Shape:
    """A program that takes the function for its calls, and the names that it counts."""

    def __init__(
        self, run: Callable[[Any, Tensor, int], Tensor], names: Callable[[int], list[str]]
    ) -> None:
        self.run = run
        self.names = names


def _steps(count: int) -> list[str]:
    return [f"step {number}" for number in range(count)]


def chain(call: Any, x: Tensor, count: int) -> Tensor:
    for number in range(count):
        x = call(number, x)
    return x


def alternate(call: Any, x: Tensor, count: int) -> Tensor:
    """Calls with local operations between them, and a weight that all of these share."""
    scale = counted("scale", x.cos())
    for number in range(count):
        x = counted(f"between {number}", call(number, x).sin() * scale)
    return x


def head_over_steps(call: Any, x: Tensor, count: int) -> Tensor:
    states = []
    for number in range(count):
        x = call(number, x)
        states.append(x)
    return counted("head", torch.stack(states))


def fan_in(call: Any, x: Tensor, count: int) -> Tensor:
    y = counted("shared", x)
    return counted(
        "sum", torch.stack([call(number, y * (number + 1)) for number in range(count)]).sum(0) + y
    )


def skips(call: Any, x: Tensor, count: int) -> Tensor:
    """Every state is sent, used locally, and depends on states that were sent before."""
    total = x
    for number in range(count):
        x = counted(f"state {number}", x + counted(f"before {number}", x))
        total = counted(f"total {number}", total + call(number, x) * x + x)
        x = x * 0.5
    return total


SHAPES = {
    "a chain": Shape(chain, _steps),
    "local operations between calls": Shape(
        alternate,
        lambda count: ["scale", *_steps(count), *(f"between {number}" for number in range(count))],
    ),
    "a head over steps": Shape(head_over_steps, lambda count: [*_steps(count), "head"]),
    "a sum of calls": Shape(fan_in, lambda count: [*_steps(count), "shared", "sum"]),
    "skip connections": Shape(
        skips,
        lambda count: [
            *_steps(count),
            *(
                f"{kind} {number}"
                for kind in ("state", "before", "total")
                for number in range(count)
            ),
        ],
    ),
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_node_runs_once(workers: LocalCluster, w0: Agent, kind: str, count: int) -> None:
    shape, x = SHAPES[kind], new_leaf()

    def call(number: int, x: Tensor) -> Tensor:
        return w0.call(f"w{1 + number % 3}", step, x, number)

    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [shape.run(call, 0.1 * x, count).sum()])
        found = everything(workers, context_id, x)
    expected_runs = Counter(each for name in shape.names(count) for each in names_of(name))
    assert runs == expected_runs

    def call_here(number: int, x: Tensor) -> Tensor:
        return weight(f"w{1 + number % 3}", counted(f"step {number}", x))

    runs.clear()
    assert_equal(found, alone(shape.run(call_here, 0.1 * x, count).sum(), x))
    assert runs == expected_runs


@pytest.mark.parametrize("kind", SHAPES)
def test_retained_gradients_are_those_of_one_process(w0: Agent, kind: str) -> None:
    retained: list[Tensor] = []

    def keep(call: Any) -> Any:
        def run(number: int, x: Tensor) -> Tensor:
            y: Tensor = call(number, x)
            for each in (x, y):
                if not each.is_leaf:
                    each.retain_grad()
                    retained.append(each)
            return y

        return run

    def gradients() -> list[Tensor | None]:
        found = [each.grad for each in retained]
        retained.clear()
        return found

    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = SHAPES[kind].run(keep(lambda number, x: w0.call("w1", step, x, number)), 0.1 * x, 5)
        autograd.backward(context_id, [y.sum()])
    found = gradients()
    y = SHAPES[kind].run(keep(lambda number, x: weight("w1", counted("", x))), 0.1 * x, 5)
    y.sum().backward()
    torch.testing.assert_close(found, gradients())


def run_module(x: Tensor) -> Tensor:
    result: Tensor = x * 2
    return result


def test_hooks_of_modules_beside_what_was_sent(w0: Agent) -> None:
    """Their nodes follow a tensor that was sent, and lead to a parameter in a partial run."""
    x, seen = new_leaf(), []
    first, second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    for module in (first, second):
        module.register_full_backward_hook(
            lambda _, inputs, outputs: seen.append((inputs[0], outputs[0]))  # type: ignore[index]
        )

    def compute(call: Callable[[Tensor], Tensor]) -> Tensor:
        y = first(x)
        z = second(y)
        return (call(z) + z * first.bias + y).sum()

    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [compute(lambda z: w0.call("w1", run_module, z))])
        found = autograd.get_gradients(context_id)
    remote = seen.copy()
    seen.clear()
    compute(run_module).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(remote, seen)
    for leaf in (x, *first.parameters(), *second.parameters()):
        torch.testing.assert_close(found[leaf], leaf.grad)


def test_hooks_on_a_leaf_that_is_ready_for_a_part(workers: LocalCluster, w0: Agent) -> None:
    """A partial run does not remove the hooks."""
    x, w = new_leaf(), new_leaf(1, 2, 3)
    seen: list[list[float]] = []
    w.register_hook(lambda gradient: seen.append(gradient.tolist()) or gradient * 2)  # type: ignore[func-returns-value]
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", torch.mul, x, 2) * w
        autograd.backward(context_id, [w0.call("w1", torch.mul, y, w).sum()])
        found = everything(workers, context_id, x, w)
    assert len(seen) == 1
    expected = alone((2 * x * w * w).sum(), x, w)
    assert_equal(found, expected)
    assert seen[0] == seen[1]


def test_a_node_before_a_leaf_waits_for_all_that_lead_to_it(
    workers: LocalCluster, w0: Agent
) -> None:
    """It follows nodes of a partial run, but the loss also leads to it in another way."""
    x, w = new_leaf(), new_leaf(1, 2, 3)

    def compute(call: Callable[[Tensor], Tensor]) -> Tensor:
        shared = w.sin().cos()
        return (call(call(x) * shared) + (shared * 3).exp()).sum()

    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [compute(lambda x: w0.call("w1", run_module, x))])
        found = everything(workers, context_id, x, w)
    assert_equal(found, alone(compute(run_module), x, w))


class OfFirst(torch.autograd.Function):
    """A sum whose second argument gets an undefined gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@pytest.mark.parametrize("observed", [False, True])
def test_an_undefined_gradient_that_a_part_ends_with(
    workers: LocalCluster, w0: Agent, observed: bool
) -> None:
    """The partial run happens before all edges to the received tensor are decided."""
    x, y = new_leaf(), new_leaf(1, 2, 3)
    seen: list[Tensor | None] = []

    def compute(call: Callable[[str, Tensor], Tensor]) -> Tensor:
        arrived = call("w1", x)
        if observed:
            arrived.register_hook(seen.append)
        call("w2", arrived.sin())  # the result is not used
        total: Tensor = OfFirst.apply(call("w3", y), arrived)  # type: ignore[no-untyped-call]
        return total.sum()

    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [compute(lambda worker, x: w0.call(worker, weigh, x))])
        found = everything(workers, context_id, x, y)
    assert_equal(found, alone(compute(weight), x, y))
    assert seen == ([None, None] if observed else [])  # once on the workers, once in one process


def test_a_long_chain_with_local_operations_between_calls(workers: LocalCluster, w0: Agent) -> None:
    """It takes one message for each call."""
    x, w = new_leaf(), new_leaf(1, 2, 3)
    count = 60

    def compute(call: Callable[[Tensor], Tensor]) -> Tensor:
        y = x
        for _ in range(count):
            y = (call(y) * w).sin()
        return y.sum()

    with autograd.context(agent=w0) as context_id:
        loss = compute(lambda y: w0.call("w1", run_module, y))
        before = workers["w1"]._runtime.calls_served
        autograd.backward(context_id, [loss])
        messages = workers["w1"]._runtime.calls_served - before
        found = everything(workers, context_id, x, w)
    assert messages <= count
    assert_equal(found, alone(compute(run_module), x, w))


def head(states: list[Tensor], _: Tensor, leaf: Tensor) -> Tensor:
    return torch.stack(states) * leaf


def last_of_a_chain(states: list[Tensor], sent: Tensor, _: Tensor) -> Tensor:
    """Return the tensor that was sent last: a chain of calls with operations between them."""
    return sent


def last_and_weight(states: list[Tensor], sent: Tensor, leaf: Tensor) -> Tensor:
    return sent * leaf.cos()


def calls_for(count: int, loss_of: Callable[[list[Tensor], Tensor, Tensor], Tensor]) -> int:
    """Count the Python calls for a graph of `count` steps whose sources are resolved one by one."""
    leaf = new_leaf()
    shared = leaf.exp().sin()
    sources: dict[Any, SentTensor] = {}
    receives: dict[Node, ReceivedGroup] = {}
    states: list[Tensor] = []
    sent: list[Tensor] = []
    for number in range(count):
        data = torch.ones(3, dtype=torch.double)
        (arrived,), nodes = attach_receive_nodes([data], [number], "somebody")
        states.append(arrived)
        receives.update(nodes)
        sent.append((arrived * leaf).sin() * shared)
        sources[number] = SentTensor(sent[-1], "somebody")
    loss = loss_of(states, sent[-1], leaf)
    ends = [loss, *sent]
    (expected,) = torch.autograd.grad(
        ends, leaf, [torch.ones_like(end) for end in ends], retain_graph=True
    )
    sources["loss"] = SentTensor(loss, "somebody")
    graph = LocalGraph(sources, receives, retain_graph=False)
    found = 0

    def count_calls(*_: Any) -> None:
        nonlocal found
        found += 1

    answered = []
    sys.setprofile(count_calls)
    try:
        graph.resolve("loss", torch.ones_like(loss))
        for number in reversed(range(count)):
            answered += graph.run().receives
            graph.resolve(number, torch.ones(3, dtype=torch.double))
        outcome = graph.run()
    finally:
        sys.setprofile(None)
    assert len(answered) + len(outcome.receives) == count
    ((_, gradient),) = outcome.leaves
    torch.testing.assert_close(gradient, expected)
    return found


@pytest.mark.parametrize("loss_of", [head, last_of_a_chain, last_and_weight])
def test_a_pass_takes_linear_time(
    loss_of: Callable[[list[Tensor], Tensor, Tensor], Tensor],
) -> None:
    small, large = calls_for(50, loss_of), calls_for(200, loss_of)
    assert large < 4.2 * small

"""Hooks on tensors, modules and nodes see and change the same values as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from telegrad import autograd
from telegrad.agent import Agent
from telegrad.autograd.hooks import (
    SuppressedHooks,
    count_foreign_hooks,
    record_hooks,
    register_own_hook,
)
from telegrad.autograd.local_graph import LocalGraph
from telegrad.autograd.send_recv import (
    SentTensor,
    accumulate_grad_node,
    attach_receive_nodes,
    is_shared_node,
)
from telegrad.testing import LocalCluster
from tests.autograd.functions import (
    TwoLayers,
    alone,
    assert_equal,
    everything,
    here,
    new_leaf,
    weigh,
    weight,
    weights,
)
from tests.local.gates import Log


@pytest.fixture
def transport() -> str:
    return "memory"


def weigh_with_hooks(log: Log, x: Tensor) -> Tensor:
    """Register hooks on the received tensor, on an inner one, and on the result."""
    x.register_hook(lambda gradient: log.note(("arrived", gradient.tolist())))
    x.register_hook(lambda gradient: gradient * 2)
    y = weigh(x)
    y.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    z = 3 * y
    z.register_hook(lambda gradient: log.note(("left", gradient.tolist())))
    return z


def test_hooks_see_and_change_gradients(workers: LocalCluster, w0: Agent, log: Log) -> None:
    x = new_leaf()
    x.register_hook(lambda gradient: gradient + 1)
    with autograd.context(agent=w0) as context_id:
        z = w0.call("w1", weigh_with_hooks, log, x)
        z.register_hook(lambda gradient: gradient * 10)
        autograd.backward(context_id, [(z * z).sum()])
        found = everything(workers, context_id, x)
    notes = Log()

    def compute() -> Tensor:
        arrived = x.clone()
        arrived.register_hook(lambda gradient: notes.note(("arrived", gradient.tolist())))
        arrived.register_hook(lambda gradient: gradient * 2)
        y = weight("w1", arrived)
        y.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
        z = 3 * y
        z.register_hook(lambda gradient: notes.note(("left", gradient.tolist())))
        back = z.clone()
        back.register_hook(lambda gradient: gradient * 10)
        return (back * back).sum()

    assert_equal(found, alone(compute(), x))
    assert log.entries == notes.entries


def use_twice(third: str, x: Tensor) -> Tensor:
    return weigh(x) + here().call(third, weigh, x)


def test_a_hook_on_a_leaf_sees_the_whole_gradient_once(
    workers: LocalCluster, w0: Agent, log: Log
) -> None:
    """Parts of it come from several workers, and from a chain that uses the leaf again."""
    for leaf in weights.values():
        leaf.register_hook(lambda gradient: log.note(1) or gradient.clamp(-0.1, 0.1))  # type: ignore[func-returns-value]
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", use_twice, "w2", weights["w0"])
        z = w0.call("w2", use_twice, "w1", y * weights["w0"])
        autograd.backward(context_id, [z.sum()])
        found = everything(workers, context_id)
    assert len(log.entries) == 3

    def compute() -> Tensor:
        leaf = weights["w0"]
        y = weight("w1", leaf) + weight("w2", leaf)
        return (weight("w2", y * leaf) + weight("w1", y * leaf)).sum()

    assert_equal(found, alone(compute()))


def test_a_hook_never_sees_part_of_a_gradient() -> None:
    """Hooks wait until both gradients of a tensor are there, while other tensors are answered."""
    seen: list[list[float]] = []
    leaf = new_leaf()
    _, receives = attach_receive_nodes([torch.ones(3)], [1], "somebody")
    (group,) = receives.values()
    y = 2 * leaf
    y.register_hook(lambda gradient: seen.append(gradient.tolist()))
    sources = {"y": SentTensor(y, "somebody"), "z": SentTensor(3 * y, "somebody")}
    graph = LocalGraph(sources, receives, retain_graph=False)
    graph.resolve("y", torch.ones_like(y))
    assert graph.run() == ([], [(group, (None,), range(1))])
    assert seen == []
    graph.resolve("z", torch.ones_like(y))
    assert [gradient.tolist() for _, gradient in graph.run().leaves] == [[8, 8, 8]]
    assert seen == [[4, 4, 4]]


class Stop(torch.autograd.Function):
    """A function whose backward returns None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


def observe_some(log: Log, third: str, xs: list[Tensor]) -> Tensor:
    """Use some of many tensors, and register hooks on used and unused ones."""

    def note(name: str, gradient: Tensor | None) -> None:
        log.note((name, None if gradient is None else gradient.tolist()))

    def note_all(gradients: Sequence[Tensor | None]) -> None:
        for gradient in gradients:
            note("several", gradient)

    xs[0].register_hook(lambda gradient: note("used", gradient))
    xs[0].register_hook(lambda gradient: gradient * 3)
    xs[1].register_hook(lambda gradient: note("unused", gradient))
    xs[2].register_hook(lambda gradient: note("undefined", gradient))
    xs[3].retain_grad()
    register_multi_grad_hook(xs[3:6], note_all)
    kept.append(xs[3])
    doubled = 2 * xs[6]
    on_third = here().call(third, torch.sin, doubled) if third else torch.sin(doubled)
    stopped: Tensor = Stop.apply(xs[2])  # type: ignore[no-untyped-call]
    return (xs[0] * xs[3] * xs[4] + stopped + on_third).sum()


def observed(log: Log, leaves: list[Tensor]) -> list[Tensor]:
    """Return copies with hooks on one that is not used, and on one with an undefined gradient."""
    xs = [leaf.clone() for leaf in leaves]
    for index in (1, 2):
        xs[index].register_hook(lambda gradient, index=index: log.note(("sent", index, gradient)))
    return xs


kept: list[Tensor] = []


@pytest.mark.parametrize("third", ["", "w2"])
def test_hooks_on_some_of_many_small_tensors(
    workers: LocalCluster, w0: Agent, log: Log, third: str
) -> None:
    """These share a node of the graph, but each has its own gradient and hooks."""
    leaves = [new_leaf(number / 50, 2.0) for number in range(100)]
    with autograd.context(agent=w0) as context_id:
        # With a third worker, w1 has to wait for a gradient when it has the first one.
        y = w0.call("w1", observe_some, log, third, observed(log, leaves))
        autograd.backward(context_id, [y])
        found = everything(workers, context_id, *leaves)
    retained = kept.pop().grad
    notes = Log()
    arrived = [x.clone() for x in observed(notes, leaves)]
    expected = alone(observe_some(notes, "", arrived), *leaves)
    expected_retained = kept.pop().grad
    assert retained is not None
    assert expected_retained is not None
    torch.testing.assert_close(retained, expected_retained)
    assert sorted(log.entries, key=str) == sorted(notes.entries, key=str)
    assert len(log.entries) == 6
    assert_equal(found, expected)


def test_a_hook_between_two_ends_runs_once(workers: LocalCluster, w0: Agent, log: Log) -> None:
    """The sum leads to a received tensor, which is ready at once, and to a leaf, which is not."""
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        total = w0.call("w1", weigh, x) + x
        total.register_hook(lambda gradient: log.note(gradient.tolist()))
        autograd.backward(context_id, [total.sum()])
    assert log.entries == [[1, 1, 1]]


def test_a_retained_gradient_is_counted_once(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        total = w0.call("w1", weigh, x) + x
        total.retain_grad()
        autograd.backward(context_id, [total.sum()])
    assert total.grad is not None
    assert total.grad.tolist() == [1, 1, 1]


def test_retained_gradients_of_what_arrives_and_leaves(w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        leaves = 2 * x
        leaves.retain_grad()
        arrived = w0.call("w1", torch.mul, leaves, 3)
        arrived.retain_grad()
        autograd.backward(context_id, [arrived.sum()])
    assert leaves.grad is not None
    assert arrived.grad is not None
    assert (leaves.grad.tolist(), arrived.grad.tolist()) == ([3, 3, 3], [1, 1, 1])


def run_module(log: Log, x: Tensor) -> Tensor:
    module = TwoLayers()

    def see(_: nn.Module, inputs: Any, outputs: Any) -> tuple[Tensor]:
        log.note((inputs[0].tolist(), outputs[0].tolist()))
        return (2 * inputs[0],)

    module.register_full_backward_hook(see)

    def clamp(_: nn.Module, outputs: Any) -> Any:
        return (outputs[0].clamp(-0.1, 0.1),)

    module.first.register_full_backward_pre_hook(clamp)
    result: Tensor = module(x)
    return result


def test_hooks_of_modules(w0: Agent, log: Log) -> None:
    x, notes = new_leaf(), Log()
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", run_module, log, x).sum()])
        found = autograd.get_gradients(context_id)[x]
    run_module(notes, x).sum().backward()
    torch.testing.assert_close(found, x.grad)
    assert log.entries == notes.entries


def test_a_hook_after_accumulation_finds_the_gradient_in_its_place(
    workers: LocalCluster, w0: Agent, log: Log
) -> None:
    leaf = weights["w1"]
    leaf.grad = torch.full((3,), 7.0, dtype=torch.double)

    def see(changed: Tensor) -> None:
        assert changed.grad is not None
        log.note(changed.grad.tolist())
        changed.grad *= 2

    handle = leaf.register_post_accumulate_grad_hook(see)
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", weigh, x * w0.call("w1", weigh, x)).sum()])
        found = everything(workers, context_id, x)
    assert leaf.grad.tolist() == [7, 7, 7], "the value before the pass is restored"
    handle.remove()
    leaf.grad = None
    expected = alone(weight("w1", x * weight("w1", x)).sum(), x)
    torch.testing.assert_close(log.entries, [expected["w1"].tolist()])
    assert_equal(found, {**expected, "w1": 2 * expected["w1"]})


@pytest.mark.parametrize("kind", ["before", "after"])
def test_hooks_on_the_node_where_gradients_of_a_leaf_end(w0: Agent, log: Log, kind: str) -> None:
    x = new_leaf()
    node = accumulate_grad_node(x)
    if kind == "before":
        node.register_prehook(lambda gradients: (gradients[0] * 5,))
    else:
        node.register_hook(lambda *_: log.note("accumulated"))
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", torch.mul, x, 3).sum()])
        found = autograd.get_gradients(context_id)[x]
    assert found.tolist() == ([15, 15, 15] if kind == "before" else [3, 3, 3])
    assert log.entries == ([] if kind == "before" else ["accumulated"])


def raise_in_backward(x: Tensor) -> Tensor:
    y = weigh(x)

    def refuse(_: Tensor) -> None:
        raise KeyError("not this one")

    y.register_hook(refuse)
    return y


def test_an_error_in_a_hook_says_where_and_ends_the_pass(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", weigh, w0.call("w2", raise_in_backward, w0.call("w3", weigh, x)))
        with pytest.raises(RuntimeError, match=r"Error on Node 2: .*not this one.*worker 'w2'"):
            autograd.backward(context_id, [y.sum()])
        autograd.backward(context_id, [w0.call("w3", weigh, x).sum()])
        assert torch.isfinite(everything(workers, context_id, x)["0"]).all()


# Hooks that do nothing in one graph task


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def test_two_passes_may_suppress_the_same_hooks() -> None:
    """Two passes that run at the same time can end in any order."""
    y = Doubled.apply(new_leaf())
    seen: list[str] = []
    hooks: dict[int, Any] = {1: seen.append}
    original = hooks[1]
    first, second = (SuppressedHooks([hooks], [y.grad_fn]) for _ in range(2))
    first.__enter__()
    second.__enter__()
    assert hooks[1] is not original
    hooks[1]("called in another task")
    hooks[2] = print  # registered meanwhile
    first.__exit__()
    assert hooks[1] is not original
    second.__exit__()
    assert hooks == {1: original, 2: print}
    assert "apply" not in y.grad_fn.__dict__
    assert seen == ["called in another task"]
    y.sum().backward()


def test_a_hook_of_this_package_never_counts_as_one_of_others() -> None:
    """Not even for a moment: another thread may read the count while the hook is registered."""
    record_hooks(is_shared_node)
    node = torch.ones(1, requires_grad=True).sum().grad_fn
    assert node is not None
    before = count_foreign_hooks()
    meanwhile: list[int] = []

    def register(hook: Any) -> Any:
        handle = node.register_hook(hook)
        meanwhile.append(count_foreign_hooks())
        return handle

    register_own_hook(register, lambda *_: None)
    assert meanwhile == [before]
    node.register_hook(lambda *_: None)
    assert count_foreign_hooks() == before + 1


# Tensors that share a node


def retain_and_use(tensors: list[Tensor], log: Log, in_place: bool) -> Tensor:
    """Retain the gradient of one of many received tensors. Hooks of it run before."""
    one = tensors[5]
    one.retain_grad()
    one.register_hook(lambda gradient: gradient * 3)
    total = sum(tensors, torch.zeros(2)) * one.sum()
    if in_place:
        one[:1].mul_(2)
    total.register_hook(lambda _: log.note(one))
    return total.sum() + one.sum()


def test_gradients_of_many_received_tensors_can_be_retained(w0: Agent, log: Log) -> None:
    leaves = [torch.full((2,), float(index), requires_grad=True) for index in range(16)]
    alone_log = Log()
    retain_and_use([leaf * 1 for leaf in leaves], alone_log, False).backward()
    with autograd.context(agent=w0) as context:
        loss = w0.call("w1", retain_and_use, [leaf * 1 for leaf in leaves], log, False)
        for passes in (1, 2):  # gradients are added up, as in torch
            autograd.backward(context, [loss], retain_graph=True)
            assert torch.equal(log.entries[0].grad, passes * alone_log.entries[0].grad)
        log.entries[0].grad = None
        autograd.backward(context, [loss])
        assert torch.equal(log.entries[0].grad, alone_log.entries[0].grad)


def test_a_retained_gradient_of_a_tensor_that_is_written_later_is_an_error(
    w0: Agent, log: Log
) -> None:
    """Torch would end the process: it accesses the wrong output of the node."""
    tensors = [torch.ones(2, requires_grad=True) * 1 for _ in range(16)]
    with autograd.context(agent=w0) as context:
        loss = w0.call("w1", retain_and_write, tensors, log)
        with pytest.raises(RuntimeError, match=r"clone\(\) the tensor before retain_grad"):
            autograd.backward(context, [loss])


def retain_and_write(tensors: list[Tensor], log: Log) -> Tensor:
    log.note(tensors[5])  # otherwise nobody could look at its gradient
    tensors[5].retain_grad()
    tensors[5][:1].mul_(3)
    return (tensors[0] + tensors[5]).sum()


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        return None


def watch_any(tensors: list[Tensor], log: Log) -> Tensor:
    register_multi_grad_hook(tensors[:2], log.note, mode="any")
    first: Tensor = NoGradient.apply(tensors[0])  # type: ignore[no-untyped-call]
    return torch.stack([first, *tensors[1:]]).sum()


def test_a_hook_for_any_of_many_received_tensors_runs_once(w0: Agent, log: Log) -> None:
    tensors = [torch.ones(2, requires_grad=True) * 1 for _ in range(16)]
    alone_log = Log()
    watch_any([each.detach().requires_grad_() * 1 for each in tensors], alone_log).backward()
    with autograd.context(agent=w0) as context:
        autograd.backward(context, [w0.call("w1", watch_any, tensors, log)])
    assert len(log.entries) == len(alone_log.entries) == 1

"""Gradients through remote calls equal those of the same computation in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from telegrad import autograd, current_agent
from telegrad.agent import Agent
from telegrad.autograd.gradient_messages import pack, unpack
from telegrad.errors import CallCancelled, CallTimeout, UsageError
from telegrad.nn import RemoteModule
from telegrad.refs import RRef, remote
from telegrad.testing import LocalCluster
from tests.autograd import functions
from tests.autograd.functions import (
    alone,
    assert_equal,
    everything,
    here,
    kept,
    new_leaf,
    weigh,
    weigh_along,
    weight,
    weights,
)
from tests.local.gates import PATIENCE, Gate

# Routes of tensors between workers


def test_a_chain_that_comes_back_to_its_beginning(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", weigh_along, ["w0", "w2", "w1"], x)
        autograd.backward(context_id, [y.sum()])
        found = everything(workers, context_id, x)
    expected = alone(weight("w1", weight("w2", weight("w0", weight("w1", x)))).sum(), x)
    assert_equal(found, expected)


def test_a_call_to_oneself(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w0", weigh, w0.call("w0", weigh, x) * x)
        autograd.backward(context_id, [y.sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(weight("w0", weight("w0", x) * x).sum(), x))


def test_a_diamond(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        top = w0.call("w1", weigh, x)
        left, right = w0.submit("w2", weigh, top), w0.submit("w3", weigh, top)
        y = w0.call("w1", weigh, left.wait() + right.wait())
        autograd.backward(context_id, [(y * top).sum()])
        found = everything(workers, context_id, x)

    def compute() -> Tensor:
        top = weight("w1", x)
        return (weight("w1", weight("w2", top) + weight("w3", top)) * top).sum()

    assert_equal(found, alone(compute(), x))


def test_a_worker_that_waits_for_what_its_own_gradient_leads_to(
    workers: LocalCluster, w0: Agent
) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", functions.weigh_and_return_to, "w2", x)
        z = w0.call("w2", functions.weigh_and_return_to, "w1", y + x)
        autograd.backward(context_id, [(y * z).sum()])
        found = everything(workers, context_id, x)

    def compute() -> Tensor:
        y = weight("w1", weight("w2", x) + x)
        return (y * weight("w2", weight("w1", y + x) + y + x)).sum()

    assert_equal(found, alone(compute(), x))


def test_an_output_that_the_loss_does_not_use(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        _, used = w0.call("w1", functions.weigh_both, x)
        w0.call("w2", functions.weigh_both, used)
        autograd.backward(context_id, [used.sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(3 * weight("w1", x).sum(), x))


def test_a_worker_touched_only_in_passing(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", functions.weigh_in_passing, "w2", x)
        autograd.backward(context_id, [y.sum()])
        assert_equal(
            everything(workers, context_id, x), {"0": torch.full((3,), 2.0, dtype=torch.double)}
        )


def call_and_drop(third: str) -> Tensor:
    """Drop the result of a third worker, which requires gradients, and use this worker's weight."""
    here().submit(third, functions.weigh_both, weights[here().name]).wait()
    return 2 * weights[here().name]


def test_a_callee_that_drops_the_answer_of_a_third(workers: LocalCluster, w0: Agent) -> None:
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", call_and_drop, "w2").sum()])
        assert_equal(
            everything(workers, context_id), {"w1": torch.full((3,), 2.0, dtype=torch.double)}
        )


def choose(take_it: bool, third: str, x: Tensor) -> Tensor:
    return here().call(third, weigh, x) if take_it else weigh(x)


@pytest.mark.parametrize("take_it", [True, False])
def test_a_branch_not_taken(workers: LocalCluster, w0: Agent, take_it: bool) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", choose, take_it, "w2", x).sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(weight("w2" if take_it else "w1", x).sum(), x))


def test_a_call_whose_callee_raised(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w2", weigh, x)
        with pytest.raises(KeyError):
            w0.call("w1", functions.fail_with, y)
        autograd.backward(context_id, [y.sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(weight("w2", x).sum(), x))


@pytest.mark.parametrize("answered", [True, False], ids=["answered before", "not answered"])
@pytest.mark.parametrize("how", ["timed out", "cancelled", "timed out while waiting"])
def test_a_call_that_was_given_up(
    workers: LocalCluster, w0: Agent, gate: Gate, how: str, answered: bool
) -> None:
    x = new_leaf()
    w0.call("w1", abs, -1)  # connects: the call below has to arrive before it times out
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w2", weigh, x)
        if how == "timed out while waiting":
            with pytest.raises(CallTimeout):
                w0._runtime.invoke("w1", functions.hold_and_weigh, (gate, y), None, 0.02)
        else:
            future = w0._runtime.start(
                "w1",
                functions.hold_and_weigh,
                (gate, y),
                None,
                0.5 if how == "timed out" else None,
            )
            gate.wait_for()
            if how == "cancelled":
                future.cancel()
            assert isinstance(future.exception(PATIENCE), CallTimeout | CallCancelled)
        if answered:
            gate.open()
        autograd.backward(context_id, [(y * y).sum()])
        found = everything([w0, workers["w2"], workers["w3"]], context_id, x)
        gate.open()
    assert_equal(found, alone((weight("w2", x) ** 2).sum(), x))


def send_on(gate: Gate, to: str, arrived: Gate) -> None:
    """Wait for the gate, and send a tensor that was stored here to another worker."""
    gate.hold()
    here().call(to, note, arrived, kept["late"])


def note(arrived: Gate, x: Tensor) -> None:
    arrived.open()


def weigh_and_send_on_when_the_gradient_comes(
    third: str, gate: Gate, arrived: Gate, x: Tensor
) -> Tensor:
    y = here().call(third, weigh_and_keep_beyond, "w3", weigh(x))

    def let_go(_: Tensor) -> None:
        gate.open()
        arrived.hold()

    y.register_hook(let_go)  # before the other workers take part in the pass
    return 1 * y


def weigh_and_keep_beyond(third: str, x: Tensor) -> Tensor:
    return here().call(third, weigh_and_keep, weigh(x))


def weigh_and_keep(x: Tensor) -> Tensor:
    kept["late"] = weigh(x)
    return 1 * kept["late"]


def test_tensors_that_travel_while_the_pass_is_under_way(
    workers: LocalCluster, w0: Agent, gate: Gate
) -> None:
    """A call sends tensors to a worker that has already started its part of the pass."""
    x, arrived = new_leaf(), Gate()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", weigh_and_send_on_when_the_gradient_comes, "w2", gate, arrived, x)
        ignored = w0.submit("w3", send_on, gate, "w1", arrived)
        autograd.backward(context_id, [y.sum()])
        found = everything(workers, context_id, x)
        ignored.wait()
    assert_equal(found, alone(weight("w3", weight("w2", weight("w1", x))).sum(), x))


# Arguments and results


def scaled(parts: dict[str, Any], factor: float) -> dict[str, Any]:
    return {
        "sum": parts["a"] * factor + parts["more"][0] + parts["plain"],
        "plain": parts["plain"] + 1,
        "more": [parts["more"][0] * 2, "text"],
    }


def test_tensors_with_and_without_gradients_in_containers(workers: LocalCluster, w0: Agent) -> None:
    a, b, plain = new_leaf(), new_leaf(1, 2, 3), torch.ones(3, dtype=torch.double)
    with autograd.context(agent=w0) as context_id:
        made = w0.call("w1", scaled, {"a": a, "more": (b, None), "plain": plain}, factor=3)
        assert not made["plain"].requires_grad
        autograd.backward(context_id, [(made["sum"] * made["more"][0]).sum()])
        found = everything(workers, context_id, a, b)
    assert_equal(found, alone(((3 * a + b + plain) * 2 * b).sum(), a, b))


def test_leaves_and_parameters_as_arguments_get_their_gradients(
    workers: LocalCluster, w0: Agent
) -> None:
    leaf, parameter = new_leaf(), nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.double))
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", torch.mul, leaf, parameter)
        z = w0.call("w2", torch.mul, parameter, parameter)
        autograd.backward(context_id, [(y + z).sum()])
        found = everything(workers, context_id, leaf, parameter)
    assert leaf.grad is None
    assert parameter.grad is None
    assert_equal(found, alone((leaf * parameter + parameter**2).sum(), leaf, parameter))


def scale_each(values: list[Tensor]) -> list[Tensor]:
    """Scale all but the last tensor by their indices, and change a received one in place."""
    assert values[0] is values[-1]
    return [value.mul_(number) for number, value in enumerate(values[:-1], 1)]


@pytest.mark.parametrize("kind", ["leaves", "parameters", "results", "all of these", "views"])
def test_many_small_tensors_get_their_gradients(
    workers: LocalCluster, w0: Agent, kind: str
) -> None:
    leaves = [new_leaf(number, 1, 2) for number in range(60)]
    if kind in {"parameters", "all of these"}:
        leaves[::3] = [nn.Parameter(leaf.detach()) for leaf in leaves[::3]]

    def sent() -> list[Tensor]:
        values = [leaf * 2 for leaf in leaves] if kind == "results" else list(leaves)
        if kind == "all of these":
            values[::4] = [leaf.sin() for leaf in values[::4]]
        if kind == "views":
            values = [row.view(3) for row in torch.stack(values)]
        return values

    with autograd.context(agent=w0) as context_id:
        values = sent()
        made = w0.call("w1", scale_each, [*values, values[0]])
        autograd.backward(context_id, [torch.stack(made[:-5]).square().sum() + values[1].sum()])
        found = everything(workers, context_id, *leaves)
    values = sent()
    scaled = [value * number for number, value in enumerate(values[:-5], 1)]
    expected = alone(torch.stack(scaled).square().sum() + values[1].sum(), *leaves)
    assert len(expected) == (60 if kind == "views" else 55)
    assert_equal(found, expected)


def test_a_leaf_is_itself_sent_and_comes_back(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        back = w0.call("w1", functions.product, [x])
        assert back.requires_grad
        autograd.backward(context_id, [back.sum(), x.sum() + 0])
        assert_equal(
            everything(workers, context_id, x), {"0": torch.full((3,), 2.0, dtype=torch.double)}
        )


def change_in_place(x: Tensor) -> Tensor:
    x.mul_(2)
    x[..., 0].add_(1)
    x.tanh_()
    return x


SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "a vector": lambda x: x * 1,
    "a matrix": lambda x: x.repeat(2, 1),
    "a transposed matrix": lambda x: x.repeat(2, 1).t(),
    "a row": lambda x: x.repeat(2, 1)[1],
    "a column": lambda x: x.repeat(2, 1).t()[:, 0],
    "a scalar in a row": lambda x: x.sum().view(1),
    "a parameter": lambda x: x,
}


@pytest.mark.parametrize("kind", SHAPED)
def test_operations_in_place_on_what_was_received(
    workers: LocalCluster, w0: Agent, kind: str
) -> None:
    x = nn.Parameter(new_leaf().detach()) if kind == "a parameter" else new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", change_in_place, SHAPED[kind](x))
        y.mul_(3)
        autograd.backward(context_id, [y.sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(3 * change_in_place(SHAPED[kind](x).clone()).sum(), x))


def test_operations_in_place_on_what_was_sent(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = x * 1
        first = w0.call("w1", weigh, y)
        y.mul_(3)
        second = w0.call("w1", weigh, y)
        y[0].mul_(5)
        autograd.backward(context_id, [(first * second * y).sum()])
        found = everything(workers, context_id, x)

    def compute() -> Tensor:
        y = x * 1
        first, y = weight("w1", y), 3 * y
        return (first * weight("w1", y) * y * torch.tensor([5, 1, 1])).sum()

    assert_equal(found, alone(compute(), x))


def embed(rows: Tensor, x: Tensor) -> Tensor:
    return F.embedding(rows, x, sparse=True)


def test_sparse_gradients(workers: LocalCluster, w0: Agent) -> None:
    table = torch.arange(8, dtype=torch.double).view(4, 2).requires_grad_()
    with autograd.context(agent=w0) as context_id:
        first = w0.call("w1", embed, torch.tensor([1, 1, 3]), table)
        second = w0.call("w2", embed, torch.tensor([0, 3]), table)
        autograd.backward(context_id, [first.sum() + (second**2).sum()])
        found = autograd.get_gradients(context_id)[table]
    assert found.is_sparse
    (
        embed(torch.tensor([1, 1, 3]), table).sum()
        + (embed(torch.tensor([0, 3]), table) ** 2).sum()
    ).backward()
    assert table.grad is not None
    torch.testing.assert_close(found.to_dense(), table.grad.to_dense())


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x**3, x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        (x,) = ctx.saved_tensors
        of_cube, of_copy = gradients
        return of_copy if of_cube is None else 3 * x**2 * of_cube


def cube(x: Tensor) -> tuple[Tensor, Tensor]:
    return Cube.apply(weigh(x))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("output", [0, 1])
def test_functions_of_the_user(workers: LocalCluster, w0: Agent, output: int) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = Cube.apply(w0.call("w1", cube, x)[output])  # type: ignore[no-untyped-call]
        autograd.backward(context_id, [y[output].sum()])
        found = everything(workers, context_id, x)
    expected = alone(
        Cube.apply(Cube.apply(weight("w1", x))[output])[output].sum(),  # type: ignore[no-untyped-call]
        x,
    )
    assert_equal(found, expected)


def weigh_in_little_memory(x: Tensor) -> Tensor:
    y: Tensor = checkpoint(weigh, weigh(x), use_reentrant=False)
    return here().call("w2", weigh, y) * y


def test_checkpoints_inside_a_call(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", weigh_in_little_memory, x).sum()])
        found = everything(workers, context_id, x)

    def compute() -> Tensor:
        y = weight("w1", weight("w1", x))
        return (weight("w2", y) * y).sum()

    assert_equal(found, alone(compute(), x))


def test_tensors_kept_on_a_worker_between_calls(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        w0.call("w1", functions.keep, "it", x)
        y = w0.call("w1", functions.use, "it", x) + w0.call("w1", functions.use, "it", 2 * x)
        autograd.backward(context_id, [y.sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone((weight("w1", x) * 3 * x).sum(), x))


@pytest.mark.parametrize("how", ["call", "submit"])
def test_nothing_flows_through_a_call_made_without_gradients(
    workers: LocalCluster, w0: Agent, how: str
) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        with torch.no_grad():
            target = w0.call("w1", weigh, x) if how == "call" else w0.submit("w1", weigh, x).wait()
        autograd.backward(context_id, [(w0.call("w2", weigh, x) - target).sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone((weight("w2", x) - weight("w1", x).detach()).sum(), x))


def fetch_from(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the result of another worker unchanged."""
    agent = current_agent()
    assert agent is not None
    return agent.call(name, weigh, x)


def test_what_is_only_handed_on_keeps_its_way_back(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", fetch_from, "w2", x)
        gc.collect()
        autograd.backward(context_id, [y.sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(weight("w2", x).sum(), x))


class Stop(torch.autograd.Function):
    """A function whose backward returns None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        doubled: Tensor = 2 * x * gradients[0]
        return doubled


def square(x: Tensor) -> Tensor:
    return Square.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def stop(x: Tensor) -> Tensor:
    return Stop.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_no_gradient_reaches_a_function_that_takes_it_for_zeros(
    workers: LocalCluster, w0: Agent
) -> None:
    """In one process `Square` continues with zeros, so the leaf has a gradient of zeros."""
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", stop, square(x)).sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(stop(square(x)).sum(), x))


# Several passes


def test_several_passes_add_up(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", weigh, x)
        z = w0.call("w2", weigh, y)
        autograd.backward(context_id, [z.sum()], retain_graph=True)
        autograd.backward(context_id, [z.sum(), (y * y).sum()], retain_graph=True)
        autograd.backward(context_id, [(x * w0.call("w3", weigh, x)).sum()])
        autograd.backward(context_id, [y.sum()])
        found = everything(workers, context_id, x)

    def compute() -> Tensor:
        y = weight("w1", x)
        return (2 * weight("w2", y) + y * y + x * weight("w3", x) + y).sum()

    assert_equal(found, alone(compute(), x))


def test_a_graph_is_used_once_unless_it_is_retained(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", weigh, x)
        loss = y.sum()
        autograd.backward(context_id, [loss])
        with pytest.raises(RuntimeError, match="a second time"):
            autograd.backward(context_id, [loss])
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", weigh, x).sum()])
        assert "w1" in everything(workers, context_id, x)


def test_a_pass_may_begin_on_another_worker(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        w0.call("w1", functions.keep, "it", w0.call("w2", weigh, x))
        w0.call("w1", backward_from_kept, context_id, "it")
        found = everything(workers, context_id, x)
    assert_equal(found, alone(weight("w1", weight("w2", x)).sum(), x))


def backward_from_kept(context_id: int, name: str) -> None:
    autograd.backward(context_id, [kept[name].sum()])


def test_gradients_are_tensors_of_their_own(workers: LocalCluster, w0: Agent) -> None:
    """Changing a gradient in place changes no other gradient."""
    x, y = new_leaf(), new_leaf(1, 2, 3)
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", torch.sum, x + y)])
        gradients = autograd.get_gradients(context_id)
        gradients[x].mul_(2)
        assert gradients[x].tolist() == [2, 2, 2]
        assert autograd.get_gradients(context_id)[y].tolist() == [1, 1, 1]


# References and modules


def test_references_as_arguments(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        there = remote("w1", weigh, (x,), agent=w0)
        mine = RRef(2 * x, agent=w0)
        y = w0.call("w2", functions.fetch_weighed, there) + w0.call(
            "w3", functions.fetch_weighed, mine
        )
        again = there.to_here() * there.rpc_sync().sum()
        autograd.backward(context_id, [(y * again).sum()])
        found = everything(workers, context_id, x)

    def compute() -> Tensor:
        there = weight("w1", x)
        return ((weight("w2", there) + weight("w3", 2 * x)) * there * there.sum()).sum()

    assert_equal(found, alone(compute(), x))


def test_backward_from_a_reference(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        loss = remote("w1", weigh, (x,), agent=w0).remote().sum()
        loss.backward(context_id, retain_graph=True)
        loss.backward(context_id)
        found = everything(workers, context_id, x)
        with pytest.raises(UsageError, match="dist_autograd_ctx_id"):
            loss.backward()
    assert_equal(found, alone(2 * weight("w1", x).sum(), x))


def test_backward_from_a_reference_of_ones_own(w0: Agent) -> None:
    x = new_leaf()
    RRef((x * x).sum(), agent=w0).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, -2.0, 4.0]


def test_a_remote_module_learns_like_one_at_hand(workers: LocalCluster, w0: Agent) -> None:
    local, x = functions.TwoLayers(), new_leaf()
    module = RemoteModule("w1/cpu", functions.TwoLayers, agent=w0)
    with autograd.context(agent=w0) as context_id:
        y = module(x) + module.forward_async(2 * x).wait()
        autograd.backward(context_id, [y.sum()])
        found = [
            w0.call("w1", gradient_of, context_id, each) for each in module.remote_parameters()
        ]
        mine = autograd.get_gradients(context_id)[x]
    (local(x) + local(2 * x)).sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in local.parameters()])
    torch.testing.assert_close(mine, x.grad)


def gradient_of(context_id: int, parameter: RRef[nn.Parameter]) -> Tensor:
    return autograd.get_gradients(context_id)[parameter.local_value()]


# Callbacks and futures


def test_callbacks_keep_the_context(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        y = (
            w0.submit("w1", weigh, x)
            .then(lambda done: w0.call("w2", weigh, done.wait() * x))
            .wait()
        )
        autograd.backward(context_id, [y.sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(weight("w2", weight("w1", x) * x).sum(), x))


def test_functions_that_answer_later(workers: LocalCluster, w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        ys = [w0.submit("w1", functions.weigh_later, "w2", factor * x) for factor in range(1, 5)]
        autograd.backward(context_id, [sum(y.wait().sum() for y in ys)])  # type: ignore[list-item]
        found = everything(workers, context_id, x)

    def compute() -> Tensor:
        return torch.stack(
            [weight("w1", weight("w2", weight("w1", factor * x))) for factor in range(1, 5)]
        ).sum()

    assert_equal(found, alone(compute(), x))


# Rules


def test_roots_that_have_no_gradient_are_refused(w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        for roots, complaint in (
            ([], "No tensors provided"),
            ([torch.ones(())], "requires_grad not set"),
            ([2 * x], "not a scalar"),
            ([torch.ones((), requires_grad=True)], "gradient function"),
        ):
            with pytest.raises(UsageError, match=complaint):
                autograd.backward(context_id, roots)
        with pytest.raises(TypeError):
            autograd.backward(context_id, x.sum())  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            autograd.backward(context_id, [3])  # type: ignore[list-item]


def test_torchs_own_backward_says_what_to_do_instead(w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0):
        loss = w0.call("w1", weigh, x).sum()
        with pytest.raises(UsageError, match=r"telegrad\.autograd\.backward"):
            loss.backward()


def test_a_tensor_of_another_context_is_refused_where_the_loss_needs_it(
    workers: LocalCluster, w0: Agent
) -> None:
    x = new_leaf()
    with autograd.context(agent=w0):
        stale = w0.call("w1", weigh, x)
    with autograd.context(agent=w0) as context_id:
        with pytest.raises(UsageError, match="another autograd context"):
            autograd.backward(context_id, [(w0.call("w1", weigh, x) * stale).sum()])
    with autograd.context(agent=w0) as context_id:
        w0.call("w1", weigh, stale)
        first = w0.call("w1", weigh, x)
        autograd.backward(context_id, [w0.call("w2", weigh, first * x).sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(weight("w2", weight("w1", x) * x).sum(), x))


def test_small_gradients_travel_as_one_tensor() -> None:
    shapes: list[tuple[int, ...]] = [
        (3,),
        (),
        (2, 3),
        (3,),
        (),
        (0,),
        (2000,),
        (1, 2, 3),
        (3,),
        (2, 3),
    ]
    gradients = [(number, torch.randn(shape)) for number, shape in enumerate(shapes)]
    gradients.insert(3, (20, torch.randn(3, 2).T))
    gradients.append((21, torch.randn(1).expand(4)))
    mixed = [
        *gradients,
        (22, None),
        (23, torch.randn(3, dtype=torch.double)),
        (24, torch.eye(3).to_sparse()),
    ]
    packed = pack(*map(list, zip(*mixed, strict=True)))  # type: ignore[arg-type]
    assert isinstance(packed, tuple)
    assert {tensor_id for tensor_id, _ in packed[0]} == {5, 6, 22, 23, 24}
    found = {
        tensor_id: gradient
        for tensor_ids, gradients in unpack(packed)
        for tensor_id, gradient in zip(tensor_ids, gradients, strict=True)
    }
    assert found.keys() == {tensor_id for tensor_id, _ in mixed}
    for tensor_id, gradient in mixed:
        if gradient is None:
            assert found[tensor_id] is None
        else:
            torch.testing.assert_close(found[tensor_id], gradient)

"""Gradients are exact, or an error says that they would be missing."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from telegrad import autograd
from telegrad.agent import Agent
from telegrad.errors import SerializationError, UsageError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.testing import LocalCluster
from tests.autograd.functions import alone, assert_equal, everything, new_leaf, weigh, weight


@pytest.fixture
def transport() -> str:
    return "unix"


class MyParameter(nn.Parameter):
    """A subclass that pickles as parameters do."""


class MyTensor(Tensor):
    """A subclass that leaves pickling to torch."""


class Secretive(Tensor):
    """A subclass that pickles itself, without its gradient."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.tensor, (self.detach().tolist(),)


def double(x: Tensor) -> Tensor:
    return 2 * x


def type_of(x: Tensor) -> type:
    return type(x)


@pytest.mark.parametrize("kind", [MyParameter, MyTensor])
def test_subclasses_keep_their_type_and_their_gradient(w0: Agent, kind: type) -> None:
    leaf = new_leaf()
    sent = MyParameter(leaf.detach()) if kind is MyParameter else leaf.as_subclass(kind)
    source = sent if kind is MyParameter else leaf
    with autograd.context(agent=w0) as context_id:
        assert w0.call("w1", type_of, sent) is kind
        back = w0.call("w1", double, sent)
        autograd.backward(context_id, [(back * sent).sum().as_subclass(Tensor)])
        found = autograd.get_gradients(context_id)[source]
    torch.testing.assert_close(found.as_subclass(Tensor), 4 * leaf.detach())


def test_a_parameter_of_a_subclass_arrives_as_one_outside_of_a_context(w0: Agent) -> None:
    arrived = w0.call("w1", double_in_place, MyParameter(torch.ones(2)))
    assert type(arrived) is MyParameter
    assert arrived.requires_grad
    assert arrived.is_leaf


def double_in_place(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x


def test_a_type_whose_gradient_would_be_lost_is_refused(w0: Agent) -> None:
    sent = new_leaf().as_subclass(Secretive)
    with autograd.context(agent=w0):
        with pytest.raises(
            SerializationError, match=r"gradients do not travel through tensors of type Secretive"
        ):
            w0.call("w1", double, sent)
        assert w0.call("w1", double, sent.detach()).tolist() == [1, -2, 4]
    assert w0.call("w1", double, sent).tolist() == [1, -2, 4]


# NestedTensors


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(2 * x, torch.tensor([0, 2, 3]))


def with_holes(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(
        2 * x, torch.tensor([0, 2, 3]), torch.tensor([1, 1])
    )


def cube_values(nested: Tensor) -> Tensor:
    result: Tensor = nested.values() ** 3
    return result


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return a * b


@pytest.mark.parametrize("make", [jagged, with_holes])
def test_jagged_tensors_as_arguments_and_results(
    w0: Agent, make: Callable[[Tensor], Tensor]
) -> None:
    x = torch.arange(6.0).view(3, 2).requires_grad_()

    def compute(call: Callable[..., Tensor]) -> Tensor:
        there = call(cube_values, make(x))
        return there.sum() + cube_values(call(make, x)).sum()

    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [compute(lambda *call: w0.call("w1", *call))])
        found = autograd.get_gradients(context_id)[x]
    compute(lambda function, *args: function(*args)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, x.grad)


def test_jagged_tensors_of_one_structure_still_fit_together(w0: Agent) -> None:
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    with autograd.context(agent=w0) as context_id:
        nested = jagged(x)
        product = w0.call("w1", multiply, nested, 3 * nested)
        autograd.backward(context_id, [product.values().sum()])
        found = autograd.get_gradients(context_id)[x]
    torch.testing.assert_close(found, 24 * x.detach())


def joined(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([2 * x, 3 * x[:1]])


def cube_parts(nested: Tensor) -> Tensor:
    result: Tensor = torch.nested.to_padded_tensor(nested, 0.0) ** 3
    return result


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_strided_nested_tensors_as_arguments_and_results(w0: Agent) -> None:
    x = torch.arange(6.0).view(3, 2).requires_grad_()

    def compute(call: Callable[..., Tensor]) -> Tensor:
        there = call(cube_parts, joined(x))
        return there.sum() + cube_parts(call(joined, x)).sum()

    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [compute(lambda *call: w0.call("w1", *call))])
        found = autograd.get_gradients(context_id)[x]
    compute(lambda function, *args: function(*args)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, x.grad)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_a_strided_nested_tensor_whose_own_gradient_is_wanted_is_refused(w0: Agent) -> None:
    leaf = joined(torch.ones(3, 2)).requires_grad_()
    with autograd.context(agent=w0):
        for sent in (leaf, nn.Parameter(leaf.detach())):
            with pytest.raises(SerializationError, match="Let its parts require gradients"):
                w0.call("w1", cube_parts, sent)
        assert w0.call("w1", cube_parts, leaf.detach()).sum() == 6 * 8 + 2 * 27
    assert w0.call("w1", cube_parts, leaf).requires_grad


# Threads


def test_a_thread_that_takes_the_context_along(workers: LocalCluster, w0: Agent) -> None:
    x, results = new_leaf(), []
    with autograd.context(agent=w0) as context_id:
        run = contextvars.copy_context().run
        thread = threading.Thread(
            target=lambda: run(lambda: results.append(w0.call("w1", weigh, x)))
        )
        thread.start()
        thread.join()
        autograd.backward(context_id, [results[0].sum()])
        found = everything(workers, context_id, x)
    assert_equal(found, alone(weight("w1", x).sum(), x))


def first_of(x: Tensor) -> Tensor:
    return weigh(x)[:1]


@pytest.mark.parametrize("function", [weigh, first_of])
def test_a_thread_that_does_not_take_the_context_along(
    w0: Agent, function: Callable[[Tensor], Tensor]
) -> None:
    x, results = new_leaf(), []
    with autograd.context(agent=w0) as context_id:
        # in free-threaded Python 3.14, threads inherit the context by default
        empty = contextvars.Context()
        thread = threading.Thread(
            target=lambda: results.append(empty.run(lambda: w0.call("w1", function, x)))
        )
        thread.start()
        thread.join()
        with pytest.raises(UsageError, match="outside of this autograd context"):
            autograd.backward(context_id, [(w0.call("w1", weigh, x) * results[0]).sum()])
        with pytest.raises(UsageError, match="outside of this autograd context"):
            autograd.backward(context_id, [w0.call("w1", torch.mul, results[0], 2).sum()])
        autograd.backward(context_id, [(w0.call("w1", weigh, x) * results[0].detach()).sum()])


agents: dict[str, Agent] = {}


def weigh_by_w2(x: Tensor) -> Tensor:
    """Run on w1 and make a call with the agent of w2, which is in the same process."""
    return agents["w2"].call("w0", weigh, x)


@pytest.mark.parametrize("count", [1, 20], ids=["", "many"])
def test_a_call_with_another_agent_of_the_process_is_not_under_the_context(
    workers: LocalCluster, w0: Agent, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setitem(agents, "w2", workers["w2"])
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        calls = (
            lambda: w0.call("w1", weigh_by_w2, x),  # the error is one of w1
            lambda: torch.stack(workers["w2"].call("w1", lambda x: [weigh(x)] * count, x)).sum(0),
        )
        for call in calls:
            with pytest.raises(UsageError, match="with the agent that it belongs to"):
                autograd.backward(context_id, [call().sum()])
        autograd.backward(context_id, [(w0.call("w1", weigh, x) * calls[1]().detach()).sum()])
        assert autograd.get_gradients(context_id).keys() == {x}


def weigh_often(x: Tensor) -> list[Tensor]:
    return [weigh(x) for _ in range(20)]


def test_many_small_results_of_a_call_outside_of_the_context(w0: Agent) -> None:
    results = w0.call("w1", weigh_often, new_leaf())
    with autograd.context(agent=w0) as context_id:
        with pytest.raises(UsageError, match="outside of this autograd context"):
            autograd.backward(context_id, [w0.call("w1", torch.mul, results[3], 2).sum()])
        autograd.backward(
            context_id, [w0.call("w1", torch.mul, results[3].detach().requires_grad_(), 2).sum()]
        )


def a_parameter() -> Tensor:
    return nn.Parameter(torch.ones(3, dtype=torch.double))


def test_a_leaf_that_was_fetched_outside_of_the_context_is_a_leaf(w0: Agent) -> None:
    parameter = w0.call("w1", a_parameter)
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [w0.call("w1", torch.mul, parameter, 3).sum()])
        assert autograd.get_gradients(context_id)[parameter].tolist() == [3, 3, 3]


# Other cases


def multiply_by_i(x: Tensor) -> Tensor:
    return x * 1j


def test_a_complex_root_is_refused(w0: Agent) -> None:
    x = new_leaf()
    with autograd.context(agent=w0) as context_id:
        z = w0.call("w1", multiply_by_i, x)
        with pytest.raises(UsageError, match="root 0 is complex"):
            autograd.backward(context_id, [z.sum()])
        autograd.backward(context_id, [(z * z).real.sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == (-2 * x).tolist()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
@pytest.mark.parametrize("kind", [Tensor, nn.Parameter, MyParameter, MyTensor])
def test_forward_mode_tangents_are_refused(w0: Agent, kind: type[Any]) -> None:
    primal: Tensor = torch.ones(2)
    if kind is not Tensor:
        primal = kind(primal) if issubclass(kind, nn.Parameter) else primal.as_subclass(kind)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(primal, torch.ones(2))  # type: ignore[no-untyped-call]
        with pytest.raises(SerializationError, match="forward-mode tangent"):
            w0.call("w1", double, dual)
        assert w0.call("w1", double, torch.ones(2)).tolist() == [2, 2]


def empty() -> Tensor:
    return torch.empty(0, 3)


def test_an_empty_tensor_arrives_on_the_cpu(w0: Agent) -> None:
    with torch.device("meta"):
        assert w0.call("w1", empty).device.type == "cpu"


def test_accumulated_gradients_are_not_those_of_the_context(w0: Agent) -> None:
    module = RemoteModule("w1/cpu", nn.Linear, (2, 1), agent=w0)
    optimizer = DistributedOptimizer(torch.optim.SGD, module.remote_parameters(), lr=0.1)
    with autograd.context(agent=w0) as context_id:
        autograd.backward(context_id, [module(torch.ones(1, 2)).sum()])
        before = optimizer.clip_grad_norm_(1e9, context_id)
        optimizer.accumulate(context_id)
        optimizer.zero_grad(set_to_none=False)
        assert optimizer.clip_grad_norm_(1e9, context_id) == before > 0


# Modes of the caller do not travel to the callee


def modes() -> tuple[bool, bool, torch.dtype, bool]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
    )


def test_modes_of_the_caller_stay_with_the_caller(w0: Agent) -> None:
    """The result of a call with gradients disabled does not require one, as in one process."""
    x = new_leaf()
    outside = w0.call("w1", modes)
    with autograd.context(agent=w0), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert w0.call("w1", modes) == outside == (True, False, torch.float32, False)
        assert w0.submit("w1", modes).wait() == outside
        assert not w0.call("w1", weigh, x).requires_grad
        assert w0.call("w1", weigh, x).dtype == torch.double

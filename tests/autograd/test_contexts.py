"""Contexts start, follow calls, and end on all workers."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch
from torch import Tensor

from telegrad import autograd
from telegrad.agent import Agent
from telegrad.autograd import api
from telegrad.autograd.engine import _receive_message
from telegrad.autograd.gradient_messages import _MIN_TO_PACK, pack, unpack
from telegrad.autograd.registry import ContextRegistry, _are_open
from telegrad.autograd.worker_context import CONTEXT_ID_BITS
from telegrad.errors import PeerLost, UsageError
from telegrad.futures import Future
from telegrad.testing import LocalCluster
from tests.autograd import functions
from tests.autograd.functions import (
    assert_released,
    everything,
    is_there,
    kept,
    new_leaf,
    weigh,
    weigh_along,
)
from tests.local.conftest import Background
from tests.local.gates import PATIENCE, Gate, until


def test_it_is_available() -> None:
    assert autograd.is_available()


def test_a_context_follows_calls_and_ends_everywhere(workers: LocalCluster, w0: Agent) -> None:
    with autograd.context(agent=w0) as context_id:
        w0.call("w1", weigh_along, ["w2"], new_leaf())
        assert [w0.call(agent.name, is_there, context_id) for agent in workers] == [True] * 4
        assert w0.statistics()["autograd_tensors_sent"] == 1
        assert workers["w2"].statistics()["autograd_tensors_received"] == 1
    assert_released(workers)
    with pytest.raises(UsageError, match=f"Could not find autograd context with id: {context_id}"):
        autograd.get_gradients(context_id)
    assert not w0.call("w1", is_there, context_id)


def test_it_ends_when_its_block_raises(workers: LocalCluster, w0: Agent) -> None:
    with pytest.raises(KeyError), autograd.context(agent=w0):
        w0.call("w1", functions.fail_with, new_leaf())
    assert_released(workers)
    with autograd.context(agent=w0):
        pass


def test_contexts_do_not_nest(w0: Agent) -> None:
    with autograd.context(agent=w0), pytest.raises(UsageError, match="contexts do not nest"):
        with autograd.context(agent=w0):
            pass


def open_one_inside() -> bool:
    try:
        with autograd.context():
            return True
    except UsageError:
        return False


def test_a_called_function_may_begin_one_of_its_own_only_outside(w0: Agent) -> None:
    assert w0.call("w1", open_one_inside)
    with autograd.context(agent=w0):
        assert not w0.call("w1", open_one_inside)


def test_a_context_needs_an_agent() -> None:
    with pytest.raises(UsageError, match="RPC has not been initialized"), autograd.context():
        pass


def test_ids_of_all_workers_differ(workers: LocalCluster) -> None:
    ids = set()
    for agent in workers:
        for _ in range(3):
            with autograd.context(agent=agent) as context_id:
                ids.add(context_id)
    assert len(ids) == 12


def test_outside_a_context_tensors_travel_as_leaves(workers: LocalCluster, w0: Agent) -> None:
    y = w0.call("w1", weigh, new_leaf())
    assert y.is_leaf
    assert y.requires_grad
    assert_released(workers)


@pytest.mark.parametrize("is_known", [False, True])
def test_a_called_function_that_outlives_the_context_leaves_nothing(
    workers: LocalCluster, w0: Agent, gate: Gate, is_known: bool
) -> None:
    with autograd.context(agent=w0):
        future = w0.submit("w1", hold_and_weigh_along, gate, new_leaf())
        gate.wait_for()
    if is_known:  # the callee is informed before it replies
        until(lambda: not workers["w1"].statistics()["autograd_contexts"])
    gate.open()
    assert future.wait().requires_grad
    assert_released(workers)


def hold_and_weigh_along(gate: Gate, x: Tensor) -> Tensor:
    gate.hold()
    return weigh_along(["w2"], x)


def test_graphs_are_freed_when_the_context_ends(workers: LocalCluster, w0: Agent) -> None:
    with autograd.context(agent=w0) as context_id:
        loss = w0.call("w1", weigh_and_watch, new_leaf()).sum()
        watched = kept_watch[0]
        autograd.backward(context_id, [loss])
    del loss
    assert_released(workers)
    gc.collect()
    assert watched() is None


kept_watch: list[weakref.ref[Tensor]] = []


def weigh_and_watch(x: Tensor) -> Tensor:
    y = weigh(x)
    kept_watch[:] = [weakref.ref(y)]
    return y


def test_a_part_whose_beginning_does_not_know_it_is_forgotten(
    workers: LocalCluster, w0: Agent
) -> None:
    """The message that the context has ended was lost."""
    orphan = ContextRegistry.of(workers["w1"]._runtime).get_or_create(12345)
    assert orphan is not None
    with autograd.context(agent=w0) as context_id:
        w0.call("w1", weigh, new_leaf())
        ContextRegistry.of(workers["w1"]._runtime).audit()
        assert orphan.released
        assert w0.call("w1", is_there, context_id)


def test_a_pass_over_a_part_that_has_ended_fails(workers: LocalCluster, w0: Agent) -> None:
    """A worker has released its part: the missing gradients are an error."""
    with autograd.context(agent=w0) as context_id:
        y = w0.call("w1", weigh, new_leaf())
        ContextRegistry.of(workers["w1"]._runtime).end(context_id)
        with pytest.raises(UsageError, match="has ended on worker 'w1'"):
            autograd.backward(context_id, [y.sum()])


def test_coroutines_have_contexts_of_their_own(workers: LocalCluster, w0: Agent) -> None:
    async def train(factor: int) -> Tensor:
        x = new_leaf(1, 1, 1)
        with autograd.context(agent=w0) as context_id:
            y = await w0.submit("w1", torch.mul, x, factor)
            z = await w0.submit("w2", torch.mul, y, factor)
            autograd.backward(context_id, [z.sum()])
            return everything(workers, context_id, x)["0"]

    async def train_all() -> list[Tensor]:
        return await asyncio.gather(*(train(factor) for factor in range(1, 6)))

    assert [gradient[0].item() for gradient in asyncio.run(train_all())] == [1, 4, 9, 16, 25]


def test_a_callback_after_the_end_runs_without_the_context(
    workers: LocalCluster, w0: Agent, gate: Gate
) -> None:
    promise: Future[Tensor] = Future()
    with autograd.context(agent=w0):
        later = promise.then(lambda done: w0.call("w1", weigh, done.wait()))
    promise.set_result(new_leaf())
    assert later.wait().is_leaf
    assert_released(workers)


def keep_received(x: Tensor) -> None:
    kept["received"] = x


def test_what_a_context_left_behind_is_still_a_tensor(w0: Agent) -> None:
    with autograd.context(agent=w0):
        w0.call("w1", keep_received, new_leaf(1, 2, 3))
    assert (kept["received"] * 2).tolist() == [2, 4, 6]


# What a worker knows of contexts


def registry_of(agent: Agent) -> ContextRegistry:
    return ContextRegistry.of(agent._runtime)


def test_a_context_that_has_ended_is_not_made_again(workers: LocalCluster, w0: Agent) -> None:
    registry = registry_of(workers["w1"])
    registry.end(77)
    assert registry.has_ended(77)
    assert registry.get_or_create(77) is None
    assert registry.find(77) is None


def test_only_the_latest_ended_contexts_are_remembered(
    w0: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telegrad.autograd.registry._MAX_ENDED_IDS", 2)
    registry = registry_of(w0)
    for context_id in (1, 2, 3):
        registry.end(context_id)
    assert [registry.has_ended(context_id) for context_id in (1, 2, 3)] == [False, True, True]


def test_a_context_is_released_once(w0: Agent) -> None:
    registry = registry_of(w0)
    context = registry.start()
    assert f"<Context {context.context_id} on 'w0': open, 0 sends" in repr(context)
    context.release()
    context.release()
    assert "released" in repr(context)
    assert str(context.context_id) in repr(registry)
    registry.end(context.context_id)


def test_a_block_that_was_not_entered_ends_nothing(w0: Agent) -> None:
    with autograd.context(agent=w0) as context_id:
        autograd.context(agent=w0).__exit__(None, None, None)
        assert is_there(context_id)


def test_a_block_may_end_on_another_thread(
    workers: LocalCluster, w0: Agent, in_background: Background
) -> None:
    block = autograd.context(agent=w0)
    in_background(block.__enter__).result(PATIENCE)
    block.__exit__(None, None, None)
    assert_released(workers)


def test_without_an_agent_no_context_is_open(workers: LocalCluster) -> None:
    assert api._get_debug_info() == {
        "num_current_backward_passes": 0,
        "num_autograd_contexts": 0,
    }
    assert _are_open([1, 2], workers["w0"]._runtime.local_member) == [False, False]
    assert api._get_max_id() == (1 << CONTEXT_ID_BITS) - 1


def test_ids_of_contexts_belong_to_the_worker_that_starts_them(w0: Agent) -> None:
    largest = w0.call("w1", api._get_max_id)
    assert largest >> CONTEXT_ID_BITS == 1
    with autograd.context(agent=w0) as context_id:
        assert context_id >> CONTEXT_ID_BITS == 0
        api._is_valid_context(context_id)
    with pytest.raises(UsageError, match="Could not find autograd context"):
        api._is_valid_context(context_id)


def test_a_worker_that_no_tensor_reached_has_no_gradients_to_send(workers: LocalCluster) -> None:
    receiver = workers["w1"]._runtime.local_member.incarnation
    reply = workers["w0"].call(
        "w1", _receive_message, receiver, 4711, ("w0", 1), False, "w0", ([], [], [])
    )
    assert list(map(list, reply[:3])) == [[], [], []]
    with pytest.raises(PeerLost, match="a worker restarted since"):
        workers["w0"].call(
            "w1", _receive_message, "an earlier one", 4711, ("w0", 1), False, "w0", ([], [], [])
        )


def test_gradients_of_different_kinds_are_sent_as_they_are() -> None:
    count = 2 * _MIN_TO_PACK
    tensor_ids = list(range(count))
    mixed: list[Tensor | None] = [torch.ones(2, dtype=torch.float64)]
    mixed += [torch.ones(2) for _ in tensor_ids[1:]]
    assert pack(tensor_ids, mixed) == list(zip(tensor_ids, mixed, strict=True))
    packed = pack(tensor_ids, [torch.ones(2) for _ in tensor_ids])
    assert isinstance(packed, tuple)
    ((found, _),) = unpack(packed)
    assert found == tensor_ids

"""Calls that nest, wait for each other or block never stand in each other's way."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from telegrad import Future, current_agent
from telegrad.agent import Agent
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, Log, Meeting, hold_at


def here() -> Agent:
    agent = current_agent()
    assert agent is not None
    return agent


def descend(depth: int, others: dict[str, str]) -> int:
    """Calls the next worker, which calls the next, ..."""
    agent = here()
    return 0 if depth == 0 else 1 + agent.call(others[agent.name], descend, depth - 1, others)


def descend_by_futures(depth: int, others: dict[str, str]) -> int:
    agent = here()
    return (
        0
        if depth == 0
        else 1 + agent.submit(others[agent.name], descend_by_futures, depth - 1, others).wait()
    )


def call_back(to: str, number: int) -> int:
    return here().call(to, abs, -number) + here().submit(to, abs, -number).wait()


def fan_out(to: str, width: int, depth: int) -> int:
    """A tree of calls between two workers; the number of its leaves."""
    agent = here()
    if depth == 0:
        return 1
    futures = [agent.submit(to, fan_out, agent.name, width, depth - 1) for _ in range(width)]
    return sum(future.wait() for future in futures)


def join(meeting: Meeting) -> int:
    return meeting.join()


def open_gate_of_caller(gate: Gate) -> str:
    """Blocks its caller's worker until the callee itself opens the gate."""
    held = here().submit("w0", hold_at, gate, "let go")
    gate.wait_for()
    gate.open()
    return held.wait()


def hold_if(gate: Gate | None) -> str:
    if gate is None:
        return "fast"
    gate.hold()
    return "held"


def note_and_call_back(log: Log, to: str, number: int) -> None:
    here().call(to, abs, number)
    log.note(number)


def total(gate: Gate, tensor: torch.Tensor) -> float:
    gate.hold()
    return tensor.sum().item()


@pytest.fixture(autouse=True)
def room_for_many_sockets() -> Iterator[None]:
    """Both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Nesting


def test_500_calls_deep(w0: Agent) -> None:
    assert w0.call("w1", descend, 500, {"w0": "w1", "w1": "w0"}) == 500


def test_200_calls_deep_by_futures(w0: Agent) -> None:
    assert w0.call("w1", descend_by_futures, 200, {"w0": "w1", "w1": "w0"}) == 200


def test_a_ring_of_workers(cluster: Clusters) -> None:
    ring = {"w0": "w1", "w1": "w2", "w2": "w0"}
    assert cluster(3)["w0"].call("w1", descend, 100, ring) == 100


def test_a_worker_that_calls_only_itself(w0: Agent) -> None:
    assert w0.call("w0", descend, 100, {"w0": "w0"}) == 100


def test_fifty_calls_call_back(w0: Agent) -> None:
    futures = [w0.submit("w1", call_back, "w0", i) for i in range(50)]
    assert [future.wait() for future in futures] == [2 * i for i in range(50)]


def test_both_sides_call_back_at_once(pair: LocalCluster) -> None:
    futures = [
        pair[caller].submit(callee, call_back, caller, i)
        for i in range(50)
        for caller, callee in (("w0", "w1"), ("w1", "w0"))
    ]
    assert sum(future.wait() for future in futures) == 2 * sum(2 * i for i in range(50))


def test_a_tree_of_calls(cluster: Clusters) -> None:
    w0 = cluster(2, threads=2)["w0"]
    assert w0.call("w1", fan_out, "w0", 4, 4) == 256


def test_a_callee_that_blocks_its_caller(w0: Agent) -> None:
    for attempt in (lambda gate: w0.call("w1", open_gate_of_caller, gate), _by_future(w0)):
        assert attempt(Gate()) == "let go"


def _by_future(agent: Agent) -> Any:
    return lambda gate: agent.submit("w1", open_gate_of_caller, gate).wait()


# Blocking


def test_calls_that_wait_for_each_other_outnumber_the_threads(cluster: Clusters) -> None:
    w0 = cluster(2, threads=2)["w0"]
    meeting = Meeting(40)
    futures = [w0.submit("w1", join, meeting) for _ in range(40)]
    assert sorted(future.result(PATIENCE) for future in futures) == list(range(40))


def test_lambdas_that_wait_for_each_other(cluster: Clusters) -> None:
    w0 = cluster(2, threads=2)["w0"]
    meeting = Meeting(10)
    futures = [w0.submit("w1", lambda: meeting.join()) for _ in range(10)]  # noqa: PLW0108  # a lambda is the point
    assert sorted(future.result(PATIENCE) for future in futures) == list(range(10))


def test_a_fast_call_overtakes_a_hundred_that_block(w0: Agent, gate: Gate) -> None:
    blocked = [w0.submit("w1", hold_at, gate, i) for i in range(100)]
    assert w0.submit("w1", abs, -1).result(PATIENCE) == 1
    assert w0.call("w1", abs, -2) == 2
    gate.wait_for(100)
    assert w0.submit("w1", abs, -3).result(PATIENCE) == 3
    assert not any(future.done() for future in blocked)
    gate.open()
    assert [future.result(PATIENCE) for future in blocked] == list(range(100))


def test_replies_before_a_blocking_call_are_not_held_back(w0: Agent, gate: Gate) -> None:
    before = [w0.submit("w1", abs, -i) for i in range(50)]
    blocked = w0.submit("w1", hold_at, gate)
    after = [w0.submit("w1", abs, -i) for i in range(50)]
    assert [future.result(PATIENCE) for future in before + after] == [*range(50), *range(50)]
    assert not blocked.done()


def test_a_function_that_was_always_fast_may_block(w0: Agent, gate: Gate) -> None:
    for _ in range(5):
        futures = [w0.submit("w1", hold_if, None) for _ in range(100)]
        assert {future.wait() for future in futures} == {"fast"}
    mixed = [w0.submit("w1", hold_if, gate if i % 10 == 0 else None) for i in range(100)]
    fast = [future for i, future in enumerate(mixed) if i % 10]
    assert {future.result(PATIENCE) for future in fast} == {"fast"}
    assert not any(mixed[i].done() for i in range(0, 100, 10))
    gate.open()
    assert {mixed[i].result(PATIENCE) for i in range(0, 100, 10)} == {"held"}


def test_a_blocked_callee_still_calls_others(pair: LocalCluster, gate: Gate) -> None:
    blocked = [pair["w0"].submit("w1", hold_at, gate) for _ in range(30)]
    assert pair["w1"].call("w0", call_back, "w1", 3) == 6
    assert not any(future.done() for future in blocked)


# Back-pressure


def test_a_small_pool_loses_no_nested_call(cluster: Clusters, log: Log) -> None:
    w0 = cluster(2, threads=1, max_threads=2)["w0"]
    futures = [w0.submit("w1", note_and_call_back, log, "w0", i) for i in range(300)]
    for future in futures:
        future.result(PATIENCE)
    assert sorted(log.entries) == list(range(300))


def test_a_tree_of_calls_in_a_small_pool(cluster: Clusters) -> None:
    w0 = cluster(2, threads=1, max_threads=1)["w0"]
    assert w0.submit("w1", fan_out, "w0", 3, 4).result(PATIENCE) == 81


def test_a_full_pool_lets_synchronous_calls_through(cluster: Clusters, gate: Gate) -> None:
    w0 = cluster(2, threads=2, max_threads=2)["w0"]
    blocked = [w0.submit("w1", hold_at, gate, i) for i in range(100)]
    gate.wait_for(3)
    assert w0.call("w1", abs, -1) == 1
    gate.open()
    assert [future.result(PATIENCE) for future in blocked] == list(range(100))


def test_a_full_socket_waits_and_loses_nothing(cluster: Clusters, gate: Gate) -> None:
    """The callee reads no more, the connection fills, the caller waits inside `submit`; then all
    goes on.
    """
    w0 = cluster(2, threads=1, max_threads=1, shared_memory_min_bytes=1 << 40)["w0"]
    payload = torch.ones(250_000)

    def submit_all() -> list[Future[float]]:
        return [w0.submit("w1", total, gate, payload) for _ in range(40)]

    with ThreadPoolExecutor(1) as pool:
        submitted = pool.submit(submit_all)
        gate.wait_for(2)
        assert w0.call("w1", abs, -1) == 1
        gate.open()
        assert {future.result(PATIENCE) for future in submitted.result(PATIENCE)} == {250_000.0}


def test_large_messages_cross_in_both_directions(pair: LocalCluster) -> None:
    """Neither side may stop reading because it is busy sending."""
    payload = torch.ones(500_000)
    futures = [
        agent.submit(to, torch.add, payload, 1)
        for _ in range(10)
        for agent, to in _directions(pair)
    ]
    assert all(bool((future.result(PATIENCE) == 2).all()) for future in futures)


def _directions(pair: LocalCluster) -> list[tuple[Agent, str]]:
    return [(pair["w0"], "w1"), (pair["w1"], "w0")]


# Callbacks


def test_a_callback_that_blocks_delays_no_other_call(w0: Agent, gate: Gate) -> None:
    replies = Gate()
    future = w0.submit("w1", hold_at, replies)  # the reply comes after the callback is in place
    future.add_done_callback(lambda _: gate.hold())
    replies.open()
    gate.wait_for()
    assert [w0.submit("w1", abs, -i).result(PATIENCE) for i in range(20)] == list(range(20))


def test_a_callback_that_blocked_before_does_not_run_on_the_thread_that_reads(
    w0: Agent, gate: Gate
) -> None:
    w0.call("w1", abs, -1)
    gates = Gate(), Gate()

    def submit_with_callback(number: int) -> Future[int]:
        replies = Gate()

        def hold(_: object) -> int:
            gates[number].hold()
            return number

        chained = w0.submit("w1", hold_at, replies).then(hold)
        replies.open()
        gates[number].wait_for()
        return chained

    first = submit_with_callback(0)
    assert w0.submit("w1", abs, -1).result(PATIENCE) == 1  # the clock has found the thread
    found = [loop.hand_over_count for loop in w0._runtime.event_loops]
    second = submit_with_callback(1)
    assert w0.submit("w1", abs, -2).result(PATIENCE) == 2
    assert [loop.hand_over_count for loop in w0._runtime.event_loops] == found
    for each in gates:
        each.open()
    assert [first.result(PATIENCE), second.result(PATIENCE)] == [0, 1]


def test_a_callback_that_blocks_no_more_runs_where_the_answer_is_read_again(
    w0: Agent, gate: Gate
) -> None:
    replies = Gate()

    def callback(_: object) -> None:
        gate.hold()

    blocked = w0.submit("w1", hold_at, replies).then(callback)
    replies.open()
    gate.wait_for()
    assert w0.submit("w1", abs, -1).result(PATIENCE) == 1
    multiplexed = w0._runtime.peers.reach("w1").multiplexed
    assert multiplexed._slow_callbacks
    gate.open()
    blocked.result(PATIENCE)
    for _ in range(1000):
        w0.submit("w1", abs, -1).then(callback).result(PATIENCE)
        if not multiplexed._slow_callbacks:
            break
    assert not multiplexed._slow_callbacks


def test_a_callback_may_wait_for_a_thread_that_waits_for_the_same_future(w0: Agent) -> None:
    for add in (Future.then, Future.add_done_callback):
        replies, waited = Gate(), Gate()
        future = w0.submit("w1", hold_at, replies)
        add(future, lambda _, waited=waited: waited.hold())  # type: ignore[misc]
        replies.open()
        future.result(PATIENCE / 2)
        waited.wait_for()
        waited.open()


def test_a_callback_may_wait_for_another_call(w0: Agent) -> None:
    first = w0.submit("w1", abs, -1)
    chained = first.then(
        lambda done: done.value() + w0.submit("w1", abs, -2).wait() + w0.call("w1", abs, -3)
    )
    assert chained.result(PATIENCE) == 6


def test_callbacks_of_replies_that_arrive_together_may_wait_for_each_other(w0: Agent) -> None:
    w0.submit("w1", abs, -1).wait()
    loops, clock = list(w0._runtime.event_loops), w0._runtime.clock
    asleep, awake, meeting = threading.Event(), threading.Event(), threading.Barrier(3)

    def sleep(_: object) -> None:
        asleep.set()
        awake.wait(PATIENCE)

    for loop in loops:  # nothing is read while the leader sleeps
        clock.remove_listener(loop)
    w0.submit("w1", abs, -1).add_done_callback(sleep)
    assert asleep.wait(PATIENCE)
    chained = [w0.submit("w1", abs, -1).then(lambda _: meeting.wait(PATIENCE)) for _ in range(3)]
    assert w0.call("w1", abs, -2) == 2  # the replies to the calls before it have been sent
    for loop in loops:
        clock.add_listener(loop)
    awake.set()
    assert sorted(future.result(PATIENCE) for future in chained) == [0, 1, 2]


def test_callbacks_that_wait_for_each_other(w0: Agent, gate: Gate) -> None:
    meeting = threading.Barrier(10)
    chained = [
        w0.submit("w1", hold_at, gate).then(lambda _: meeting.wait(PATIENCE)) for _ in range(10)
    ]
    gate.open()
    assert sorted(future.result(PATIENCE) for future in chained) == list(range(10))

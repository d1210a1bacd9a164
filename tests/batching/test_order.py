"""Which of the waiting calls run next, and when: fair queues and policies, without threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad import Deadline
from telegrad.batching.calls import BatchedCall
from telegrad.batching.metrics import QueueMetrics
from telegrad.batching.scheduler import (
    AdaptivePolicy,
    AllCallersPolicy,
    BatchOptions,
    BatchPolicy,
    BatchScheduler,
    FairQueue,
    MinimumSizePolicy,
    policy_for,
)


def make_call(
    caller: str | int = "w0",
    arrival_time: float = 0.0,
    priority: float = 0.0,
    deadline: float | None = None,
) -> BatchedCall:
    made = BatchedCall(None, caller, None if deadline is None else Deadline(deadline), (), (), {})
    made.arrival_time, made.priority, made.queued = arrival_time, priority, True
    return made


# Fair queues


def test_callers_take_turns() -> None:
    queue = FairQueue()
    for number, caller in enumerate("aaaabbc"):
        queue.add(make_call(caller, number))
    assert [(each.caller, each.arrival_time) for each in queue.pop(5)] == [
        ("a", 0),
        ("b", 4),
        ("c", 6),
        ("a", 1),
        ("b", 5),
    ]
    assert [each.arrival_time for each in queue.pop(5)] == [2, 3]


def test_a_higher_priority_goes_first() -> None:
    queue = FairQueue()
    for number, priority in enumerate((0, 1, 0, 5)):
        queue.add(make_call("a", number, priority))
    assert [each.arrival_time for each in queue.pop(3)] == [3, 1, 0]


def test_of_two_lines_the_more_urgent_then_the_older_goes_first() -> None:
    old, new, urgent = FairQueue(), FairQueue(), FairQueue()
    old.add(make_call(arrival_time=1))
    new.add(make_call(arrival_time=2))
    urgent.add(make_call(arrival_time=3, priority=1))
    assert sorted([new, urgent, old], key=FairQueue.sort_key) == [urgent, old, new]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans())), st.integers(1, 7)
)
def test_everybody_gets_through_a_line_once_and_in_order(
    calls: list[tuple[str, int, bool]], size: int
) -> None:
    queue, entries = FairQueue(), []
    for number, (caller, priority, leaves) in enumerate(calls):
        made = make_call(caller, number, priority)
        entries.append((made, leaves))
        queue.add(made)
    for made, leaves in entries:
        if leaves:
            made.queued = False
            queue.discard_one()
    taken: list[BatchedCall] = []
    while len(queue):
        batch = queue.pop(size)
        assert len(batch) == min(size, len(batch) + len(queue))
        taken += batch
    assert {id(each) for each in taken} == {id(made) for made, leaves in entries if not leaves}
    assert len(taken) == len({id(each) for each in taken})
    assert [each.priority for each in taken] == sorted(
        (each.priority for each in taken), reverse=True
    )
    for caller in "abc":
        for priority in range(3):
            own = [
                each.arrival_time
                for each in taken
                if (each.caller, each.priority) == (caller, priority)
            ]
            assert own == sorted(own)


# Policies


def rule(**settings: Any) -> BatchPolicy:
    made = policy_for(BatchOptions(**settings))
    assert made is not None
    return made


def together(policy: BatchPolicy, *callers: str | int, now: float = 0.0) -> None:
    for caller in callers:
        if len(policy):
            policy.record_overlap(caller)
        policy.add(make_call(caller, now), 0.0)


def learned(*callers: str) -> BatchPolicy:
    """A rule with `max_wait=1` that knows these callers to come together."""
    policy = rule(max_wait=1.0)
    for now in range(0, 30, 10):
        together(policy, *callers, now=now)
        assert policy.is_ready(now + 1)
        policy.release(now + 1)
    return policy


def test_nobody_waits_unless_told_to() -> None:
    assert policy_for(BatchOptions()) is None
    assert isinstance(rule(max_wait=1.0), AdaptivePolicy)
    assert isinstance(rule(min_size=2), MinimumSizePolicy)
    assert isinstance(rule(min_size="all"), AllCallersPolicy)


def test_at_first_a_call_waits_to_see_who_comes() -> None:
    policy = rule(max_wait=1.0)
    assert not policy.runs_alone("a")
    together(policy, "a")
    assert not policy.is_ready(0.5)
    assert policy.latest_start == 1.0
    assert policy.is_ready(1.0)


def test_a_caller_that_is_always_alone_does_not_wait_for_long() -> None:
    assert learned("a").runs_alone("a")


def test_those_who_come_together_wait_for_each_other_and_no_longer() -> None:
    policy = learned("a", "b", "c")
    assert not policy.runs_alone("a")
    together(policy, "a", "b", now=100)
    assert not policy.is_ready(100.5)
    together(policy, "c", now=100.6)
    assert policy.is_ready(100.6)


def test_who_does_not_come_is_not_waited_for_again_until_it_does() -> None:
    policy = learned("a", "b")
    together(policy, "a", now=100)
    assert policy.is_ready(101)
    policy.release(101)
    assert policy.runs_alone("a")
    policy.record_overlap("b")  # it called while a batch ran
    assert not policy.runs_alone("a")


def test_a_lost_companion_is_not_waited_for() -> None:
    policy = learned("a", "b")
    policy.caller_lost("b")
    assert policy.runs_alone("a")


def test_a_full_batch_does_not_wait() -> None:
    policy = rule(max_wait=1.0, max_size=2)
    together(policy, "a", "b")
    assert policy.is_ready(0.0)


def test_a_deadline_shortens_the_wait() -> None:
    policy = rule(max_wait=1.0)
    policy.add(make_call("a", 0.0, deadline=0.5), 0.1)
    assert policy.latest_start == 0.4


def test_a_quorum_without_a_limit_waits_for_ever_and_does_not_break_up_for_a_deadline() -> None:
    policy = rule(min_size=2)
    policy.add(make_call("a", 0.0, deadline=0.5), 0.1)
    assert policy.latest_start == math.inf
    assert not policy.is_ready(1e9)


def test_a_quorum_counts_calls_less_those_who_died() -> None:
    policy = rule(min_size=3)
    together(policy, "a", "b")
    assert not policy.is_ready(0.0)
    policy.caller_lost("stranger")
    assert not policy.is_ready(0.0)
    policy.caller_lost("b")
    assert policy.is_ready(0.0)
    policy.release(0.0)
    together(policy, "b")  # it is back
    assert policy.unverified_callers == ["b"]
    together(policy, "a")
    assert not policy.is_ready(0.0)


def test_everybody_is_who_has_called_and_lives() -> None:
    policy = rule(min_size="all")
    assert policy.runs_alone("a")
    assert not policy.runs_alone("b")
    together(policy, "b", 12345)  # a thread of this process is not waited for, but may join
    assert not policy.is_ready(0.0)
    policy.caller_lost("a")
    assert policy.is_ready(0.0)


@pytest.mark.parametrize("settings", [{"max_wait": 1.0}, {"min_size": 2}, {"min_size": "all"}])
def test_who_leaves_is_not_here(settings: dict[str, Any]) -> None:
    policy = rule(**settings)
    together(policy, "b")
    if policy.is_ready(0.0):
        policy.release(0.0)
    leaves = make_call("a", 1.0)
    policy.add(leaves, 0.0)
    policy.remove(leaves)
    assert leaves not in policy
    assert leaves not in policy.release(99.0)


# The scheduler, which has a policy and fair queues


def prepared(caller: str, value: Any) -> BatchedCall:
    made = BatchedCall(None, caller, None, (), (value,), {})
    made.prepare()
    return made


def scheduler(**settings: Any) -> BatchScheduler:
    return BatchScheduler(BatchOptions(**settings), QueueMetrics())


def test_released_calls_that_do_not_fit_together_run_one_after_the_other() -> None:
    made = scheduler(min_size=4, max_size=4)
    calls = [prepared("a", value) for value in (1, torch.ones(1), 2, torch.zeros(1))]
    for call in calls:
        made.add(call, False, 0.0)
    assert made.pop_batch(0.0) == [calls[0], calls[2]]
    assert len(made) == 2
    assert made.pop_batch(0.0) == [calls[1], calls[3]]
    assert made.pop_batch(0.0) == []


def test_released_calls_of_a_lost_worker_leave_too() -> None:
    made = scheduler(min_size=3, max_size=3)
    calls = [
        prepared(caller, value) for caller, value in zip("aab", (1, torch.ones(1), 2), strict=True)
    ]
    for call in calls:
        made.add(call, False, 0.0)
    assert made.pop_batch(0.0) == [calls[0], calls[2]]
    assert made.caller_lost("a") == [calls[1]]
    assert len(made) == 0


def test_a_call_leaves_once() -> None:
    made = scheduler(min_size=3)
    calls = [prepared("a", value) for value in (1, 2)]
    for call in calls:
        made.add(call, False, 0.0)
    assert [made.remove(calls[0]), made.remove(calls[0])] == [True, False]
    assert len(made) == 1
    assert made.caller_lost("a") == [calls[1]]

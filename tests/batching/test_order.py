"""Who goes first, who is waited for and for how long: the rules by themselves, with no threads and no clock."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad import Deadline
from telegrad.batching.calls import BatchedCall
from telegrad.batching.policy import (
    AdaptivePolicy,
    AllCallersPolicy,
    BatchOptions,
    BatchPolicy,
    MinimumSizePolicy,
    policy_for,
)
from telegrad.batching.scheduler import FairQueue


def entry(
    caller: str | int = "w0",
    arrived: float = 0.0,
    priority: float = 0.0,
    deadline: float | None = None,
) -> BatchedCall:
    made = BatchedCall(None, caller, None if deadline is None else Deadline(deadline), (), (), {})
    made.arrived, made.priority, made.queued = arrived, priority, True
    return made


# Lines


def test_callers_take_turns() -> None:
    line = FairQueue()
    for number, caller in enumerate("aaaabbc"):
        line.add(entry(caller, number))
    assert [(each.caller, each.arrived) for each in line.take(5)] == [
        ("a", 0),
        ("b", 4),
        ("c", 6),
        ("a", 1),
        ("b", 5),
    ]
    assert [each.arrived for each in line.take(5)] == [2, 3]


def test_a_higher_priority_goes_first() -> None:
    line = FairQueue()
    for number, priority in enumerate((0, 1, 0, 5)):
        line.add(entry("a", number, priority))
    assert [each.arrived for each in line.take(3)] == [3, 1, 0]


def test_of_two_lines_the_more_urgent_then_the_older_goes_first() -> None:
    old, new, urgent = FairQueue(), FairQueue(), FairQueue()
    old.add(entry(arrived=1))
    new.add(entry(arrived=2))
    urgent.add(entry(arrived=3, priority=1))
    assert sorted([new, urgent, old], key=FairQueue.rank) == [urgent, old, new]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans())), st.integers(1, 7)
)
def test_everybody_gets_through_a_line_once_and_in_order(
    calls: list[tuple[str, int, bool]], size: int
) -> None:
    line, entries = FairQueue(), []
    for number, (caller, priority, leaves) in enumerate(calls):
        made = entry(caller, number, priority)
        entries.append((made, leaves))
        line.add(made)
    for made, leaves in entries:
        if leaves:
            made.queued = False
            line.left()
    taken: list[BatchedCall] = []
    while len(line):
        batch = line.take(size)
        assert len(batch) == min(size, len(batch) + len(line))
        taken += batch
    assert {id(each) for each in taken} == {id(made) for made, leaves in entries if not leaves}
    assert len(taken) == len({id(each) for each in taken})
    assert [each.priority for each in taken] == sorted(
        (each.priority for each in taken), reverse=True
    )
    for caller in "abc":
        for priority in range(3):
            own = [
                each.arrived for each in taken if (each.caller, each.priority) == (caller, priority)
            ]
            assert own == sorted(own)


# Company


def rule(**settings: Any) -> BatchPolicy:
    made = policy_for(BatchOptions(**settings))
    assert made is not None
    return made


def together(company: BatchPolicy, *callers: str | int, now: float = 0.0) -> None:
    for caller in callers:
        if len(company):
            company.overlapped(caller)
        company.add(entry(caller, now), 0.0)


def learned(*callers: str) -> BatchPolicy:
    """A rule with `max_wait=1` that knows these callers to come together."""
    company = rule(max_wait=1.0)
    for now in range(0, 30, 10):
        together(company, *callers, now=now)
        assert company.ready(now + 1)
        company.release(now + 1)
    return company


def test_nobody_waits_unless_told_to() -> None:
    assert policy_for(BatchOptions()) is None
    assert isinstance(rule(max_wait=1.0), AdaptivePolicy)
    assert isinstance(rule(min_size=2), MinimumSizePolicy)
    assert isinstance(rule(min_size="all"), AllCallersPolicy)


def test_at_first_a_call_waits_to_see_who_comes() -> None:
    company = rule(max_wait=1.0)
    assert not company.suffices("a")
    together(company, "a")
    assert not company.ready(0.5)
    assert company.until == 1.0
    assert company.ready(1.0)


def test_a_caller_that_is_always_alone_does_not_wait_for_long() -> None:
    assert learned("a").suffices("a")


def test_those_who_come_together_wait_for_each_other_and_no_longer() -> None:
    company = learned("a", "b", "c")
    assert not company.suffices("a")
    together(company, "a", "b", now=100)
    assert not company.ready(100.5)
    together(company, "c", now=100.6)
    assert company.ready(100.6)


def test_who_does_not_come_is_not_waited_for_again_until_it_does() -> None:
    company = learned("a", "b")
    together(company, "a", now=100)
    assert company.ready(101)
    company.release(101)
    assert company.suffices("a")
    company.overlapped("b")  # it called while a batch ran
    assert not company.suffices("a")


def test_a_lost_companion_is_not_waited_for() -> None:
    company = learned("a", "b")
    company.lost("b")
    assert company.suffices("a")


def test_a_full_batch_does_not_wait() -> None:
    company = rule(max_wait=1.0, max_size=2)
    together(company, "a", "b")
    assert company.ready(0.0)


def test_a_deadline_shortens_the_wait() -> None:
    company = rule(max_wait=1.0)
    company.add(entry("a", 0.0, deadline=0.5), 0.1)
    assert company.until == 0.4


def test_a_quorum_without_a_limit_waits_for_ever_and_does_not_break_up_for_a_deadline() -> None:
    company = rule(min_size=2)
    company.add(entry("a", 0.0, deadline=0.5), 0.1)
    assert company.until == math.inf
    assert not company.ready(1e9)


def test_a_quorum_counts_calls_less_those_who_died() -> None:
    company = rule(min_size=3)
    together(company, "a", "b")
    assert not company.ready(0.0)
    company.lost("stranger")
    assert not company.ready(0.0)
    company.lost("b")
    assert company.ready(0.0)
    company.release(0.0)
    together(company, "b")  # it is back
    assert company.newcomers == ["b"]
    together(company, "a")
    assert not company.ready(0.0)


def test_everybody_is_who_has_called_and_lives() -> None:
    company = rule(min_size="all")
    assert company.suffices("a")
    assert not company.suffices("b")
    together(company, "b", 12345)  # a thread of this process is not waited for, but may join
    assert not company.ready(0.0)
    company.lost("a")
    assert company.ready(0.0)


@pytest.mark.parametrize("settings", [{"max_wait": 1.0}, {"min_size": 2}, {"min_size": "all"}])
def test_who_leaves_is_not_here(settings: dict[str, Any]) -> None:
    company = rule(**settings)
    together(company, "b")
    if company.ready(0.0):
        company.release(0.0)
    leaves = entry("a", 1.0)
    company.add(leaves, 0.0)
    company.remove(leaves)
    assert leaves not in company
    assert leaves not in company.release(99.0)

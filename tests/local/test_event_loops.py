"""Several event loops read the connections of one agent, as they do where Python has no interpreter
lock.
"""

from __future__ import annotations

import collections
import errno
import os
from typing import Any

import pytest

from telegrad.agent import Agent
from telegrad.config import Config
from telegrad.errors import UsageError
from telegrad.free_threading import has_gil
from telegrad.runtime import active_runtime
from telegrad.scheduling.event_loops import default_loop_count
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, Meeting, hold_at

LOOPS = 3
CALLERS = ("w1", "w2", "w3", "w4", "w5", "w6")


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    return cluster(1 + len(CALLERS), event_loops=LOOPS)


def meet(meeting: Meeting) -> int:
    return meeting.join()


def call_on(to: str, value: int) -> int:
    agent = active_runtime()
    assert agent is not None
    return agent.agent.call(to, abs, value)


def spread(agent: Agent, purpose: str) -> list[int]:
    """Return how many connections of one purpose each loop of an agent reads."""
    found = collections.Counter(
        each.loop for each in agent._runtime.listener.connections if each.group == purpose
    )
    return sorted(found[loop] for loop in agent._runtime.event_loops)


def test_connections_of_each_purpose_are_spread_evenly(workers: LocalCluster) -> None:
    for name in CALLERS:
        assert workers[name].call("w0", abs, -1) == 1
    assert spread(workers["w0"], "exclusive") == [len(CALLERS) // LOOPS] * LOOPS
    assert spread(workers["w0"], "multiplexed") == [len(CALLERS) // LOOPS] * LOOPS


def test_loops_read_at_the_same_time(workers: LocalCluster) -> None:
    """Each call waits for the others, on the thread that read it."""
    for loop in workers["w0"]._runtime.event_loops:
        workers["w0"]._runtime.clock.remove_listener(loop)  # nobody relieves a leader that is stuck
    meeting = Meeting(LOOPS)
    futures = [workers[name].submit("w0", meet, meeting) for name in CALLERS[:LOOPS]]
    assert sorted(future.result(PATIENCE) for future in futures) == list(range(LOOPS))


def test_calls_of_all_kinds_are_answered(
    workers: LocalCluster, gate: Gate, in_background: Any
) -> None:
    held = [in_background(workers[name].call, "w0", hold_at, gate, name) for name in CALLERS]
    gate.wait_for(len(CALLERS))
    futures = [workers[name].submit("w0", abs, -number) for name in CALLERS for number in range(50)]
    assert [future.result(PATIENCE) for future in futures] == list(range(50)) * len(CALLERS)
    assert [workers[name].call("w0", call_on, name, -1) for name in CALLERS] == [1] * len(CALLERS)
    gate.open()
    assert [each.result(PATIENCE) for each in held] == list(CALLERS)


def test_where_descriptors_run_out_fewer_loops_do(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster(3, event_loops=LOOPS)

    def refuse(*_: Any) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "eventfd", refuse)
    assert [workers[name].call("w0", abs, -1) for name in ("w1", "w2")] == [1, 1]
    assert len(list(workers["w0"]._runtime.event_loops)) == 1


def test_a_python_with_an_interpreter_lock_has_one_loop(cluster: Clusters) -> None:
    workers = cluster(3)
    assert [workers[name].call("w0", abs, -1) for name in ("w1", "w2")] == [1, 1]
    loops = len(list(workers["w0"]._runtime.event_loops))
    assert loops == min(2, default_loop_count())
    assert default_loop_count() == 1 or not has_gil()


def test_the_number_of_loops_is_checked() -> None:
    assert Config.from_environment({"TELEGRAD_EVENT_LOOPS": "2"}).event_loops == 2
    assert Config.from_environment({"TELEGRAD_EVENT_LOOPS": "none"}).event_loops is None
    with pytest.raises(UsageError, match="event_loops must be at least 1"):
        Config(event_loops=0)

"""Remote calls in profiles of `torch.profiler.profile`."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from telegrad.refs import remote
from telegrad.runtime import AgentRuntime
from telegrad.server.connection import ServerConnection
from tests.conftest import Clusters


@pytest.fixture
def transport() -> str:
    return "unix"


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def names(profiled: profile) -> set[str]:
    events = profiled.events()
    assert events is not None
    return {event.name for event in events}


def all_threads() -> profile:
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=config)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # of torch 2.11
def test_calls_are_ranges_of_the_caller(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]
    x = torch.ones(2)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        agent.call("w1", double, x)
        agent.submit("w1", double, x).wait()
        agent.call(1, max, 1, 2)
        remote("w1", double, args=(x,), agent=agent).to_here()
        with pytest.raises(TypeError):
            agent.call("w1", double)  # type: ignore[call-arg]
    assert {
        "telegrad.call#double(w0 -> w1)",
        "telegrad.submit#double(w0 -> w1)",
        "telegrad.call#max(w0 -> w1)",
        "telegrad.create#double(w0 -> w1)",
    } <= names(profiled)


def test_calls_are_ranges_of_the_callee(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]
    with all_threads() as profiled:
        agent.call("w1", double, torch.ones(2))
        with pytest.raises(TypeError):
            agent.call("w1", double)  # type: ignore[call-arg]
    events = [event for event in profiled.events() or [] if "double" in event.name]
    served = [event for event in events if event.name == "telegrad.serve#double(w0 -> w1)"]
    made = [event for event in events if event.name == "telegrad.call#double(w0 -> w1)"]
    assert len(served) == len(made) == 2
    assert all(each.thread != made[0].thread for each in served)
    inner = {event.name for event in served[0].cpu_children}
    assert "aten::add" in inner


def test_nothing_is_replaced_without_a_profile(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]
    before = AgentRuntime.invoke, AgentRuntime.send, ServerConnection._run
    with profile(activities=[ProfilerActivity.CPU]):
        assert AgentRuntime.invoke is not before[0]
        agent.call("w1", max, 1, 2)
    assert (AgentRuntime.invoke, AgentRuntime.send, ServerConnection._run) == before


def test_a_profile_may_start_and_stop_during_calls(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]
    stop = threading.Event()
    results: list[int] = []

    def call() -> None:
        while not stop.is_set():
            results.append(agent.call("w1", max, 1, 2))
            results.append(agent.submit("w1", max, 1, 2).wait())

    thread = threading.Thread(target=call)
    thread.start()
    for _ in range(5):
        with profile(activities=[ProfilerActivity.CPU]):
            agent.call("w1", max, 1, 2)
    stop.set()
    thread.join()
    assert set(results) <= {2}

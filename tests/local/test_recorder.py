"""Calls in progress (`Agent.calls`), and what an agent remembers of those that have ended."""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import Agent, autograd, batched, current_agent, ps, rpc
from telegrad.current import Deadline, ServedCall
from telegrad.diagnosis import snapshot as snapshots
from telegrad.diagnosis.calls import CallInProgress
from telegrad.diagnosis.history import latencies, percentile, recorded_calls, recorded_events
from telegrad.diagnosis.stacks import stacks
from telegrad.errors import CallTimeout, PeerLost
from telegrad.futures import Future
from telegrad.recorder import FlightRecorder
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import Gate, hold_at, until


@pytest.fixture
def transport() -> str:
    return "unix"


def call_through(to: str, gate: Gate) -> None:
    agent = current_agent()
    assert agent is not None
    agent.call(to, hold_at, gate)


def fail() -> None:
    raise KeyError("as planned")


@rpc.functions.async_execution
def pending() -> Future[int]:
    return Future()


@batched
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def users(agent: Agent) -> list[CallInProgress]:
    return [call for call in agent.calls() if not call.internal]


def history(agent: Agent) -> list[dict[str, Any]]:
    calls = recorded_calls(agent._runtime.recorder)
    return [call for call in calls if not call["internal"]]


# Calls in progress


def test_a_call_in_progress_is_listed_at_both_ends(
    cluster: Clusters, gate: Gate, in_background: Background
) -> None:
    workers = cluster(2)
    done = in_background(workers["w0"].with_timeout(20).call, "w1", hold_at, gate)
    gate.wait_for()
    (served,), (made,) = users(workers["w1"]), users(workers["w0"])  # the ages are of these moments
    assert (made.direction, made.function, made.peer, made.state) == (
        "made",
        "hold_at",
        "w1",
        "sent",
    )
    assert (served.direction, served.function, served.peer, served.state) == (
        "served",
        "hold_at",
        "w0",
        "running",
    )
    assert made.call_id == served.call_id
    assert 0 < served.age <= made.age < 20
    for call in (made, served):
        assert call.deadline is not None
        assert call.deadline == pytest.approx(20 - call.age, abs=2.0)
    assert str(served).startswith("hold_at for w0: running ")
    assert served.request_bytes > 0
    until(lambda: users(workers["w0"])[0].request_bytes == served.request_bytes)
    gate.open()
    done.result()
    assert users(workers["w0"]) == []
    until(lambda: users(workers["w1"]) == [])


def test_a_nested_call_names_the_call_that_made_it(cluster: Clusters, gate: Gate) -> None:
    workers = cluster(3)
    done = workers["w0"].submit("w1", call_through, "w2", gate)
    gate.wait_for()
    nested = next(call for call in users(workers["w1"]) if call.direction == "made")
    served = next(call for call in users(workers["w1"]) if call.direction == "served")
    assert nested.parent == ("w0", served.call_id, "call_through")
    assert users(workers["w0"])[0].parent is None
    gate.open()
    done.wait()


def test_a_call_that_waits_for_a_thread_is_queued(cluster: Clusters, gate: Gate) -> None:
    workers = cluster(2, threads=1, max_threads=1)
    served = workers["w1"]._runtime.functions.find(hold_at)
    served.seconds = 1.0  # so the executor runs it
    futures = [workers["w0"].submit("w1", hold_at, gate) for _ in range(2)]
    gate.wait_for()
    until(lambda: [call.state for call in users(workers["w1"])] == ["running", "queued"])
    gate.open()
    for future in futures:
        future.wait()


def test_a_call_that_a_future_will_answer_is_deferred(cluster: Clusters) -> None:
    workers = cluster(2)
    future = workers["w0"].submit("w1", pending)
    until(lambda: [call.state for call in users(workers["w1"])] == ["deferred"])
    future.cancel()
    until(lambda: users(workers["w1"]) == [])
    assert history(workers["w1"])[-1]["outcome"] == "cancelled"
    assert history(workers["w0"])[-1]["outcome"] == "cancelled"


def test_a_call_whose_function_is_being_imported_is_listed_and_others_of_it_wait(
    cluster: Clusters, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callee imports the module; another thread reads the connection meanwhile."""
    name = f"imported_slowly_{os.getpid()}"
    lines = ["import builtins", f"builtins.{name}()", "def add_one(x):", "    return x + 1"]
    (tmp_path / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(builtins, name, lambda: None, raising=False)
    add_one = importlib.import_module(name).add_one
    workers = cluster(3, timeout=None)
    assert workers["w0"].call("w2", add_one, 1) == 2  # so that it is pickled only once
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, name, gate.hold)
    futures = [workers["w0"].submit("w1", add_one, 0)]
    gate.wait_for()
    (served,) = users(workers["w1"])
    assert (served.function, served.peer) == ("a function that is being loaded", "w0")
    serving = [thread["serves"] for thread in stacks() if thread["serves"] is not None]
    assert [call["function"] for call in serving] == ["a function that is being loaded"]
    futures += [workers["w0"].submit("w1", add_one, number) for number in (1, 2)]
    until(lambda: len(users(workers["w1"])) == 3)
    assert workers["w0"].submit("w1", max, 1, 2).wait() == 2  # other functions do not wait
    gate.open()
    assert [future.wait() for future in futures] == [1, 2, 3]
    until(lambda: len(history(workers["w1"])) == 4)
    assert {call["function"] for call in history(workers["w1"])} == {"add_one", "max"}


def test_a_closed_agent_has_no_calls(cluster: Clusters) -> None:
    workers = cluster(1)
    workers["w0"].close()
    assert workers["w0"].calls() == []


# Calls that have ended


def test_the_outcome_of_each_call_is_recorded(cluster: Clusters, gate: Gate) -> None:
    workers = cluster(3)
    agent = workers["w0"]
    agent.call("w1", max, 1, 2)
    agent.submit("w1", max, 1, 2).wait()
    for call in (agent.call, lambda *args: agent.submit(*args).wait()):
        with pytest.raises(KeyError):
            call("w1", fail)
    with pytest.raises(CallTimeout):
        agent.with_timeout(0.05).call("w1", hold_at, gate)
    lost = agent.submit("w2", hold_at, gate)
    gate.wait_for(2)
    workers.kill("w2")
    with pytest.raises(PeerLost):
        lost.wait()
    found = [(each["function"], each["peer"], each["outcome"]) for each in history(agent)]
    assert found == [
        ("max", "w1", "ok"),
        ("max", "w1", "ok"),
        ("fail", "w1", "failed"),
        ("fail", "w1", "failed"),
        ("hold_at", "w1", "CallTimeout"),
        ("hold_at", "w2", "PeerLost"),
    ]
    gate.open()
    until(lambda: len(history(workers["w1"])) == 5)
    served = history(workers["w1"])
    assert [each["outcome"] for each in served] == ["ok", "ok", "KeyError", "KeyError", "ok"]
    for each in served:
        assert each["received"] <= each["start"] <= each["returned"] <= each["end"]
    assert [each["id"] for each in served] == [each["id"] for each in history(agent)[:5]]


def test_sizes_include_tensors(cluster: Clusters) -> None:
    workers = cluster(2)
    workers["w0"].call("w1", torch.add, torch.ones(1000), 1)
    (made,) = history(workers["w0"])
    until(lambda: history(workers["w1"]) != [])
    (served,) = history(workers["w1"])
    for size in ("request_bytes", "reply_bytes"):
        assert made[size] == served[size]
        assert 4000 < made[size] < 5000


def test_the_memory_of_the_recorder_is_fixed(cluster: Clusters) -> None:
    workers = cluster(2, flight_recorder=8)
    for number in range(20):
        workers["w0"].call("w1", abs, number)
    assert len(workers["w0"]._runtime.recorder.calls()) == 8


def test_a_recorder_of_size_0_keeps_nothing(cluster: Clusters) -> None:
    workers = cluster(2, flight_recorder=0)
    workers["w0"].call("w1", abs, -1)
    for agent in workers:
        assert agent._runtime.recorder.calls() == []
        assert agent._runtime.recorder.events() == []


def test_the_recorder_keeps_no_function_of_the_user_alive(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]

    def call_closures() -> weakref.ref[torch.Tensor]:
        captured = torch.ones(3)
        agent.call("w1", lambda: captured + 1)
        agent.submit("w1", lambda: captured + 1).wait()
        return weakref.ref(captured)

    gone = call_closures()
    gc.collect()
    assert gone() is None
    assert len(history(agent)) == 2


def test_events(cluster: Clusters) -> None:
    workers = cluster(3)
    agent = workers["w0"]
    futures = [agent.submit("w1", double, torch.ones(2)) for _ in range(50)]
    for future in futures:
        future.wait()
    with autograd.context(agent=agent) as context:
        loss = agent.call("w1", torch.mul, torch.ones(2, requires_grad=True), 2).sum()
        autograd.backward(context, [loss])
    workers.kill("w2")
    agent._runtime.failures.declare_lost("w2", agent._runtime.member("w2").incarnation)
    kinds = {event["kind"] for event in recorded_events(agent._runtime.recorder)}
    assert {"backward", "lost"} <= kinds
    kinds = {event["kind"] for event in recorded_events(workers["w1"]._runtime.recorder)}
    assert {"connection opened", "batch"} <= kinds


def test_latencies_by_function_and_peer() -> None:
    calls = [
        {
            "direction": "made",
            "function": "f",
            "peer": "w1",
            "internal": False,
            "start": float(second),
            "end": second + second / 1000,
            "outcome": "ok" if second else "failed",
            "request_bytes": 10,
            "reply_bytes": 1,
        }
        for second in range(100)
    ]
    (row,) = latencies(calls, 100.0, 0.0)
    assert (row["calls"], row["failed"], row["per_second"]) == (100, 1, 1.0)
    assert row["p50"] == pytest.approx(0.049)
    assert row["p99"] == pytest.approx(0.098)
    assert row["longest"] == pytest.approx(0.099)
    assert latencies([], 100.0, 0.0) == []


def test_one_recent_call_is_no_high_rate(cluster: Clusters) -> None:
    workers = cluster(2)
    workers["w0"].call("w1", max, 1, 2)
    found = workers["w0"].snapshot()
    (row,) = [row for row in found["latencies"] if not row["internal"]]
    assert 0 < row["per_second"] <= 1
    assert found["totals"]["made"]["per_second"] == row["per_second"]
    assert found["totals"]["served"] is None


def test_the_rate_of_a_full_recorder_is_that_of_what_it_remembers(cluster: Clusters) -> None:
    workers = cluster(2, flight_recorder=4)
    diagnosis = workers["w0"]._runtime.diagnosis
    diagnosis._opened -= 100
    for _ in range(8):
        workers["w0"].call("w1", max, 1, 2)
    assert diagnosis.snapshot(50.0)["totals"]["made"]["per_second"] > 1


@pytest.mark.parametrize(("fraction", "value"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.99, 4), (1, 4)])
def test_percentile(fraction: float, value: int) -> None:
    assert percentile([1, 2, 3, 4], fraction) == value


def test_records_tell_what_they_are() -> None:
    call = ServedCall()
    call.caller, call.call_id, call.function = "w0", 7, "f"
    call.started_at, call.outcome = 0.0, ""
    assert repr(call) == "<ServedCall 7 of 'w0': f, queued>"
    assert repr(FlightRecorder(4)) == "<FlightRecorder 0 calls, 0 events>"


def test_the_deadline_of_a_call_is_counted_from_its_arrival() -> None:
    call = ServedCall()
    call.received_at, call.timeout_ms = 1000.0, 1500
    assert call.deadline == Deadline(1001.5)
    call.timeout_ms = 0
    assert call.deadline is None


# Snapshots


def test_a_snapshot_is_json_and_complete(cluster: Clusters) -> None:
    workers = cluster(2)
    workers["w0"].call("w1", torch.add, torch.ones(200_000), 1)
    workers["w0"].call("w1", double, torch.ones(2))
    model = torch.nn.Linear(2, 1)
    with ps.Optimizer(model, "w1", agent=workers["w0"], lr=0.1) as optimizer:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        found = workers["w1"].snapshot()
    assert json.loads(json.dumps(found)) == found
    assert found["worker"]["name"] == "w1"
    assert [member["name"] for member in found["members"]] == ["w0", "w1"]
    assert found["batching"][0]["function"] == "double"
    (shard,) = found["parameter_servers"]
    assert (shard["version"], shard["trainers"], shard["staleness"]) == (1, ["w0"], {"w0": 0})
    assert any(event["kind"] == "round" for event in found["events"])
    assert any(row["function"].endswith("add") for row in found["latencies"])
    assert found["shared_memory"]["segments"] == 1
    assert found["statistics"]["calls_served"] >= 2
    assert found["peers"] == []
    assert workers["w0"].snapshot()["peers"][0]["state"] == "connected"


def test_a_section_that_blocks_does_not_block_the_snapshot(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_PATIENCE", 0.01)
    agent = cluster(1)["w0"]
    lock = threading.Lock()

    def take() -> int:
        with lock:
            return 1

    agent._runtime.add_report("blocks", take)
    agent._runtime.add_report("fails", lambda: 1 / 0)
    with lock:
        for _ in range(2):
            found = agent.snapshot()
            assert "no answer within" in found["blocks"]["error"]
            assert found["worker"]["name"] == "w0"
    until(lambda: agent.snapshot()["blocks"] == 1)
    assert agent.snapshot()["fails"]["error"].startswith("ZeroDivisionError")


def test_the_leader_of_a_barrier_says_who_is_missing(
    cluster: Clusters, in_background: Background
) -> None:
    workers: LocalCluster = cluster(3)
    done = [in_background(workers[name].barrier) for name in ("w0", "w1")]
    waiting = {"operation": "barrier", "missing": ["w2"]}
    until(lambda: workers["w0"].snapshot()["gathers"] == [waiting])
    workers["w2"].barrier()
    for each in done:
        each.result()

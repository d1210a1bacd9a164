"""A profile of the caller shows what its calls did on their callees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.profiler import record_function
from torch.autograd.profiler_legacy import profile

import telegrad.rpc as rpc
from telegrad import autograd, current_agent, profiling
from telegrad.current import thread_state
from telegrad.errors import UsageError
from telegrad.refs import remote
from telegrad.testing import LocalCluster
from tests.local.conftest import Background
from tests.local.gates import Gate, hold_at

ADD = "aten::add"


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    profiling.enable_remote_events()
    with LocalCluster(3) as cluster:
        yield cluster


def double(x: torch.Tensor) -> torch.Tensor:
    with record_function("doubling"):
        return x + x


def double_at(worker: str, x: torch.Tensor) -> torch.Tensor:
    agent = current_agent()
    assert agent is not None
    return agent.call(worker, double, x)


@rpc.functions.async_execution
def double_later(worker: str, x: torch.Tensor) -> Any:
    agent = current_agent()
    assert agent is not None
    return agent.submit(worker, double, x).then(lambda done: done.wait())


def is_profiled() -> bool:
    return torch.autograd._profiler_enabled()


class Adder:
    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def by_name(done: Any) -> dict[str, Any]:
    return {event.name: event for event in done.function_events}


def test_a_call_and_what_it_did_on_its_callee(cluster: LocalCluster) -> None:
    with profile() as done:
        with record_function("around it"):
            result = cluster["w0"].call("w1", double, torch.ones(2))
    assert result.tolist() == [2.0, 2.0]
    events = by_name(done)
    call = "rpc_sync#double(w0 -> w1)"
    add, doubling = events[f"{call}#remote_op: {ADD}"], events[f"{call}#remote_op: doubling"]
    assert (events[call].node_id, events[call].is_remote) == (0, False)
    assert (add.node_id, add.is_remote) == (doubling.node_id, doubling.is_remote) == (1, True)
    assert add.cpu_parent is doubling
    outer, inner, remote_range = (
        events["around it"].time_range,
        events[call].time_range,
        doubling.time_range,
    )
    assert (
        outer.start
        <= inner.start
        <= remote_range.start
        <= remote_range.end
        <= inner.end
        <= outer.end
    )
    assert events["around it"].node_id == 0


def test_asynchronous_calls_and_operators(cluster: LocalCluster) -> None:
    with profile() as done:
        futures = [
            cluster["w0"].submit(f"w{rank}", torch.add, torch.ones(2), rank) for rank in (1, 2)
        ]
        assert [future.wait().tolist() for future in futures] == [[2.0, 2.0], [3.0, 3.0]]
    events = by_name(done)
    for rank in (1, 2):
        assert events[f"rpc_async#{ADD}(w0 -> w{rank})#remote_op: {ADD}"].node_id == rank


def test_references_and_their_methods(cluster: LocalCluster) -> None:
    with profile() as done:
        adder = remote("w1", Adder, agent=cluster["w0"])
        assert adder.rpc_sync().add(torch.ones(1)).item() == 2.0
        assert adder.rpc_async().add(torch.ones(1)).wait().item() == 2.0
        adder._get_profiling_future().wait()
    names = by_name(done)
    assert "rpc_remote#Adder(w0 -> w1)" in names
    assert f"rpc_sync#method add(w0 -> w1)#remote_op: {ADD}" in names
    assert f"rpc_async#method add(w0 -> w1)#remote_op: {ADD}" in names


@pytest.mark.parametrize(("function", "mode"), [(double_at, "sync"), (double_later, "async")])
def test_calls_of_the_callee(cluster: LocalCluster, function: Any, mode: str) -> None:
    with profile() as done:
        assert cluster["w0"].submit("w1", function, "w2", torch.ones(1)).wait().item() == 2.0
    events = by_name(done)
    outer = f"rpc_async#{function.__name__}(w0 -> w1)"
    inner = f"{outer}#remote_op: rpc_{mode}#double(w1 -> w2)"
    assert (events[inner].node_id, events[inner].is_remote) == (1, True)
    assert events[f"{inner}#remote_op: {ADD}"].node_id == 2
    assert events[f"{inner}#remote_op: {ADD}"].time_range.end <= events[outer].time_range.end


def test_the_callee_has_the_options_of_the_caller(cluster: LocalCluster) -> None:
    add = f"rpc_sync#double(w0 -> w1)#remote_op: {ADD}"
    with profile(record_shapes=True, profile_memory=True) as done:
        cluster["w0"].call("w1", double, torch.ones(100))
    assert by_name(done)[add].input_shapes[:2] == [[100], [100]]
    assert by_name(done)[add].cpu_memory_usage >= 400
    with profile() as done:
        cluster["w0"].call("w1", double, torch.ones(100))
    assert not any(by_name(done)[add].input_shapes)
    assert by_name(done)[add].cpu_memory_usage == 0


def test_a_function_that_fails(cluster: LocalCluster) -> None:
    with profile() as done:
        with pytest.raises(ValueError, match="seven"):
            cluster["w0"].call("w1", int, "seven")
        with pytest.raises(ValueError, match="eight"):
            cluster["w0"].submit("w1", int, "eight").wait()
    assert {"rpc_sync#int(w0 -> w1)", "rpc_async#int(w0 -> w1)"} <= set(by_name(done))
    assert cluster["w0"].call("w1", is_profiled) is False


def test_a_call_that_is_cancelled(cluster: LocalCluster, gate: Gate) -> None:
    with profile():
        future = cluster["w0"].submit("w1", hold_at, gate)
        gate.wait_for()
        assert future.is_call
        assert future.cancel()
    assert future.cancelled()


def test_only_the_profiled_thread_and_only_while_it_is(
    cluster: LocalCluster, in_background: Background
) -> None:
    agent = cluster["w0"]
    assert agent.call("w1", is_profiled) is False
    with profile():
        assert agent.call("w1", is_profiled) is True
        assert in_background(agent.call, "w1", is_profiled).result() is False
    assert thread_state.interceptor is None
    assert agent.call("w1", is_profiled) is False
    with profile(enabled=False):
        assert agent.call("w1", is_profiled) is False


def test_the_backward_pass(cluster: LocalCluster) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context(agent=cluster["w0"]) as context, profile() as done:
        loss = cluster["w0"].call("w1", torch.mul, x, 3).sum()
        autograd.backward(context, [loss])
        assert autograd.get_gradients(context)[x].tolist() == [3.0, 3.0]
    assert any("#remote_op: " in name and "MulBackward" in name for name in by_name(done))


def test_only_registered_functions_are_run() -> None:
    profiling.enable_remote_events()
    with LocalCluster(2, only_registered=True) as cluster, profile():
        with pytest.raises(UsageError, match="double is not one"):
            cluster["w0"].call("w1", double, torch.ones(1))


def test_a_trace_for_the_browser(cluster: LocalCluster, tmp_path: Path) -> None:
    with profile() as done:
        cluster["w0"].call("w1", double, torch.ones(1))
    done.export_chrome_trace(str(tmp_path / "trace"))
    threads = {
        event["name"]: event["tid"] for event in json.loads((tmp_path / "trace").read_text())
    }
    assert "node_id:1" in threads[f"rpc_sync#double(w0 -> w1)#remote_op: {ADD}"]


@rpc.functions.async_execution
def returns_no_future() -> Any:
    return 3


def test_a_future_of_a_remote_object_is_profiled(cluster: LocalCluster) -> None:
    with profile() as found:
        made = remote("w1", double_later, ("w2", torch.ones(2)), agent=cluster["w0"])
        assert made.to_here().tolist() == [2, 2]
        made._get_profiling_future().wait()
    names = [event.name for event in found.function_events]
    assert any("double_later" in name for name in names)


def test_an_async_function_must_return_a_future_here_too(cluster: LocalCluster) -> None:
    with profile():
        with pytest.raises(UsageError, match=r"returns_no_future returned int"):
            cluster["w0"].call("w1", returns_no_future)


def test_a_profile_that_began_earlier_has_no_remote_events(cluster: LocalCluster) -> None:
    with profile() as found:
        thread_state.interceptor = None  # as if remote events had been enabled in this block
        cluster["w0"].call("w1", double, torch.ones(2))
        torch.ones(2) + torch.ones(2)
    assert ADD in [event.name for event in found.function_events]
    assert not any(event.is_remote for event in found.function_events)

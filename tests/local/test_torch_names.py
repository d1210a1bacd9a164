"""Internal names of torch's RPC that programs use: agent methods, contexts, types, counters."""

from __future__ import annotations

import enum
import pickle
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad.autograd as dist_autograd
import telegrad.rpc as rpc
from telegrad.agent import Agent
from telegrad.errors import PeerLost
from telegrad.futures import Future
from telegrad.refs import remote
from telegrad.runtime import active_runtime
from telegrad.testing import LocalCluster
from tests.local.gates import Gate, hold_at, until


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Any]:
    """Yield the agent of a group of one, made by `init_rpc`."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{tmp_path}/store", num_worker_threads=3
    )
    options.device_maps = {"w0": {torch.device("cpu"): torch.device("cpu")}}
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
    yield rpc._get_current_rpc_agent()
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown()


def test_the_backend_type_is_an_enum_class() -> None:
    member = rpc.BackendType.TENSORPIPE
    assert isinstance(rpc.BackendType, type)
    assert isinstance(member, rpc.BackendType)
    assert isinstance(member, enum.Enum)
    assert isinstance(rpc.BackendType | None, types.UnionType)
    assert list(rpc.BackendType) == [member] == [rpc.BackendType["TENSORPIPE"]]
    assert (member.name, repr(member)) == ("TENSORPIPE", "BackendType.TENSORPIPE")
    assert pickle.loads(pickle.dumps(member)) is member


def test_the_agent_is_an_rpc_agent(agent: Any) -> None:
    assert isinstance(agent, rpc.RpcAgent)
    assert isinstance(agent, rpc.TensorPipeAgent)
    assert agent.is_static_group
    agent.store.set("key", "value")
    assert agent.store.get("key") == b"value"


def test_the_agent_knows_its_options(agent: Any) -> None:
    assert agent._get_backend_options().num_worker_threads == 3
    cpu = torch.device("cpu")
    assert agent._get_device_map(agent.get_worker_info("w0")) == {cpu: cpu}
    assert agent._get_device_map(rpc.WorkerInfo("w9", 9)) == {}


def test_metrics_count_calls(agent: Any, gate: Gate) -> None:
    assert agent.get_metrics()["agent.thread_pool_size"] == "3"
    assert agent.get_metrics()["agent.client_active_calls"] == "0"
    call = rpc.rpc_async("w0", hold_at, (gate,))
    gate.wait_for()
    assert agent.get_metrics()["agent.client_active_calls"] == "1"
    assert agent.get_metrics()["agent.server_active_calls"] == "1"
    assert agent.get_debug_info().keys() == agent.get_metrics().keys()
    gate.open()
    call.wait()
    until(lambda: agent.get_metrics()["agent.server_active_calls"] == "0")
    assert agent.get_metrics()["agent.client_active_calls"] == "0"


def test_join_waits_for_calls_under_way(agent: Any, gate: Gate) -> None:
    call = rpc.rpc_async("w0", hold_at, (gate,))
    gate.wait_for()
    thread = threading.Thread(target=agent.join)
    thread.start()
    assert thread.is_alive()
    gate.open()
    thread.join()
    assert call.done()
    agent.sync()
    agent.join(shutdown=True, timeout=30)
    assert agent._runtime.closing


def test_debug_info_holds_all_counters(agent: Any) -> None:
    info = rpc._get_debug_info()
    parts = [
        rpc._rref_context_get_debug_info(),
        agent.get_debug_info(),
        dist_autograd._get_debug_info(),
    ]
    assert info.keys() == {key for part in parts for key in part}
    with dist_autograd.context():
        assert rpc._get_debug_info()["num_autograd_contexts"] == 1


def test_a_context_by_hand(agent: Any) -> None:
    context = dist_autograd._new_context()
    assert isinstance(context, dist_autograd.DistAutogradContext)
    assert dist_autograd._current_context() is context
    with pytest.raises(RuntimeError, match="Already have an autograd context"):
        dist_autograd._new_context()
    dist_autograd._release_context(context._context_id())
    with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
        dist_autograd._current_context()
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        dist_autograd._release_context(context._context_id())
    assert dist_autograd._get_debug_info() == {
        "num_current_backward_passes": 0,
        "num_autograd_contexts": 0,
    }


class Look(torch.autograd.Function):
    """Record the number of running passes in the backward pass."""

    seen: list[int] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Look.seen.append(dist_autograd._get_debug_info()["num_current_backward_passes"])
        return gradients[0]


def context_of(number: int) -> tuple[set[int], list[int], list[int]]:
    context = dist_autograd._retrieve_context(number)
    return (
        context._known_worker_ids(),
        list(context._send_functions()),
        list(context._recv_functions()),
    )


def test_what_a_context_noted(agent: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as number:
        y = Look.apply(rpc.rpc_sync("w0", torch.mul, (x, 3)))
        context = dist_autograd._retrieve_context(number)
        assert context._known_worker_ids() == {0}
        sends, receives = context._send_functions(), context._recv_functions()
        assert sends.keys() == receives.keys()  # it sent both to itself
        assert len(sends) == 2
        first = sends[min(sends)].next_functions[0][0]
        assert first.name() == "torch::autograd::AccumulateGrad"
        dist_autograd.backward(number, [y.sum()])
    assert Look.seen.pop() >= 1
    assert dist_autograd._get_debug_info()["num_current_backward_passes"] == 0


def test_both_ends_know_a_tensor_by_one_id() -> None:
    with LocalCluster(2) as cluster, dist_autograd.context(agent=cluster["w0"]) as number:
        x = torch.ones(2, requires_grad=True)
        cluster["w0"].call("w1", torch.mul, x, 3)
        context = dist_autograd._current_context()
        known, sends, receives = cluster["w0"].call("w1", context_of, number)
        assert known == set()
        assert receives == list(context._send_functions())
        assert sends == list(context._recv_functions())
        assert context._known_worker_ids() == {1}


@pytest.mark.parametrize("blocking", [True, False])
def test_the_type_of_an_object(blocking: bool) -> None:
    with LocalCluster(2) as cluster:

        def type_of(rref: rpc.RRef[Any]) -> Any:
            found = rref._get_type(blocking=blocking)
            return found if blocking else found.wait()

        create = remote_from(cluster["w0"])
        assert type_of(create("w1", torch.ones, (2,))) is torch.Tensor
        assert type_of(create("w1", Gate)) is Gate
        assert type_of(rpc.RRef(3, agent=cluster["w0"])) is int
        with pytest.raises(ValueError, match="seven"):
            type_of(create("w1", int, ("seven",)))


def remote_from(agent: Agent) -> Any:
    return lambda *args: remote(*args, agent=agent)


def fail() -> None:
    raise LookupError("no", active_runtime() is not None)


@pytest.mark.usefixtures("agent")
def test_torchs_wait_all_ends_with_the_first_error() -> None:
    never: Future[int] = Future()
    with pytest.raises(LookupError) as caught:
        torch.futures.wait_all([never, rpc.rpc_async("w0", fail)])
    assert caught.value.args == ("no", True)
    assert "in fail" in str(caught.value.__cause__)  # the remote traceback
    lost: Future[int] = Future()
    collected = torch.futures.collect_all([never, lost])
    assert not collected.done()
    lost.set_exception(PeerLost("worker 'w1' was lost"))
    with pytest.raises(PeerLost, match="w1"):
        collected.wait()
    assert not never.done()


@pytest.mark.usefixtures("agent")
def test_torchs_wait_all_returns_all_values() -> None:
    plain: torch.futures.Future[int] = torch.futures.Future()
    plain.set_result(3)
    assert torch.futures.wait_all([plain, rpc.rpc_async("w0", abs, (-4,))]) == [3, 4]
    assert torch.futures.wait_all([plain]) == [3]
    assert torch.futures.wait_all([]) == []
    assert not isinstance(torch.futures.collect_all([plain]), Future)  # torch's own

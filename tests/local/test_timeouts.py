"""Durations that a user gives: every place that takes one refuses what is none, and takes any."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import telegrad
import telegrad.rpc as rpc
from telegrad import dashboard, observer, ps
from telegrad.batching import batched
from telegrad.cli.observe import _positive
from telegrad.config import Config
from telegrad.errors import CallTimeout, UsageError
from telegrad.futures import Future
from telegrad.refs import RRef, remote
from telegrad.testing import LocalCluster, faults
from telegrad.timeouts import LONGEST, duration, time_limit
from telegrad.weights import Publisher, Subscriber
from telegrad.worker_group import WorkerGroup
from tests.conftest import Clusters

NO_DURATIONS = [math.nan, math.inf, -math.inf, "5", b"5", object(), [1.0], torch.ones(2), 1j]
HUGE = [1e9, 1e18, 1e300, 10**400]


@pytest.fixture
def transport() -> str:
    return "memory"


@pytest.fixture
def torch_group(tmp_path: Path) -> Iterator[None]:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options)
    yield
    rpc.shutdown()


# What is refused


@pytest.mark.parametrize("value", NO_DURATIONS, ids=repr)
def test_what_is_no_number_of_seconds_is_named(value: Any) -> None:
    with pytest.raises(UsageError, match="the pause is a finite number of seconds, not "):
        duration(value, "the pause")
    with pytest.raises(UsageError, match="a timeout is a positive number of seconds or None, not "):
        time_limit(value, positive=True)


def test_a_value_without_a_text_is_named_by_its_type() -> None:
    class Odd:
        def __float__(self) -> float:
            raise LookupError

        def __repr__(self) -> str:
            raise LookupError

    with pytest.raises(UsageError, match=r"not a Odd$"):
        duration(Odd())


@pytest.mark.parametrize(
    "value", [2, 2.0, np.float32(2), np.int64(2), Fraction(2), Decimal(2), torch.tensor(2.0)]
)
def test_any_number_is_a_duration(value: Any) -> None:
    assert type(duration(value)) is float
    assert duration(value, positive=True) == time_limit(value) == 2.0


@pytest.mark.parametrize("value", HUGE)
def test_the_longest_duration_is_one_that_clocks_can_use(value: float) -> None:
    assert duration(value) == LONGEST
    assert duration(-value) <= -LONGEST
    assert time_limit(None) is None


# Every public parameter that is a duration

NOBODY: observer.Group = observer.Group("nobody", [], None)  # type: ignore[arg-type]
Place = Callable[[telegrad.Agent, Any], object]


def _publisher(agent: telegrad.Agent) -> Publisher:
    publisher = Publisher({"a": torch.ones(1)}, "timeouts", agent=agent)
    publisher.close()
    return publisher


def _subscriber(agent: telegrad.Agent, patience: float = 1.0) -> Subscriber:
    subscriber = Subscriber("timeouts", publisher="w0", patience=patience, agent=agent)
    subscriber.close()
    return subscriber


def _done() -> Future[int]:
    done: Future[int] = Future()
    done.set_result(1)
    return done


def _optimizer(agent: telegrad.Agent, patience: float) -> ps.Optimizer:
    model = torch.nn.Linear(1, 1)
    return ps.Optimizer(
        model, servers="nobody", optimizer=torch.optim.SGD, lr=0.1, patience=patience, agent=agent
    )


PLACES: dict[str, Place] = {
    "Agent.all_gather(timeout)": lambda w0, value: w0.all_gather(1, ["w0"], value),
    "Agent.barrier(timeout)": lambda w0, value: w0.barrier(["w0"], value),
    "Agent.shutdown(timeout)": lambda w0, value: w0.shutdown(value),
    "Agent.with_timeout(timeout)": lambda w0, value: w0.with_timeout(value).call("w1", abs, 1),
    "Config(connect_timeout)": lambda _, value: Config(connect_timeout=value),
    "Config(heartbeat_interval)": lambda _, value: Config(heartbeat_interval=value),
    "Config(heartbeat_timeout)": lambda _, value: Config(heartbeat_timeout=value),
    "Config(join_timeout)": lambda _, value: Config(join_timeout=value),
    "Config(restart_timeout)": lambda _, value: Config(restart_timeout=value),
    "Config(resume_timeout)": lambda _, value: Config(resume_timeout=value),
    "Config(timeout)": lambda _, value: Config(timeout=value),
    "Deadline.after(seconds)": lambda _, value: telegrad.Deadline.after(value),
    "Future.exception(timeout)": lambda _, value: _done().exception(value),
    "Future.result(timeout)": lambda _, value: _done().result(value),
    "Group.ask(timeout)": lambda _, value: NOBODY.ask("members", value),
    "Group.clock_offsets(timeout)": lambda _, value: NOBODY.clock_offsets(value),
    "Group.snapshot(timeout)": lambda _, value: NOBODY.snapshot(value),
    "Group.snapshot(window)": lambda _, value: NOBODY.snapshot(window=value),
    "Optimizer(patience)": _optimizer,
    "Publisher.flush(timeout)": lambda w0, value: _publisher(w0).flush(value),
    "RRef.fetch_async(timeout)": lambda w0, value: _list(w0).fetch_async(value).wait(),
    "RRef.remote(timeout)": lambda w0, value: _list(w0).remote(value).copy().to_here(),
    "RRef.rpc_async(timeout)": lambda w0, value: _list(w0).rpc_async(value).copy().wait(),
    "RRef.rpc_sync(timeout)": lambda w0, value: _list(w0).rpc_sync(value).copy(),
    "RRef.stream(timeout)": lambda w0, value: list(_list(w0).stream(value).__iter__()),
    "RRef.to_here(timeout)": lambda w0, value: _list(w0).to_here(value),
    "RpcBackendOptions(rpc_timeout)": lambda _, value: rpc.RpcBackendOptions(rpc_timeout=value),
    "Subscriber(patience)": _subscriber,
    "Subscriber.pull_into(timeout)": lambda w0, value: _subscriber(w0).pull_into({}, timeout=value),
    "Subscriber.state_dict(timeout)": lambda w0, value: _subscriber(w0).state_dict(timeout=value),
    "Subscriber.view(timeout)": lambda w0, value: _subscriber(w0).view(timeout=value).__enter__(),
    "Tables(patience)": lambda w0, value: ps.Tables("nobody", patience=value, agent=w0),
    "TensorPipeRpcBackendOptions(rpc_timeout)": lambda _, value: rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=value
    ),
    "WorkerGroup.wait_for(timeout)": lambda w0, value: WorkerGroup(w0).wait_for(1, value),
    "WorkerGroup.with_timeout(timeout)": lambda w0, value: (
        WorkerGroup(w0).with_timeout(value).gather(abs, 1)
    ),
    "attach(timeout)": lambda _, value: observer.attach(pid=1, timeout=value),
    "batched(max_wait)": lambda _, value: batched(max_wait=value)(abs),
    "Fault(seconds)": lambda _, value: faults.Fault("delay", seconds=value),
    "FaultPlan.wait_for(timeout)": lambda _, value: faults.FaultPlan(()).wait_for(0, value),
    "delay(seconds)": lambda _, value: faults.delay(value),
    "remote(timeout)": lambda w0, value: remote("w1", list, timeout=value, agent=w0).to_here(),
    "serve(timeout)": lambda _, value: dashboard.serve(pid=1, timeout=value),
}
# of the agent that `init_rpc` makes
TORCH_PLACES: dict[str, Callable[[Any], object]] = {
    "remote(timeout)": lambda value: rpc.remote("w0", list, timeout=value).to_here(),
    "rpc_async(timeout)": lambda value: rpc.rpc_async("w0", list, timeout=value).wait(),
    "rpc_sync(timeout)": lambda value: rpc.rpc_sync("w0", list, timeout=value),
    "shutdown(timeout)": lambda value: rpc.shutdown(timeout=value),
    "_all_gather(timeout)": lambda value: rpc.api._all_gather(1, timeout=value),
    "_set_rpc_timeout(seconds)": rpc.api._set_rpc_timeout,
    "_wait_all_workers(timeout)": rpc.api._wait_all_workers,
    "RpcAgent.join(timeout)": lambda value: _rpc_agent().join(timeout=value),
}
ENDS = {"Agent.shutdown(timeout)", "shutdown(timeout)"}  # the agent
FINDS_NOBODY = {  # after it has taken the duration
    "Config(heartbeat_interval)": "must exceed",
    "Optimizer(patience)": "the name of no worker matches",
    "Subscriber.pull_into(timeout)": "the subscriber of 'timeouts' is closed",
    "Subscriber.state_dict(timeout)": "the subscriber of 'timeouts' is closed",
    "Subscriber.view(timeout)": "the subscriber of 'timeouts' is closed",
    "Tables(patience)": "the name of no worker matches",
    "attach(timeout)": "found no worker in process 1",
    "serve(timeout)": "found no worker in process 1",
}


def _rpc_agent() -> Any:
    return rpc.api._get_current_rpc_agent()


def _list(agent: telegrad.Agent) -> RRef[list[int]]:
    return remote("w1", list, agent=agent)


def test_these_are_all_public_parameters_that_are_durations() -> None:
    """Give a new one a place above, which tests that it is checked."""
    names = [
        "batching",
        "dashboard",
        "observer",
        "ps",
        "refs",
        "rpc",
        "rpc.api",
        "testing.faults",
        "weights",
    ]
    modules = [telegrad, faults, *(importlib.import_module(f"telegrad.{name}") for name in names)]
    found = set(itertools.chain.from_iterable(map(_durations, modules)))
    # what Telegrad makes and users read
    found -= {"PublishReport(seconds)", "Times.add(seconds)", "FiredFault(seconds)"}
    private = {name for name in TORCH_PLACES if name.startswith("_")}
    in_settings = {"batched(max_wait)"}
    assert found == (PLACES.keys() | TORCH_PLACES.keys()) - private - in_settings


def _durations(module: ModuleType) -> Iterator[str]:
    """Yield the parameters of a public module, and of its classes, that are numbers of seconds."""
    for value in (getattr(module, name) for name in module.__all__):
        if callable(value):
            yield from _durations_of(value)
        for name in vars(value) if isinstance(value, type) else ():
            if not name.startswith("_") and inspect.isroutine(getattr(value, name)):
                yield from _durations_of(getattr(value, name))


def _durations_of(function: Any) -> Iterator[str]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a class of C++
        return
    for name, parameter in parameters.items():
        is_number = "float" in str(parameter.annotation)
        if is_number and {"interval", "patience", "seconds", "timeout", "wait", "window"} & {
            *name.split("_")
        }:
            yield f"{function.__qualname__}({name})"


def test_every_place_refuses_what_is_no_duration(cluster: Clusters) -> None:
    w0 = cluster(2)["w0"]
    for name, place in PLACES.items():
        for value in (math.nan, math.inf, "5", [1.0]):
            with pytest.raises(UsageError, match=r"is a (finite|positive) number of seconds"):
                print(name, value, place(w0, value))
    assert w0.call("w1", abs, -1) == 1


def test_every_place_takes_any_duration(cluster: Clusters) -> None:
    w0 = cluster(2)["w0"]
    for name in sorted(PLACES.keys() - ENDS):
        if name in FINDS_NOBODY:
            with pytest.raises(UsageError, match=FINDS_NOBODY[name]):
                PLACES[name](w0, 1e300)
        else:
            PLACES[name](w0, 1e300)


@pytest.mark.usefixtures("torch_group")
def test_every_function_of_torch_refuses_what_is_no_duration() -> None:
    for name, place in TORCH_PLACES.items():
        for value in (math.nan, math.inf, "5", None):
            with pytest.raises(UsageError, match="is a finite number of seconds"):
                print(name, value, place(value))
    assert rpc.rpc_sync("w0", abs, (-1,)) == 1


@pytest.mark.usefixtures("torch_group")
def test_every_function_of_torch_takes_any_duration() -> None:
    for name in sorted(TORCH_PLACES.keys() - ENDS):
        TORCH_PLACES[name](1e300)


def test_a_group_works_with_the_longest_durations() -> None:
    """Threads that wait for the network must be able to wait for so long."""
    names = ("timeout", "join_timeout", "connect_timeout", "resume_timeout", "heartbeat_timeout")
    settings: Any = dict.fromkeys(names, 1e300)
    for transport in ("memory", "unix", "tcp"):
        with LocalCluster(2, transports=(transport,), **settings) as cluster:
            assert cluster["w0"].call("w1", abs, -1) == 1
            assert cluster["w0"].call("w1", _call_back) == 1
            assert cluster["w0"].submit("w1", abs, -1).result(1e300) == 1
            cluster["w0"].barrier(["w0"], 1e300)


def _call_back() -> int:
    agent = telegrad.current_agent()
    assert agent is not None
    return agent.with_timeout(1e300).call("w0", abs, -1)


def test_the_owner_of_an_object_checks_the_timeout_too(cluster: Clusters) -> None:
    own = RRef(1, agent=cluster(1)["w0"])
    assert own.to_here(1e300) == 1
    with pytest.raises(UsageError, match="a timeout is a finite number of seconds, not nan"):
        own.to_here(math.nan)


def test_a_limit_that_has_passed_ends_a_wait_at_once() -> None:
    future: Future[int] = Future()
    for limit in (0, -1.0, -1e300):
        with pytest.raises(CallTimeout, match="no result after"):
            future.result(limit)


def test_options_of_the_command_line_are_checked_as_well() -> None:
    assert _positive("1e18") == LONGEST
    for text in ("nan", "inf", "-1", "0", "x"):
        with pytest.raises(ArgumentTypeError, match="is not a positive number of seconds"):
            _positive(text)


def test_what_is_no_number_is_also_a_type_error() -> None:
    """Torch raises `TypeError` there."""
    for value in (timedelta(seconds=1), "5", None, [1.0]):
        with pytest.raises(TypeError, match="rpc_timeout is a finite number of seconds, not "):
            rpc.TensorPipeRpcBackendOptions(rpc_timeout=value)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as refused:
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=math.nan)
    assert not isinstance(refused.value, TypeError)

"""Arguments of the wrong type or size: the error says what is wrong before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import telegrad
import telegrad.rpc as rpc
from telegrad.agent import Agent
from telegrad.errors import UsageError
from telegrad.refs import remote
from telegrad.testing import LocalCluster
from telegrad.worker_group import WorkerGroup
from tests.conftest import Clusters


@pytest.fixture
def transport() -> str:
    return "memory"


@pytest.mark.parametrize("args", ["ab", b"ab", {"a": 1}, torch.ones(2), 5])
def test_arguments_that_are_no_tuple(w0: Agent, args: Any) -> None:
    with pytest.raises(UsageError, match=r"args must be a tuple, not .*; write args=\(value,\)"):
        remote("w1", max, args, agent=w0)


@pytest.mark.parametrize("args", [None, [(1, 2)], iter([(1, 2)]), ((1, 2),)])
def test_arguments_in_any_sequence(w0: Agent, args: Any) -> None:
    assert remote("w1", list, args, agent=w0).to_here() == ([] if args is None else [1, 2])


@pytest.mark.parametrize("kwargs", [5, "ab", [("key", abs)], {1: 2}, {None: 1}])
def test_keyword_arguments_that_have_no_names(w0: Agent, tmp_path: Path, kwargs: Any) -> None:
    message = "kwargs must be a dict with the names of parameters, not "
    with pytest.raises(UsageError, match=message):
        remote("w1", sorted, ([1],), kwargs, agent=w0)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(UsageError, match=message):
                call("alone", sorted, ([1],), kwargs)  # type: ignore[operator]
    finally:
        rpc.shutdown()


@pytest.mark.parametrize("names", [[], (), "w0", set()])
def test_a_barrier_needs_a_list_of_names(w0: Agent, names: Any) -> None:
    for attempt in (lambda: w0.barrier(names), lambda: w0.all_gather(1, names)):
        with pytest.raises(UsageError, match="names is a list of at least one worker, or None"):
            attempt()


def test_a_gather_of_torch_without_names_is_one_of_all(tmp_path: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert rpc.api._all_gather(5, set()) == {"alone": 5}
    finally:
        rpc.shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0, "world_size": 0}, "the size of a group is at least 1, or None, not 0"),
        ({"rank": 0, "world_size": -3}, "the size of a group is at least 1, or None, not -3"),
        ({"rank": 0, "world_size": "2"}, "the size of a group is at least 1, or None, not '2'"),
        ({"rank": "0", "world_size": 1}, "a rank is a whole number, or None, not '0'"),
        ({"rank": 1.0, "world_size": 2}, "a rank is a whole number, or None, not 1.0"),
        ({"rank": 2, "world_size": 2}, "a group of 2 needs a rank from 0 to 1, not 2"),
        ({"config": {"timeout": 5}}, "config is a telegrad.Config, not {'timeout': 5}"),
    ],
)
def test_an_agent_in_no_place(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Agent("w0", store=dist.HashStore(), **settings)
    assert str(caught.value) == message


def test_numbers_of_a_worker_group_are_whole(cluster: Clusters) -> None:
    group = WorkerGroup(cluster(2)["w0"])
    counts: list[Any] = ["1", 1.0, 0, -1, 2]
    for count in counts:
        with pytest.raises(UsageError, match=r"cannot call .* workers: the group has 1"):
            group.call_some(count, abs, -1)
    for per_worker in counts[:-1]:
        with pytest.raises(UsageError, match="per_worker is at least 1 call at once, not "):
            group.map(abs, [-1], per_worker=per_worker)
    assert group.map(abs, [-1], per_worker=2).values() == [1]


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "a"])
def test_the_chunk_of_a_stream_is_a_number_of_items(w0: Agent, chunk: Any) -> None:
    with pytest.raises(UsageError, match="the chunk of a stream must be at least 1 item, not "):
        remote("w1", list, agent=w0).stream(chunk=chunk)


def test_a_listener_is_callable(pair: LocalCluster) -> None:
    add: list[Callable[[Any], None]] = [pair["w0"].on_join, pair["w0"].on_loss]
    for method in add:
        with pytest.raises(UsageError, match="a listener must be callable, not int"):
            method(5)


def test_a_function_is_callable(pair: LocalCluster) -> None:
    wrong: Any
    for wrong in ("torch.add", 3, None, [abs]):
        with pytest.raises(TypeError, match="the function of a call must be callable, not "):
            pair["w0"].call("w1", wrong, -1)
        with pytest.raises(TypeError, match="the function of a call must be callable, not "):
            pair["w0"].submit("w1", wrong, -1).wait()
        with pytest.raises(TypeError, match="the function of a call must be callable, not "):
            remote("w1", wrong, (-1,), agent=pair["w0"])
        with pytest.raises(TypeError, match="the function of a call must be callable, not "):
            telegrad.launch(wrong, 2)
    for roles in ("x", None, {"ps": "1"}):
        with pytest.raises(TypeError, match="roles is a number of workers, or a dict"):
            telegrad.launch(print, roles)  # type: ignore[arg-type]


def test_options_of_batched_have_their_types() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"maxsize": 3}, "batched has no option 'maxsize'; it has max_size, "),
        ({"max_size": "8"}, "max_size must be a number, not '8'"),
        ({"max_queue": "8"}, "max_queue must be a number, not '8'"),
        ({"pad_to": 8}, "pad_to is a list of sizes, not 8"),
        ({"pad_to": ["8"]}, r"pad_to\[0\] must be a number, not '8'"),
    ]
    for options, message in wrong:
        with pytest.raises(UsageError, match=message):
            telegrad.batched(**options)(abs)


def test_a_cluster_names_its_workers(cluster: Clusters) -> None:
    workers = cluster(2)
    with pytest.raises(KeyError, match="no worker 'w9'; this cluster has w0, w1"):
        workers["w9"]
    with pytest.raises(KeyError, match="no worker 'w9'"):
        workers.kill("w9")
    with pytest.raises(UsageError, match="none is 'w9': let further ones join with"):
        workers.join("w9")
    workers.kill("w1")
    assert workers.join("w1").get_worker_info().id == 1

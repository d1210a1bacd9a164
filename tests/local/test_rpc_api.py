"""`telegrad.rpc` with the default agent of this process."""

from __future__ import annotations

import operator
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import telegrad.rpc as rpc
from telegrad import Agent, Config
from telegrad.current import process_state
from telegrad.errors import CallTimeout, GroupBroken, JoinError, PeerLost, UsageError
from telegrad.group import store_connection
from telegrad.rpc import api, backend_registry, constants, device_maps
from telegrad.rpc.device_maps import DeclaredDevices
from telegrad.rpc.internal import (
    RPCExecMode,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
)
from tests.local.conftest import Background
from tests.local.gates import PATIENCE, Gate, hold_at

SECRET = "sixteen characters or more"


def fail(text: str) -> None:
    raise KeyError(text)


def own_name() -> str:
    return rpc.get_worker_info().name


def ask(to: str, function: Callable[..., Any]) -> Any:
    return rpc.rpc_sync(to, function)


def options(init_method: str, **settings: Any) -> rpc.TensorPipeRpcBackendOptions:
    config = Config(secret=SECRET, join_timeout=PATIENCE)
    return rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, **{"config": config, **settings}
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture(autouse=True)
def not_initialized() -> Iterator[None]:
    """Check that RPC is not initialized before each test, and shut it down after it."""
    assert not api._is_current_rpc_agent_set()
    yield
    if api._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)


@pytest.fixture
def alone(url: str) -> None:
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options(url))


@pytest.fixture
def fellow(tmp_path: Path, url: str, in_background: Background) -> Iterator[Agent]:
    """Make this process w0 of a group of two; w1 is an agent of the same process."""
    store = dist.PrefixStore(
        f"telegrad_{process_state.groups_joined}", dist.FileStore(f"{tmp_path}/store", 2)
    )
    with_secret = Config(secret=SECRET, join_timeout=PATIENCE)
    fellow = Agent("w1", store=store, rank=1, world_size=2, config=with_secret)
    entering = in_background(fellow.__enter__)
    rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options(url))
    entering.result(PATIENCE)
    yield fellow
    fellow.close()


# Coming and going


@pytest.mark.parametrize("rendezvous", ["file", "tcp", "env"])
def test_every_rendezvous_of_torch(
    rendezvous: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rendezvous == "tcp":
        url = f"tcp://127.0.0.1:{free_port()}"
    elif rendezvous == "env":
        url = "env://"
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
            monkeypatch.setenv(name, value)
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options(url))
    assert rpc.rpc_sync("w0", operator.add, args=(1, 2)) == 3
    rpc.shutdown()


def test_rank_and_size_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TELEGRAD_SECRET", SECRET)
    rpc.init_rpc("w0")
    assert rpc.get_worker_info() == rpc.WorkerInfo("w0", 0)
    rpc.shutdown()


def test_the_rank_alone_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="rank -1 is outside a group of 1 worker,"):
        rpc.init_rpc("w0", world_size=1, rpc_backend_options=options("env://"))
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UsageError, match="RANK must be a number, not 'first'"):
        rpc.init_rpc("w0", world_size=1, rpc_backend_options=options("env://"))
    monkeypatch.setenv("RANK", "0")
    rpc.init_rpc("w0", world_size=1, rpc_backend_options=options("env://"))
    assert rpc.get_worker_info() == rpc.WorkerInfo("w0", 0)
    rpc.shutdown()


def test_a_rank_that_nobody_gave_is_torchs_error(url: str) -> None:
    with pytest.raises(ValueError, match="rank parameter missing"):
        rpc.init_rpc("w0", rpc_backend_options=options(url))
    assert not api._is_current_rpc_agent_set()


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = Config(secret=SECRET, join_timeout=0.2)
    nowhere = options(f"tcp://127.0.0.1:{free_port()}", config=hasty)
    with pytest.raises(JoinError, match=r"did not answer within 0\.2 s .* check MASTER_ADDR"):
        rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=nowhere)
    assert not api._is_current_rpc_agent_set()


@pytest.mark.parametrize("scheme", ["tcp", "env"])
def test_a_process_that_is_no_store(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts the connection and says nothing, as a frozen host of a store does."""
    monkeypatch.setattr(store_connection, "_GRACE", 0.1)
    hasty = Config(secret=SECRET, join_timeout=0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        url = f"tcp://127.0.0.1:{port}" if scheme == "tcp" else "env://"
        with pytest.raises(JoinError, match=r"0\.2 s \(a process accepts connections there, but"):
            rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=options(url, config=hasty))
    assert not api._is_current_rpc_agent_set()


def test_a_refused_device_map_leaves_no_agent(url: str) -> None:
    impossible = options(url, device_maps={"w0": {"cuda:99": "cuda:98"}})
    with pytest.raises(ValueError, match="source devices with invalid indices"):
        rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=impossible)
    assert not api._is_current_rpc_agent_set()


def test_a_group_without_a_size_is_open(url: str, tmp_path: Path) -> None:
    prefix = f"telegrad_{process_state.groups_joined}"
    rpc.init_rpc("w0", rank=0, rpc_backend_options=options(url))
    store = dist.PrefixStore(prefix, dist.FileStore(f"{tmp_path}/store", -1))
    for _ in range(2):
        with Agent("guest", store=store, rank=1, config=Config(secret=SECRET)) as guest:
            assert rpc.rpc_sync("guest", own_name) == "guest"
            assert guest.call("w0", own_name) == "w0"
            guest.shutdown()
    assert [info.name for info in api._get_current_rpc_agent().get_worker_infos()] == ["w0"]
    agent: Any = api._get_current_rpc_agent()
    agent.join()  # waits for its own calls, since nobody else is expected
    assert api._is_current_rpc_agent_set()
    rpc.shutdown()


def test_init_after_shutdown(url: str) -> None:
    for name in ("first", "second", "first"):
        rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=options(url))
        assert rpc.rpc_sync(name, own_name) == name
        rpc.shutdown()


def test_init_twice_is_an_error(alone: None, url: str) -> None:
    with pytest.raises(RuntimeError, match="already initialized"):
        rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options(url))
    assert rpc.rpc_sync("w0", own_name) == "w0"


def test_init_after_a_failed_one(url: str) -> None:
    hasty = Config(secret=SECRET, join_timeout=0.05)
    with pytest.raises(JoinError, match=r"missing ranks: \[1\]"):
        rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options(url, config=hasty))
    assert not api._is_current_rpc_agent_set()
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options(url))
    rpc.shutdown()


def test_everybody_shuts_down(fellow: Agent, in_background: Background) -> None:
    assert rpc.rpc_sync("w1", own_name) == "w1"
    leaving = in_background(fellow.shutdown)
    rpc.shutdown()
    assert leaving.result(PATIENCE) == ()
    assert not api._is_current_rpc_agent_set()


def test_shutdown_in_time_without_the_others(fellow: Agent) -> None:
    rpc.shutdown(timeout=0.1)
    assert not api._is_current_rpc_agent_set()


def test_shutdown_at_once(fellow: Agent, gate: Gate) -> None:
    future = rpc.rpc_async("w1", hold_at, args=(gate,))
    gate.wait_for()
    rpc.shutdown(graceful=False)
    assert isinstance(future.exception(PATIENCE), PeerLost)
    assert not api._is_current_rpc_agent_set()


def test_a_function_that_shuts_down_ends_the_agent_that_runs_it(fellow: Agent) -> None:
    with pytest.raises(PeerLost):
        rpc.rpc_sync("w1", rpc.shutdown, args=(False,))
    assert rpc.rpc_sync("w0", own_name) == "w0"


def test_a_join_says_who_is_missing(fellow: Agent) -> None:
    agent: Any = api._get_current_rpc_agent()
    with pytest.raises(GroupBroken, match="join ended without w1") as caught:
        agent.join(timeout=0.1)
    assert tuple(caught.value.missing) == ("w1",)


@pytest.mark.parametrize(
    "use",
    [
        lambda: rpc.rpc_sync("w0", abs, args=(1,)),
        lambda: rpc.rpc_sync("w0", abs, args=(1,), timeout=1),
        lambda: rpc.rpc_async("w0", abs, args=(1,)),
        rpc.get_worker_info,
        rpc.get_rpc_timeout,
        rpc.shutdown,
        lambda: api._set_rpc_timeout(1),
        lambda: api._all_gather(1),
        lambda: api._barrier(set()),
        api._wait_all_workers,
        api._get_current_rpc_agent,
        api._require_initialized(lambda: None),
    ],
)
def test_without_init_everything_says_so(use: Callable[[], Any], url: str) -> None:
    with pytest.raises(RuntimeError, match=r"RPC has not been initialized. Call .*init_rpc first"):
        use()
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options(url))
    rpc.shutdown()
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        use()


# Calls


def test_calls(fellow: Agent) -> None:
    for to in ("w1", 1, rpc.get_worker_info("w1")):
        assert rpc.rpc_sync(to, operator.add, args=(1, 2)) == 3
        assert rpc.rpc_sync(to, int, args=("11",), kwargs={"base": 2}, timeout=PATIENCE) == 3
        assert rpc.rpc_async(to, operator.add, args=(1, 2)).wait() == 3
        assert (
            rpc.rpc_async(to, int, args=("11",), kwargs={"base": 2}, timeout=PATIENCE).wait() == 3
        )
    assert torch.equal(
        rpc.rpc_sync("w1", torch.add, args=(torch.ones(2), 1)), torch.full((2,), 2.0)
    )
    assert rpc.rpc_sync("w1", own_name) == "w1"


def test_arguments_may_be_a_list_or_nothing(alone: None) -> None:
    assert rpc.rpc_sync("w0", max, args=[1, 2]) == 2
    assert rpc.rpc_sync("w0", dict) == {}
    assert rpc.rpc_async("w0", dict, args=None, kwargs=None).wait() == {}


@pytest.mark.parametrize("args", [5, "abc", {"a": 1}, torch.ones(2)], ids=str)
@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote])
def test_arguments_that_are_no_sequence_are_refused(
    alone: None, call: Callable[..., Any], args: Any
) -> None:
    with pytest.raises(UsageError, match=r"args must be a tuple, not .*; write args=\(value,\)"):
        call("w0", max, args=args)


def test_inside_a_remote_function_its_own_agent_counts(fellow: Agent) -> None:
    assert rpc.rpc_sync("w1", ask, args=("w0", own_name)) == "w0"
    assert rpc.rpc_async("w1", ask, args=("w1", own_name)).wait() == "w1"


def test_a_remote_error_arrives_as_itself(fellow: Agent) -> None:
    with pytest.raises(KeyError, match="mine"):
        rpc.rpc_sync("w1", fail, args=("mine",))
    with pytest.raises(KeyError, match="mine"):
        rpc.rpc_async("w1", fail, args=("mine",)).wait()


def test_a_function_that_cannot_be_called_is_refused_here(alone: None) -> None:
    for attempt in (rpc.rpc_sync, rpc.rpc_async):
        for timeout in (constants.UNSET_RPC_TIMEOUT, 1):
            with pytest.raises((TypeError, UsageError), match="callable"):
                attempt("w0", 3, timeout=timeout)  # type: ignore[arg-type, operator]


# Time limits


def test_the_default_limit_is_the_options(url: str) -> None:
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=options(url, rpc_timeout=7))
    assert rpc.get_rpc_timeout() == 7
    api._set_rpc_timeout(3)
    assert rpc.get_rpc_timeout() == 3
    api._set_rpc_timeout(0)
    assert rpc.get_rpc_timeout() == 0
    assert api._get_current_rpc_agent()._runtime.timeout is None


def test_a_call_that_takes_too_long(alone: None, gate: Gate) -> None:
    for attempt in (rpc.rpc_sync, lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait()):
        with pytest.raises(
            RuntimeError, match=r"RPC ran for more than set timeout \(50 ms\)"
        ) as caught:
            attempt("w0", hold_at, args=(gate,), timeout=0.05)
        assert isinstance(caught.value, CallTimeout)
    api._set_rpc_timeout(0.05)
    for attempt in (rpc.rpc_sync, lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait()):
        with pytest.raises(CallTimeout):
            attempt("w0", hold_at, args=(gate,))


def test_zero_means_no_limit(alone: None, gate: Gate, in_background: Background) -> None:
    api._set_rpc_timeout(0.05)
    patient = rpc.rpc_async("w0", hold_at, args=(gate, "done"), timeout=0)
    waiting = in_background(lambda: rpc.rpc_sync("w0", hold_at, args=(gate, "done"), timeout=0))
    hasty = rpc.rpc_async("w0", hold_at, args=(gate,))
    assert isinstance(hasty.exception(PATIENCE), CallTimeout)
    assert not patient.done()
    gate.open()
    assert patient.wait() == waiting.result(PATIENCE) == "done"


def test_other_negative_limits_are_refused(alone: None) -> None:
    for attempt in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(UsageError, match="timeout"):
            attempt("w0", abs, args=(1,), timeout=-5)
    with pytest.raises(UsageError, match="timeout"):
        api._set_rpc_timeout(-1)


# The group


def test_worker_infos(fellow: Agent) -> None:
    assert rpc.get_worker_info() == rpc.WorkerInfo("w0", 0)
    assert rpc.get_worker_info("w1") == rpc.WorkerInfo("w1", 1)
    assert repr(rpc.get_worker_info("w1")) == "WorkerInfo(id=1, name=w1)"
    assert api._get_current_rpc_agent().get_worker_infos() == [
        rpc.WorkerInfo("w0", 0),
        rpc.WorkerInfo("w1", 1),
    ]
    with pytest.raises(RuntimeError, match="nobody"):
        rpc.get_worker_info("nobody")


def test_a_worker_info_of_a_name_rank_or_info(fellow: Agent) -> None:
    info = rpc.get_worker_info("w1")
    for to in (info, "w1", 1):
        assert rpc._to_worker_info(to) == info
    with pytest.raises(ValueError, match="Cannot get WorkerInfo from None"):
        rpc._to_worker_info(None)  # type: ignore[arg-type]


def test_the_default_agent_can_be_removed_without_closing_it(alone: None) -> None:
    agent = api._get_current_rpc_agent()
    rpc._reset_current_rpc_agent()
    assert not api._is_current_rpc_agent_set()
    assert agent.call("w0", abs, -1) == 1
    agent.close()


def test_all_gather(fellow: Agent, in_background: Background) -> None:
    theirs = in_background(fellow.all_gather, "from w1")
    assert api._all_gather("from w0", timeout=PATIENCE) == {"w0": "from w0", "w1": "from w1"}
    assert theirs.result(PATIENCE) == {"w0": "from w0", "w1": "from w1"}
    assert api._all_gather("mine", worker_names={"w0"}) == {"w0": "mine"}


def test_a_gather_without_everybody_raises(fellow: Agent) -> None:
    with pytest.raises(GroupBroken, match="w1") as caught:
        api._all_gather("from w0", timeout=0.05)
    assert caught.value.missing == ("w1",)


def test_barriers(fellow: Agent, in_background: Background) -> None:
    theirs = in_background(fellow.barrier)
    api._barrier({"w0", "w1"})
    theirs.result(PATIENCE)
    api._barrier({"w0"})
    theirs = in_background(fellow.barrier)
    api._wait_all_workers(PATIENCE)
    theirs.result(PATIENCE)


def test_wait_all_waits_for_what_was_started_inside(alone: None) -> None:
    with api._wait_all():
        futures = [rpc.rpc_async("w0", abs, args=(-i,)) for i in range(10)]
    assert all(future.done() for future in futures)
    outside = rpc.rpc_async("w0", abs, args=(1,))
    with api._wait_all():
        pass
    assert outside.wait() == 1


def test_wait_all_raises_what_a_call_raised(alone: None) -> None:
    def start_some() -> None:
        with api._wait_all():
            rpc.rpc_async("w0", fail, args=("mine",))
            rpc.rpc_async("w0", abs, args=(1,))

    with pytest.raises(KeyError, match="mine"):
        start_some()


# Options and backends


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"backend": "tensorpipe"}, TypeError),
        ({"backend": 3}, TypeError),
        ({"rpc_backend_options": {"init_method": "env://"}}, TypeError),
        ({"name": 3}, RuntimeError),
        ({"name": "no spaces"}, RuntimeError),
    ],
)
def test_wrong_arguments_of_init(
    arguments: dict[str, Any], error: type[Exception], url: str
) -> None:
    proper = {"name": "w0", "rank": 0, "world_size": 1, "rpc_backend_options": options(url)}
    with pytest.raises(error):
        rpc.init_rpc(**{**proper, **arguments})
    assert not api._is_current_rpc_agent_set()


def test_torchs_options_are_accepted() -> None:
    made = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4,
        rpc_timeout=0,
        init_method="env://",
        _transports=["shm", "uv"],
        _channels=["basic"],
    )
    assert (made.num_worker_threads, made.rpc_timeout, made.init_method) == (4, 0, "env://")
    assert (made.device_maps, made.devices) == ({}, [])
    config = made.to_config()
    assert (config.threads, config.timeout) == (4, None)
    assert "init_method='env://'" in repr(made)


def test_defaults_are_torchs() -> None:
    made = rpc.TensorPipeRpcBackendOptions()
    assert made.rpc_timeout == constants.DEFAULT_RPC_TIMEOUT_SEC == 60
    assert made.init_method == constants.DEFAULT_INIT_METHOD == "env://"
    assert made.num_worker_threads == constants.DEFAULT_NUM_WORKER_THREADS == 16


@pytest.mark.parametrize("settings", [{"rpc_timeout": -1}, {"num_worker_threads": 0}])
def test_impossible_options_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        rpc.TensorPipeRpcBackendOptions(**settings)


def test_settings_count_unless_an_option_is_given(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"SECRET": SECRET, "TIMEOUT": "5", "THREADS": "3"}.items():
        monkeypatch.setenv(f"TELEGRAD_{name}", text)
    made = rpc.TensorPipeRpcBackendOptions(init_method=url)
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=made)
    agent = api._get_current_rpc_agent()
    assert (agent.config.timeout, agent.config.threads) == (5, 3)
    rpc.shutdown()
    config = Config(secret=SECRET, timeout=None, threads=2)
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=made, config=config)
    assert api._get_current_rpc_agent().config == config
    assert made.config is None
    rpc.shutdown()
    given = options(url, rpc_timeout=7, num_worker_threads=4, config=config).to_config()
    assert (given.timeout, given.threads) == (7, 4)
    with pytest.raises(UsageError, match="pass one of them"):
        rpc.init_rpc("w0", rpc_backend_options=options(url), config=config)


def test_plain_options_will_do(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_SECRET", SECRET)
    plain = rpc.RpcBackendOptions(rpc_timeout=9, init_method=url)
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=plain)
    assert rpc.get_rpc_timeout() == 9


def test_device_maps_are_one_to_one() -> None:
    made = rpc.TensorPipeRpcBackendOptions(device_maps={"w1": {0: 1}}, devices=["cuda:0", 1])
    made.set_device_map("w1", {"cuda:1": "cuda:0"})
    made.set_device_map("w2", {0: 0})
    cuda = [torch.device("cuda", index) for index in range(3)]
    assert made.device_maps == {
        "w1": {cuda[0]: cuda[1], cuda[1]: cuda[0]},
        "w2": {cuda[0]: cuda[0]},
    }
    assert made.devices == cuda[:2]
    with pytest.raises(ValueError, match="1-to-1"):
        made.set_device_map("w1", {0: 2})
    with pytest.raises(ValueError, match="CUDA devices"):
        made.set_devices(["cpu"])


def test_a_refused_device_map_changes_nothing() -> None:
    made = rpc.TensorPipeRpcBackendOptions(device_maps={"w1": {0: 1}})
    with pytest.raises(ValueError, match="1-to-1"):
        made.set_device_map("w1", {2: 3, 0: 4})
    assert made.device_maps == {"w1": {torch.device("cuda:0"): torch.device("cuda:1")}}


@pytest.mark.parametrize(
    ("declared", "complaint"),
    [
        (
            {"maps": {"w1": {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}}},
            "Node w0 has duplicated target devices .* for w1",
        ),
        (
            {"maps": {"w1": {"cuda:2": "cuda:0"}}},
            "Node w0 has source devices with invalid indices .* for w1",
        ),
        (
            {"maps": {"w1": {"cuda:0": "cuda:2"}}},
            "Node w0 has target devices with invalid indices .* for w1",
        ),
        ({"maps": {"w2": {"cuda:0": "cuda:0"}}}, "Node w0 has invalid target node names"),
        (
            {"maps": {"w1": {"cuda:0": "cuda:0"}}, "devices": ["cuda:1"]},
            "Node w0 has unexpected source devices",
        ),
        ({"devices": ["cuda:1", "cuda:1"]}, "Node w0 has duplicated devices"),
        ({"devices": ["cuda:2"]}, "Node w0 has devices with invalid indices"),
    ],
)
def test_device_maps_that_make_no_sense_are_refused(
    declared: dict[str, Any], complaint: str
) -> None:
    first = DeclaredDevices(**{"gpus": 2, "maps": {}, "devices": [], **declared})
    with pytest.raises(ValueError, match=complaint):
        device_maps.check({"w0": first, "w1": DeclaredDevices(2, {}, [])}, complete=True)


def test_device_maps_that_make_sense_are_accepted() -> None:
    maps = {"w1": {"cpu": "cuda:1", "cuda:0": "cpu", "cuda:1": "cuda:0"}}
    device_maps.check(
        {"w0": DeclaredDevices(2, maps, []), "w1": DeclaredDevices(2, {}, ["cuda:0", "cuda:1"])},
        complete=True,
    )
    # more workers may join later
    device_maps.check({"w0": DeclaredDevices(2, maps, [])}, complete=False)


def test_the_backend_is_named_tensorpipe_as_in_torch(url: str) -> None:
    backend = rpc.BackendType.TENSORPIPE
    assert backend_registry.backend_registered("TENSORPIPE")
    assert backend in rpc.BackendType
    made = backend_registry.construct_rpc_backend_options(
        backend, rpc_timeout=5, init_method=url, num_worker_threads=2
    )
    assert (made.rpc_timeout, made.init_method) == (5, url)
    with pytest.raises(AttributeError, match="NOWHERE"):
        _ = rpc.BackendType.NOWHERE


def test_a_backend_of_ones_own(url: str, request: pytest.FixtureRequest) -> None:
    class Options(rpc.RpcBackendOptions):
        pass

    def construct(rpc_timeout: float, init_method: str, **_: Any) -> Options:
        return Options(rpc_timeout, init_method)

    def start(
        store: Any, name: str, rank: int, world_size: int, rpc_backend_options: Options
    ) -> Agent:
        agent = Agent(name + "-own", store=store, config=Config(secret=SECRET))
        agent.open()
        return agent

    backend = backend_registry.register_backend("OWN", construct, start)
    request.addfinalizer(lambda: rpc.BackendType.remove("OWN"))
    with pytest.raises(RuntimeError, match="already registered"):
        backend_registry.register_backend("OWN", construct, start)
    rpc.init_rpc(
        "w0", backend=backend, rank=0, world_size=1, rpc_backend_options=Options(init_method=url)
    )
    assert rpc.rpc_sync("w0-own", own_name) == "w0-own"
    rpc.shutdown()
    # the backend is inferred
    rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=Options(init_method=url))
    assert rpc.get_worker_info().name == "w0-own"


class OtherOptions(rpc.RpcBackendOptions):
    """Options that belong to no backend."""


def test_options_of_no_backend_are_refused(url: str) -> None:
    strange = OtherOptions(init_method=url)
    with pytest.raises(TypeError, match="Could not infer backend"):
        rpc.init_rpc("w0", rank=0, world_size=1, rpc_backend_options=strange)
    with pytest.raises(TypeError, match="must be a `TensorPipeRpcBackendOptions`, not a `Other"):
        rpc.init_rpc(
            "w0",
            backend=rpc.BackendType.TENSORPIPE,
            rank=0,
            world_size=1,
            rpc_backend_options=strange,
        )
    assert not api._is_current_rpc_agent_set()


def test_a_backend_starts_once(alone: None, url: str) -> None:
    with pytest.raises(UsageError, match="already initialized"):
        api._init_rpc_backend(None, None, "w0", 0, 1, options(url))


def test_the_pickler_of_messages_has_torchs_methods() -> None:
    value = {"weights": torch.arange(3.0), "step": 4}
    data, buffers = _internal_rpc_pickler.serialize(value)
    received = _internal_rpc_pickler.deserialize(data, buffers)
    assert received["step"] == 4
    assert received["weights"].tolist() == [0, 1, 2]
    key = _build_rpc_profiling_key(RPCExecMode.SYNC, "add", "w0", "w1")
    assert key == "rpc_sync#add(w0 -> w1)"


def test_states_of_a_gather_look_like_torchs() -> None:
    states = rpc.AllGatherStates()
    assert states.gathered_objects == {}
    assert not states.proceed_signal.is_set()


def test_is_available() -> None:
    assert rpc.is_available()

"""`install` redirects torch's names wherever they were imported; `uninstall` undoes it."""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import pickle
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed.autograd
import torch.distributed.rpc
import torch.futures

import telegrad.autograd
import telegrad.nn
import telegrad.optim
import telegrad.rpc
from telegrad import compat
from telegrad.errors import PeerLost
from telegrad.futures import Future
from telegrad.testing import LocalCluster

SUBMODULES = ["api", "backend_registry", "constants", "functions", "internal", "options"]


def imported(code: str) -> ModuleType:
    """Return a module with this code, in `sys.modules`; the caller removes it."""
    module = ModuleType("imported_by_a_test")
    sys.modules[module.__name__] = module
    exec(code, vars(module))
    return module


@pytest.mark.parametrize("name", SUBMODULES)
@pytest.mark.usefixtures("installed")
def test_every_submodule_is_telegrads(name: str) -> None:
    ours = importlib.import_module(f"telegrad.rpc.{name}")
    assert importlib.import_module(f"torch.distributed.rpc.{name}") is ours
    assert getattr(torch.distributed.rpc, name) is ours


@pytest.mark.usefixtures("installed")
def test_every_way_to_import_leads_to_telegrad() -> None:
    module = imported(
        "import torch.distributed.rpc\n"
        "import torch.distributed.rpc as rpc\n"
        "from torch.distributed import rpc as also\n"
        "from torch.distributed.rpc import RRef, rpc_async, functions\n"
        "from torch.distributed.nn import RemoteModule\n"
        "import torch.distributed.nn.api.remote_module as remote_module\n"
        "from torch._C._distributed_rpc import PyRRef, _is_current_rpc_agent_set\n"
    )
    del sys.modules[module.__name__]
    assert module.rpc is module.also is module.torch.distributed.rpc is telegrad.rpc
    assert module.RRef is module.PyRRef is telegrad.rpc.RRef
    assert module.rpc_async is telegrad.rpc.rpc_async
    assert module.functions is telegrad.rpc.functions
    assert module.RemoteModule is telegrad.nn.RemoteModule
    assert module.remote_module is telegrad.nn
    assert module._is_current_rpc_agent_set() is False
    assert module.rpc.is_available()


def test_what_was_imported_before_is_caught_up_with_and_given_back() -> None:
    module = imported(
        "import torch.distributed.rpc as rpc\n"
        "from torch.distributed.rpc import RRef, WorkerInfo, api\n"
        "from torch.distributed.rpc.functions import async_execution\n"
        "from torch.distributed.nn import RemoteModule\n"
        "from torch.futures import wait_all, Future\n"
    )
    before = dict(vars(module))
    try:
        compat.install()
        assert module.rpc is telegrad.rpc
        assert module.RRef is telegrad.rpc.RRef
        assert module.WorkerInfo is telegrad.rpc.WorkerInfo
        assert module.api is telegrad.rpc.api
        assert module.async_execution is telegrad.rpc.functions.async_execution
        assert module.RemoteModule is telegrad.nn.RemoteModule
        failed: Future[int] = Future()
        failed.set_exception(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            module.wait_all([Future(), failed])
        assert module.Future is before["Future"]
    finally:
        compat.uninstall()
        del sys.modules[module.__name__]
    assert vars(module) == before


def test_installing_twice_is_installing_once() -> None:
    theirs = sys.modules["torch.distributed.rpc"]
    compat.install()
    compat.install()
    assert compat.installed()
    compat.uninstall()
    assert not compat.installed()
    assert torch.distributed.rpc is sys.modules["torch.distributed.rpc"] is theirs
    compat.uninstall()


def test_uninstalling_gives_torch_all_its_modules_back() -> None:
    importlib.import_module("torch.distributed.nn")
    before = {
        name: module for name, module in sys.modules.items() if name.startswith("torch.distributed")
    }
    names = (
        dict(vars(torch.distributed.rpc)),
        dict(vars(torch._C._distributed_rpc)),
        dict(vars(torch.distributed.nn)),  # type: ignore[attr-defined]
    )
    compat.install()
    compat.uninstall()
    assert {name: sys.modules.get(name) for name in before} == before
    assert names == (
        vars(torch.distributed.rpc),
        vars(torch._C._distributed_rpc),
        vars(torch.distributed.nn),  # type: ignore[attr-defined]
    )
    assert multiprocessing.spawn.get_preparation_data.__module__ == "multiprocessing.spawn"
    assert not any(type(finder).__module__ == "telegrad.compat" for finder in sys.meta_path)


@pytest.mark.usefixtures("installed")
def test_parts_of_torchs_engine_cannot_be_imported() -> None:
    for name in ("rref_proxy", "server_process_global_profiler", "_testing"):
        with pytest.raises(ModuleNotFoundError, match=f"torch.distributed.rpc.{name}"):
            importlib.import_module(f"torch.distributed.rpc.{name}")


@pytest.mark.usefixtures("installed")
def test_torchscript_keeps_torchs_rref() -> None:
    assert torch._jit_internal.RRef is not telegrad.rpc.RRef  # type: ignore[comparison-overlap]


@pytest.mark.usefixtures("installed")
def test_a_new_process_installs_before_it_does_anything_else() -> None:
    data = multiprocessing.spawn.get_preparation_data("child")
    first = next(iter(data))
    del data["authkey"]  # only a process that is being started may have it
    message = pickle.dumps(data)
    compat.uninstall()
    path = sys.path
    try:
        received = pickle.loads(message)
        assert compat.installed()
        assert sys.path == data["sys_path"]
    finally:
        sys.path = path
    assert first == "telegrad.compat"
    assert {name: value for name, value in received.items() if name != first} == {
        name: value for name, value in data.items() if name != first
    }


def test_a_new_process_is_told_nothing_after_uninstall() -> None:
    compat.install()
    prepare = multiprocessing.spawn.get_preparation_data
    compat.uninstall()
    assert "telegrad.compat" not in prepare("child")


@pytest.mark.usefixtures("installed")
def test_wait_all_ends_with_the_first_error() -> None:
    with LocalCluster(2) as cluster:
        never: Future[int] = Future()
        failed = cluster["w0"].submit("w1", int, "seven")
        with pytest.raises(ValueError, match="seven"):
            torch.futures.wait_all([never, failed])
        assert torch.futures.wait_all([cluster["w0"].submit("w1", abs, -n) for n in range(3)]) == [
            0,
            1,
            2,
        ]


@pytest.mark.usefixtures("installed")
def test_wait_all_takes_torchs_futures_and_lost_workers() -> None:
    plain: torch.futures.Future[int] = torch.futures.Future()
    plain.set_result(3)
    chained = plain.then(lambda done: done.wait() + 1)
    assert torch.futures.wait_all([plain, chained]) == [3, 4]
    assert torch.futures.wait_all([]) == []
    lost: Future[int] = Future()
    lost.set_exception(PeerLost("worker 'w1' was lost"))
    with pytest.raises(PeerLost, match="w1"):
        torch.futures.wait_all([Future(), lost])
    with pytest.raises(TypeError, match="int"):
        torch.futures.wait_all([lost, 3])  # type: ignore[list-item]


@pytest.mark.usefixtures("installed")
def test_distributed_autograd_is_telegrads() -> None:
    module = importlib.import_module("torch.distributed.autograd")
    assert module is torch.distributed.autograd is telegrad.autograd
    assert module.is_available()


@pytest.mark.usefixtures("installed")
def test_the_optimizer_is_telegrads_and_the_other_optimizers_are_torchs() -> None:
    optim = importlib.import_module("torch.distributed.optim")
    assert optim.DistributedOptimizer is telegrad.optim.DistributedOptimizer
    assert importlib.import_module("torch.distributed.optim.optimizer") is telegrad.optim
    assert optim.ZeroRedundancyOptimizer.__module__.startswith("torch.")


class Library:
    """An object that claims to be a module, as the libraries of cffi in `sys.modules` do."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return ModuleType


def test_a_library_that_is_no_module_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setitem(sys.modules, "library_of_a_test", Library())  # type: ignore[arg-type]
    assert isinstance(sys.modules["library_of_a_test"], ModuleType)
    request.getfixturevalue("installed")
    assert compat.installed()

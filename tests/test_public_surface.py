"""What the package offers is what `__all__` says, and torch's functions take torch's arguments."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import pytest
import torch.distributed.rpc as torch_rpc

import telegrad
import telegrad.rpc

PACKAGES = [
    "telegrad",
    "telegrad.autograd",
    "telegrad.batching",
    "telegrad.cli",
    "telegrad.cluster",
    "telegrad.dashboard",
    "telegrad.observer",
    "telegrad.ps",
    "telegrad.refs",
    "telegrad.rpc",
    "telegrad.testing",
    "telegrad.weights",
]
MODULES = [
    "telegrad.cli.actor_learner",
    "telegrad.cli.progress",
    "telegrad.compat",
    "telegrad.nn",
    "telegrad.optim",
    "telegrad.profiling",
    "telegrad.rpc.api",
    "telegrad.rpc.backend_registry",
    "telegrad.rpc.constants",
    "telegrad.rpc.functions",
    "telegrad.rpc.internal",
    "telegrad.rpc.options",
    "telegrad.testing.cluster",
    "telegrad.testing.faults",
    "telegrad.worker_group",
]


def _in_ruffs_order(name: str) -> tuple[int, str]:
    """Constants first, then classes, then the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def _public(module: ModuleType) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType | TypeVar | ParamSpec)
    }


@pytest.mark.parametrize("name", PACKAGES + MODULES)
def test_all_is_sorted_and_true(name: str) -> None:
    module = importlib.import_module(name)
    names = list(module.__all__)
    assert names == sorted(names, key=_in_ruffs_order)
    assert len(set(names)) == len(names)
    assert [missing for missing in names if not hasattr(module, missing)] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_offers_nothing_beside_all(name: str) -> None:
    module = importlib.import_module(name)
    assert set(_public(module)) - set(module.__all__) == set()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_defines_nothing_public_beside_all(name: str) -> None:
    module = importlib.import_module(name)
    own = {
        key for key, value in _public(module).items() if getattr(value, "__module__", None) == name
    }
    assert own - set(module.__all__) == set()


def test_the_torch_shaped_names_are_there() -> None:
    ours = {name for name in dir(telegrad.rpc) if not name.startswith("_")}
    wanted = {
        "AllGatherStates",
        "BackendType",
        "RRef",
        "RpcBackendOptions",
        "TensorPipeRpcBackendOptions",
        "WorkerInfo",
        "api",
        "backend_registry",
        "constants",
        "functions",
        "get_rpc_timeout",
        "get_worker_info",
        "init_rpc",
        "is_available",
        "options",
        "remote",
        "rpc_async",
        "rpc_sync",
        "shutdown",
    }
    assert wanted - ours == set()


@pytest.mark.parametrize(
    "path",
    [
        "init_rpc",
        "is_available",
        "api.rpc_sync",
        "api.rpc_async",
        "api.remote",
        "api.shutdown",
        "api.get_worker_info",
        "api._all_gather",
        "api._barrier",
        "api._wait_all",
        "api._wait_all_workers",
        "_init_rpc_backend",
        "backend_registry.backend_registered",
        "backend_registry.construct_rpc_backend_options",
        "backend_registry.init_backend",
        "backend_registry.register_backend",
        "options.TensorPipeRpcBackendOptions",
        "TensorPipeRpcBackendOptions.set_device_map",
        "TensorPipeRpcBackendOptions.set_devices",
    ],
)
def test_functions_take_torchs_parameters(path: str) -> None:
    ours, theirs = _find(telegrad.rpc, path), _find(torch_rpc, path)
    mine, torchs = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for position, (name, parameter) in enumerate(torchs.items()):
        if parameter.kind in variadic:
            assert any(each.kind == parameter.kind for each in mine.values())
            continue
        assert name in mine
        assert mine[name].kind == parameter.kind
        if parameter.kind != inspect.Parameter.KEYWORD_ONLY:
            assert list(mine).index(name) == position
        if parameter.default is not inspect.Parameter.empty and not name.endswith("backend"):
            assert mine[name].default == parameter.default
    required = {
        name
        for name, each in mine.items()
        if each.default is each.empty and each.kind not in variadic
    }
    assert required <= set(torchs)


def _find(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


@pytest.mark.parametrize("path", ["functions.async_execution", "api._require_initialized"])
def test_decorators_take_one_function(path: str) -> None:
    assert len(inspect.signature(_find(telegrad.rpc, path)).parameters) == 1  # type: ignore[arg-type]


def test_constants_are_torchs() -> None:
    for name in telegrad.rpc.constants.__all__:
        assert getattr(telegrad.rpc.constants, name) == getattr(torch_rpc.constants, name)


def test_there_is_a_version() -> None:
    assert all(part.isdigit() for part in telegrad.__version__.split(".")[:2])

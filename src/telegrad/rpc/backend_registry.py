"""Backends by name, as torch has them. There is one engine here; others may register their own."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad.errors import UsageError
from telegrad.rpc.options import RpcBackendOptions

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """How to make a backend's options and start it."""

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., Any]


def _enum(members: dict[str, BackendValue]) -> Any:
    make: Any = enum.Enum
    return make("BackendType", members)


class _Names:
    """Stands for `BackendType`, an enum that grows: looking a member up always sees the newest."""

    def __init__(self) -> None:
        self.enum = _enum({})

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("enum", {}).__members__:
            return self.enum[name]
        raise AttributeError(f"no RPC backend named {name!r}; there are {sorted(self.enum.__members__)}")

    def __getitem__(self, name: str) -> Any:
        return self.enum[name]

    def __iter__(self) -> Any:
        return iter(self.enum)

    def __contains__(self, backend: object) -> bool:
        return isinstance(backend, enum.Enum) and backend.name in self.enum.__members__

    @property
    def __members__(self) -> Any:
        return self.enum.__members__


BackendType: Any = _Names()


def backend_registered(backend_name: str) -> bool:
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend; returns its member of `BackendType`."""
    if backend_registered(backend_name):
        raise UsageError(f"RPC backend {backend_name}: already registered")
    members = {name: member.value for name, member in BackendType.__members__.items()}
    members[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType.enum = _enum(members)
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any, rpc_timeout: float = 60.0, init_method: str = "env://", **options: Any
) -> RpcBackendOptions:
    made: RpcBackendOptions = backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **options)
    return made


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    return backend.value.init_backend_handler(*args, **kwargs)

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


class _GrowingEnum(enum.EnumMeta):
    """The type of `BackendType`: an enum that gets members when backends are registered."""

    def __getattr__(cls, name: str) -> Any:
        if name in cls._member_map_:  # an enum may call this for its members, too
            return cls._member_map_[name]
        raise AttributeError(f"no RPC backend named {name!r}; there are {sorted(cls._member_map_)}")

    def __contains__(cls, backend: object) -> bool:
        return isinstance(backend, cls)

    def add(cls, name: str, value: Any) -> Any:
        """Add a member; `remove` takes it back."""
        member: Any = object.__new__(cls)  # type: ignore[arg-type]
        member._name_ = name
        member._value_ = value
        type.__setattr__(cls, name, member)
        cls._member_names_.append(name)
        cls._member_map_[name] = member
        return member

    def remove(cls, name: str) -> None:
        """Take a member back."""
        del cls._member_map_[name]
        cls._member_names_.remove(name)
        type.__delattr__(cls, name)


class BackendType(enum.Enum, metaclass=_GrowingEnum):
    """The backends that are registered: `BackendType.TENSORPIPE`, and others by `register_backend`."""

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return getattr, (BackendType, self.name)


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
    return BackendType.add(
        backend_name, BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    )


def construct_rpc_backend_options(
    backend: Any, rpc_timeout: float = 60.0, init_method: str = "env://", **options: Any
) -> RpcBackendOptions:
    made: RpcBackendOptions = backend.value.construct_rpc_backend_options_handler(
        rpc_timeout, init_method, **options
    )
    return made


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    return backend.value.init_backend_handler(*args, **kwargs)

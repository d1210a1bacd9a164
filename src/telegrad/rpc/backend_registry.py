"""RPC backends by name, as in torch. Telegrad registers one; programs may register others.

State: the members of `BackendType`; they change while modules are imported.
"""

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
    """The functions that make the options of a backend and start it."""

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., Any]


class _ExtensibleEnum(enum.EnumMeta):
    """The type of `BackendType`: an enum to which `register_backend` adds members."""

    def __getattr__(cls, name: str) -> Any:
        # Some versions of Python call this for members, too.
        if name in cls._member_map_:  # pragma: no cover
            return cls._member_map_[name]
        raise AttributeError(
            f"no RPC backend is named {name!r}; registered are {sorted(cls._member_map_)}"
        )

    def __contains__(cls, backend: object) -> bool:
        return isinstance(backend, cls)

    def add(cls, name: str, value: Any) -> Any:
        """Add a member."""
        member: Any = object.__new__(cls)  # type: ignore[arg-type]
        member._name_ = name
        member._value_ = value
        type.__setattr__(cls, name, member)
        cls._member_names_.append(name)
        cls._member_map_[name] = member
        return member

    def remove(cls, name: str) -> None:
        """Remove a member."""
        del cls._member_map_[name]
        cls._member_names_.remove(name)
        type.__delattr__(cls, name)


class BackendType(enum.Enum, metaclass=_ExtensibleEnum):
    """The registered backends: `BackendType.TENSORPIPE`, and those of `register_backend`."""

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return getattr, (BackendType, self.name)


def backend_registered(backend_name: str) -> bool:
    """Return True if there is a backend of this name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend. Return its member of `BackendType`."""
    if backend_registered(backend_name):
        raise UsageError(f"RPC backend {backend_name}: already registered")
    return BackendType.add(
        backend_name, BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    )


def construct_rpc_backend_options(
    backend: Any, rpc_timeout: float = 60.0, init_method: str = "env://", **options: Any
) -> RpcBackendOptions:
    """Return options for a backend."""
    constructed: RpcBackendOptions = backend.value.construct_rpc_backend_options_handler(
        rpc_timeout, init_method, **options
    )
    return constructed


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a backend and return its agent."""
    return backend.value.init_backend_handler(*args, **kwargs)

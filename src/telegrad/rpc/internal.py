"""Names of `torch.distributed.rpc.internal` that programs and PyTorch's tests use."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from telegrad.profiling import profiling_key
from telegrad.wire import codec

__all__ = ["PythonUDF", "RPCExecMode"]


class RPCExecMode(enum.Enum):
    """The kinds of calls."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]


class _Pickler:
    """The codec of the wire format, with torch's methods."""

    def serialize(self, value: Any) -> tuple[bytes, list[memoryview]]:
        return codec.encode(value)

    def deserialize(self, data: bytes, buffers: Sequence[memoryview]) -> Any:
        return codec.decode(data, buffers)


_internal_rpc_pickler = _Pickler()


def _build_rpc_profiling_key(mode: RPCExecMode, function: str, source: str, target: str) -> str:
    return profiling_key(mode.value, function, source, target)

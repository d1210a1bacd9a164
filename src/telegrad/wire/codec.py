"""Python objects to bytes and back: pickle protocol 5 with large buffers outside the pickle.

`encode` tries the C pickler first. What that cannot pickle by reference (lambdas, closures, local
classes) is pickled by cloudpickle. Buffers of at least `OUT_OF_BAND` bytes are returned beside the
pickle, so they are not copied here. If a value cannot be pickled, the error names the part of it
that is the reason.

A container of many small tensors or arrays is encoded as two pickles: first their stacks
(`wire/small_tensors.py`), then the value, which refers to them. Such a body begins with `_STACKED`
and the length of the first pickle.

State: `_reducers`, the table of reducers of this process. `register` adds to it, when modules are
imported; there is no lock because one assignment to a dict is atomic.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections import ChainMap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from telegrad.errors import SerializationError
from telegrad.wire.frames import MAX_BUFFERS
from telegrad.wire.small_tensors import (
    CONTAINERS,
    StackingPicklerMixin,
    TensorStacks,
    holds_many,
    unstack,
)
from telegrad.wire.tensor_subclasses import reducer_for
from telegrad.wire.tensors import REDUCERS, can_stack_tensors

# Below this size, a copy into the pickle is cheaper than a buffer of its own.
OUT_OF_BAND = 1 << 15
Encoded = tuple[bytes, list[memoryview]]

_PROTOCOL = 5
_BytesIO = io.BytesIO
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_MAX_ATOMS = 16
_STACKED = 0x01  # the first byte of a pickle is 0x80
_STACKED_HEADER = struct.Struct("<BQ")
_MAX_PATH_LENGTH = 20


class _Reducers(dict[type, Callable[[Any], Any]]):
    """Telegrad's reducers, then those registered with `copyreg`, looked up at each use."""

    def __missing__(self, key: type) -> Callable[[Any], Any]:
        reducer = copyreg.dispatch_table.get(key)
        if reducer is None:
            reducer = reducer_for(key)
            if reducer is None:
                raise KeyError(key)
        return reducer


_reducers = _Reducers(REDUCERS)


class _Pickler(pickle.Pickler):
    dispatch_table = _reducers


class _ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap(_reducers, cloudpickle.Pickler.dispatch_table)


class _StackingPickler(StackingPicklerMixin, _Pickler):
    pass


class _StackingByValuePickler(StackingPicklerMixin, _ByValuePickler):
    pass


def register(cls: type, reducer: Callable[[Any], Any]) -> None:
    """Use `reducer` for objects of exactly this class in messages.

    Does for messages what `copyreg.pickle` does for all pickles.
    """
    _reducers[cls] = reducer
    REDUCERS[cls] = reducer


def encode_atoms(value: Any) -> bytes | None:
    """Return the pickle of a number, a string or a short tuple of such; None for other values.

    No reducer is needed for these, and their pickle is the same for every receiver. This takes a
    third of the time of `encode`.
    """
    if type(value) is tuple:
        if len(value) > _MAX_ATOMS:
            return None
        for part in value:
            if type(part) not in _ATOMS and (
                type(part) is not tuple or not _ATOMS.issuperset(map(type, part))
            ):
                return None
    elif type(value) not in _ATOMS:
        return None
    return pickle.dumps(value, _PROTOCOL)


def encode(value: Any, *, by_value: bool = False) -> Encoded:
    """Return the pickle of `value` and its large buffers.

    With `by_value`, functions and classes that `__main__` defines are sent with their code. Raise
    `SerializationError` if the value cannot be pickled.
    """
    stacks = type(value) in CONTAINERS and holds_many(value) and can_stack_tensors()
    if not by_value:
        try:
            return _dump_stacked(_StackingPickler, value) if stacks else _dump(_Pickler, value)
        except Exception:
            # For example a lambda: cloudpickle, below, either pickles it or raises the reason.
            pass
    try:
        if stacks:
            return _dump_stacked(_StackingByValuePickler, value)
        return _dump(_ByValuePickler, value)
    except Exception as error:
        if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
            raise SerializationError("the value is nested too deeply to be sent") from error
        path, part = _find_unpicklable(value)
        raise SerializationError(
            f"{path or 'the value'} of type {type(part).__qualname__} cannot be sent: {error}",
            path=path,
        ) from error


def decode(body: bytes | memoryview, buffers: Any = ()) -> Any:
    """Return the value that was encoded. Its tensors use the memory of the buffers."""
    if body[0] == _STACKED:
        return _load_stacked(memoryview(body), iter(buffers))
    return pickle.loads(body, buffers=buffers)


def _dump(pickler: Any, value: Any, max_buffers: int = MAX_BUFFERS) -> Encoded:
    buffers: list[memoryview] = []

    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND or len(buffers) == max_buffers:
            return True
        buffers.append(raw)
        return False

    file = _BytesIO()
    pickler(file, _PROTOCOL, buffer_callback=keep_in_pickle).dump(value)
    return file.getvalue(), buffers


def _dump_stacked(pickler: Any, value: Any) -> Encoded:
    # A reducer that the user registered for arrays must be called for each of them.
    stacks_arrays = np.ndarray not in _reducers and np.ndarray not in copyreg.dispatch_table
    stacks = TensorStacks(stacks_arrays)
    body, buffers = _dump(partial(pickler, stacks), value)
    blocks, block_buffers = _dump(pickle.Pickler, stacks.blocks(), MAX_BUFFERS - len(buffers))
    header = _STACKED_HEADER.pack(_STACKED, len(blocks))
    return b"".join((header, blocks, body)), block_buffers + buffers


def _load_stacked(body: memoryview, buffers: Iterator[Any]) -> Any:
    _, length = _STACKED_HEADER.unpack_from(body)
    start = _STACKED_HEADER.size
    blocks = pickle.loads(body[start:], buffers=buffers)
    unpickler = pickle.Unpickler(_BytesIO(body[start + length :]), buffers=buffers)
    unpickler.persistent_load = unstack(blocks)  # type: ignore[method-assign]
    return unpickler.load()


def _find_unpicklable(value: Any) -> tuple[str, Any]:
    """Return the path to the innermost part of `value` that cannot be pickled, and that part."""
    path = ""
    for _ in range(_MAX_PATH_LENGTH):
        try:
            step, part = next(
                (step, part) for step, part in _parts(value) if not _is_picklable(part)
            )
        except Exception:
            break  # each part can be pickled, or code of the user raised while we looked at them
        path, value = path + step, part
    return path, value


def _is_picklable(value: Any) -> bool:
    try:
        _dump(_ByValuePickler, value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value and the path from the value to each.

    `torch.utils._pytree` does not fit: it knows neither attributes nor closures.
    """
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, list | tuple | set | frozenset):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for name, part in vars(value).items():
            yield f".{name}", part
    if getattr(value, "__closure__", None):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
            yield f"<closure>.{name}", cell.cell_contents

"""Python objects to bytes and back: pickle protocol 5 with tensors as out-of-band buffers.

`encode` tries the fast C pickler first; what that cannot pickle by reference (lambdas, closures, local classes) goes by
cloudpickle. Buffers of at least `OUT_OF_BAND` bytes leave the pickle and travel beside it, so they are never copied
here. A failure names the part of the value that cannot travel.

A container of many small tensors or arrays travels as two pickles: their stacks (`wire/stacking.py`), then the value,
which refers to them. Such a body begins with `_STACKED` and the length of the first pickle.
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
from telegrad.wire.stacking import (
    CONTAINERS,
    StackingPicklerMixin,
    TensorStacks,
    holds_many,
    unstack,
)
from telegrad.wire.tensor_subclasses import reducer_for
from telegrad.wire.tensors import REDUCERS, all_plain

OUT_OF_BAND = 1 << 15  # up to here a copy into the pickle costs less than a buffer of its own
Encoded = tuple[bytes, list[memoryview]]

_PROTOCOL = 5
_BytesIO = io.BytesIO
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_MOST_ATOMS = 16
_STACKED = 0x01  # a pickle begins with 0x80
_HEADER = struct.Struct("<BQ")


class _Reducers(dict[type, Callable[[Any], Any]]):
    """Our reducers first, then whatever users registered with `copyreg`, looked up at the time of use."""

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


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap(_reducers, cloudpickle.Pickler.dispatch_table)


class _StackingPickler(StackingPicklerMixin, _Pickler):
    pass


class _StackingByValue(StackingPicklerMixin, _ByValue):
    pass


def register(kind: type, reducer: Callable[[Any], Any]) -> None:
    """Let objects of exactly `kind` travel as `reducer(object)` says, as `copyreg.pickle` does for plain pickle."""
    _reducers[kind] = reducer
    REDUCERS[kind] = reducer


def encode_atoms(value: Any) -> bytes | None:
    """The pickle of a number, a text or a short tuple of such; None for everything else.

    No reducer has a say in these, and they are the same for every receiver. This takes a third of the time of `encode`.
    """
    if type(value) is tuple:
        if len(value) > _MOST_ATOMS:
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
    """The pickle of `value` and its large buffers. `by_value`: send what `__main__` defines along with its code."""
    many = type(value) in CONTAINERS and holds_many(value) and all_plain()
    if not by_value:
        try:
            return _dump_stacked(_StackingPickler, value) if many else _dump(_Pickler, value)
        except Exception:
            # a lambda, a closure, a local class: cloudpickle below either sends it or says why not
            pass
    try:
        return _dump_stacked(_StackingByValue, value) if many else _dump(_ByValue, value)
    except Exception as error:
        if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
            raise SerializationError("the value is nested too deeply to be sent") from error
        path, culprit = _blame(value)
        raise SerializationError(
            f"{path or 'the value'} of type {type(culprit).__qualname__} cannot be sent: {error}",
            path=path,
        ) from error


def decode(body: bytes | memoryview, buffers: Any = ()) -> Any:
    """The value that `encode` was given. The buffers become the memory of its tensors."""
    if body[0] == _STACKED:
        return _load_stacked(memoryview(body), iter(buffers))
    return pickle.loads(body, buffers=buffers)


def _dump(pickler: Any, value: Any, max_buffers: int = MAX_BUFFERS) -> Encoded:
    buffers: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND or len(buffers) == max_buffers:
            return True
        buffers.append(raw)
        return False

    file = _BytesIO()
    pickler(file, _PROTOCOL, buffer_callback=keep_inside).dump(value)
    return file.getvalue(), buffers


def _dump_stacked(pickler: Any, value: Any) -> Encoded:
    arrays = np.ndarray not in _reducers and np.ndarray not in copyreg.dispatch_table
    stacks = TensorStacks(arrays)
    body, buffers = _dump(partial(pickler, stacks), value)
    blocks, of_blocks = _dump(pickle.Pickler, stacks.blocks(), MAX_BUFFERS - len(buffers))
    header = _HEADER.pack(_STACKED, len(blocks))
    return b"".join((header, blocks, body)), of_blocks + buffers


def _load_stacked(body: memoryview, buffers: Iterator[Any]) -> Any:
    _, length = _HEADER.unpack_from(body)
    blocks = pickle.loads(body[_HEADER.size :], buffers=buffers)
    unpickler = pickle.Unpickler(_BytesIO(body[_HEADER.size + length :]), buffers=buffers)
    unpickler.persistent_load = unstack(blocks)  # type: ignore[method-assign]
    return unpickler.load()


def _blame(value: Any) -> tuple[str, Any]:
    """The innermost part of `value` that cannot be pickled, and the path to it."""
    path, depth = "", 0
    while depth < 20:
        try:
            step, part = next((step, part) for step, part in _parts(value) if not _travels(part))
        except Exception:
            break  # no part of it is to blame, or it does not even let us look
        path, value, depth = path + step, part, depth + 1
    return path, value


def _travels(value: Any) -> bool:
    try:
        _dump(_ByValue, value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, list | tuple | set | frozenset):
        for number, part in enumerate(value):
            yield f"[{number}]", part
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for name, part in vars(value).items():
            yield f".{name}", part
    if getattr(value, "__closure__", None):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
            yield f"<closure>.{name}", cell.cell_contents

"""Python objects to bytes and back: pickle protocol 5 with large buffers outside the pickle.

`encode` tries the C pickler first. What that cannot pickle by reference (lambdas, closures, local
classes) is pickled by cloudpickle. Buffers of at least `OUT_OF_BAND` bytes are returned beside the
pickle, so they are not copied here. If a value cannot be pickled, the error names the part of it
that is the reason.

A container of many small tensors or arrays is encoded as two pickles: first their stacks, one block
of bytes for each dtype and shape, then the value, which refers to them. Such a body begins with
`_STACKED` and the length of the first pickle. The reason is that for a small tensor, a reducer
call, a buffer and a constructor call cost far more than copying its bytes. A pickler with
`StackingPicklerMixin` keeps small plain tensors and arrays out of the pickle: it writes an index in
their place (a persistent id of pickle) and appends them to their stack. The receiver splits the
stacks before it unpickles the rest.

Rules of stacks:
- An object that occurs several times has one index, so it arrives as one object.
- Each tensor and array arrives with memory of its own.
- The ids of tensors that require gradients (`wire/gradient_tracking.py`) are sent with their stack.
- What is not plain (attributes, gaps, other devices, read-only arrays) stays in the pickle and is
  reduced as `wire/tensors.py` describes.

State: `_reducers`, the table of reducers of this process. `register` adds to it, when modules are
imported; there is no lock because one assignment to a dict is atomic. A `TensorStacks` belongs to
one message.
"""

from __future__ import annotations

import copyreg
import inspect
import io
import math
import pickle
import struct
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import attrgetter
from types import CodeType, FunctionType, MethodType
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from telegrad.errors import SerializationError
from telegrad.wire.frames import MAX_BUFFERS
from telegrad.wire.gradient_tracking import restore_gradients, tensor_ids_for
from telegrad.wire.tensor_subclasses import reducer_for
from telegrad.wire.tensors import (
    REDUCERS,
    SMALL_TENSOR,
    can_stack_tensors,
    decode_small,
    dtype_of,
    stackable_code,
)
from telegrad.wire.tensors import encode_small as encode_small_tensor

MANY = 16  # with fewer items, stacks cost more than they save
_MAX_ITEM_BYTES = 4096  # of one tensor or array
_MAX_ITEMS = 1 << 24  # in each stack
_MAX_STACKS = 127  # with `_MAX_ITEMS`: an index fits the 4-byte integers of pickle
_MAX_DEPTH = 3  # of nested containers that `holds_many` looks into
_SCALARS = frozenset((int, float, str, bool, bytes, complex, type(None)))
_STACKABLE_TYPES = frozenset((Tensor, nn.Parameter, np.ndarray))
CONTAINERS = frozenset((tuple, list, dict, OrderedDict, defaultdict))
_tensor_key = attrgetter("dtype", "shape", "layout", "is_cpu", "requires_grad")
_array_key = attrgetter("dtype", "shape")
# A stack in a message: the dtype (its code, or the name of an array's dtype), the shape and the
# bytes. For tensors that require gradients also their ids, and whether they are parameters.
StackedBlock = tuple[int | str, tuple[int, ...], Any, list[int] | None, bool]
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


class _Stack:
    """The tensors or arrays of one dtype and shape. Their indices begin at `base`."""

    __slots__ = ("base", "dtype", "dtype_key", "is_parameter", "items", "requires_grad", "shape")

    def __init__(
        self,
        base: int,
        dtype_key: int | str,
        dtype: Any,
        shape: tuple[int, ...],
        requires_grad: bool = False,
        is_parameter: bool = False,
    ) -> None:
        self.base = base
        self.dtype_key = dtype_key
        self.dtype = dtype
        self.shape = shape
        self.requires_grad = requires_grad
        self.is_parameter = is_parameter
        self.items: list[Any] = []

    def block(self) -> StackedBlock:
        data: Any
        if isinstance(self.dtype_key, str):
            data = b"".join(self.items)
        else:
            with torch.no_grad():
                stacked = torch.stack(self.items).resolve_conj().resolve_neg()
            data = stacked.view(-1).view(torch.uint8).numpy()
        tensor_ids = tensor_ids_for(self.items) if self.requires_grad else None
        buffer = pickle.PickleBuffer(data)
        return self.dtype_key, self.shape, buffer, tensor_ids, self.is_parameter


class TensorStacks(dict[tuple[Any, ...], "_Stack | None"]):
    """The stacks of a message by dtype and shape; None for what cannot be stacked."""

    def __init__(self, stacks_arrays: bool = True) -> None:
        """Make stacks of tensors, and with `stacks_arrays` also of numpy arrays."""
        super().__init__()
        self.indices: dict[int, int] = {}  # by `id()`; the stacks keep the objects alive
        self.array_type = np.ndarray if stacks_arrays else None

    def __missing__(self, key: tuple[Any, ...]) -> _Stack | None:
        stack = self[key] = self._make(*key)
        return stack

    def _make(
        self,
        dtype: Any,
        shape: tuple[int, ...],
        layout: torch.layout = torch.strided,
        is_cpu: bool = True,
        requires_grad: bool = False,
        is_parameter: bool = False,
    ) -> _Stack | None:
        size = dtype.itemsize * math.prod(shape)
        # A parameter that requires no gradient stays in the pickle.
        is_plain = layout is torch.strided and is_cpu and requires_grad >= is_parameter
        if not is_plain or not 0 < size <= _MAX_ITEM_BYTES or len(self) >= _MAX_STACKS:
            return None
        dtype_key: int | str | None
        if isinstance(dtype, np.dtype):
            dtype_key = dtype.str if dtype.kind in "biufc" and dtype.isnative else None
        else:
            dtype_key = stackable_code(dtype)
        if dtype_key is None:
            return None
        base = len(self) * _MAX_ITEMS
        return _Stack(base, dtype_key, dtype, tuple(shape), requires_grad, is_parameter)

    def blocks(self) -> dict[int, StackedBlock]:
        """Return the stacks for `unstack`, each by its first index."""
        stacks = [stack for stack in self.values() if stack is not None and stack.items]
        return {stack.base: stack.block() for stack in stacks}


class StackingPicklerMixin:
    """Pickler mixin that moves small tensors and arrays to `stacks` and pickles their indices."""

    def __init__(self, stacks: TensorStacks, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stacks = stacks

    def persistent_id(self, item: Any) -> int | None:
        """Return the index of a tensor or array that is stacked; None to pickle the object."""
        cls = type(item)
        stacks = self._stacks
        if cls is Tensor:
            if item.is_nested:  # it has no shape
                return None
            stack = stacks[_tensor_key(item)]
            if stack is None or item.__dict__ or not item.is_contiguous():
                return None
        elif cls is nn.Parameter:
            if item.is_nested:
                return None
            stack = stacks[(*_tensor_key(item), True)]
            if stack is None or item.__dict__ or not item.is_contiguous():
                return None
        elif cls is stacks.array_type:
            key = _array_key(item)
            stack = stacks[key]
            # Compared by identity: equal dtypes may have different metadata.
            if stack is None or stack.dtype is not key[0] or not item.flags.carray:
                return None
        else:
            return None
        index = stacks.indices.get(id(item))
        if index is None:
            items = stack.items
            if len(items) == _MAX_ITEMS:
                return None
            index = stacks.indices[id(item)] = stack.base + len(items)
            items.append(item)
        return index


def unstack(blocks: dict[int, StackedBlock]) -> Callable[[int], Any]:
    """Return a function that returns the tensor or array with a given index."""
    items: dict[int, Any] = {}
    for base, (dtype_key, shape, data, tensor_ids, is_parameter) in blocks.items():
        rows = _split(dtype_key, shape, data)
        if tensor_ids is not None:
            rows = restore_gradients(rows, tensor_ids, is_parameter)
        items.update(zip(range(base, base + len(rows)), rows, strict=True))
    return items.__getitem__


def _split(dtype_key: int | str, shape: tuple[int, ...], data: Any) -> list[Any]:
    """Return the tensors or arrays of a stack."""
    if isinstance(dtype_key, str):
        return _copy_rows(np.frombuffer(data, dtype_key), shape)
    dtype = dtype_of(dtype_key)
    if dtype is torch.bfloat16:  # numpy does not have it
        integers = _copy_rows(np.frombuffer(data, np.int16), shape)
        return [torch.from_numpy(row).view(torch.bfloat16) for row in integers]
    flat = torch.frombuffer(data, dtype=dtype).numpy()
    return list(map(torch.from_numpy, _copy_rows(flat, shape)))


def _copy_rows(flat: np.ndarray[Any, Any], shape: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    if not shape:
        return [np.array(scalar) for scalar in flat]
    return [row.copy() for row in flat.reshape(-1, *shape)]


def holds_many(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Return whether a container seems to contain many small tensors or arrays.

    This is a cheap guess: it looks only at the first items of a large container.
    """
    # Called for every message. `torch.utils._pytree` would visit all items and take far longer.
    parts = value.values() if isinstance(value, dict) else value
    if len(parts) >= MANY:
        return _holds_some(next(iter(parts)), depth)
    for part in parts:  # noqa: SIM110  # a generator takes twice as long
        if type(part) in CONTAINERS and depth and holds_many(part, depth - 1):
            return True
    return False


def _holds_some(value: Any, depth: int) -> bool:
    """Return whether `value` is a small tensor or array or contains one."""
    if type(value) in _STACKABLE_TYPES:
        return True
    if type(value) in _SCALARS or not depth:
        return False
    if not isinstance(value, tuple | list):
        value = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        value = value.values()
    return any(_holds_some(part, depth - 1) for part in islice(value, MANY))


class _Reducers(dict[type, Callable[[Any], Any]]):
    """Telegrad's reducers, then those registered with `copyreg`, looked up at each use."""

    def __missing__(self, key: type) -> Callable[[Any], Any]:
        reducer = copyreg.dispatch_table.get(key)
        if reducer is None:
            if not issubclass(key, Tensor):
                raise KeyError(key)
            reducer = reducer_for(key)
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


def encode_small(value: Any) -> bytes | None:
    """Encode a number, a string, a short tuple of such, or a small plain tensor.

    Return None for other values. No reducer is needed for these, and the result is the same for
    every receiver. This takes a third of the time of `encode`.
    """
    if type(value) is Tensor:
        return encode_small_tensor(value)
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


def locate(error: SerializationError, message: str, path: str) -> None:
    """Say in an error of `encode` which message it is about, and where in it the value is."""
    text, part = str(error), error.path or "the value"
    if text.startswith(part):
        text, error.path = path + text.removeprefix(part), path
    error.args = (f"{message}: {text}",)


def decode(body: bytes | memoryview, buffers: Any = ()) -> Any:
    """Return the value that was encoded. Its tensors use the memory of the buffers."""
    kind = body[0]
    if kind == SMALL_TENSOR:
        return decode_small(body)
    if kind == _STACKED:
        return _load_stacked(memoryview(body), iter(buffers))
    return pickle.loads(body, buffers=buffers)


def _dump(pickler: Any, value: Any, max_buffers: int = MAX_BUFFERS) -> Encoded:
    buffers: list[memoryview] = []

    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND:
            return True
        if len(buffers) == max_buffers:
            if hasattr(raw.obj, "copy_from_device"):  # `transport.host_image`: read it now
                raw.obj.copy_from_device()
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


class _StackedUnpickler(pickle.Unpickler):
    """An unpickler whose attributes can be set, which Python 3.13.0 permits only in subclasses."""


def _load_stacked(body: memoryview, buffers: Iterator[Any]) -> Any:
    _, length = _STACKED_HEADER.unpack_from(body)
    start = _STACKED_HEADER.size
    blocks = pickle.loads(body[start:], buffers=buffers)
    unpickler = _StackedUnpickler(_BytesIO(body[start + length :]), buffers=buffers)
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


def _reduces_itself(value: object) -> bool:
    """Return whether code of its class in Python decides what is pickled of an object."""
    methods = ("__reduce_ex__", "__reduce__")
    return any(hasattr(getattr(type(value), name), "__code__") for name in methods)


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
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not _reduces_itself(value):
        for name, part in vars(value).items():
            yield f".{name}", part
    if isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what is sent with a function that is sent by value."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        yield f"<closure>.{name}", cell.cell_contents
    defaults = inspect.signature(function, follow_wrapped=False).parameters.values()
    for parameter in defaults:
        if parameter.default is not parameter.empty:
            yield f"<default>.{parameter.name}", parameter.default
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f"<global>.{name}", function.__globals__[name]


def _global_names(code: CodeType) -> list[str]:
    """Return the names that code may look up in its module, also in functions inside of it."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _global_names(constant)
    return names

"""Containers of many small tensors or numpy arrays: one block of bytes for each dtype and shape.

For a small tensor, a reducer call, a buffer and a constructor call cost far more than copying its
bytes. A pickler with `StackingPicklerMixin` therefore keeps small plain tensors and arrays out of
the pickle. It writes an index in their place (a persistent id of pickle) and appends them to the
stack of their dtype and shape. The receiver splits the stacks before it unpickles the rest.

Rules:
- An object that occurs several times has one index, so it arrives as one object.
- Each tensor and array arrives with memory of its own.
- The ids of tensors that require gradients (`wire/gradient_tracking.py`) are sent with their stack.
- What is not plain (attributes, gaps, other devices, read-only arrays) stays in the pickle and is
  reduced as `wire/tensors.py` describes.

State: none in this module. A `TensorStacks` belongs to one message.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from telegrad.wire.dtypes import dtype_of, stackable_code
from telegrad.wire.gradient_tracking import restore_gradients, tensor_ids_for

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


# A stack in a message: the dtype (a code of `wire/dtypes.py`, or the name of an array's dtype), the
# shape and the bytes. For tensors that require gradients also their ids, and whether they are
# parameters.
StackedBlock = tuple[int | str, tuple[int, ...], Any, list[int] | None, bool]


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
            stack = stacks[_tensor_key(item)]
            if stack is None or item.__dict__ or not item.is_contiguous():
                return None
        elif cls is nn.Parameter:
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

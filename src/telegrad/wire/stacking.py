"""Containers of many small tensors or numpy arrays: one block of bytes for all of one dtype and shape.

A reducer call, a buffer and a constructor call for each tensor cost far more than its few bytes. A
pickler with `StackingPicklerMixin` takes small plain tensors and arrays out of the pickle: it puts a number in
their place (pickle's persistent ids) and copies their values into one stack for each dtype and shape.
The receiver splits the stacks before it unpickles the rest.

Rules: an object that occurs several times has one number, so it arrives as one object. Every tensor
and array arrives with memory of its own. The tickets of tensors that require gradients travel with
their stack. Whatever is not plain (attributes, gaps, other devices, read-only arrays) stays in the
pickle and travels as `wire/tensors.py` says.
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
from telegrad.wire.tensor_gradients import arrive_tracked, leave_tracked

MANY = 16  # below, stacks cost more than they save
_LARGEST = 4096  # bytes of one tensor or array
_NUMBERS = 1 << 24  # in each stack; a number must fit pickle's 4-byte integers
_STACKS = 127
_DEPTH = 3  # of nested containers in which `holds_many` looks

_SCALARS = frozenset((int, float, str, bool, bytes, complex, type(None)))
_SMALL_THINGS = frozenset((Tensor, nn.Parameter, np.ndarray))
CONTAINERS = frozenset((tuple, list, dict, OrderedDict, defaultdict))
_tensor_key = attrgetter("dtype", "shape", "layout", "is_cpu", "requires_grad")
_array_key = attrgetter("dtype", "shape")


# A stack as it travels: dtype (a code of `wire/tensors.py`, or the name of an array's dtype), shape,
# bytes; for tensors that require gradients also their tickets, and whether they are parameters.
StackedBlock = tuple[int | str, tuple[int, ...], Any, list[int] | None, bool]


class _Stack:
    """The things of one dtype and shape. Their numbers begin at `base`."""

    __slots__ = ("base", "dtype", "is_parameter", "kind", "requires_grad", "shape", "things")

    def __init__(
        self,
        base: int,
        kind: int | str,
        dtype: Any,
        shape: tuple[int, ...],
        requires_grad: bool = False,
        is_parameter: bool = False,
    ) -> None:
        self.base = base
        self.kind = kind
        self.dtype = dtype
        self.shape = shape
        self.requires_grad = requires_grad
        self.is_parameter = is_parameter
        self.things: list[Any] = []

    def block(self) -> StackedBlock:
        data: Any
        if isinstance(self.kind, str):
            data = b"".join(self.things)
        else:
            with torch.no_grad():
                stacked = torch.stack(self.things).resolve_conj().resolve_neg()
            data = stacked.view(-1).view(torch.uint8).numpy()
        tickets = leave_tracked(self.things) if self.requires_grad else None
        return self.kind, self.shape, pickle.PickleBuffer(data), tickets, self.is_parameter


class TensorStacks(dict[tuple[Any, ...], "_Stack | None"]):
    """The stacks of a message by dtype and shape; None: things like that are not stacked."""

    def __init__(self, arrays: bool = True) -> None:
        """Make stacks of tensors and, unless somebody registered how they travel, `arrays`."""
        super().__init__()
        self.numbers: dict[int, int] = {}  # by id; the stacks keep the things alive
        self.array_type = np.ndarray if arrays else None

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
        plain = layout is torch.strided and is_cpu and requires_grad >= is_parameter
        if not plain or not 0 < size <= _LARGEST or len(self) >= _STACKS:
            return None
        kind: int | str | None
        if isinstance(dtype, np.dtype):
            kind = dtype.str if dtype.kind in "biufc" and dtype.isnative else None
        else:
            kind = stackable_code(dtype)
        if kind is None:
            return None
        return _Stack(len(self) * _NUMBERS, kind, dtype, tuple(shape), requires_grad, is_parameter)

    def blocks(self) -> dict[int, StackedBlock]:
        """Return what `unstack` needs: the stacks, each by its first number."""
        stacks = [stack for stack in self.values() if stack is not None and stack.things]
        return {stack.base: stack.block() for stack in stacks}


class StackingPicklerMixin:
    """Mixin for picklers that put small tensors and arrays on `stacks` and their numbers into the pickle."""

    def __init__(self, stacks: TensorStacks, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stacks = stacks

    def persistent_id(self, thing: Any) -> int | None:
        kind = type(thing)
        stacks = self._stacks
        if kind is Tensor:
            stack = stacks[_tensor_key(thing)]
            if stack is None or thing.__dict__ or not thing.is_contiguous():
                return None
        elif kind is nn.Parameter:
            stack = stacks[(*_tensor_key(thing), True)]
            if stack is None or thing.__dict__ or not thing.is_contiguous():
                return None
        elif kind is stacks.array_type:
            key = _array_key(thing)
            stack = stacks[key]
            # `is`: dtypes may be equal and differ in their metadata.
            if stack is None or stack.dtype is not key[0] or not thing.flags.carray:
                return None
        else:
            return None
        number = stacks.numbers.get(id(thing))
        if number is None:
            things = stack.things
            if len(things) == _NUMBERS:
                return None
            number = stacks.numbers[id(thing)] = stack.base + len(things)
            things.append(thing)
        return number


def unstack(blocks: dict[int, StackedBlock]) -> Callable[[int], Any]:
    """Return what finds a tensor or array by its number."""
    things: dict[int, Any] = {}
    for base, (dtype, shape, data, tickets, is_parameter) in blocks.items():
        rows = _split(dtype, shape, data)
        if tickets is not None:
            rows = arrive_tracked(rows, tickets, is_parameter)
        things.update(zip(range(base, base + len(rows)), rows, strict=True))
    return things.__getitem__


def _split(dtype: int | str, shape: tuple[int, ...], data: Any) -> list[Any]:
    if isinstance(dtype, str):
        return _rows(np.frombuffer(data, dtype), shape)
    torch_dtype = dtype_of(dtype)
    if torch_dtype is torch.bfloat16:  # numpy does not know it
        halves = _rows(np.frombuffer(data, np.int16), shape)
        return [torch.from_numpy(half).view(torch.bfloat16) for half in halves]
    flat = torch.frombuffer(data, dtype=torch_dtype).numpy()
    return list(map(torch.from_numpy, _rows(flat, shape)))


def _rows(flat: np.ndarray[Any, Any], shape: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    if not shape:
        return [np.array(scalar) for scalar in flat]
    return [row.copy() for row in flat.reshape(-1, *shape)]


def holds_many(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether a container seems to contain many small tensors or arrays.

    This is a guess that costs little: of a large container, only the first part is looked at.
    """
    parts = value.values() if isinstance(value, dict) else value
    if len(parts) >= MANY:
        return _holds_some(next(iter(parts)), depth)
    for part in parts:  # noqa: SIM110  # every message comes here, and a generator takes twice as long
        if type(part) in CONTAINERS and depth and holds_many(part, depth - 1):
            return True
    return False


def _holds_some(value: Any, depth: int) -> bool:
    """Return whether `value` is a small tensor or array or contains one."""
    if type(value) in _SMALL_THINGS:
        return True
    if type(value) in _SCALARS or not depth:
        return False
    if not isinstance(value, tuple | list):
        value = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        value = value.values()
    return any(_holds_some(part, depth - 1) for part in islice(value, MANY))

"""Check whether a result is the only reference to its memory.

The memory of such a result can be leased to the caller without a snapshot. The check compares the
reference counts of Python and of torch with those of an object that has no other reference. The
expected counts depend on the versions of Python and torch, so they are measured at import and not
written down. The helper functions below must therefore be called with the same nesting for the
measurement and for the check.

Without the interpreter lock, a reference count may be too low for a moment while a reference moves
between threads. No result counts as exclusive there, and the caller gets a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from telegrad.free_threading import has_gil

# For fewer bytes, a snapshot costs less than mapping the memory of the tensor itself.
MIN_LEASE_BYTES = 1 << 20
_MAX_ITEMS = 16  # longer tuples and lists are not searched
_SCALAR_TYPES = (int, float, bool, str, type(None))


def is_exclusive(value: Any, min_bytes: int = MIN_LEASE_BYTES, any_device: bool = False) -> bool:
    """Return whether the caller's variable is the only reference to the CUDA tensors of `value`.

    Return False for a result without a tensor of at least `min_bytes` bytes. With `any_device`,
    consider tensors of all devices and not only those of CUDA devices.
    """
    kind = type(value)
    if kind is Tensor:
        if not (value.is_cuda or any_device) or value.numel() * value.itemsize < min_bytes:
            return False
        return _reference_count(value) <= _EXCLUSIVE_COUNT and _owns_storage(value) and has_gil()
    if (kind is not tuple and kind is not list) or len(value) > _MAX_ITEMS:
        return False
    sizes = [
        item.numel() * item.itemsize
        for item in value
        if type(item) is Tensor and (item.is_cuda or any_device)
    ]
    return (
        bool(sizes)
        and max(sizes) >= min_bytes
        and _reference_count(value) <= _EXCLUSIVE_COUNT
        and has_gil()
        and all(
            (count <= _EXCLUSIVE_ITEM_COUNT and _owns_storage(item))
            if type(item) is Tensor
            else type(item) in _SCALAR_TYPES
            for count, item in zip(_item_reference_counts(value), value, strict=True)
        )
    )


def _reference_count(value: object) -> int:
    return sys.getrefcount(value)


def _item_reference_counts(value: Iterable[object]) -> list[int]:
    return [sys.getrefcount(item) for item in value]


def _storage_reference_counts(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)  # type: ignore[attr-defined]


def _owns_storage(tensor: Tensor) -> bool:
    """Return whether no other tensor, graph or C++ object refers to the memory of `tensor`.

    The memory must also belong to torch, not to an object such as a numpy array.
    """
    return (
        tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor._use_count() == 1  # type: ignore[attr-defined]
        and _storage_reference_counts(tensor) == _EXCLUSIVE_STORAGE_COUNTS
        and tensor.untyped_storage().resizable()
    )


def _reference_count_of_argument(value: object) -> int:
    """Stand for `is_exclusive` in the measurement: a parameter adds one reference."""
    return _reference_count(value)


def _measure_exclusive_counts() -> tuple[int, int, tuple[int, int]]:
    """Return what the functions above count for objects that nothing else refers to."""
    value, items = object(), (object(),)
    return (
        _reference_count_of_argument(value),
        _item_reference_counts(items)[0],
        _storage_reference_counts(torch.empty(1)),
    )


_EXCLUSIVE_COUNT, _EXCLUSIVE_ITEM_COUNT, _EXCLUSIVE_STORAGE_COUNTS = _measure_exclusive_counts()

"""Whether a result is the last that refers to its memory, so that it can be lent to the caller as it is.

Python's counts of references and torch's tell. What they are for something that one variable refers to depends on the
versions of both, so they are not compared with fixed numbers, but with those of an object that is known to be alone.

Without the interpreter lock, Python's count may be too low for a moment while a reference passes from one thread to
another. So there no result is taken for the last, and the caller gets a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from telegrad.interpreter import has_lock

# bytes: a snapshot of fewer costs less than mapping memory that was not made for it
MIN_LEASE_BYTES = 1 << 20
_MAX_ITEMS = 16  # a result of more parts is not looked through
_SCALAR_TYPES = (int, float, bool, str, type(None))


def is_exclusive(value: Any, min_bytes: int = MIN_LEASE_BYTES, any_device: bool = False) -> bool:
    """Does nobody refer to the CUDA tensors of a result but the one variable that this is called with?

    Only results with one of `min_bytes` so many bytes are looked at; False for others. `any_device`: on any device.
    """
    kind = type(value)
    if kind is Tensor:
        if not (value.is_cuda or any_device) or value.numel() * value.itemsize < min_bytes:
            return False
        return _reference_count(value) <= _EXCLUSIVE_COUNT and _owns_storage(value) and has_lock()
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
        and has_lock()
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
    """Is this all there is to its memory, which is torch's own: no view, no graph, no reference from C++?"""
    return (
        tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor._use_count() == 1  # type: ignore[attr-defined]
        and _storage_reference_counts(tensor) == _EXCLUSIVE_STORAGE_COUNTS
        and tensor.untyped_storage().resizable()
    )


def _reference_count_of_argument(value: object) -> int:
    return _reference_count(value)


def _measure_exclusive_counts() -> tuple[int, int, tuple[int, int]]:
    """What the functions above count if there is nobody else; it differs between versions of Python."""
    value, items = object(), (object(),)
    return (
        _reference_count_of_argument(value),
        _item_reference_counts(items)[0],
        _storage_reference_counts(torch.empty(1)),
    )


_EXCLUSIVE_COUNT, _EXCLUSIVE_ITEM_COUNT, _EXCLUSIVE_STORAGE_COUNTS = _measure_exclusive_counts()

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
WORTH_LENDING = 1 << 20
_PARTS = 16  # a result of more parts is not looked through
_PLAIN = (int, float, bool, str, type(None))


def is_exclusive(value: Any, at_least: int = WORTH_LENDING, anywhere: bool = False) -> bool:
    """Does nobody refer to the CUDA tensors of a result but the one variable that this is called with?

    Only results with one of `at_least` so many bytes are looked at; False for others. `anywhere`: on any device.
    """
    kind = type(value)
    if kind is Tensor:
        if not (value.is_cuda or anywhere) or value.numel() * value.itemsize < at_least:
            return False
        return _references(value) <= _ALONE and _is_whole(value) and has_lock()
    if (kind is not tuple and kind is not list) or len(value) > _PARTS:
        return False
    sizes = [
        part.numel() * part.itemsize
        for part in value
        if type(part) is Tensor and (part.is_cuda or anywhere)
    ]
    return (
        bool(sizes)
        and max(sizes) >= at_least
        and _references(value) <= _ALONE
        and has_lock()
        and all(
            (count <= _ALONE_INSIDE and _is_whole(part))
            if type(part) is Tensor
            else type(part) in _PLAIN
            for count, part in zip(_references_inside(value), value, strict=True)
        )
    )


def _references(value: object) -> int:
    return sys.getrefcount(value)


def _references_inside(value: Iterable[object]) -> list[int]:
    return [sys.getrefcount(part) for part in value]


def _references_to_memory(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)  # type: ignore[attr-defined]


def _is_whole(tensor: Tensor) -> bool:
    """Is this all there is to its memory, which is torch's own: no view, no graph, no reference from C++?"""
    return (
        tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor._use_count() == 1  # type: ignore[attr-defined]
        and _references_to_memory(tensor) == _ALONE_MEMORY
        and tensor.untyped_storage().resizable()
    )


def _alone(value: object) -> int:
    return _references(value)


def _count_alone() -> tuple[int, int, tuple[int, int]]:
    """What the functions above count if there is nobody else; it differs between versions of Python."""
    value, inside = object(), (object(),)
    return _alone(value), _references_inside(inside)[0], _references_to_memory(torch.empty(1))


_ALONE, _ALONE_INSIDE, _ALONE_MEMORY = _count_alone()

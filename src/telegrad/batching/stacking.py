"""The arguments of many calls as those of one, and its result as one for each.

Tensors are stacked along a new first dimension. Tuples, lists, dicts and dataclasses that hold
tensors keep their form, with each leaf stacked. Everything else arrives as a list, one item per
call. Calls go together only if their `signature_of` is the same. All of it is made of
differentiable operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from telegrad.errors import UsageError

Signature = tuple[Any, ...]

_PLAIN: Signature = ()  # the signature of what is not stacked


def signature_of(value: Any) -> Signature:
    """Equal for values that can be stacked with each other."""
    kind = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.device, value.layout
    if kind in (tuple, list) or _is_namedtuple(value):
        signatures: Signature = tuple([signature_of(item) for item in value])
    elif kind is dict:
        signatures = tuple([(key, signature_of(item)) for key, item in value.items()])
        if all(signature == _PLAIN for _, signature in signatures):
            return _PLAIN
    elif _is_record(value):
        signatures = tuple(
            [signature_of(getattr(value, field.name)) for field in dataclasses.fields(value)]
        )
    else:
        return _PLAIN
    return (kind, *signatures) if any(signature != _PLAIN for signature in signatures) else _PLAIN


def stack(values: Sequence[Any], signature: Signature) -> Any:
    """One value made of many that have this signature."""
    first = values[0]
    if signature == _PLAIN:
        return list(values)
    if isinstance(first, torch.Tensor):
        return first.unsqueeze(0) if len(values) == 1 else torch.stack(list(values))
    _, *signatures = signature
    if isinstance(first, dict):
        return {key: stack([value[key] for value in values], inner) for key, inner in signatures}
    if isinstance(first, tuple | list):
        items = [
            stack([value[index] for value in values], inner)
            for index, inner in enumerate(signatures)
        ]
        return type(first)(*items) if _is_namedtuple(first) else type(first)(items)
    names = [field.name for field in dataclasses.fields(first)]
    return _remake(
        first,
        {
            name: stack([getattr(value, name) for value in values], inner)
            for name, inner in zip(names, signatures, strict=True)
        },
    )


def split(value: Any, count: int, name: str, rows: int | None = None) -> list[Any]:
    """What `name` returned for a batch, as one result per call; if it was padded to `rows`, the first `count`.

    A tensor, array or list is cut along its first dimension; tuples, dicts and dataclasses of those
    are cut inside; None is None for everybody.
    """
    if isinstance(value, torch.Tensor):
        _check(value.shape[0] if value.dim() else 0, rows or count, name)
        return [value[0]] if count == 1 else list(value.unbind(0)[:count])
    if isinstance(value, list | np.ndarray):
        _check(len(value) if isinstance(value, list) or value.ndim else 0, rows or count, name)
        return list(value[:count])
    if value is None:
        return [None] * count
    if isinstance(value, dict):
        columns = [split(item, count, name, rows) for item in value.values()]
        return [dict(zip(value, row, strict=True)) for row in _rows(columns, count)]
    if isinstance(value, tuple):
        columns = [split(item, count, name, rows) for item in value]
        return [
            type(value)(*row) if _is_namedtuple(value) else row for row in _rows(columns, count)
        ]
    if _is_record(value):
        names = [field.name for field in dataclasses.fields(value)]
        columns = [split(getattr(value, each), count, name, rows) for each in names]
        return [_remake(value, dict(zip(names, row, strict=True))) for row in _rows(columns, count)]
    raise UsageError(
        f"{name} returned {type(value).__name__} for a batch of {count}. A batched function returns a tensor or list "
        "with one result per call, or a tuple, dict or dataclass of those, or None"
    )


def _rows(columns: list[list[Any]], count: int) -> list[tuple[Any, ...]]:
    return list(zip(*columns, strict=True)) if columns else [()] * count


def _check(length: int, rows: int, name: str) -> None:
    if length != rows:
        raise UsageError(f"{name} returned {length} results for a batch of {rows}")


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _remake(example: Any, fields: dict[str, Any]) -> Any:
    """A dataclass like `example` with other values; no code of the user checks them, for they are batches."""
    made = object.__new__(type(example))
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made

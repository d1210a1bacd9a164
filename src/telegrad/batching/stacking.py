"""Stack the arguments of many calls into those of one, and split its result into one for each call.

Tensors are stacked along a new first dimension. Tuples, lists, dicts and dataclasses that contain
tensors keep their structure, and each leaf is stacked. Other values become a list with one item for
each call. Calls can be stacked if their arguments have equal signatures (`signature_of`). All
operations on tensors are differentiable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from telegrad.errors import UsageError

Signature = tuple[Any, ...]

_NOT_STACKED: Signature = ()  # the signature of values that contain no tensor


def signature_of(value: Any) -> Signature:
    """Return a value that is equal for values that can be stacked with each other."""
    kind = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.device, value.layout
    if kind in (tuple, list) or _is_namedtuple(value):
        signatures: Signature = tuple([signature_of(item) for item in value])
    elif kind is dict:
        signatures = tuple([(key, signature_of(item)) for key, item in value.items()])
        if all(signature == _NOT_STACKED for _, signature in signatures):
            return _NOT_STACKED
    elif _is_dataclass(value):
        signatures = tuple(
            [signature_of(getattr(value, field.name)) for field in dataclasses.fields(value)]
        )
    else:
        return _NOT_STACKED
    return (
        (kind, *signatures)
        if any(signature != _NOT_STACKED for signature in signatures)
        else _NOT_STACKED
    )


def stack(values: Sequence[Any], signature: Signature) -> Any:
    """Stack values that have this signature into one."""
    first = values[0]
    if signature == _NOT_STACKED:
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
    return _copy_dataclass(
        first,
        {
            name: stack([getattr(value, name) for value in values], inner)
            for name, inner in zip(names, signatures, strict=True)
        },
    )


def split(value: Any, count: int, name: str, rows: int | None = None) -> list[Any]:
    """Split what the function `name` returned for a batch into `count` results.

    A tensor, array or list is split along its first dimension; tuples, dicts and dataclasses of
    those are split inside; None is the result of every call. The results for padding are dropped if
    the batch was padded to `rows` rows.
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
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        columns = [split(getattr(value, each), count, name, rows) for each in names]
        return [
            _copy_dataclass(value, dict(zip(names, row, strict=True)))
            for row in _rows(columns, count)
        ]
    raise UsageError(
        f"{name} returned {type(value).__name__} for a batch of {count} calls. A batched function "
        "must return a tensor, array or list with one result for each call, a tuple, dict or "
        "dataclass of those, or None"
    )


def _rows(columns: list[list[Any]], count: int) -> list[tuple[Any, ...]]:
    """Return the transpose of `columns`, which has `count` rows."""
    return list(zip(*columns, strict=True)) if columns else [()] * count


def _check(length: int, rows: int, name: str) -> None:
    if length != rows:
        raise UsageError(f"{name} returned {length} results for a batch of {rows}")


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _copy_dataclass(example: Any, fields: dict[str, Any]) -> Any:
    """Return a dataclass of the type of `example` with other field values.

    Its `__init__` and `__post_init__` are not called: they may reject batches.
    """
    made = object.__new__(type(example))
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made

"""Constructors of tensors from what arrived."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.wire.dtypes import DTYPES
from telegrad.wire.tensor_gradients import build_parameter, restore_gradient

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

_frombuffer = torch.frombuffer


def build_flat(code: int, data: Any) -> Tensor:
    return _frombuffer(data, dtype=DTYPES[code])


def empty(code: int, shape: Sequence[int], device: str | torch.device) -> Tensor:
    """Memory for a tensor that a carrier brings."""
    return torch.empty(shape, dtype=DTYPES[code], device=device)


def shaped(code: int, shape: Sequence[int], data: Any) -> Tensor:
    dtype = DTYPES[code]
    if not len(data):
        return torch.empty(
            shape, dtype=dtype, device=data.device if isinstance(data, Tensor) else "cpu"
        )
    if isinstance(data, Tensor):
        return data.view(dtype).view(shape).detach()
    return _frombuffer(data, dtype=dtype).resize_(shape)


def build_restrided(code: int, shape: Sequence[int], stride: Sequence[int], data: Any) -> Tensor:
    dtype = DTYPES[code]
    flat = data.view(dtype).detach() if isinstance(data, Tensor) else _frombuffer(data, dtype=dtype)
    return flat.as_strided_(shape, stride)


def build_reinterpreted(code: int, tensor: Tensor) -> Tensor:
    return tensor.view(DTYPES[code]).detach()


def build_expanded(seed: Tensor, shape: Sequence[int]) -> Tensor:
    return seed.expand(shape).detach()


def build_with_gaps(packed: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(
        packed.shape, stride, dtype=packed.dtype, device=packed.device
    ).copy_(packed)


def build_tracked(
    code: int, shape: Sequence[int], data: Any, ticket: int, is_parameter: bool
) -> Tensor:
    tensor = build_flat(code, data) if len(shape) == 1 and len(data) else shaped(code, shape, data)
    return (
        build_parameter(tensor, ticket, None) if is_parameter else restore_gradient(tensor, ticket)
    )


def build_with_attributes(data: Tensor, ticket: int | None, state: dict[str, Any] | None) -> Tensor:
    tensor = restore_gradient(data, ticket)
    if state:
        tensor.__dict__.update(state)
    return tensor


def build_meta(code: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=DTYPES[code], device="meta")


def build_moved(build: Callable[..., Tensor], parts: tuple[Any, ...], device: str) -> Tensor:
    return build(*parts).to(device)


# A registered extension code makes pickle look a constructor up in a table instead of importing its module each time.
EXTENSION_CODE = 0x54474400  # and those that follow: 16 are ours, the next 16 those of the carrier
for _number, _constructor in enumerate(
    (build_flat, shaped, build_with_attributes, build_parameter, build_tracked)
):
    copyreg.add_extension(_constructor.__module__, _constructor.__name__, EXTENSION_CODE + _number)

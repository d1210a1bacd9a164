"""Constructors that the receiver calls to build tensors from the parts of a message.

Pickle calls them with the arguments that the reducers of `wire/tensors.py` returned. `data` is
memory of the message: bytes on the CPU, or a tensor of bytes on another device. The tensor is built
on this memory without a copy and owns it. It is never a view (`detach`, `resize_` and
`as_strided_` make none), because autograd refuses some in-place operations on views.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.wire.dtypes import DTYPES
from telegrad.wire.gradient_tracking import build_parameter, restore_gradient

# What a reducer returns: a constructor and its arguments.
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

_frombuffer = torch.frombuffer


def build_flat(code: int, data: Any) -> Tensor:
    """Build a CPU tensor with one dimension. There must be at least one element."""
    return _frombuffer(data, dtype=DTYPES[code])


def build_empty(code: int, shape: Sequence[int], device: str | torch.device) -> Tensor:
    """Build a tensor whose values are not set. A device transfer writes them later."""
    return torch.empty(shape, dtype=DTYPES[code], device=device)


def build_shaped(code: int, shape: Sequence[int], data: Any) -> Tensor:
    """Build a contiguous tensor."""
    dtype = DTYPES[code]
    if not len(data):
        device = data.device if isinstance(data, Tensor) else "cpu"
        return torch.empty(shape, dtype=dtype, device=device)
    if isinstance(data, Tensor):
        return data.view(dtype).view(shape).detach()
    return _frombuffer(data, dtype=dtype).resize_(shape)


def build_restrided(code: int, shape: Sequence[int], stride: Sequence[int], data: Any) -> Tensor:
    """Build a tensor with these strides from all the memory that it spans."""
    dtype = DTYPES[code]
    flat = data.view(dtype).detach() if isinstance(data, Tensor) else _frombuffer(data, dtype=dtype)
    return flat.as_strided_(shape, stride)


def build_reinterpreted(code: int, tensor: Tensor) -> Tensor:
    """Build a tensor of another dtype of the same size from the same bytes."""
    return tensor.view(DTYPES[code]).detach()


def build_expanded(unexpanded: Tensor, shape: Sequence[int]) -> Tensor:
    """Build an expanded tensor: dimensions of size 1 get the sizes in `shape`."""
    return unexpanded.expand(shape).detach()


def build_with_gaps(packed: Tensor, stride: Sequence[int]) -> Tensor:
    """Build a tensor whose strides leave gaps, from a contiguous one."""
    tensor = torch.empty_strided(packed.shape, stride, dtype=packed.dtype, device=packed.device)
    return tensor.copy_(packed)


def build_tracked(
    code: int, shape: Sequence[int], data: Any, tensor_id: int, is_parameter: bool
) -> Tensor:
    """Build a contiguous CPU tensor or parameter that requires a gradient."""
    tensor = (
        build_flat(code, data) if len(shape) == 1 and len(data) else build_shaped(code, shape, data)
    )
    if is_parameter:
        return build_parameter(tensor, tensor_id, None)
    return restore_gradient(tensor, tensor_id)


def build_with_attributes(
    data: Tensor, tensor_id: int | None, state: dict[str, Any] | None
) -> Tensor:
    """Build a tensor that may require a gradient and may have attributes of the user."""
    tensor = restore_gradient(data, tensor_id)
    if state:
        tensor.__dict__.update(state)
    return tensor


def build_meta(code: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Build a tensor of the meta device."""
    return torch.empty_strided(shape, stride, dtype=DTYPES[code], device="meta")


def build_moved(build: Callable[..., Tensor], parts: tuple[Any, ...], device: str) -> Tensor:
    """Build a tensor and move it to another device."""
    return build(*parts).to(device)


# With a registered extension code, pickle finds a constructor in a table and does not import its
# module for each tensor. The codes are part of the wire format. The first 16 are for the
# constructors below, the next 16 for those of device transfers.
EXTENSION_CODE = 0x54474400
for _offset, _constructor in enumerate(
    (build_flat, build_shaped, build_with_attributes, build_parameter, build_tracked)
):
    copyreg.add_extension(_constructor.__module__, _constructor.__name__, EXTENSION_CODE + _offset)

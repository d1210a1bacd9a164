"""Tensors of subclasses of `torch.Tensor`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from telegrad.errors import UsageError
from telegrad.wire.tensor_builders import Reduced
from telegrad.wire.tensor_gradients import (
    refuse_tangent,
    restore_gradient,
    ticket_for,
    wants_gradients,
)

_PROTOCOL = 5  # of pickle


def reducer_for(kind: type) -> Callable[[Any], Any] | None:
    """Return how tensors of a subclass of `Tensor` travel; None: it is no such class."""
    if not issubclass(kind, Tensor):
        return None
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        if _pickles_like(kind, Tensor):
            return reduce_subclass
        if issubclass(kind, nn.Parameter) and _pickles_like(kind, nn.Parameter):
            return reduce_parameter_subclass
    if (kind.__module__, kind.__name__) == ("torch.nested._internal.nested_tensor", "NestedTensor"):
        return reduce_jagged
    return reduce_as_its_type_says


def _pickles_like(kind: type, base: type) -> bool:
    names = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in names)


def reduce_parameter_subclass(parameter: nn.Parameter) -> Reduced:
    """A parameter of a subclass that pickles as parameters do, which would make a plain one of it."""
    with torch._C.DisableTorchFunctionSubclass():
        if forward_ad._current_level >= 0:
            refuse_tangent(parameter)
        data = parameter.detach().as_subclass(Tensor)
        return _parameter_subclass, (
            type(parameter),
            data,
            ticket_for(parameter),
            parameter.__dict__,
        )


def reduce_jagged(tensor: Any) -> Any:
    """A jagged NestedTensor: gradients go through its values."""
    if not tensor.requires_grad or not wants_gradients():
        return reduce_as_its_type_says(tensor)
    lengths = (tensor._maybe_min_seqlen, tensor._maybe_max_seqlen)
    return _jagged, (
        tensor.values(),
        tensor.offsets(),
        tensor.lengths(),
        tensor._ragged_idx,
        *lengths,
    )


def reduce_as_its_type_says(tensor: Tensor) -> Any:
    """A tensor of a subclass that pickles itself, and would do so without its gradient."""
    if forward_ad._current_level >= 0:
        refuse_tangent(tensor)
    if tensor.requires_grad and wants_gradients():
        raise UsageError(
            f"it requires a gradient, and gradients do not travel through tensors of type "
            f"{type(tensor).__qualname__}. Send a plain tensor (for a DTensor, its to_local()), or detach() it"
        )
    return tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]


def reduce_subclass(tensor: Tensor) -> Reduced:
    """A tensor of a subclass that leaves pickling to torch, which would send all the memory that a view belongs to."""
    if forward_ad._current_level >= 0:
        refuse_tangent(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        data = tensor.detach().as_subclass(Tensor)
    return _subclass, (type(tensor), data, ticket_for(tensor), tensor.__dict__)


def _subclass(
    kind: type[Tensor], data: Tensor, ticket: int | None, state: dict[str, Any]
) -> Tensor:
    tensor = restore_gradient(data, ticket).as_subclass(kind)
    tensor.__dict__.update(state)
    return tensor


def _parameter_subclass(
    kind: type[Tensor], data: Tensor, ticket: int | None, state: dict[str, Any]
) -> Tensor:
    if ticket and ticket > 0:
        tensor = restore_gradient(data, ticket).as_subclass(kind)
    else:
        tensor = Tensor._make_subclass(kind, data, ticket is not None)
    tensor.__dict__.update(state)
    return tensor


def _jagged(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ragged_idx: int,
    shortest: int | None,
    longest: int | None,
) -> Any:
    nested_tensor = importlib.import_module("torch.nested._internal.nested_tensor")  # few need it
    with torch.enable_grad():
        if lengths is None:
            return nested_tensor.nested_view_from_values_offsets(
                values, offsets, ragged_idx, shortest, longest
            )
        return nested_tensor.nested_view_from_values_offsets_lengths(
            values, offsets, lengths, ragged_idx, shortest, longest
        )

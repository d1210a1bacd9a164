"""Reducers and constructors for subclasses of `torch.Tensor`.

- A subclass that leaves pickling to torch is sent as a plain tensor and its attributes. Torch
  itself would send all the memory that a view belongs to.
- A jagged `NestedTensor` whose gradient is wanted is sent as its values and offsets: the gradient
  flows through the values.
- Other subclasses define how they are pickled, and their gradient would be lost. They are refused
  if they require a gradient that a distributed backward pass wants.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from telegrad.errors import UsageError
from telegrad.wire.gradient_tracking import (
    is_recording,
    refuse_tangent,
    restore_gradient,
    tensor_id_for,
)
from telegrad.wire.tensors import Reduced

_NESTED_MODULE = "torch.nested._internal.nested_tensor"
_PICKLING_METHODS = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
_PICKLE_PROTOCOL = 5


def reducer_for(cls: type[Tensor]) -> Callable[[Any], Any]:
    """Return the reducer for a subclass of `Tensor`."""
    if cls.__torch_dispatch__ is Tensor.__torch_dispatch__:
        if _pickles_like(cls, Tensor):
            return _reduce_subclass
        if issubclass(cls, nn.Parameter) and _pickles_like(cls, nn.Parameter):
            return _reduce_parameter_subclass
    if (cls.__module__, cls.__name__) == (_NESTED_MODULE, "NestedTensor"):
        return _reduce_jagged
    return _reduce_by_own_method


def _pickles_like(cls: type, base: type) -> bool:
    return all(getattr(cls, name, None) is getattr(base, name, None) for name in _PICKLING_METHODS)


def _reduce_subclass(tensor: Tensor) -> Reduced:
    """Reduce a tensor of a subclass that is pickled like `Tensor`."""
    if forward_ad._current_level >= 0:
        refuse_tangent(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        data = tensor.detach().as_subclass(Tensor)
    return _build_subclass, (type(tensor), data, tensor_id_for(tensor), tensor.__dict__)


def _reduce_parameter_subclass(parameter: nn.Parameter) -> Reduced:
    """Reduce a parameter of a subclass that is pickled like `Parameter`.

    Torch's own reducer would build an `nn.Parameter` and lose the subclass.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if forward_ad._current_level >= 0:
            refuse_tangent(parameter)
        data = parameter.detach().as_subclass(Tensor)
        tensor_id = tensor_id_for(parameter)
        return _build_parameter_subclass, (type(parameter), data, tensor_id, parameter.__dict__)


def _reduce_jagged(tensor: Any) -> Any:
    """Reduce a jagged NestedTensor."""
    if not tensor.requires_grad or not is_recording():
        return _reduce_by_own_method(tensor)
    return _build_jagged, (
        tensor.values(),
        tensor.offsets(),
        tensor.lengths(),
        tensor._ragged_idx,
        tensor._maybe_min_seqlen,
        tensor._maybe_max_seqlen,
    )


def _reduce_by_own_method(tensor: Tensor) -> Any:
    """Reduce a tensor of a subclass as it defines itself, which drops its gradient."""
    if forward_ad._current_level >= 0:
        refuse_tangent(tensor)
    if tensor.requires_grad and is_recording():
        raise UsageError(
            "it requires a gradient, and gradients do not travel through tensors of type "
            f"{type(tensor).__qualname__}. Send a plain tensor (for a DTensor, its to_local()), "
            "or detach() it"
        )
    return tensor.__reduce_ex__(_PICKLE_PROTOCOL)  # type: ignore[no-untyped-call]


def _build_subclass(
    cls: type[Tensor], data: Tensor, tensor_id: int | None, state: dict[str, Any]
) -> Tensor:
    tensor = restore_gradient(data, tensor_id).as_subclass(cls)
    tensor.__dict__.update(state)
    return tensor


def _build_parameter_subclass(
    cls: type[Tensor], data: Tensor, tensor_id: int | None, state: dict[str, Any]
) -> Tensor:
    if tensor_id and tensor_id > 0:
        tensor = restore_gradient(data, tensor_id).as_subclass(cls)
    else:
        tensor = Tensor._make_subclass(cls, data, tensor_id is not None)
    tensor.__dict__.update(state)
    return tensor


def _build_jagged(
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    ragged_idx: int,
    min_length: int | None,
    max_length: int | None,
) -> Any:
    # Imported here because few programs use it.
    nested_tensor = importlib.import_module(_NESTED_MODULE)
    with torch.enable_grad():
        if lengths is None:
            return nested_tensor.nested_view_from_values_offsets(
                values, offsets, ragged_idx, min_length, max_length
            )
        return nested_tensor.nested_view_from_values_offsets_lengths(
            values, offsets, lengths, ragged_idx, min_length, max_length
        )

"""Reducers for tensors: each becomes a small description and its bytes as a `PickleBuffer`.

How a tensor is sent:
- Only the bytes that it uses are sent, not the whole storage of a view.
- Strides are kept. A tensor that fills its memory without gaps (transposed, channels-last) is sent
  as it is. One with gaps is packed for the transfer. A view of a small part of its memory arrives
  contiguous.
- An expanded tensor is sent unexpanded.
- The receiver builds the tensor on the memory that the bytes arrived in, without a copy. It owns
  this memory, and it is not a view. See `wire/tensor_builders.py`.
- A tensor that requires a gradient is sent with an id. See `wire/gradient_tracking.py`.
- Sparse and quantized tensors are in `wire/tensor_layouts.py`, subclasses of `Tensor` in
  `wire/tensor_subclasses.py`.
- Memory of another device than the CPU is sent as the `DeviceTensorReducer` decides.

The codec's pickler uses `REDUCERS` for `Tensor` and `nn.Parameter`.

State: `_Hooks`, one for each process. `device_reducer` is set once, when `telegrad.cuda.transfers`
is imported. `maps_cpu` is set when a device map sends CPU tensors to another device, and is never
reset. They are module globals because pickle calls a reducer with the object alone. The device
reducer finds the route of the current message by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from telegrad.wire.dtypes import CODES, NUMPY_CODES
from telegrad.wire.gradient_tracking import (
    build_parameter,
    refuse_tangent,
    tensor_id_for,
)
from telegrad.wire.tensor_builders import (
    Reduced,
    build_expanded,
    build_flat,
    build_meta,
    build_moved,
    build_reinterpreted,
    build_restrided,
    build_shaped,
    build_tracked,
    build_with_attributes,
    build_with_gaps,
)
from telegrad.wire.tensor_layouts import SPARSE_LAYOUTS, reduce_quantized, reduce_sparse

# A view keeps its strides if its memory with the gaps is at most this many times what it uses.
_MAX_SPAN_RATIO = 4
# Copying so few bytes into the pickle is cheaper than a buffer and its callback in the codec.
_MAX_COPIED_BYTES = 1024
_strided = torch.strided


class DeviceTensorReducer(Protocol):
    """Decides how tensors are sent from device to device."""

    def reduce_device_tensor(self, tensor: Tensor, code: int) -> Reduced | None:
        """Reduce a contiguous tensor of a device other than the CPU.

        Return None to send it through host memory.
        """

    def target_of_cpu_tensor(self, tensor: Tensor) -> str | None:
        """Return the device on which a CPU tensor should arrive; None for the CPU.

        Called only after `map_cpu_tensors`.
        """


class _Hooks:
    device_reducer: DeviceTensorReducer | None = None
    maps_cpu = False


def set_device_reducer(device_reducer: DeviceTensorReducer) -> None:
    """Let `device_reducer` send the tensors of other devices in all messages of this process."""
    _Hooks.device_reducer = device_reducer


def map_cpu_tensors() -> None:
    """Ask the device reducer about each CPU tensor from now on: some device map moves them."""
    _Hooks.maps_cpu = True


def can_stack_tensors() -> bool:
    """Return whether small tensors may be stacked instead of being reduced one by one.

    They may not if each must be checked for its target device or for a forward-mode tangent.
    """
    return not _Hooks.maps_cpu and forward_ad._current_level < 0


def reduce_tensor(tensor: Tensor) -> Reduced:
    """Reduce a plain `torch.Tensor` of any dtype, layout and device."""
    if forward_ad._current_level >= 0:
        refuse_tangent(tensor)
    if _Hooks.maps_cpu and tensor.is_cpu:
        return _reduce_mapped(tensor)
    return reduce_on_same_device(tensor)


def _reduce_mapped(tensor: Tensor) -> Reduced:
    """Reduce a CPU tensor that may have to arrive on another device."""
    assert _Hooks.device_reducer is not None
    device = None
    # Others are reduced to their data, which comes here again, and what is added to it.
    if not tensor.requires_grad and not tensor.__dict__:
        device = _Hooks.device_reducer.target_of_cpu_tensor(tensor)
    return reduce_on_same_device(tensor) if device is None else _reduce_for_device(tensor, device)


def _reduce_for_device(tensor: Tensor, device: str) -> Reduced:
    """Reduce a CPU tensor that the receiver moves to another device."""
    return build_moved, (*reduce_on_same_device(tensor), device)


def reduce_on_same_device(tensor: Tensor) -> Reduced:
    """Reduce a tensor like `reduce_tensor`, but let a CPU tensor arrive on the CPU."""
    code = CODES.get(tensor.dtype)
    is_plain = (
        code in NUMPY_CODES and tensor.is_cpu and tensor.layout is _strided and not tensor.__dict__
    )
    if is_plain and tensor.is_contiguous():
        if not tensor.requires_grad:
            data = _as_array(tensor)
            if data is not None:
                size = data.nbytes
                if size > _MAX_COPIED_BYTES:
                    content: Any = PickleBuffer(data)
                else:
                    content = bytearray(data.tobytes())
                if data.ndim == 1 and size:
                    return build_flat, (code, content)
                return build_shaped, (code, data.shape, content)
        elif not _Hooks.maps_cpu and not tensor.is_neg() and not tensor.is_conj():
            return _reduce_tracked(tensor, code, False)
    if tensor.requires_grad or tensor.__dict__:
        attributes = tensor.__dict__ or None
        return build_with_attributes, (tensor.detach(), tensor_id_for(tensor), attributes)
    if code is None:
        return reduce_quantized(tensor)
    if tensor.is_meta:
        return build_meta, (code, tuple(tensor.shape), tensor.stride())
    if tensor.layout is not _strided:
        if tensor.layout in SPARSE_LAYOUTS:
            return reduce_sparse(tensor)
        # mkldnn and other private layouts are sent as dense tensors.
        return _reduce_dense(tensor.to_dense(), code)
    if (
        not tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    ):
        reduced = None
        if _Hooks.device_reducer is not None:
            reduced = _Hooks.device_reducer.reduce_device_tensor(tensor, code)
        return reduced or _reduce_for_device(tensor.cpu(), str(tensor.device))
    return _reduce_dense(tensor, code)


def _as_array(tensor: Tensor) -> Any:
    """Return the memory of a plain tensor as an array.

    Return None if its negation or conjugation is lazy, so that the memory is not its value.
    """
    try:
        return tensor.numpy()
    except RuntimeError:
        if tensor.is_neg() or tensor.is_conj():
            return None
        raise


def reduce_parameter(parameter: nn.Parameter) -> Reduced:
    """Reduce an `nn.Parameter`."""
    if forward_ad._current_level >= 0:
        refuse_tangent(parameter)
    code = CODES.get(parameter.dtype)
    is_plain = (
        code in NUMPY_CODES
        and parameter.is_cpu
        and parameter.layout is _strided
        and not parameter.__dict__
    )
    if is_plain and parameter.requires_grad and parameter.is_contiguous() and not _Hooks.maps_cpu:
        return _reduce_tracked(parameter, code, True)
    attributes = parameter.__dict__ or None
    return build_parameter, (parameter.detach(), tensor_id_for(parameter), attributes)


def _reduce_tracked(tensor: Tensor, code: int | None, is_parameter: bool) -> Reduced:
    """Reduce a contiguous CPU tensor that requires a gradient.

    Its data is part of the description: a nested description of the data would take longer.
    """
    data = tensor.detach().numpy()
    buffer = PickleBuffer(data) if data.nbytes else b""
    return build_tracked, (code, tuple(tensor.shape), buffer, tensor_id_for(tensor), is_parameter)


def _reduce_dense(tensor: Tensor, code: int) -> Reduced:
    """Reduce a strided tensor with any strides."""
    tensor = tensor.resolve_conj().resolve_neg()
    shape, stride, numel = tuple(tensor.shape), tensor.stride(), tensor.numel()
    if numel == 0:
        return build_shaped, (code, shape, b"" if tensor.is_cpu else tensor.contiguous().view(-1))
    if not tensor.is_contiguous():
        dimensions = list(zip(shape, stride, strict=True))
        if any(size > 1 and step == 0 for size, step in dimensions):
            unexpanded_shape = [size if step else 1 for size, step in dimensions]
            return build_expanded, (tensor.as_strided(unexpanded_shape, stride), shape)
        # Elements of memory from the first to the last one that the tensor uses.
        span = 1 + sum((size - 1) * step for size, step in dimensions)
        if span <= numel:  # no gaps, in any order of dimensions, or overlapping windows
            memory = _raw_bytes(tensor.as_strided((span,), (1,)))
            return build_restrided, (code, shape, stride, memory)
        # Torch cannot make tensors of most of these dtypes contiguous.
        if tensor.itemsize == 1 and code not in NUMPY_CODES:
            return build_reinterpreted, (code, tensor.view(torch.uint8))
        if span <= _MAX_SPAN_RATIO * numel:
            return build_with_gaps, (tensor.contiguous(), stride)
        tensor = tensor.contiguous()
    return build_shaped, (code, shape, _raw_bytes(tensor.as_strided((numel,), (1,))))


def _raw_bytes(flat: Tensor) -> PickleBuffer | Tensor:
    """Return the bytes of a flat tensor: as a buffer on the CPU, else as a tensor."""
    raw = flat.view(torch.uint8)
    return PickleBuffer(raw.numpy()) if raw.is_cpu else raw


REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    Tensor: reduce_tensor,
    nn.Parameter: reduce_parameter,
}

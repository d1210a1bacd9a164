"""Tensors in messages: reducers for the sender and constructors for the receiver.

A reducer turns a tensor into a small description and its bytes as a `PickleBuffer`. Pickle calls
the constructors (`build_*`) with the arguments that the reducers returned. `data` is memory of the
message: bytes on the CPU, or a tensor of bytes on another device.

How a tensor is sent:
- Only the bytes that it uses are sent, not the whole storage of a view.
- Strides are kept. A tensor that fills its memory without gaps (transposed, channels-last) is sent
  as it is. One with gaps is packed for the transfer. A view of a small part of its memory arrives
  contiguous.
- An expanded tensor is sent unexpanded.
- The receiver builds the tensor on the memory that the bytes arrived in, without a copy. It owns
  this memory. It is never a view (`detach`, `resize_` and `as_strided_` make none), because
  autograd refuses some in-place operations on views.
- A tensor that requires a gradient is sent with an id. See `wire/gradient_tracking.py`.
- Sparse, quantized and nested tensors are sent as the dense tensors that they consist of.
  Subclasses of `Tensor` are in `wire/tensor_subclasses.py`.
- Memory of another device than the CPU is sent as the `DeviceTensorReducer` decides.

The codec's pickler uses `REDUCERS` for `Tensor` and `nn.Parameter`.

A dtype is sent as a code, its position in `DTYPES`. A dtype that this version of torch does not
have is None there, so codes are the same in all versions.

State: `_Hooks`, one for each process. `device_reducer` is set once, when `telegrad.cuda.transfers`
is imported. `maps_cpu` is set when a device map sends CPU tensors to another device, and is never
reset. They are module globals because pickle calls a reducer with the object alone. The device
reducer finds the route of the current message by itself.
"""

from __future__ import annotations

import copyreg
import struct
from collections.abc import Callable, Sequence
from pickle import PickleBuffer
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from telegrad.errors import UsageError
from telegrad.wire.gradient_tracking import (
    build_parameter,
    is_recording,
    refuse_tangent,
    restore_gradient,
    tensor_id_for,
)

# Positions are part of the wire format: add new names only at the end.
_DTYPE_NAMES = """
    float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128
    complex32 uint16 uint32 uint64
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
    uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7
    bcomplex32 bits1x8 bits2x4 bits4x2 bits8 bits16
""".split()  # noqa: SIM905  # one row per family reads better than a list
_NUMPY_NAMES = [name for name in _DTYPE_NAMES[:12] if name != "bfloat16"]
DTYPES: list[Any] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}
NUMPY_CODES = frozenset(CODES[getattr(torch, name)] for name in _NUMPY_NAMES)
# What a reducer returns: a constructor and its arguments.
Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
_frombuffer = torch.frombuffer
SPARSE_LAYOUTS = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)
_PER_TENSOR_SCHEMES = (torch.per_tensor_affine, torch.per_tensor_symmetric)
# A view keeps its strides if its memory with the gaps is at most this many times what it uses.
_MAX_SPAN_RATIO = 4
# Copying so few bytes into the pickle is cheaper than a buffer and its callback in the codec.
_MAX_COPIED_BYTES = 1024
_strided = torch.strided
SMALL_TENSOR = 0x02  # the first byte of what `encode_small` returns
_MAX_DIMENSIONS = 8
# By the number of dimensions. A dimension of a small tensor with elements fits 2 bytes.
_SHAPES = [struct.Struct(f"<BBB{count}H") for count in range(_MAX_DIMENSIONS + 1)]


def code_of(dtype: torch.dtype) -> int:
    """Return the code of a dtype. Raise `KeyError` for quantized dtypes, which have none."""
    return CODES[dtype]


def stackable_code(dtype: torch.dtype) -> int | None:
    """Return the code of a dtype whose tensors can be stacked and split; None for other dtypes."""
    code = CODES.get(dtype)
    return code if code in NUMPY_CODES or dtype is torch.bfloat16 else None


def dtype_of(code: int) -> torch.dtype:
    """Return the dtype that has this code."""
    dtype: torch.dtype = DTYPES[code]
    return dtype


def build_flat(code: int, data: Any) -> Tensor:
    """Build a CPU tensor with one dimension. There must be at least one element."""
    return _frombuffer(data, dtype=DTYPES[code])


def build_empty(code: int, shape: Sequence[int], device: str | torch.device) -> Tensor:
    """Build a tensor whose values are not set. A device transfer writes them later."""
    return torch.empty(shape, dtype=DTYPES[code], device=device)  # pragma: gpu


def build_shaped(code: int, shape: Sequence[int], data: Any) -> Tensor:
    """Build a contiguous tensor."""
    dtype = DTYPES[code]
    if not len(data):
        device = data.device if isinstance(data, Tensor) else "cpu"
        return torch.empty(shape, dtype=dtype, device=device)
    if isinstance(data, Tensor):  # pragma: gpu
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


def reduce_sparse(tensor: Tensor) -> Reduced:
    """Reduce a tensor of one of the `SPARSE_LAYOUTS`."""
    shape = tuple(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        return _build_coo, (tensor._indices(), tensor._values(), shape, tensor.is_coalesced())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        compressed, plain = tensor.crow_indices(), tensor.col_indices()
    else:
        compressed, plain = tensor.ccol_indices(), tensor.row_indices()
    return _build_compressed, (compressed, plain, tensor.values(), shape, str(tensor.layout))


def reduce_quantized(tensor: Tensor) -> Reduced:
    """Reduce a tensor of a dtype that has no code."""
    if tensor.is_quantized and tensor.dtype in (torch.quint8, torch.qint8, torch.qint32):
        integers = tensor.int_repr()
        if tensor.qscheme() in _PER_TENSOR_SCHEMES:
            return _build_quantized, (integers, tensor.q_scale(), tensor.q_zero_point())
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        axis = tensor.q_per_channel_axis()
        return _build_quantized_by_channel, (integers, scales, zero_points, axis)
    reduced = tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    return reduced[0], reduced[1]


def _reduce_nested(tensor: Tensor, code: int | None) -> Reduced:
    """Reduce a nested tensor with the layout `torch.strided`. Gradients flow through its parts."""
    if tensor.requires_grad and tensor.is_leaf:  # so a distributed backward pass wants its gradient
        raise UsageError(
            "it is a nested tensor that requires a gradient itself, which a distributed backward "
            "pass cannot store. Let its parts require gradients, and join them with "
            "torch.nested.as_nested_tensor, or use layout=torch.jagged"
        )
    with torch.enable_grad():
        parts = tensor.unbind()
    return _build_nested, (parts, code, str(tensor.device), tensor.__dict__ or None)


def _build_nested(
    parts: Sequence[Tensor], code: int, device: str, state: dict[str, Any] | None
) -> Tensor:
    with torch.enable_grad():
        if parts:
            tensor = torch.nested.as_nested_tensor(list(parts))
        else:
            tensor = torch.nested.nested_tensor([], dtype=DTYPES[code], device=device)
    if state:
        tensor.__dict__.update(state)
    return tensor


def _build_coo(indices: Tensor, values: Tensor, shape: tuple[int, ...], coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=coalesced, check_invariants=False
    )


def _build_compressed(
    compressed: Tensor, plain: Tensor, values: Tensor, shape: tuple[int, ...], layout_name: str
) -> Tensor:
    layout = getattr(torch, layout_name.removeprefix("torch."))
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=layout, check_invariants=False
    )


def _build_quantized(integers: Tensor, scale: float, zero_point: int) -> Tensor:
    return torch._make_per_tensor_quantized_tensor(integers, scale, zero_point)


def _build_quantized_by_channel(
    integers: Tensor, scales: Tensor, zero_points: Tensor, axis: int
) -> Tensor:
    return torch._make_per_channel_quantized_tensor(integers, scales, zero_points, axis)


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
        elif not (_Hooks.maps_cpu or tensor.is_neg() or tensor.is_conj() or tensor.is_nested):
            return _reduce_tracked(tensor, code, False)
    if tensor.is_nested and (is_recording() or not (tensor.requires_grad or tensor.__dict__)):
        return _reduce_nested(tensor, code)
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
    if (  # pragma: gpu
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


def encode_small(tensor: Tensor) -> bytes | None:
    """Return the encoding of a small plain tensor, or None if only a reducer can send it.

    It is a header (`SMALL_TENSOR`, the code of the dtype, the number of dimensions), the shape and
    the values. This takes a third of the time of a pickle.
    """
    code = CODES.get(tensor.dtype)
    if (
        code not in NUMPY_CODES
        or not tensor.is_cpu
        or tensor.layout is not _strided
        or tensor.requires_grad
        or tensor.__dict__
        or not tensor.is_contiguous()
        or not can_stack_tensors()
    ):
        return None
    data = _as_array(tensor)
    if data is None or not 0 < data.nbytes <= _MAX_COPIED_BYTES or data.ndim > _MAX_DIMENSIONS:
        return None
    shape = _SHAPES[data.ndim].pack(SMALL_TENSOR, code, data.ndim, *data.shape)
    return shape + data.tobytes()  # type: ignore[no-any-return]


def decode_small(body: bytes | memoryview) -> Tensor:
    """Return the tensor that `encode_small` encoded, with memory of its own."""
    shape = _SHAPES[body[2]]
    tensor = _frombuffer(bytearray(body[shape.size :]), dtype=DTYPES[body[1]])
    return tensor if body[2] == 1 else tensor.resize_(shape.unpack_from(body)[3:])


def _as_array(tensor: Tensor) -> Any:
    """Return the memory of a plain tensor as an array.

    Return None if its negation or conjugation is lazy, so that the memory is not its value, or if
    it is nested.
    """
    try:
        return tensor.numpy()
    except RuntimeError:
        if tensor.is_neg() or tensor.is_conj() or tensor.is_nested:
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
        and not parameter.is_nested
        and not parameter.__dict__
    )
    if is_plain and parameter.requires_grad and parameter.is_contiguous() and not _Hooks.maps_cpu:
        return _reduce_tracked(parameter, code, True)
    if parameter.is_nested and parameter.requires_grad and is_recording():
        return _reduce_nested(parameter, code)  # which refuses it
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

"""How tensors become picklable parts: a small description plus their bytes as a `PickleBuffer`.

Only the bytes a tensor uses travel. A dense tensor keeps its strides: as it is if it fills its memory without gaps
(transposed, channels-last), packed for the way if it has gaps; only a view of a small part of its memory arrives
contiguous. An expanded tensor travels unexpanded. The receiver builds the tensor on the memory that the bytes arrived
in, so nothing is copied again and the tensor is the receiver's own. It is not a view: autograd refuses some operations
in place on views. Memory of another device leaves as its `DeviceCarrier` says. `REDUCERS` is what the codec gives its
pickler; `reducer_for` knows subclasses of `Tensor`.

No gradient is lost on the way: a tensor that requires one gets a ticket from the `GradientTracker`, or, if its type
pickles itself in a way that we do not know, it is refused while the tracker wants gradients. So are forward-mode
tangents.
"""

from __future__ import annotations

from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from telegrad.wire.dtypes import CODES, NUMPY_CODES, code_of
from telegrad.wire.tensor_builders import (
    EXTENSION_CODE,
    Reduced,
    build_expanded,
    build_flat,
    build_meta,
    build_moved,
    build_reinterpreted,
    build_restrided,
    build_tracked,
    build_with_attributes,
    build_with_gaps,
    empty,
    shaped,
)
from telegrad.wire.tensor_gradients import (
    build_parameter,
    refuse_tangent,
    set_gradient_tracker,
    ticket_for,
)
from telegrad.wire.tensor_layouts import SPARSE_LAYOUTS, reduce_quantized, reduce_sparse

__all__ = [
    "EXTENSION_CODE",
    "REDUCERS",
    "DeviceCarrier",
    "Reduced",
    "all_plain",
    "code_of",
    "empty",
    "move_host",
    "reduce_as_it_is",
    "set_device_carrier",
    "set_gradient_tracker",
    "shaped",
]

# a view keeps its strides if its memory, gaps included, is at most so many times what it uses
_GAPS_KEPT = 4
_FEW_BYTES = 1024
_strided = torch.strided


class DeviceCarrier(Protocol):
    """Who knows how tensors get from device to device."""

    def leaving(self, tensor: Tensor, code: int) -> Reduced | None:
        """A contiguous tensor of another device than the CPU that is being packed; None: through host memory."""

    def leaving_host(self, tensor: Tensor) -> str | None:
        """Where else than on the CPU a CPU tensor that is being packed should arrive. Asked once `moves_host`."""


class _Hooks:
    carrier: DeviceCarrier | None = None
    moves_host = False


def all_plain() -> bool:
    """Return whether CPU tensors arrive on the CPU, and there are no forward-mode tangents."""
    return not _Hooks.moves_host and forward_ad._current_level < 0


def set_device_carrier(carrier: DeviceCarrier) -> None:
    _Hooks.carrier = carrier


def move_host() -> None:
    """Some peer wants CPU tensors elsewhere: from now on the carrier is asked about each of them."""
    _Hooks.moves_host = True


def reduce_tensor(tensor: Tensor) -> Reduced:
    """A plain `torch.Tensor` of any dtype, layout and device."""
    if forward_ad._current_level >= 0:
        refuse_tangent(tensor)
    if _Hooks.moves_host and tensor.is_cpu:
        return _reduce_host(tensor)
    return reduce_as_it_is(tensor)


def _reduce_host(tensor: Tensor) -> Reduced:
    """A CPU tensor that may have to arrive on another device."""
    assert _Hooks.carrier is not None
    device = (
        None if tensor.requires_grad or tensor.__dict__ else _Hooks.carrier.leaving_host(tensor)
    )
    return reduce_as_it_is(tensor) if device is None else reduce_for(tensor, device)


def reduce_for(tensor: Tensor, device: str) -> Reduced:
    """A CPU tensor that is to arrive on another device."""
    return build_moved, (*reduce_as_it_is(tensor), device)


def reduce_as_it_is(tensor: Tensor) -> Reduced:
    """Like `reduce_tensor`, but a CPU tensor arrives on the CPU."""
    code = CODES.get(tensor.dtype)
    plain = (
        code in NUMPY_CODES and tensor.is_cpu and tensor.layout is _strided and not tensor.__dict__
    )
    if plain and tensor.is_contiguous():
        if not tensor.requires_grad:
            data = _as_array(tensor)
            if data is not None:
                size = data.nbytes
                # A copy of few bytes costs less than a buffer that the codec has to ask about.
                content = PickleBuffer(data) if size > _FEW_BYTES else bytearray(data.tobytes())
                if data.ndim == 1 and size:
                    return build_flat, (code, content)
                return shaped, (code, data.shape, content)
        elif not _Hooks.moves_host and not tensor.is_neg() and not tensor.is_conj():
            return _reduce_tracked(tensor, code, False)
    if tensor.requires_grad or tensor.__dict__:
        return build_with_attributes, (tensor.detach(), ticket_for(tensor), tensor.__dict__ or None)
    if code is None:
        return reduce_quantized(tensor)
    if tensor.is_meta:
        return build_meta, (code, tuple(tensor.shape), tensor.stride())
    if tensor.layout is not _strided:
        if tensor.layout in SPARSE_LAYOUTS:
            return reduce_sparse(tensor)
        # mkldnn and other private layouts travel as dense tensors
        return _reduce_dense(tensor.to_dense(), code)
    if (
        not tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    ):
        carried = None if _Hooks.carrier is None else _Hooks.carrier.leaving(tensor, code)
        return carried or reduce_for(tensor.cpu(), str(tensor.device))
    return _reduce_dense(tensor, code)


def _as_array(tensor: Tensor) -> Any:
    """Return a plain tensor's memory as an array; None if it waits for its sign or its conjugation."""
    try:
        return tensor.numpy()
    except RuntimeError:
        if tensor.is_neg() or tensor.is_conj():
            return None
        raise


def reduce_parameter(parameter: nn.Parameter) -> Reduced:
    if forward_ad._current_level >= 0:
        refuse_tangent(parameter)
    code = CODES.get(parameter.dtype)
    plain = (
        code in NUMPY_CODES
        and parameter.is_cpu
        and parameter.layout is _strided
        and not parameter.__dict__
    )
    if plain and parameter.requires_grad and parameter.is_contiguous() and not _Hooks.moves_host:
        return _reduce_tracked(parameter, code, True)
    return build_parameter, (parameter.detach(), ticket_for(parameter), parameter.__dict__ or None)


def _reduce_tracked(tensor: Tensor, code: int | None, is_parameter: bool) -> Reduced:
    """A contiguous CPU tensor that requires a gradient, in one piece: descriptions of two tensors would take longer."""
    data = tensor.detach().numpy()
    buffer = PickleBuffer(data) if data.nbytes else b""
    return build_tracked, (code, tuple(tensor.shape), buffer, ticket_for(tensor), is_parameter)


def _reduce_dense(tensor: Tensor, code: int) -> Reduced:
    tensor = tensor.resolve_conj().resolve_neg()
    shape, stride, numel = tuple(tensor.shape), tensor.stride(), tensor.numel()
    if numel == 0:
        return shaped, (code, shape, b"" if tensor.is_cpu else tensor.contiguous().view(-1))
    if not tensor.is_contiguous():
        if any(size > 1 and step == 0 for size, step in zip(shape, stride, strict=True)):
            seed = [size if step else 1 for size, step in zip(shape, stride, strict=True)]
            return build_expanded, (tensor.as_strided(seed, stride), shape)
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if span <= numel:  # no gaps, in whatever order of dimensions; or windows that overlap
            return build_restrided, (code, shape, stride, _bytes(tensor.as_strided((span,), (1,))))
        # torch cannot copy tensors of most of these dtypes
        if tensor.itemsize == 1 and code not in NUMPY_CODES:
            return build_reinterpreted, (code, tensor.view(torch.uint8))
        if span <= _GAPS_KEPT * numel:
            return build_with_gaps, (tensor.contiguous(), stride)
        tensor = tensor.contiguous()
    return shaped, (code, shape, _bytes(tensor.as_strided((numel,), (1,))))


def _bytes(flat: Tensor) -> PickleBuffer | Tensor:
    raw = flat.view(torch.uint8)
    return PickleBuffer(raw.numpy()) if raw.is_cpu else raw


REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    Tensor: reduce_tensor,
    nn.Parameter: reduce_parameter,
}

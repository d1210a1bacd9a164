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

import copyreg
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pickle import PickleBuffer
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from telegrad.errors import UsageError

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]

# The position in this list is what travels, so it may only grow at its end.
_DTYPE_NAMES = """
    float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128
    complex32 uint16 uint32 uint64
    float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
    uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7
    bcomplex32 bits1x8 bits2x4 bits4x2 bits8 bits16
""".split()  # noqa: SIM905  # one row per family reads better than a list
_DTYPES: list[Any] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}
_NUMPY = frozenset(_CODES[getattr(torch, name)] for name in _DTYPE_NAMES[:12] if name != "bfloat16")

# a view keeps its strides if its memory, gaps included, is at most so many times what it uses
_GAPS_KEPT = 4
_FEW_BYTES = 1024
_UNTRACKED = 0
_PROTOCOL = 5  # of pickle
_frombuffer = torch.frombuffer
_strided = torch.strided


class GradientTracker(Protocol):
    """Who wants to know of tensors that need gradients and travel."""

    def wants_gradients(self) -> bool:
        """Is the message that is being packed under way for a computation whose gradients somebody wants?"""

    def leaving(self, tensor: Tensor) -> int:
        """A ticket for a tensor that is being packed, which travels with it; at most 0: nobody tracks it.

        It is negative if the tensor was computed from others, so that its gradient would go on to them.
        """

    def leaving_together(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the tickets of many tensors, as `leaving` does of one."""

    def arriving(self, data: Tensor, ticket: int) -> Tensor:
        """What a tensor that needed a gradient where it left is at the other end."""

    def arriving_together(self, data: Sequence[Tensor], tickets: Sequence[int]) -> list[Tensor]:
        """Return what many tensors are at the other end, as `arriving` does of one."""


class DeviceCarrier(Protocol):
    """Who knows how tensors get from device to device."""

    def leaving(self, tensor: Tensor, code: int) -> Reduced | None:
        """A contiguous tensor of another device than the CPU that is being packed; None: through host memory."""

    def leaving_host(self, tensor: Tensor) -> str | None:
        """Where else than on the CPU a CPU tensor that is being packed should arrive. Asked once `moves_host`."""


class _Hooks:
    tracker: GradientTracker | None = None
    carrier: DeviceCarrier | None = None
    moves_host = False


def code_of(dtype: torch.dtype) -> int:
    return _CODES[dtype]


def stackable_code(dtype: torch.dtype) -> int | None:
    """Return the code of a dtype whose tensors can be stacked and split; None: they cannot."""
    code = _CODES.get(dtype)
    return code if code in _NUMPY or dtype is torch.bfloat16 else None


def dtype_of(code: int) -> torch.dtype:
    dtype: torch.dtype = _DTYPES[code]
    return dtype


def all_plain() -> bool:
    """Return whether CPU tensors arrive on the CPU, and there are no forward-mode tangents."""
    return not _Hooks.moves_host and forward_ad._current_level < 0


def set_gradient_tracker(tracker: GradientTracker) -> None:
    _Hooks.tracker = tracker


def set_device_carrier(carrier: DeviceCarrier) -> None:
    _Hooks.carrier = carrier


def move_host() -> None:
    """Some peer wants CPU tensors elsewhere: from now on the carrier is asked about each of them."""
    _Hooks.moves_host = True


def _ticket(tensor: Tensor) -> int | None:
    """What travels with a tensor for autograd. None: it needs no gradient."""
    if not tensor.requires_grad:
        return None
    return _UNTRACKED if _Hooks.tracker is None else _Hooks.tracker.leaving(tensor)


def _arrived(data: Tensor, ticket: int | None) -> Tensor:
    if ticket is None:
        return data
    if _Hooks.tracker is None:
        return data.requires_grad_()
    return _Hooks.tracker.arriving(data, ticket)


def leave_tracked(tensors: Sequence[Tensor]) -> list[int]:
    """Return what travels with tensors for autograd, all of which require gradients."""
    if _Hooks.tracker is None:
        return [_UNTRACKED] * len(tensors)
    return _Hooks.tracker.leaving_together(tensors)


def arrive_tracked(
    data: Sequence[Tensor], tickets: Sequence[int], are_parameters: bool
) -> list[Tensor]:
    """Return the tensors that left with these tickets."""
    if _Hooks.tracker is None or (are_parameters and min(tickets) <= 0):
        arrive = partial(_parameter, state=None) if are_parameters else _arrived
        return list(map(arrive, data, tickets))
    tensors = _Hooks.tracker.arriving_together(data, tickets)
    if are_parameters:
        for tensor in tensors:
            tensor.__class__ = nn.Parameter  # `as_subclass` would add a node to the graph
    return tensors


def reduce_tensor(tensor: Tensor) -> Reduced:
    """A plain `torch.Tensor` of any dtype, layout and device."""
    if forward_ad._current_level >= 0:
        _refuse_tangent(tensor)
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
    return _moved, (*reduce_as_it_is(tensor), device)


def reduce_as_it_is(tensor: Tensor) -> Reduced:
    """Like `reduce_tensor`, but a CPU tensor arrives on the CPU."""
    code = _CODES.get(tensor.dtype)
    plain = code in _NUMPY and tensor.is_cpu and tensor.layout is _strided and not tensor.__dict__
    if plain and tensor.is_contiguous():
        if not tensor.requires_grad:
            data = _as_array(tensor)
            if data is not None:
                size = data.nbytes
                # A copy of few bytes costs less than a buffer that the codec has to ask about.
                content = PickleBuffer(data) if size > _FEW_BYTES else bytearray(data.tobytes())
                if data.ndim == 1 and size:
                    return _flat, (code, content)
                return shaped, (code, data.shape, content)
        elif not _Hooks.moves_host and not tensor.is_neg() and not tensor.is_conj():
            return _reduce_tracked(tensor, code, False)
    if tensor.requires_grad or tensor.__dict__:
        return _dressed, (tensor.detach(), _ticket(tensor), tensor.__dict__ or None)
    if code is None:
        return _reduce_quantized(tensor)
    if tensor.is_meta:
        return _meta, (code, tuple(tensor.shape), tensor.stride())
    if tensor.layout is not _strided:
        return _reduce_sparse(tensor)
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


def _refuse_tangent(tensor: Tensor) -> None:
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise UsageError(
            "it has a forward-mode tangent (torch.autograd.forward_ad), and tangents do not travel. Send the "
            "primal and the tangent as two tensors: unpack_dual(tensor)"
        )


def reduce_parameter(parameter: nn.Parameter) -> Reduced:
    if forward_ad._current_level >= 0:
        _refuse_tangent(parameter)
    code = _CODES.get(parameter.dtype)
    plain = (
        code in _NUMPY
        and parameter.is_cpu
        and parameter.layout is _strided
        and not parameter.__dict__
    )
    if plain and parameter.requires_grad and parameter.is_contiguous() and not _Hooks.moves_host:
        return _reduce_tracked(parameter, code, True)
    return _parameter, (parameter.detach(), _ticket(parameter), parameter.__dict__ or None)


def _reduce_tracked(tensor: Tensor, code: int | None, is_parameter: bool) -> Reduced:
    """A contiguous CPU tensor that requires a gradient, in one piece: descriptions of two tensors would take longer."""
    data = tensor.detach().numpy()
    buffer = PickleBuffer(data) if data.nbytes else b""
    return _tracked, (code, tuple(tensor.shape), buffer, _ticket(tensor), is_parameter)


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
            _refuse_tangent(parameter)
        data = parameter.detach().as_subclass(Tensor)
        return _parameter_subclass, (type(parameter), data, _ticket(parameter), parameter.__dict__)


def reduce_jagged(tensor: Any) -> Any:
    """A jagged NestedTensor: gradients go through its values."""
    if not tensor.requires_grad or _Hooks.tracker is None or not _Hooks.tracker.wants_gradients():
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
        _refuse_tangent(tensor)
    if tensor.requires_grad and _Hooks.tracker is not None and _Hooks.tracker.wants_gradients():
        raise UsageError(
            f"it requires a gradient, and gradients do not travel through tensors of type "
            f"{type(tensor).__qualname__}. Send a plain tensor (for a DTensor, its to_local()), or detach() it"
        )
    return tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]


def reduce_subclass(tensor: Tensor) -> Reduced:
    """A tensor of a subclass that leaves pickling to torch, which would send all the memory that a view belongs to."""
    if forward_ad._current_level >= 0:
        _refuse_tangent(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        data = tensor.detach().as_subclass(Tensor)
    return _subclass, (type(tensor), data, _ticket(tensor), tensor.__dict__)


def _reduce_dense(tensor: Tensor, code: int) -> Reduced:
    tensor = tensor.resolve_conj().resolve_neg()
    shape, stride, numel = tuple(tensor.shape), tensor.stride(), tensor.numel()
    if numel == 0:
        return shaped, (code, shape, b"" if tensor.is_cpu else tensor.contiguous().view(-1))
    if not tensor.is_contiguous():
        if any(size > 1 and step == 0 for size, step in zip(shape, stride, strict=True)):
            seed = [size if step else 1 for size, step in zip(shape, stride, strict=True)]
            return _expanded, (tensor.as_strided(seed, stride), shape)
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if span <= numel:  # no gaps, in whatever order of dimensions; or windows that overlap
            return _restrided, (code, shape, stride, _bytes(tensor.as_strided((span,), (1,))))
        # torch cannot copy tensors of most of these dtypes
        if tensor.itemsize == 1 and code not in _NUMPY:
            return _reinterpreted, (code, tensor.view(torch.uint8))
        if span <= _GAPS_KEPT * numel:
            return _with_gaps, (tensor.contiguous(), stride)
        tensor = tensor.contiguous()
    return shaped, (code, shape, _bytes(tensor.as_strided((numel,), (1,))))


def _bytes(flat: Tensor) -> PickleBuffer | Tensor:
    raw = flat.view(torch.uint8)
    return PickleBuffer(raw.numpy()) if raw.is_cpu else raw


def _reduce_sparse(tensor: Tensor) -> Reduced:
    if tensor.layout is torch.sparse_coo:
        return _coo, (
            tensor._indices(),
            tensor._values(),
            tuple(tensor.shape),
            tensor.is_coalesced(),
        )
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        compressed, plain = tensor.crow_indices(), tensor.col_indices()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        compressed, plain = tensor.ccol_indices(), tensor.row_indices()
    else:  # mkldnn and other private layouts travel as dense tensors
        return _reduce_dense(tensor.to_dense(), _CODES[tensor.dtype])
    return _compressed, (
        compressed,
        plain,
        tensor.values(),
        tuple(tensor.shape),
        str(tensor.layout),
    )


def _reduce_quantized(tensor: Tensor) -> Reduced:
    if tensor.is_quantized and tensor.dtype in (torch.quint8, torch.qint8, torch.qint32):
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return _quantized, (tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point())
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return _quantized_by_channel, (
            tensor.int_repr(),
            scales,
            zeros,
            tensor.q_per_channel_axis(),
        )
    reduced = tensor.__reduce_ex__(2)  # type: ignore[no-untyped-call]
    return reduced[0], reduced[1]


def _flat(code: int, data: Any) -> Tensor:
    return _frombuffer(data, dtype=_DTYPES[code])


def empty(code: int, shape: Sequence[int], device: str | torch.device) -> Tensor:
    """Memory for a tensor that a carrier brings."""
    return torch.empty(shape, dtype=_DTYPES[code], device=device)


def shaped(code: int, shape: Sequence[int], data: Any) -> Tensor:
    dtype = _DTYPES[code]
    if not len(data):
        return torch.empty(
            shape, dtype=dtype, device=data.device if isinstance(data, Tensor) else "cpu"
        )
    if isinstance(data, Tensor):
        return data.view(dtype).view(shape).detach()
    return _frombuffer(data, dtype=dtype).resize_(shape)


def _restrided(code: int, shape: Sequence[int], stride: Sequence[int], data: Any) -> Tensor:
    dtype = _DTYPES[code]
    flat = data.view(dtype).detach() if isinstance(data, Tensor) else _frombuffer(data, dtype=dtype)
    return flat.as_strided_(shape, stride)


def _reinterpreted(code: int, tensor: Tensor) -> Tensor:
    return tensor.view(_DTYPES[code]).detach()


def _expanded(seed: Tensor, shape: Sequence[int]) -> Tensor:
    return seed.expand(shape).detach()


def _with_gaps(packed: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(
        packed.shape, stride, dtype=packed.dtype, device=packed.device
    ).copy_(packed)


def _tracked(code: int, shape: Sequence[int], data: Any, ticket: int, is_parameter: bool) -> Tensor:
    tensor = _flat(code, data) if len(shape) == 1 and len(data) else shaped(code, shape, data)
    return _parameter(tensor, ticket, None) if is_parameter else _arrived(tensor, ticket)


def _dressed(data: Tensor, ticket: int | None, state: dict[str, Any] | None) -> Tensor:
    tensor = _arrived(data, ticket)
    if state:
        tensor.__dict__.update(state)
    return tensor


def _subclass(
    kind: type[Tensor], data: Tensor, ticket: int | None, state: dict[str, Any]
) -> Tensor:
    tensor = _arrived(data, ticket).as_subclass(kind)
    tensor.__dict__.update(state)
    return tensor


def _parameter(data: Tensor, ticket: int | None, state: dict[str, Any] | None) -> Tensor:
    if ticket and ticket > 0:
        tensor = _arrived(data, ticket)
        if type(tensor) is Tensor:
            tensor.__class__ = nn.Parameter  # `as_subclass` would add a node to the graph
    else:
        tensor = nn.Parameter(data, ticket is not None)
    if state:
        tensor.__dict__.update(state)
    return tensor


def _parameter_subclass(
    kind: type[Tensor], data: Tensor, ticket: int | None, state: dict[str, Any]
) -> Tensor:
    if ticket and ticket > 0:
        tensor = _arrived(data, ticket).as_subclass(kind)
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


def _meta(code: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=_DTYPES[code], device="meta")


def _moved(build: Callable[..., Tensor], parts: tuple[Any, ...], device: str) -> Tensor:
    return build(*parts).to(device)


def _coo(indices: Tensor, values: Tensor, shape: tuple[int, ...], coalesced: bool) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=coalesced, check_invariants=False
    )


def _compressed(
    compressed: Tensor, plain: Tensor, values: Tensor, shape: tuple[int, ...], layout: str
) -> Tensor:
    kind = getattr(torch, layout.removeprefix("torch."))
    return torch.sparse_compressed_tensor(
        compressed, plain, values, shape, layout=kind, check_invariants=False
    )


def _quantized(data: Tensor, scale: float, zero: int) -> Tensor:
    return torch._make_per_tensor_quantized_tensor(data, scale, zero)


def _quantized_by_channel(data: Tensor, scales: Tensor, zeros: Tensor, axis: int) -> Tensor:
    return torch._make_per_channel_quantized_tensor(data, scales, zeros, axis)


REDUCERS: dict[type, Callable[[Any], Reduced]] = {
    Tensor: reduce_tensor,
    nn.Parameter: reduce_parameter,
}

# A registered extension code makes pickle look a constructor up in a table instead of importing its module each time.
EXTENSION_CODE = 0x54474400  # and those that follow: 16 are ours, the next 16 those of the carrier
for _number, _constructor in enumerate((_flat, shaped, _dressed, _parameter, _tracked)):
    copyreg.add_extension(__name__, _constructor.__name__, EXTENSION_CODE + _number)

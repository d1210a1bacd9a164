"""Reducers and constructors for sparse and quantized tensors.

Each is sent as the dense tensors that it consists of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from telegrad.wire.tensor_builders import Reduced

SPARSE_LAYOUTS = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)
_PER_TENSOR_SCHEMES = (torch.per_tensor_affine, torch.per_tensor_symmetric)


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

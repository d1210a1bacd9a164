"""Tensors of sparse layouts and quantized dtypes."""

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


def reduce_sparse(tensor: Tensor) -> Reduced:
    if tensor.layout is torch.sparse_coo:
        return _coo, (
            tensor._indices(),
            tensor._values(),
            tuple(tensor.shape),
            tensor.is_coalesced(),
        )
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        compressed, plain = tensor.crow_indices(), tensor.col_indices()
    else:
        compressed, plain = tensor.ccol_indices(), tensor.row_indices()
    return _compressed, (
        compressed,
        plain,
        tensor.values(),
        tuple(tensor.shape),
        str(tensor.layout),
    )


def reduce_quantized(tensor: Tensor) -> Reduced:
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

"""CUDA tensors through host memory: large ones in chunks, by page-locked memory, which the bus copies by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 8 << 20  # bytes that go through page-locked memory at a time


def to_host(tensor: Tensor, exclusive: bool = False) -> Tensor:
    """Return a copy in host memory, through page-locked memory if it is large.

    Chunks are copied one after the other, and other threads may write to the tensor in between: unless it is
    `exclusive`, they are copied from a snapshot on the device, which is one operation of the stream.
    """
    size = tensor.numel() * tensor.itemsize
    if size < _CHUNK_BYTES:
        return tensor.cpu()
    if not exclusive:
        try:
            tensor = tensor.clone()
        except torch.OutOfMemoryError:
            return tensor.cpu()  # one operation, too; slower
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    _stage(tensor.view(-1).view(torch.uint8), host.view(-1).view(torch.uint8), tensor.device)
    return host


def from_host(rebuild: Callable[..., Tensor], arguments: tuple[Any, ...], index: int) -> Tensor:
    host = rebuild(*arguments)
    if host.numel() * host.itemsize < _CHUNK_BYTES:
        return host.to(f"cuda:{index}")
    tensor = torch.empty(host.shape, dtype=host.dtype, device=f"cuda:{index}")
    _stage(host.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8), tensor.device)
    return tensor


def _stage(source: Tensor, target: Tensor, device: torch.device) -> None:
    """Copy bytes between host and device in chunks: while one is on the bus, the host copies its neighbour."""
    stream = torch.cuda.current_stream(device)
    pinned_buffers = [
        torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
    ]
    events = [torch.cuda.Event(), torch.cuda.Event()]
    to_host_memory = source.is_cuda
    pending: tuple[int, int, int] | None = None
    for chunk_number, start in enumerate(range(0, source.numel(), _CHUNK_BYTES)):
        end, slot = min(start + _CHUNK_BYTES, source.numel()), chunk_number % 2
        pinned = pinned_buffers[slot][: end - start]
        if to_host_memory:
            pinned.copy_(source[start:end], non_blocking=True)
            events[slot].record(stream)
            if pending is not None:
                _finish_chunk(pending, pinned_buffers, events, target)
            pending = slot, start, end
        else:
            events[slot].synchronize()
            pinned.copy_(source[start:end])
            target[start:end].copy_(pinned, non_blocking=True)
            events[slot].record(stream)
    if pending is not None:
        _finish_chunk(pending, pinned_buffers, events, target)


def _finish_chunk(
    pending: tuple[int, int, int],
    pinned_buffers: list[Tensor],
    events: list[torch.cuda.Event],
    target: Tensor,
) -> None:
    slot, start, end = pending
    events[slot].synchronize()
    target[start:end].copy_(pinned_buffers[slot][: end - start])

"""Copies of CUDA tensors through host memory, for peers that cannot map each other's device memory.

Large tensors are copied in chunks through two pinned buffers, because the GPU copies from and to
pinned memory asynchronously. While it copies one chunk, the CPU copies the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_CHUNK_BYTES = 8 << 20  # the size of a pinned buffer


def to_host(tensor: Tensor, exclusive: bool = False) -> Tensor:
    """Return a copy of a tensor in host memory.

    Chunks are copied one after the other, and other threads may write to the tensor in between.
    Therefore the chunks of a tensor that is not `exclusive` are copied from a snapshot on the
    device, which is a single operation of the stream.
    """
    size = tensor.numel() * tensor.itemsize
    if size < _CHUNK_BYTES:
        return tensor.cpu()
    if not exclusive:
        try:
            tensor = tensor.clone()
        except torch.OutOfMemoryError:
            return tensor.cpu()  # also a single operation, but slower
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    _stage(tensor.view(-1).view(torch.uint8), host.view(-1).view(torch.uint8), tensor.device)
    return host


def from_host(rebuild: Callable[..., Tensor], arguments: tuple[Any, ...], index: int) -> Tensor:
    """Unpickle a CUDA tensor that was sent as a tensor in host memory."""
    host = rebuild(*arguments)
    if host.numel() * host.itemsize < _CHUNK_BYTES:
        return host.to(f"cuda:{index}")
    tensor = torch.empty(host.shape, dtype=host.dtype, device=f"cuda:{index}")
    _stage(host.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8), tensor.device)
    return tensor


def _stage(source: Tensor, target: Tensor, device: torch.device) -> None:
    """Copy bytes between host and device in chunks, through two pinned buffers in turn.

    To the host, a chunk is taken from its buffer while the GPU copies the next one. To the device,
    a buffer is filled again when the GPU has copied it.
    """
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
    """Wait until a chunk is in its pinned buffer and copy it to `target`."""
    slot, start, end = pending
    events[slot].synchronize()
    target[start:end].copy_(pinned_buffers[slot][: end - start])

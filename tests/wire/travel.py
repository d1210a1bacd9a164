"""What a value looks like after it has travelled, and what it weighs on the way.

The transport is a copy in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from telegrad.wire import codec


def trip(value: Any, *, by_value: bool = False) -> Any:
    """Encode and decode, with copies of the buffers as a transport would make them."""
    body, buffers = codec.encode(value, by_value=by_value)
    return codec.decode(body, [bytearray(buffer) for buffer in buffers])


def weight(value: Any) -> int:
    """Bytes on the wire."""
    body, buffers = codec.encode(value)
    return len(body) + sum(buffer.nbytes for buffer in buffers)


def bits(tensor: Tensor) -> list[int]:
    """The bytes of a dense tensor in the order of its elements, whatever its dtype and strides."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.itemsize == 1:
        return tensor.view(torch.uint8).flatten().tolist()
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).tolist()


def assert_same(received: Tensor, sent: Tensor) -> None:
    """Equal in everything a dense tensor is, NaNs included."""
    assert type(received) is type(sent)
    assert received.dtype is sent.dtype
    assert received.shape == sent.shape
    assert received.device == sent.device
    assert received.layout is sent.layout
    assert received.requires_grad == sent.requires_grad
    assert bits(received) == bits(sent)

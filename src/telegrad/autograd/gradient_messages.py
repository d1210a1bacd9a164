"""The messages of a backward pass, and how their gradients are packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.futures import Future

_MANY = 8
_SMALL = 4096  # bytes


Gradients = list[tuple[int, Tensor | None]]  # by ticket
# Others; tickets by shape; the small ones.
PackedGradients = tuple[Gradients, list[tuple[list[int], tuple[int, ...]]], Tensor]


def pack(gradients: Gradients) -> Gradients | PackedGradients:
    """Make many small gradients one tensor: a tensor of its own costs far more than its bytes.

    These are CPU tensors of the dtype that the first gradient has, in the order of their shapes.
    """
    if len(gradients) < _MANY:
        return [(tensor_id, _without_repetition(gradient)) for tensor_id, gradient in gradients]
    dtype = next((gradient.dtype for _, gradient in gradients if gradient is not None), None)
    others: Gradients = []
    # None: these are not packed
    by_kind: dict[tuple[Any, ...], tuple[list[int], list[Tensor]] | None] = {}
    for tensor_id, gradient in gradients:
        if type(gradient) is not Tensor:
            others.append((tensor_id, gradient))
            continue
        kind = _kind(gradient)
        if kind in by_kind:
            group = by_kind[kind]
        else:
            group = by_kind[kind] = (
                ([], []) if gradient.dtype == dtype and _is_small(gradient) else None
            )
        if group is None:
            others.append((tensor_id, gradient))
        else:
            group[0].append(tensor_id)
            group[1].append(gradient)
    if len(gradients) - len(others) < _MANY:
        return gradients
    by_shape = {kind[0]: group for kind, group in by_kind.items() if group is not None}
    parts = [
        torch.cat(group).view(-1) if shape else torch.stack(group)
        for shape, (_, group) in by_shape.items()
    ]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return others, [(tensor_ids, tuple(shape)) for shape, (tensor_ids, _) in by_shape.items()], flat


def unpack(packed: Gradients | PackedGradients) -> Gradients:
    if isinstance(packed, list):
        return packed
    gradients, groups, flat = packed
    sizes = [len(tensor_ids) * math.prod(shape) for tensor_ids, shape in groups]
    for (tensor_ids, shape), part in zip(groups, torch.split(flat, sizes), strict=True):
        gradients += zip(tensor_ids, part.view(len(tensor_ids), *shape).unbind(), strict=True)
    return gradients


def _without_repetition(gradient: Tensor | None) -> Tensor | None:
    """Return a small gradient as a tensor without strides of 0, which takes less time to send."""
    if gradient is not None and _is_small(gradient) and 0 in gradient.stride():
        return gradient.contiguous()
    return gradient


# all that `_is_small` depends on
_kind = attrgetter("shape", "dtype", "layout", "is_cpu", "requires_grad")


def _is_small(gradient: Tensor) -> bool:
    return (
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.layout is torch.strided
        and 0 < gradient.nbytes <= _SMALL
        and not gradient.requires_grad
    )


# tickets: of a tensor that was sent back, and of the same tensor when it came
Shortcut = tuple[int, int]


class GradientMessage(NamedTuple):
    """Answers for tensors that came from the peer, by ticket. It travels as a plain tuple, which is faster."""

    gradients: Gradients | PackedGradients
    unreached: list[int]  # the loss does not depend on these
    announced: list[int] | None  # to be answered later; None: this is not the first message
    shortcuts: Sequence[Shortcut] = ()
    has_heard: bool = True  # the sender had the first message of the receiver when it wrote this


class GradientReply:
    """What a message will be answered with. A future is made only if somebody has to wait for it."""

    __slots__ = ("_future", "_outcome")

    def __init__(self) -> None:
        self._outcome: tuple[Any, Exception | None] | None = None
        self._future: Future[Any] | None = None

    def settle(self, message: GradientMessage | None, error: Exception | None = None) -> None:
        self._outcome = message and tuple(message), error
        if self._future is not None:
            self._future._settle(*self._outcome)

    def take(self) -> Any:
        """The message if it is there, else a future for it. Raises what the pass failed with."""
        if self._outcome is None:
            self._future = Future()
            if self._outcome is None:  # `settle` writes this first and then looks for the future
                return self._future
        message, error = self._outcome
        if error is not None:
            raise error
        return message

"""`GradientMessage`: what two workers send each other in a backward pass, and its packing.

A tensor of its own costs far more than a few bytes do. So many small gradients are packed into one
tensor. Functions here have no state; a `GradientReply` belongs to one message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from telegrad.futures import Future

_MIN_TO_PACK = 8  # gradients
_MAX_SMALL_SIZE = 4096  # bytes

Gradients = list[tuple[int, Tensor | None]]  # with the ids of their tensors; None: undefined
# Gradients that are not packed; groups of tensor ids with a shape; the packed values of all groups.
PackedGradients = tuple[Gradients, list[tuple[list[int], tuple[int, ...]]], Tensor]
# By shape: the ids and the values of gradients that are packed together.
Groups = dict[tuple[int, ...], tuple[list[int], list[Tensor]]]
# The id of a tensor that was sent back to the peer it came from, and the peer's id of that tensor.
Shortcut = tuple[int, int]


def pack(tensor_ids: list[int], gradients: list[Tensor | None]) -> Gradients | PackedGradients:
    """Pack small gradients into one tensor if there are many.

    Those are CPU tensors with the dtype of the first gradient. They are grouped by shape.
    """
    if len(gradients) < _MIN_TO_PACK:
        return list(zip(tensor_ids, map(_contiguous_if_small, gradients), strict=True))
    others: Gradients = []
    groups = _one_group(tensor_ids, gradients) or _groups(tensor_ids, gradients, others)
    if len(gradients) - len(others) < _MIN_TO_PACK:
        return list(zip(tensor_ids, gradients, strict=True))
    parts = [
        torch.cat(group).view(-1) if shape else torch.stack(group)
        for shape, (_, group) in groups.items()
    ]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return others, [(packed_ids, tuple(shape)) for shape, (packed_ids, _) in groups.items()], flat


def _one_group(tensor_ids: list[int], gradients: list[Tensor | None]) -> Groups | None:
    """Return the group of all gradients, or None if they differ or are not small."""
    if set(map(type, gradients)) != {Tensor} or len(set(map(_kind, gradients))) != 1:
        return None
    found = cast(list[Tensor], gradients)
    return {found[0].shape: (tensor_ids, found)} if _is_small(found[0]) else None


def _groups(tensor_ids: list[int], gradients: list[Tensor | None], others: Gradients) -> Groups:
    """Return the groups of gradients that are packed, and add those that are not to `others`."""
    dtype = next((gradient.dtype for gradient in gradients if gradient is not None), None)
    # By kind: the ids and gradients of a group. None: gradients of this kind are not packed.
    by_kind: dict[tuple[Any, ...], tuple[list[int], list[Tensor]] | None] = {}
    for tensor_id, gradient in zip(tensor_ids, gradients, strict=True):
        if type(gradient) is not Tensor:
            others.append((tensor_id, gradient))
            continue
        kind = _kind(gradient)
        if kind in by_kind:
            group = by_kind[kind]
        else:
            is_packed = gradient.dtype == dtype and _is_small(gradient)
            group = by_kind[kind] = ([], []) if is_packed else None
        if group is None:
            others.append((tensor_id, gradient))
        else:
            group[0].append(tensor_id)
            group[1].append(gradient)
    return {kind[0]: group for kind, group in by_kind.items() if group is not None}


def unpack(
    packed: Gradients | PackedGradients,
) -> list[tuple[Sequence[int], Sequence[Tensor | None]]]:
    """Return the gradients that `pack` was called with, as pairs of their ids and themselves."""
    if isinstance(packed, list):
        return [tuple(zip(*packed, strict=True))] if packed else []  # type: ignore[list-item]
    gradients, groups, flat = packed
    found = unpack(gradients)
    sizes = [len(tensor_ids) * math.prod(shape) for tensor_ids, shape in groups]
    # Not views for autograd, like other gradients; and these take less time to create.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        for (tensor_ids, shape), part in zip(groups, torch.split(flat, sizes), strict=True):
            found.append((tensor_ids, part.view(len(tensor_ids), *shape).unbind()))
    return found


def _contiguous_if_small(gradient: Tensor | None) -> Tensor | None:
    """Return a small gradient without strides of 0, since these take longer to send."""
    if gradient is not None and _is_small(gradient) and 0 in gradient.stride():
        return gradient.contiguous()
    return gradient


# The attributes that `_is_small` depends on.
_kind = attrgetter("shape", "dtype", "layout", "is_cpu", "requires_grad")


def _is_small(gradient: Tensor) -> bool:
    return (
        type(gradient) is Tensor
        and gradient.is_cpu
        and gradient.layout is torch.strided
        and 0 < gradient.nbytes <= _MAX_SMALL_SIZE
        and not gradient.requires_grad
    )


class GradientMessage(NamedTuple):
    """Answers for tensors that the sender of the message received from its receiver.

    An answer is a gradient, or the information that the loss does not depend on the tensor. The
    message is sent as a plain tuple, which is faster to pickle.
    """

    gradients: Gradients | PackedGradients
    unreached: list[int]  # ids of tensors that the loss does not depend on
    # Ids of tensors that are answered later. None: this is not the first message to the receiver.
    announced: list[int] | None
    shortcuts: Sequence[Shortcut] = ()
    has_heard: bool = True  # the sender had received the first message of the receiver before


class GradientReply:
    """The reply to a `GradientMessage`. It creates a future only if a thread has to wait for it."""

    __slots__ = ("_future", "_outcome")

    def __init__(self) -> None:
        self._outcome: tuple[Any, Exception | None] | None = None
        self._future: Future[Any] | None = None

    def complete(self, message: GradientMessage | None, error: Exception | None = None) -> None:
        """Set the message of the reply, or the error that the pass failed with."""
        self._outcome = message and tuple(message), error
        if self._future is not None:
            self._future._try_complete(*self._outcome)

    def take(self) -> Any:
        """Return the message, or a future if it is not set yet. Raise the error if it is set."""
        if self._outcome is None:
            self._future = Future()
            # `complete` sets the outcome first and then looks for a future, so no reply is missed.
            if self._outcome is None:
                return self._future
        message, error = self._outcome
        if error is not None:
            raise error
        return message

"""Gradients of tensors that travel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd import forward_ad

from telegrad.errors import UsageError

_UNTRACKED = 0


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


class _Hooks:
    tracker: GradientTracker | None = None


def set_gradient_tracker(tracker: GradientTracker) -> None:
    _Hooks.tracker = tracker


def ticket_for(tensor: Tensor) -> int | None:
    """What travels with a tensor for autograd. None: it needs no gradient."""
    if not tensor.requires_grad:
        return None
    return _UNTRACKED if _Hooks.tracker is None else _Hooks.tracker.leaving(tensor)


def restore_gradient(data: Tensor, ticket: int | None) -> Tensor:
    if ticket is None:
        return data
    if _Hooks.tracker is None:
        return data.requires_grad_()
    return _Hooks.tracker.arriving(data, ticket)


def build_parameter(data: Tensor, ticket: int | None, state: dict[str, Any] | None) -> Tensor:
    if ticket and ticket > 0:
        tensor = restore_gradient(data, ticket)
        if type(tensor) is Tensor:
            tensor.__class__ = nn.Parameter  # `as_subclass` would add a node to the graph
    else:
        tensor = nn.Parameter(data, ticket is not None)
    if state:
        tensor.__dict__.update(state)
    return tensor


def wants_gradients() -> bool:
    return _Hooks.tracker is not None and _Hooks.tracker.wants_gradients()


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
        arrive = partial(build_parameter, state=None) if are_parameters else restore_gradient
        return list(map(arrive, data, tickets))
    tensors = _Hooks.tracker.arriving_together(data, tickets)
    if are_parameters:
        for tensor in tensors:
            tensor.__class__ = nn.Parameter  # `as_subclass` would add a node to the graph
    return tensors


def refuse_tangent(tensor: Tensor) -> None:
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise UsageError(
            "it has a forward-mode tangent (torch.autograd.forward_ad), and tangents do not travel. Send the "
            "primal and the tangent as two tensors: unpack_dual(tensor)"
        )

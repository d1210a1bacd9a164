"""Gradients of tensors in messages: the hook through which distributed autograd tracks them.

A tensor that requires a gradient is sent with a *tensor id*, which the `GradientTracker` assigns
while the message is packed. The receiver passes the id and the data to its own tracker, which
returns the tensor that the user gets. The ids mean:

    None         the tensor does not require a gradient
    positive     the tracker records the tensor, and its gradient will be sent back
    0            the tensor is not tracked: it arrives as a leaf that requires a gradient
    negative     like 0, but the tensor was computed from others, which would need gradients too

Forward-mode tangents cannot be sent. `refuse_tangent` raises an error for them.

State: `_Hook.tracker`, one for each process, set once when `telegrad.autograd` is imported. It is
a module global because pickle calls reducers and constructors with the object alone: nothing else
can be passed to them. The tracker finds the context of the current message by itself. If there is
no tracker, tensors that require gradients arrive as leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd import forward_ad

from telegrad.errors import UsageError

_UNTRACKED = 0


class GradientTracker(Protocol):
    """Records the tensors that require gradients and are sent or received."""

    def is_recording(self) -> bool:
        """Return whether the message that is being packed belongs to a distributed backward pass.

        If so, a tensor whose gradient cannot be tracked must not be sent.
        """

    def track_sent(self, tensor: Tensor) -> int:
        """Return the id of a tensor that is being packed; 0 or less if it is not tracked."""

    def track_sent_many(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the ids of many tensors, as `track_sent` does for one."""

    def track_received(self, data: Tensor, tensor_id: int) -> Tensor:
        """Return the tensor for the user: `data` as part of the receiver's graph."""

    def track_received_many(
        self, data: Sequence[Tensor], tensor_ids: Sequence[int]
    ) -> list[Tensor]:
        """Return the tensors for the user, as `track_received` does for one."""


class _Hook:
    tracker: GradientTracker | None = None


def set_gradient_tracker(tracker: GradientTracker) -> None:
    """Let `tracker` track the gradients of all messages of this process."""
    _Hook.tracker = tracker


def is_recording() -> bool:
    """Return whether the message that is being packed belongs to a distributed backward pass."""
    return _Hook.tracker is not None and _Hook.tracker.is_recording()


def tensor_id_for(tensor: Tensor) -> int | None:
    """Return the id that is sent with a tensor; None if it does not require a gradient."""
    if not tensor.requires_grad:
        return None
    return _UNTRACKED if _Hook.tracker is None else _Hook.tracker.track_sent(tensor)


def tensor_ids_for(tensors: Sequence[Tensor]) -> list[int]:
    """Return the ids that are sent with tensors, all of which require gradients."""
    if _Hook.tracker is None:
        return [_UNTRACKED] * len(tensors)
    return _Hook.tracker.track_sent_many(tensors)


def restore_gradient(data: Tensor, tensor_id: int | None) -> Tensor:
    """Return a received tensor for the user: `data` as part of this worker's graph."""
    if tensor_id is None:
        return data
    if _Hook.tracker is None:
        return data.requires_grad_()
    return _Hook.tracker.track_received(data, tensor_id)


def restore_gradients(
    data: Sequence[Tensor], tensor_ids: Sequence[int], are_parameters: bool
) -> list[Tensor]:
    """Return received tensors for the user, as `restore_gradient` does for one."""
    if _Hook.tracker is None or (are_parameters and min(tensor_ids) <= 0):
        build = partial(build_parameter, state=None) if are_parameters else restore_gradient
        return list(map(build, data, tensor_ids))
    tensors = _Hook.tracker.track_received_many(data, tensor_ids)
    if are_parameters:
        for tensor in tensors:
            tensor.__class__ = nn.Parameter  # `as_subclass` would add a node to the graph
    return tensors


def build_parameter(data: Tensor, tensor_id: int | None, state: dict[str, Any] | None) -> Tensor:
    """Build an `nn.Parameter` with these attributes."""
    if tensor_id and tensor_id > 0:
        tensor = restore_gradient(data, tensor_id)
        if type(tensor) is Tensor:
            tensor.__class__ = nn.Parameter  # `as_subclass` would add a node to the graph
    else:
        tensor = nn.Parameter(data, tensor_id is not None)
    if state:
        tensor.__dict__.update(state)
    return tensor


def refuse_tangent(tensor: Tensor) -> None:
    """Raise `UsageError` if the tensor has a forward-mode tangent."""
    if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        raise UsageError(
            "it has a forward-mode tangent (torch.autograd.forward_ad), which cannot be sent. "
            "Send the primal and the tangent as two tensors: unpack_dual(tensor)"
        )

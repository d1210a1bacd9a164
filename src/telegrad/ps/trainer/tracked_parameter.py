"""`TrackedParameter`: one parameter of a model, with the slot of the flat memory for its gradient.

It copies the gradient into the slot, knows whether the program refers to the memory of the slot,
and notices writes to the parameter by its version counter and address.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from telegrad.errors import UsageError
from telegrad.ps.layout import ParameterSlot

GradientReady = Callable[[int], None]  # takes the index of a parameter


class TrackedParameter:
    """One parameter, and `view`, the flat memory for its gradient."""

    def __init__(
        self, parameter: Tensor, slot: ParameterSlot, view: Tensor, own_storage: bool
    ) -> None:
        """`own_storage`: the view has its own storage, and may become the gradient."""
        self.parameter = parameter
        self.slot = slot
        self.index = slot.index
        self.view = view
        self.address = view.data_ptr() or -1  # an empty tensor has the address 0
        self.is_zero = True
        self._storage = view.untyped_storage() if own_storage else None
        self._own_references = self._count_references()
        self.mark_current()

    def check(self) -> None:
        """Raise `UsageError` if the parameter has another dtype or shape than its slot."""
        parameter, slot = self.parameter, self.slot
        if parameter.dtype is slot.dtype and parameter.shape == slot.shape:
            return
        raise UsageError(
            f"parameter {slot.name!r} was {slot.dtype} of shape {slot.shape} when its "
            f"ps.Optimizer was created, and is {parameter.dtype} of shape "
            f"{tuple(parameter.shape)} now, but servers hold the former: convert the model before "
            "creating the optimizer, or use torch.autocast"
        )

    # The gradient

    @property
    def is_referenced(self) -> bool:
        """Whether anything besides this object refers to the memory of the view."""
        return self._count_references() > self._own_references

    def _count_references(self) -> int:
        if self._storage is None:
            return 0
        count: int = torch._C._storage_Use_Count(self._storage._cdata)  # type: ignore[attr-defined]
        return count + sys.getrefcount(self._storage)

    def is_view(self, gradient: Tensor) -> bool:
        """Return whether a gradient is in the flat memory."""
        return (
            gradient.layout is torch.strided
            and gradient.data_ptr() == self.address
            and gradient.is_contiguous()
        )

    def clear(self) -> None:
        """Set the view to zero, unless it is zero already."""
        if not self.is_zero:
            self.view.zero_()
            self.is_zero = True

    def register_hook(self, callbacks: list[weakref.WeakMethod[GradientReady]]) -> Any:
        """Copy each gradient into the view when backward has finished it, and call `callbacks`."""
        # a hook that refers to the parameter would keep it alive for ever
        weak_self = weakref.ref(self)

        def on_accumulated(_: Tensor) -> None:
            tracked = weak_self()
            if tracked is None or not tracked.copy_gradient():
                return
            for weak_callback in callbacks:
                callback = weak_callback()
                if callback is not None:
                    callback(tracked.index)

        return self.parameter.register_post_accumulate_grad_hook(on_accumulated)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def copy_gradient(self) -> bool:
        """Copy the gradient into the view. Return False if the step has to do that later."""
        gradient = self.parameter.grad
        if gradient is None or gradient.shape != self.view.shape:
            return False
        if not self.is_view(gradient):
            if self.is_referenced:
                return False
            self.view.copy_(dense(gradient))
            self.is_zero = False
        return True

    # The parameter

    def mark_current(self) -> None:
        self._last_write = self.parameter._version, self.parameter.data_ptr()

    @property
    def is_written(self) -> bool:
        """Whether the parameter was written to or replaced since `mark_current`."""
        return (self.parameter._version, self.parameter.data_ptr()) != self._last_write


def check_kind(name: str, parameter: Tensor) -> None:
    """Raise `UsageError` for a parameter that servers cannot hold."""
    is_ordinary = isinstance(parameter, nn.Parameter) or type(parameter) is Tensor
    is_wrapper = is_traceable_wrapper_subclass(parameter) or is_lazy(parameter)
    is_dense = parameter.layout is torch.strided and not parameter.is_meta
    if not is_ordinary or is_wrapper or not is_dense:
        raise UsageError(
            f"parameter {name!r} is a {type(parameter).__name__} ({parameter.layout}, on "
            f"{parameter.device}), and parameter servers hold plain dense tensors: initialise it "
            "first, or train it with an optimizer of torch and give ps.Optimizer the other "
            "parameters"
        )
    if parameter.is_inference():
        raise UsageError(
            f"parameter {name!r} was created in inference mode and cannot be trained: create the "
            "model outside of torch.inference_mode"
        )


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient without its history, as a dense tensor."""
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def _count_references(parameter: Tensor) -> tuple[int, ...]:
    """Return the reference counts of a parameter's gradient and of its storage."""
    gradient = parameter.grad
    assert gradient is not None
    storage = gradient.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return sys.getrefcount(gradient), gradient._use_count(), uses, sys.getrefcount(storage)  # type: ignore[attr-defined]


def _counts_of_sole_reference() -> tuple[int, ...]:
    """Return the counts, in this version of torch, if only the parameter refers to its gradient."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return _count_references(parameter)


_SOLE_REFERENCE = _counts_of_sole_reference()


def is_sole_reference(parameter: Tensor) -> bool:
    """Return whether `parameter.grad` can be replaced without the program noticing."""
    gradient = parameter.grad
    if (
        gradient is None
        or type(gradient) is not Tensor
        or gradient.layout is not torch.strided
        or gradient.requires_grad
        or not gradient.is_contiguous()
        or gradient.device.type != "cpu"
        or gradient._backward_hooks
        or gradient.untyped_storage().nbytes() != gradient.nbytes
    ):
        return False
    del gradient
    return _count_references(parameter) == _SOLE_REFERENCE

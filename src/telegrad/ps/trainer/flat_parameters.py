"""`FlatParameters`: the gradients of a model in one flat memory, and its parameters as bytes.

Parameters and gradients belong to the model. They keep their own memory, memory format and device,
which may change at any time. A step copies gradients into the flat memory, which servers read, and
copies the values that servers return into the parameters.

The program may write to parameters between two steps. Such writes change version counters or
addresses, and are sent to the servers with the next step. Writes through `Parameter.data` change
neither. To find those, each step compares some elements of one parameter with the values that the
servers returned, and raises an error if they differ.

One copy is avoided where the program cannot tell: if the flat memory is shared with servers and
only `parameter.grad` refers to a gradient, the gradient is replaced by a view of the flat memory
with a storage of its own. Further backward passes into the same tensor need no copy. The program
may keep such a view like any gradient: a slot of the flat memory is written only if nothing else
refers to it. If something does, gradients are collected in private memory and sent by value in
that step.

`TrackedParameter` is one parameter of the model, with the slot of the flat memory for its gradient.
It copies the gradient into the slot, knows whether the program refers to the memory of the slot,
and notices writes to the parameter by its version counter and address.

State: the flat memory, which belongs to the trainer except between a push and its reply, when
servers read it; `missing` and `in_place`, about the gradients that were collected last; for each
parameter, its version and address after the last step. Backward hooks refer to callbacks weakly,
because hooks live as long as the model. Used by the thread that steps the optimizer, except the
hooks, which run on the threads of backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from telegrad.errors import UsageError
from telegrad.free_threading import has_gil
from telegrad.ps.layout import ParameterLayout, ParameterPart, ParameterSlot, ServerRange
from telegrad.transport import flat_memory

GradientReady = Callable[[int], None]  # takes the index of a parameter
_COMPARED_NBYTES = 1 << 16  # in one step


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
    # without the lock, the counts may be too low for a moment
    return _count_references(parameter) == _SOLE_REFERENCE and has_gil()


class FlatParameters:
    def __init__(
        self,
        layout: ParameterLayout,
        parameters: Sequence[Tensor],
        sharing: bool,
        keeps_copy: bool = False,
    ) -> None:
        """Allocate the flat memory for those of `parameters` that are in the layout.

        `sharing` allocates shared memory if possible. `keeps_copy` keeps a copy of the values that
        servers returned, which tells whether a write has changed anything.
        """
        trained = [parameters[slot.index] for slot in layout.slots]
        self.device = _common_device(trained)
        self.segment = None
        if sharing and self.device.type == "cpu":
            self.segment = flat_memory.allocate_shared(layout.nbytes)
        if self.segment is not None:
            self.gradients = self.segment.contents
        else:
            self.gradients = flat_memory.allocate_private(layout.nbytes, self.device)
        self.in_place = True  # the collected gradients are in `gradients`, not in private memory
        self.missing: frozenset[int] = frozenset()  # indices of parameters without gradients
        self._nbytes = layout.nbytes
        # for steps in which the program refers to views of the flat memory
        self._private: Tensor | None = None
        # whether gradients may become views of the flat memory
        self._makes_views = self.segment is not None
        self._server_copy: Tensor | None = None
        if keeps_copy:
            self._server_copy = flat_memory.allocate_private(layout.nbytes, self.device)
        self._tracked = {
            slot.index: TrackedParameter(parameter, slot, self._view(slot), self._makes_views)
            for slot, parameter in zip(layout.slots, trained, strict=True)
        }
        self._check_order = list(self._tracked.items())
        self._checks = 0  # made by `_check_unnoticed_writes`
        # whether no step is under way, so that parameters are what servers returned
        self._is_current = False
        # what servers returned of whole parameters that are not scalars, by index
        self._server_values: dict[int, Tensor] = {}
        if self._server_copy is not None:
            self._server_values = {
                slot.index: slot.of(self._server_copy) for slot in layout.slots if slot.shape
            }
        self._ready_callbacks: list[weakref.WeakMethod[GradientReady]] = []
        self._hooks: list[Any] = []

    def __repr__(self) -> str:
        where = "shared memory" if self.segment is not None else f"private memory on {self.device}"
        count = len(self._tracked)
        return f"<FlatParameters: {count} parameters, {self._nbytes} bytes, gradients in {where}>"

    def _view(self, slot: ParameterSlot) -> Tensor:
        if self.segment is None:
            return slot.of(self.gradients)
        return self.segment.tensor_at(slot.offset, slot.dtype, slot.shape)

    # Gradients

    @property
    def collected_gradients(self) -> Tensor:
        """The memory that holds the gradients that were collected last."""
        if self.in_place:
            return self.gradients
        assert self._private is not None
        return self._private

    def on_gradient_ready(self, callback: GradientReady) -> None:
        """Call a method when backward has finished a gradient and it is in the flat memory."""
        self._ready_callbacks.append(weakref.WeakMethod(callback))
        if not self._hooks:
            self._hooks = [
                tracked.register_hook(self._ready_callbacks)
                for tracked in self._tracked.values()
                # torch allows hooks only for these
                if tracked.parameter.requires_grad
            ]

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Copy every gradient into the flat memory, and zeros for parameters without one."""
        for tracked in self._tracked.values():
            tracked.check()
        self._check_unnoticed_writes()
        to_copy, gradients, without = [], [], []
        for tracked in self._tracked.values():
            gradient = tracked.parameter.grad
            if gradient is None:
                without.append(tracked)
            elif not tracked.is_view(gradient):
                to_copy.append(tracked)
                gradients.append(dense(gradient))
        self.missing = frozenset([tracked.index for tracked in without])
        self.in_place = not any(tracked.is_referenced for tracked in (*to_copy, *without))
        if not self.in_place:
            self._makes_views = False
            self._collect_privately()
            return
        for tracked in without:
            tracked.clear()
        if to_copy:
            torch._foreach_copy_([tracked.view for tracked in to_copy], gradients)
        del gradients  # below, only the parameters may refer to them
        may_replace = self._makes_views and not self._ready_callbacks
        for tracked in to_copy:
            tracked.is_zero = False
            if may_replace and is_sole_reference(tracked.parameter):
                tracked.parameter.grad = tracked.view.detach()

    def _collect_privately(self) -> None:
        if self._private is None:
            self._private = flat_memory.allocate_private(self._nbytes, self.device)
        for tracked in self._tracked.values():
            view, gradient = tracked.slot.of(self._private), tracked.parameter.grad
            if gradient is None:
                view.zero_()
            else:
                view.copy_(dense(gradient))

    # Values

    def part_views(self, server_range: ServerRange, values: Tensor) -> list[Tensor]:
        """Return a view of each part of a server's range, given the bytes of that range."""
        return [_shaped(part, part.of(values)) for part in server_range.parts]

    @torch.no_grad()
    def write_values(self, server_range: ServerRange, views: Sequence[Tensor]) -> None:
        """Copy new values, as views of the parts of a range, into the parameters."""
        parameters, values = [], []
        for part, view in zip(server_range.parts, views, strict=True):
            parameter = self._tracked[part.slot.index].parameter
            if part.is_whole:
                parameters.append(parameter)
                values.append(view)
                if parameter.dim() and self._server_copy is None:
                    self._server_values[part.slot.index] = view
            else:
                _write_part(parameter, part, view)
            if self._server_copy is not None:
                _elements(part, self._server_copy).copy_(view.view(-1))
        if parameters:
            torch._foreach_copy_(parameters, values)

    def mark_current(self) -> None:
        """Remember that parameters are now what servers returned: the step is complete."""
        self._is_current = True
        for tracked in self._tracked.values():
            tracked.mark_current()

    @torch.no_grad()
    def find_written(self) -> set[int]:
        """Return the indices of parameters that were written to since the last step.

        This begins a step.
        """
        self._is_current = False
        written = {tracked.index for tracked in self._tracked.values() if tracked.is_written}
        if self._server_copy is None:
            return written
        return {index for index in written if self._differs(self._tracked[index])}

    def _differs(self, tracked: TrackedParameter) -> bool:
        """Return whether a parameter is not what servers returned."""
        assert self._server_copy is not None
        value = tracked.parameter.detach().to(self._server_copy.device).contiguous()
        returned = _bytes(tracked.slot, self._server_copy)
        return not torch.equal(value.view(-1).view(torch.uint8), returned)

    def _check_unnoticed_writes(self) -> None:
        """Raise `UsageError` if a write through `.data` or numpy has changed some elements.

        Each step checks some rows of the next parameter, and other rows when its turn comes again.
        """
        index, tracked = self._check_order[self._checks % len(self._check_order)]
        lap = self._checks // len(self._check_order)
        self._checks += 1
        returned = self._server_values.get(index)
        parameter, slot = tracked.parameter, tracked.slot
        if (
            not self._is_current
            or returned is None
            or not len(returned)
            or tracked.is_written
            or not parameter.is_cpu
        ):
            return
        row_nbytes = max(1, slot.nbytes // len(returned))
        rows = max(1, _COMPARED_NBYTES // row_nbytes)
        first = lap * rows % len(returned)
        compared = parameter.detach()[first : first + rows].contiguous()
        expected = returned[first : first + rows].contiguous()
        if not torch.equal(
            compared.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)
        ):
            raise UsageError(
                f"parameter {slot.name!r} was written to through .data or numpy(), which its "
                "ps.Optimizer cannot notice, so servers would not get it: write to the parameter "
                "itself, under torch.no_grad()"
            )

    @torch.no_grad()
    def copy_values(
        self, server_range: ServerRange, indices: Iterable[int] | None = None
    ) -> dict[int, Tensor]:
        """Return copies of the parts of a server's range, by their position in the range.

        `indices` restricts them to parts of these parameters.
        """
        selected = self._tracked.keys() if indices is None else set(indices)
        return {
            position: self._part_of_parameter(part).to(self.device, copy=True)
            for position, part in enumerate(server_range.parts)
            if part.slot.index in selected
        }

    def copy_range(self, server_range: ServerRange) -> Tensor:
        """Return a copy of a server's range of the parameters, as bytes."""
        values = flat_memory.allocate_private(server_range.nbytes, self.device)
        for position, value in self.copy_values(server_range).items():
            server_range.parts[position].of(values).copy_(value)
        return values

    def _part_of_parameter(self, part: ParameterPart) -> Tensor:
        parameter = self._tracked[part.slot.index].parameter
        return parameter.detach().reshape(-1)[part.first : part.last]

    # The end

    def release(self) -> None:
        """Give the model's gradients memory of their own, and remove every hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for tracked in self._tracked.values():
            gradient = tracked.parameter.grad
            if gradient is not None and self.segment is not None and tracked.is_view(gradient):
                tracked.parameter.grad = gradient.clone()


def _common_device(parameters: Sequence[Tensor]) -> torch.device:
    devices = {parameter.device for parameter in parameters}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _shaped(part: ParameterPart, elements: Tensor) -> Tensor:
    return elements.view(part.slot.shape) if part.is_whole else elements


def _write_part(parameter: Tensor, part: ParameterPart, elements: Tensor) -> None:
    """Write some elements of a parameter, in the order of a contiguous tensor."""
    if parameter.is_contiguous():
        parameter.detach().view(-1)[part.first : part.last].copy_(elements)
        return
    whole = parameter.detach().reshape(-1)  # a copy
    whole[part.first : part.last].copy_(elements)
    parameter.copy_(whole.view(part.slot.shape))


def _elements(part: ParameterPart, flat: Tensor) -> Tensor:
    return part.slot.of(flat).view(-1)[part.first : part.last]


def _bytes(slot: ParameterSlot, flat: Tensor) -> Tensor:
    return flat[slot.offset : slot.offset + slot.nbytes]

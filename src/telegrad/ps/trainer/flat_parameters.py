"""`FlatParameters`: the gradients of a model in one piece of memory, and its parameters as servers see them.

Rule: parameters and gradients belong to the model. They keep their own memory, memory format and device, which may
change at any time. A step copies gradients into the flat memory, which servers read, and copies what servers answer
into the parameters, wherever they are then. What is written into parameters between two steps is noticed by their
version counters and addresses and goes to the servers with the next step. Writes through `Parameter.data` change
neither. To find those, each step compares some elements of one parameter with what servers answered; a difference is
an error.

One copy is saved where nobody can tell: if the flat memory is shared with servers and nothing but `parameter.grad`
refers to a gradient, that becomes a view of the flat memory with a storage of its own. Further steps with the same
tensor copy nothing. The view may be kept as any other gradient: a place in the flat memory is written only if nothing
refers to it, and if something does, gradients lie in private memory and travel by value in that step.

State: the memory, which belongs to the trainer except between a push and its answer, when servers read it; `missing`
and `in_place`, about the last gradients that were collected; of each parameter, its version and address when a step
last wrote to it. Hooks know listeners weakly: they live as long as the model.
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
from telegrad.ps import flat_memory
from telegrad.ps.layout import ParameterLayout, ParameterPart, ParameterSlot, ServerRange

Ready = Callable[[int], None]

_COMPARED = 1 << 16  # bytes that a step compares


class FlatParameters:
    def __init__(
        self,
        layout: ParameterLayout,
        parameters: Sequence[Tensor],
        sharing: bool,
        compares: bool = False,
    ) -> None:
        """Make the memory of `parameters`, which are in the order of their numbers.

        `compares` keeps a copy of what servers answered, which tells whether a write changed anything.
        """
        learning = [parameters[slot.number] for slot in layout.slots]
        self.device = _common_device(learning)
        self.segment = (
            flat_memory.allocate(layout.nbytes) if sharing and self.device.type == "cpu" else None
        )
        if self.segment is not None:
            self.gradients = self.segment.contents
        else:
            self.gradients = flat_memory.allocate_private(layout.nbytes, self.device)
        self.in_place = True
        self.missing: frozenset[int] = frozenset()  # numbers of the parameters without gradients
        self._nbytes = layout.nbytes
        self._own: Tensor | None = None  # private memory for steps in which the other is in use
        self._moves = self.segment is not None  # may gradients become views of the flat memory?
        self._known = flat_memory.allocate_private(layout.nbytes, self.device) if compares else None
        self._entries = {
            slot.number: _FlatParameter(parameter, slot, self._place(slot), self._moves)
            for slot, parameter in zip(layout.slots, learning, strict=True)
        }
        self._order = list(self._entries.items())
        self._turn = 0  # in which parameters are looked at
        # has the last step ended, so that parameters are what servers answered?
        self._is_current = False
        # what servers answered, by the numbers of whole parameters
        self._answered: dict[int, Tensor] = {}
        if self._known is not None:
            self._answered = {
                slot.number: slot.of(self._known) for slot in layout.slots if slot.shape
            }
        self._listeners: list[weakref.WeakMethod[Ready]] = []
        self._hooks: list[Any] = []

    def __repr__(self) -> str:
        where = "shared memory" if self.segment is not None else f"private memory on {self.device}"
        count = len(self._entries)
        return f"<FlatParameters: {count} parameters, {self._nbytes} bytes, gradients in {where}>"

    def _place(self, slot: ParameterSlot) -> Tensor:
        if self.segment is None:
            return slot.of(self.gradients)
        return self.segment.part(slot.offset, slot.dtype, slot.shape)

    # Gradients

    @property
    def current(self) -> Tensor:
        """The memory that holds the gradients that were last collected."""
        if self.in_place:
            return self.gradients
        assert self._own is not None
        return self._own

    def listen(self, ready: Ready) -> None:
        """Call a method with the number of each parameter whose gradient backward has finished.

        The gradient is in the flat memory then.
        """
        self._listeners.append(weakref.WeakMethod(ready))
        if not self._hooks:
            self._hooks = [
                entry.hook(self._listeners)
                for entry in self._entries.values()
                # others have no gradients that backward could finish
                if entry.parameter.requires_grad
            ]

    @torch.no_grad()
    def collect(self) -> None:
        """Put every gradient into the flat memory, and zeros where there is none."""
        for entry in self._entries.values():
            entry.check()
        self._check_unnoticed()
        places, gradients, empty = [], [], []
        for entry in self._entries.values():
            gradient = entry.parameter.grad
            if gradient is None:
                empty.append(entry)
            elif not entry.is_at_place(gradient):
                places.append(entry)
                gradients.append(_dense(gradient))
        self.missing = frozenset([entry.number for entry in empty])
        self.in_place = not any(entry.is_held for entry in (*places, *empty))
        if not self.in_place:
            self._moves = False
            self._collect_privately()
            return
        for entry in empty:
            entry.clear()
        if places:
            torch._foreach_copy_([entry.place for entry in places], gradients)
        del gradients  # nothing but the parameters may refer to them below
        movable = self._moves and not self._listeners
        for entry in places:
            entry.is_zero = False
            if movable and _nobody_else_has_gradient(entry.parameter):
                entry.parameter.grad = entry.place.detach()

    def _collect_privately(self) -> None:
        if self._own is None:
            self._own = flat_memory.allocate_private(self._nbytes, self.device)
        for entry in self._entries.values():
            place, gradient = entry.slot.of(self._own), entry.parameter.grad
            if gradient is None:
                place.zero_()
            else:
                place.copy_(_dense(gradient))

    def gradients_present(self) -> list[Tensor]:
        """Return the gradients of the model, as the model has them."""
        found = [entry.parameter.grad for entry in self._entries.values()]
        return [gradient for gradient in found if gradient is not None]

    # Parameters

    def views(self, share: ServerRange, values: Tensor) -> list[Tensor]:
        """Return the parts of a server's range in memory that holds the bytes of that range."""
        return [_shaped(part, part.of(values)) for part in share.parts]

    @torch.no_grad()
    def take(self, share: ServerRange, views: Sequence[Tensor]) -> None:
        """Copy fresh values, as `views` returns them, into the parameters."""
        parameters, values = [], []
        for part, view in zip(share.parts, views, strict=True):
            parameter = self._entries[part.slot.number].parameter
            if part.is_whole:
                parameters.append(parameter)
                values.append(view)
                if parameter.dim() and self._known is None:
                    self._answered[part.slot.number] = view
            else:
                _write_part(parameter, part, view)
            if self._known is not None:
                _elements(part, self._known).copy_(view.view(-1))
        if parameters:
            torch._foreach_copy_(parameters, values)

    def note(self) -> None:
        """Remember that parameters are now what servers answered."""
        self._is_current = True
        for entry in self._entries.values():
            entry.note()

    @torch.no_grad()
    def written(self) -> set[int]:
        """Return the numbers of parameters that were written to since servers last answered. A step begins."""
        self._is_current = False
        found = {entry.number for entry in self._entries.values() if entry.is_written}
        if self._known is None:
            return found
        return {number for number in found if self._differs(self._entries[number], self._known)}

    def _check_unnoticed(self) -> None:
        """Raise an error if some elements were written to in a way that nothing else notices."""
        number, entry = self._order[self._turn % len(self._order)]
        lap, self._turn = self._turn // len(self._order), self._turn + 1
        answered = self._answered.get(number)
        if (
            not self._is_current
            or answered is None
            or entry.is_written
            or not entry.parameter.is_cpu
        ):
            return
        rows = (
            max(1, _COMPARED // max(1, entry.slot.nbytes // len(answered))) if len(answered) else 0
        )
        first = lap * rows % max(1, len(answered))
        mine = entry.parameter.detach()[first : first + rows].contiguous()
        its = answered[first : first + rows].contiguous()
        if not torch.equal(mine.view(-1).view(torch.uint8), its.view(-1).view(torch.uint8)):
            raise UsageError(
                f"parameter {entry.slot.name!r} was written to through .data or numpy(), which its ps.Optimizer cannot "
                "notice, so servers would not get it: write to the parameter itself, under torch.no_grad()"
            )

    def _differs(self, entry: _FlatParameter, known: Tensor) -> bool:
        value = entry.parameter.detach().to(known.device).contiguous()
        return not torch.equal(value.view(-1).view(torch.uint8), _bytes(entry.slot, known))

    @torch.no_grad()
    def values(self, share: ServerRange, numbers: Iterable[int] | None = None) -> dict[int, Tensor]:
        """Return copies of the parts of a server's range, by their position among its parts."""
        wanted = self._entries.keys() if numbers is None else set(numbers)
        return {
            position: self._part_of_parameter(part).to(self.device, copy=True)
            for position, part in enumerate(share.parts)
            if part.slot.number in wanted
        }

    def range_of_values(self, share: ServerRange) -> Tensor:
        """Return a copy of a server's range of the parameters, as bytes."""
        values = flat_memory.allocate_private(share.nbytes, self.device)
        for position, value in self.values(share).items():
            share.parts[position].of(values).copy_(value)
        return values

    def _part_of_parameter(self, part: ParameterPart) -> Tensor:
        parameter = self._entries[part.slot.number].parameter
        return parameter.detach().reshape(-1)[part.first : part.last]

    # The end

    def release(self) -> None:
        """Give the model's gradients memory of their own, and remove every hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for entry in self._entries.values():
            gradient = entry.parameter.grad
            if gradient is not None and self.segment is not None and entry.is_at_place(gradient):
                entry.parameter.grad = gradient.clone()


class _FlatParameter:
    """One parameter and the place of its gradient."""

    def __init__(
        self, parameter: Tensor, slot: ParameterSlot, place: Tensor, own_storage: bool
    ) -> None:
        """Only a place with a storage of its own is ever shown to anybody."""
        self.parameter = parameter
        self.slot = slot
        self.number = slot.number
        self.place = place
        self.address = place.data_ptr() or -1  # of an empty tensor: nowhere
        self.is_zero = True
        self._storage = place.untyped_storage() if own_storage else None
        self._uses = self._count_uses()
        self.note()

    def check(self) -> None:
        parameter, slot = self.parameter, self.slot
        if parameter.dtype is slot.dtype and parameter.shape == slot.shape:
            return
        raise UsageError(
            f"parameter {slot.name!r} was {slot.dtype} of shape {slot.shape} when its ps.Optimizer was "
            f"made, and is {parameter.dtype} of shape {tuple(parameter.shape)} now, but servers hold the "
            "former: convert the model first and make the optimizer afterwards, or use torch.autocast"
        )

    # The gradient

    @property
    def is_held(self) -> bool:
        """Does anything besides this entry refer to the memory of the place?"""
        return self._count_uses() > self._uses

    def _count_uses(self) -> int:
        if self._storage is None:
            return 0
        count: int = torch._C._storage_Use_Count(self._storage._cdata)  # type: ignore[attr-defined]
        return count + sys.getrefcount(self._storage)

    def is_at_place(self, gradient: Tensor) -> bool:
        return (
            gradient.layout is torch.strided
            and gradient.data_ptr() == self.address
            and gradient.is_contiguous()
        )

    def clear(self) -> None:
        if not self.is_zero:
            self.place.zero_()
            self.is_zero = True

    def hook(self, listeners: list[weakref.WeakMethod[Ready]]) -> Any:
        """Copy each gradient to its place when backward has finished it, and tell the listeners."""
        itself = weakref.ref(self)  # a hook that knew the parameter would keep it alive for ever

        def accumulated(parameter: Tensor) -> None:
            entry = itself()
            if entry is None or not entry.copy_gradient():
                return
            for listener in listeners:
                ready = listener()
                if ready is not None:
                    ready(entry.number)

        return self.parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def copy_gradient(self) -> bool:
        """Return False if the place cannot hold the gradient, which then waits for the step."""
        gradient = self.parameter.grad
        if gradient is None or gradient.shape != self.place.shape:
            return False
        if not self.is_at_place(gradient):
            if self.is_held:
                return False
            self.place.copy_(_dense(gradient))
            self.is_zero = False
        return True

    # The parameter

    def note(self) -> None:
        self._noted = self.parameter._version, self.parameter.data_ptr()

    @property
    def is_written(self) -> bool:
        return (self.parameter._version, self.parameter.data_ptr()) != self._noted


def check_kind(name: str, parameter: Tensor) -> None:
    """Raise an error for a parameter that servers cannot hold."""
    ordinary = isinstance(parameter, nn.Parameter) or type(parameter) is Tensor
    wrapper = is_traceable_wrapper_subclass(parameter) or is_lazy(parameter)
    if not ordinary or wrapper or parameter.layout is not torch.strided or parameter.is_meta:
        raise UsageError(
            f"parameter {name!r} is a {type(parameter).__name__} ({parameter.layout}, on {parameter.device}), and "
            "parameter servers hold plain dense tensors: initialise it first, or train it with an optimizer of torch "
            "and give ps.Optimizer the other parameters"
        )
    if parameter.is_inference():
        raise UsageError(
            f"parameter {name!r} was made in inference mode and cannot be trained: make the model outside of "
            "torch.inference_mode"
        )


def _common_device(parameters: Sequence[Tensor]) -> torch.device:
    devices = {parameter.device for parameter in parameters}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def _dense(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient


def _shaped(part: ParameterPart, elements: Tensor) -> Tensor:
    return elements.view(part.slot.shape) if part.is_whole else elements


def _write_part(parameter: Tensor, part: ParameterPart, elements: Tensor) -> None:
    """Write some elements of a parameter, which count as if it were contiguous."""
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


def _references_to_gradient(parameter: Tensor) -> tuple[int, ...]:
    gradient = parameter.grad
    assert gradient is not None
    storage = gradient.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return sys.getrefcount(gradient), gradient._use_count(), uses, sys.getrefcount(storage)  # type: ignore[attr-defined]


def _alone() -> tuple[int, ...]:
    """Return what is counted of a gradient that its parameter alone refers to, in this version."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return _references_to_gradient(parameter)


_ALONE = _alone()


def _nobody_else_has_gradient(parameter: Tensor) -> bool:
    """Can `parameter.grad` be replaced by a copy without anybody noticing?"""
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
    return _references_to_gradient(parameter) == _ALONE

"""`Flat`: the parameters of a model in one piece of memory, and their gradients in another.

The memory is on the device that all parameters are on. They become views of it, and so does each gradient as soon as it
has been accumulated: what backward computes is where servers read it, and what they answer with is copied to where the
model reads it. If parameters are on several devices, it is on the CPU, and those of the others are copied.

State: the memory. It belongs to the trainer except between a push and its answer, when servers read the gradients. Who
listens is known to the hooks weakly: they live as long as the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.ps import segments
from telegrad.ps.layout import Layout, Slot


class Flat:
    def __init__(self, layout: Layout, parameters: Sequence[Tensor], sharing: bool) -> None:
        """`parameters` in the order of their numbers."""
        self.device = _common_device([parameters[slot.number] for slot in layout.slots])
        self.segment = segments.make(layout.nbytes) if sharing and self.device.type == "cpu" else None
        self.values = segments.private(layout.nbytes, self.device)
        if self.segment is not None:
            self.gradients = self.segment.contents
        else:
            self.gradients = segments.private(layout.nbytes, self.device)
        self._entries = [_Entry(parameters[slot.number], slot, self.values, self.gradients) for slot in layout.slots]
        self._parameters = tuple(entry.parameter for entry in self._entries)
        self._elsewhere = [entry for entry in self._entries if not entry.here]
        self.missing: frozenset[int] = frozenset()  # the numbers of those that had no gradient when last collected
        self._listeners: list[weakref.WeakMethod[Callable[[int], None]]] = []
        self._hooks = [entry.hook(self._listeners) for entry in self._entries if entry.here]

    def __repr__(self) -> str:
        where = "shared memory" if self.segment is not None else f"memory of its own on {self.device}"
        return f"<Flat: {len(self._parameters)} parameters, {self.values.numel()} bytes, gradients in {where}>"

    def listen(self, ready: Callable[[int], None]) -> None:
        """Call a method with the number of each parameter whose gradient backward has just put into the memory."""
        self._listeners.append(weakref.WeakMethod(ready))

    def collect(self) -> None:
        """See to it that every gradient is in the flat memory, and zeros where there is none."""
        self.missing = frozenset([entry.number for entry in self._entries if not entry.collect()])

    def take(self, start: int, values: Tensor) -> None:
        """Fresh values for the bytes from `start` on."""
        self.values[start : start + values.numel()].copy_(values)

    def deliver(self) -> None:
        """All fresh values have been taken: show them to the model."""
        for entry in self._elsewhere:
            entry.parameter.data.copy_(entry.value)
        torch.autograd.graph.increment_version(self._parameters)

    def release(self) -> None:
        """Gradients are the model's own again."""
        for hook in self._hooks:
            hook.remove()
        for entry in self._entries:
            if entry.parameter.grad is entry.gradient:
                entry.parameter.grad = entry.gradient.clone()


def _common_device(parameters: Sequence[Tensor]) -> torch.device:
    devices = {parameter.device for parameter in parameters}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


class _Entry:
    """One parameter and its places."""

    def __init__(self, parameter: Tensor, slot: Slot, values: Tensor, gradients: Tensor) -> None:
        self.parameter = parameter
        self.number = slot.number
        self.value = slot.of(values)
        self.gradient = slot.of(gradients)
        self.here = parameter.device == values.device
        self.value.copy_(parameter.detach())
        if self.here:
            parameter.data = self.value

    def collect(self) -> bool:
        """False if there is no gradient."""
        if self.parameter.grad is None:
            self.gradient.zero_()
        elif self.here:
            _move(self.parameter, self.gradient)
        else:
            self.gradient.copy_(self.parameter.grad)
        return self.parameter.grad is not None

    def hook(self, listeners: list[weakref.WeakMethod[Callable[[int], None]]]) -> Any:
        """Move each gradient to its place while it is still in the cache."""
        gradient, number = self.gradient, self.number  # a hook that knew the parameter would keep it alive for ever

        def accumulated(parameter: Tensor) -> None:
            _move(parameter, gradient)
            for listener in listeners:
                ready = listener()
                if ready is not None:
                    ready(number)

        return self.parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]


def _move(parameter: Tensor, place: Tensor) -> None:
    gradient = parameter.grad
    if gradient is not place and gradient is not None:
        place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = place

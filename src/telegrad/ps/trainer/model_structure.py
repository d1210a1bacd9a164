"""`ModelStructure`: notice that a model has other parameters than its optimizer.

A step looks whether every module still has the same submodules and parameters, which costs
microseconds. Only if one has not, the model is searched for parameters that require a gradient and
that the optimizer does not know.

State: `_seen`, the dictionaries of each module with the entries that they had.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from telegrad.errors import UsageError


class ModelStructure:
    """
    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> structure = ModelStructure(model, model.parameters())
    >>> structure.check()
    >>> model[1] = nn.Linear(1, 2)
    >>> structure.check()
    Traceback (most recent call last):
    telegrad.errors.UsageError: parameters 1.weight, 1.bias of the model are not those that its ps.Optimizer was ...
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        self._model = model
        self._known = {id(each) for each in parameters}
        self._seen = _entries(model)

    def check(self) -> None:
        """Raise an error if the model has parameters to train that the optimizer does not know."""
        for entries, before in self._seen:
            if before != entries:  # in this order: `_Identity` compares
                self._search()
                return

    def _search(self) -> None:
        unknown = [
            name
            for name, each in self._model.named_parameters()
            if each.requires_grad and id(each) not in self._known
        ]
        if unknown:
            raise UsageError(
                f"parameters {', '.join(unknown)} of the model are not those that its ps.Optimizer was made with, and "
                "would not be trained: make a new optimizer after changing the model, or give the optimizer "
                "model.parameters() in place of the model if something else trains them"
            )
        self._seen = _entries(self._model)


def _entries(model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the dictionaries of submodules and parameters of all modules, each with a copy of it."""
    return [
        (entries, {name: _Identity(each) for name, each in entries.items()})
        for module in model.modules()
        for entries in (module._modules, module._parameters)
        if entries
    ]


class _Identity:
    """Equal to one object alone. Tensors compare element by element otherwise."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return other is self._value

    def __hash__(self) -> int:
        return id(self._value)

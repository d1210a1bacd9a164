"""Which parameters of a model an optimizer trains, and `ModelStructure`, which notices changes.

A step checks whether every module still has the same submodules and parameters, which takes
microseconds. Only if one has changed, it searches the model for parameters that require a gradient
and that the optimizer does not know.

State of `ModelStructure`: `_dictionaries`, those of all modules, and `_entries`, what they
contained at the last search. Used by one thread at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import Tensor, nn

from telegrad.errors import UsageError
from telegrad.ps.embeddings.row_gradients import RowsParameter


def trained_parameters(
    model: nn.Module | Iterable[Any], groups: list[dict[str, Any]], include_frozen: bool
) -> list[list[tuple[int, str, Tensor]]]:
    """Return index, name and tensor of the parameters that servers hold, by group.

    Indices count the parameters of all groups. Parameters without a module are named by index.
    """
    names: dict[int, str] = {}
    if isinstance(model, nn.Module):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    indices = itertools.count()
    trained: list[list[tuple[int, str, Tensor]]] = []
    for group in groups:
        entries = []
        for parameter in group["params"]:
            index = next(indices)
            is_trained = parameter.requires_grad or include_frozen
            if is_trained and not isinstance(parameter, RowsParameter):
                entries.append((index, names.get(id(parameter), str(index)), parameter))
        trained.append(entries)
    return trained


class ModelStructure:
    """The modules and parameters of a model when its optimizer was created.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> structure = ModelStructure(model, model.parameters())
    >>> structure.check()
    >>> model[1] = nn.Linear(1, 2)
    >>> structure.check()
    Traceback (most recent call last):
    telegrad.errors.UsageError: parameters 1.weight, 1.bias of the model are not those that its ...
    """

    def __init__(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        self._model = model
        self._known_ids = {id(parameter) for parameter in parameters}
        self._remember()

    def check(self) -> None:
        """Raise `UsageError` if the model has trainable parameters unknown to the optimizer."""
        entries = _values(self._dictionaries)
        # by identity: `==` of tensors would compare their elements
        is_same = len(entries) == len(self._entries) and all(map(is_, entries, self._entries))
        if not is_same:
            self._search()

    def _search(self) -> None:
        unknown = [
            name
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad and id(parameter) not in self._known_ids
        ]
        if unknown:
            raise UsageError(
                f"parameters {', '.join(unknown)} of the model are not those that its "
                "ps.Optimizer was created with, and would not be trained: create a new optimizer "
                "after changing the model, or pass model.parameters() to the optimizer instead of "
                "the model if something else trains them"
            )
        self._remember()

    def _remember(self) -> None:
        """Remember the submodules and parameters of all modules."""
        self._dictionaries: list[dict[str, Any]] = [
            dictionary
            for module in self._model.modules()
            for dictionary in (module._modules, module._parameters)
        ]
        self._entries = _values(self._dictionaries)


def _values(dictionaries: list[dict[str, Any]]) -> list[Any]:
    """Return the values of all dictionaries, without running Python code for each of them."""
    return list(itertools.chain.from_iterable(map(dict.values, dictionaries)))

"""Parameter groups in the format of `torch.optim`, for optimizers whose steps are made elsewhere.

A `DistributedOptimizer` or a parameter server client has the groups; the optimizers on other
workers need the options of these groups and their changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor

from telegrad.errors import UsageError

Options = dict[str, Any]

_PARAMETERS = ("params", "param_names")  # the entries of a group that are no options


class RemoteState(defaultdict[Any, Any]):
    """The attribute `state` of an optimizer that has its state on other workers.

    It is empty, and an attempt to change it is an error, because nothing would come of it.
    """

    def __missing__(self, key: object) -> Mapping[str, Any]:
        return MappingProxyType({})

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UsageError(
            "the state of this optimizer is on other workers: read it with state_dict(), and "
            "change it with load_state_dict()"
        )

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _refuse


def group_options(group: dict[str, Any]) -> Options:
    """Return the options of a group without its parameters. Tensors are copied."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in _PARAMETERS
    }


def take_changes(groups: Sequence[dict[str, Any]], known: Sequence[Options]) -> dict[int, Options]:
    """Return the options that differ from the known ones, by index of the group.

    Update `known` with them.
    """
    changes_by_group: dict[int, Options] = {}
    for index, (group, known_options) in enumerate(zip(groups, known, strict=True)):
        changed = {
            name: value
            for name, value in group.items()
            if name not in _PARAMETERS and not _is_known(known_options, name, value)
        }
        if changed:
            changes_by_group[index] = group_options(changed)
            known_options.update(changes_by_group[index])
    return changes_by_group


def to_state_dict(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups as in a `state_dict`: with indices in place of parameters."""
    packed_groups, first = [], 0
    for group in groups:
        end = first + len(group["params"])
        packed_groups.append({**group_options(group), "params": list(range(first, end))})
        first = end
    return packed_groups


def state_by_index(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[int, Any]:
    """Return the state of each parameter in a `state_dict`, by index of the parameter.

    Raise `UsageError` if the `state_dict` is of groups of other sizes.
    """
    state_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    group_sizes = [len(group["params"]) for group in groups]
    if state_sizes != group_sizes:
        raise UsageError(
            f"the state_dict has parameter groups of sizes {state_sizes}, but this optimizer has "
            f"groups of sizes {group_sizes}; load a state_dict of the same model"
        )
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    return {keys.index(key): value for key, value in state_dict["state"].items()}


def _is_known(known: Options, name: str, value: Any) -> bool:
    """Return whether an option has the known value."""
    if name not in known:
        return False
    before = known[name]
    if isinstance(value, Tensor):
        return isinstance(before, Tensor) and torch.equal(before, value)
    return bool(before == value)

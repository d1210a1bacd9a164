"""Parameter groups in the form of `torch.optim`, for optimizers that work elsewhere than their groups are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.errors import UsageError

Options = dict[str, Any]


def options(group: dict[str, Any]) -> Options:
    """What a group says besides its parameters, as values of its own."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


def changes(groups: Sequence[dict[str, Any]], known: Sequence[Options]) -> dict[int, Options]:
    """By group, the options that differ from what is known; known from now on."""
    found: dict[int, Options] = {}
    for number, (group, before) in enumerate(zip(groups, known, strict=True)):
        changed = {
            name: value for name, value in options(group).items() if not _same(before, name, value)
        }
        if changed:
            found[number] = changed
            before.update(changed)
    return found


def packed(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of a `state_dict`, with numbers in place of parameters."""
    found, first = [], 0
    for group in groups:
        count = len(group["params"])
        found.append({**options(group), "params": list(range(first, first + count))})
        first += count
    return found


def state_by_number(state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[int, Any]:
    """The state of each parameter in a `state_dict` that is meant for these groups."""
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [len(group["params"]) for group in groups]
    if theirs != ours:
        raise UsageError(
            f"the state is of parameter groups of sizes {theirs}, this optimizer's are {ours}"
        )
    places = [place for group in state_dict["param_groups"] for place in group["params"]]
    return {places.index(place): value for place, value in state_dict["state"].items()}


def _same(known: Options, name: str, value: Any) -> bool:
    if name not in known:
        return False
    return (
        bool(torch.equal(known[name], value))
        if isinstance(value, Tensor)
        else bool(known[name] == value)
    )

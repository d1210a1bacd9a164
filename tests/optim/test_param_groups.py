"""Options of parameter groups, and their changes."""

from __future__ import annotations

import torch

from telegrad.param_groups import group_options, take_changes


def test_a_learning_rate_can_become_a_tensor_and_change_in_place() -> None:
    group = {"params": [torch.zeros(1)], "lr": 0.5, "momentum": 0.9}
    known = [group_options(group)]
    assert take_changes([group], known) == {}
    rate = group["lr"] = torch.tensor(0.5)
    assert take_changes([group], known) == {0: {"lr": torch.tensor(0.5)}}
    assert take_changes([group], known) == {}
    rate.fill_(0.25)
    assert take_changes([group], known) == {0: {"lr": torch.tensor(0.25)}}
    assert take_changes([group], known) == {}

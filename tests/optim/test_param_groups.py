"""Options of parameter groups, and their changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import ps
from telegrad.errors import UsageError
from telegrad.optim import DistributedOptimizer
from telegrad.param_groups import RemoteState, group_options, take_changes
from telegrad.refs import RRef
from telegrad.testing import LocalCluster


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


CHANGES: list[Callable[[Any], object]] = [
    lambda state: state.clear(),
    lambda state: state.update({1: 2}),
    lambda state: state.pop(1, None),
    lambda state: state.__setitem__(1, {}),
    lambda state: state.setdefault(1, {}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_is_elsewhere_cannot_be_changed(change: Callable[[Any], object]) -> None:
    with pytest.raises(UsageError, match="change it with load_state_dict"):
        change(RemoteState())


def test_optimizers_say_that_their_state_is_elsewhere() -> None:
    model = nn.Linear(2, 1)
    with LocalCluster(2) as cluster:
        agent = cluster["w0"]
        parameters = [RRef(each, agent=agent) for each in model.parameters()]
        optimizers = [
            DistributedOptimizer(torch.optim.Adam, parameters, lr=0.1),
            ps.Optimizer(model, servers="w1", optimizer=torch.optim.Adam, lr=0.1, agent=agent),
        ]
        for optimizer in optimizers:
            assert len(optimizer.state) == 0
            assert dict(optimizer.state[model.weight]) == {}
            with pytest.raises(UsageError, match="state of this optimizer is on other workers"):
                optimizer.state.clear()
            with pytest.raises(TypeError, match="does not support item assignment"):
                optimizer.state[model.weight]["step"] = 3

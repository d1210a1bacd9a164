"""Modules that live on another worker."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from telegrad.agent import Agent
from telegrad.nn import RemoteModule
from telegrad.testing import LocalCluster


@pytest.fixture
def w0(cluster: Callable[..., LocalCluster]) -> Agent:
    return cluster(3)["w0"]


def run_elsewhere(module: RemoteModule, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(x)
    return result


def not_a_module(*_: object) -> object:
    return object()


def test_it_computes_where_it_lives(w0: Agent) -> None:
    layer = RemoteModule("w1/cpu", nn.Linear, (3, 2), agent=w0)
    weight, bias = (rref.to_here() for rref in layer.remote_parameters())
    x = torch.randn(4, 3)
    expected = nn.functional.linear(x, weight, bias)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.forward_async(x).wait(), expected)
    assert torch.equal(nn.Sequential(layer, nn.Identity())(x), expected)
    assert torch.equal(w0.call("w2", run_elsewhere, layer, x), expected)
    again = RemoteModule.init_from_module_rref("w1/cpu", layer.get_module_rref())
    assert torch.equal(again(x), expected)


def test_workers_are_named_by_name_or_rank(w0: Agent) -> None:
    for place in ("w1", "w1/cpu", "rank:1/cpu"):
        assert RemoteModule(place, nn.Identity, agent=w0).on == "w1"
    for wrong in ("/cpu", "rank:x/cpu"):
        with pytest.raises(ValueError):
            RemoteModule(wrong, nn.Identity, agent=w0)


def test_modes_and_state_act_on_the_module(w0: Agent) -> None:
    layer = RemoteModule("w1", nn.Linear, (2, 2), agent=w0)
    module = layer.get_module_rref()
    assert module.rpc_sync().train(False).training is False
    layer.train()
    assert module.to_here().training
    layer.eval()
    assert not module.to_here().training
    layer.to(torch.float64)
    assert layer.state_dict()["weight"].dtype == torch.float64
    layer.load_state_dict({"weight": torch.zeros(2, 2), "bias": torch.ones(2)})
    assert layer(torch.randn(1, 2, dtype=torch.float64)).tolist() == [[1.0, 1.0]]
    layer.requires_grad_(False)
    assert not any(rref.to_here().requires_grad for rref in layer.remote_parameters())
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": torch.zeros(3, 3), "bias": torch.ones(2)})


def test_a_module_around_it_saves_and_loads_it(w0: Agent) -> None:
    model = nn.Sequential(RemoteModule("w1", nn.Linear, (2, 2), agent=w0), nn.Linear(2, 1))
    assert list(dict(model.named_parameters())) == ["1.weight", "1.bias"]
    state = model.state_dict()
    assert sorted(state) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    state["0.bias"] = torch.full((2,), 5.0)
    model.load_state_dict(state)
    assert model.state_dict()["0.bias"].tolist() == [5.0, 5.0]


def test_what_makes_no_sense_from_afar_says_so(w0: Agent) -> None:
    layer = RemoteModule("w1", nn.Linear, (2, 2), agent=w0)
    with pytest.raises(ValueError, match="remote_parameters"):
        layer.parameters()
    with pytest.raises(ValueError, match="register_forward_hook"):
        layer.register_forward_hook(print)
    for _ in range(3):  # whether or not it is made by then
        with pytest.raises(ValueError, match=r"returns an instance of <class nn\.Module>"):
            RemoteModule("w1", not_a_module, agent=w0)(1)  # type: ignore[arg-type]

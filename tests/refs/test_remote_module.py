"""Modules that live on another worker."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from telegrad.agent import Agent
from telegrad.errors import SerializationError, UsageError
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


def test_a_module_around_it_reports_what_does_not_fit(w0: Agent) -> None:
    model = nn.Sequential(RemoteModule("w1", nn.Linear, (2, 2), agent=w0))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"0.weight": torch.zeros(3, 3), "0.bias": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        model.load_state_dict({"0.bias": torch.ones(2)})
    model.load_state_dict({"0.bias": torch.full((2,), 7.0)}, strict=False)
    assert model.state_dict()["0.bias"].tolist() == [7.0, 7.0]


def test_a_module_around_it_treats_it_as_a_leaf(w0: Agent) -> None:
    layer = RemoteModule("w1", nn.Linear, (2, 2), agent=w0)
    model = nn.Sequential(layer, layer).double()
    assert layer.state_dict()["weight"].dtype == torch.float32
    assert [name for name, _ in model.named_modules()] == ["", "0"]
    assert "on='w1', device='cpu'" in repr(model)


def test_gradients_are_reset_where_they_are(w0: Agent) -> None:
    layer = RemoteModule("w1", nn.Linear, (1, 1), agent=w0)
    module = layer.get_module_rref()
    module.rpc_sync().register_buffer("grad_seen", None)
    w0.call("w1", set_gradients, module)
    assert w0.call("w1", has_gradients, module)
    layer.zero_grad()
    assert not w0.call("w1", has_gradients, module)


def set_gradients(module: Any) -> None:
    for parameter in module.local_value().parameters():
        parameter.grad = torch.ones_like(parameter)


def has_gradients(module: Any) -> bool:
    return any(parameter.grad is not None for parameter in module.local_value().parameters())


class Describe(nn.Module):
    """Return where the input is, in a container of a type."""

    def __init__(self, container: Callable[..., Any]) -> None:
        super().__init__()
        self.container = container

    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> Any:
        return self.container([x.device.type, y.device.type])


@pytest.mark.parametrize("container", [list, tuple, "-".join])
def test_inputs_are_moved_to_the_device_of_the_module(
    w0: Agent, container: Callable[..., Any]
) -> None:
    layer = RemoteModule("w1/meta", Describe, (container,), agent=w0)
    assert layer(torch.ones(2), y=torch.ones(1)) == container(["meta", "meta"])


def test_results_stay_on_a_device_that_inputs_came_from(w0: Agent) -> None:
    layer = RemoteModule("w1/meta", nn.Linear, (2, 3), agent=w0)
    result = layer(torch.ones(4, 2, device="meta"))
    assert (result.device.type, result.shape) == ("meta", (4, 3))


def test_it_needs_an_agent_and_travels_in_calls_only(w0: Agent) -> None:
    with pytest.raises(UsageError, match="RemoteModule requires RPC"):
        RemoteModule("w1", nn.Identity)
    layer = RemoteModule("w1", nn.Identity, agent=w0)
    for fail in (pickle.dumps, copy.deepcopy):
        with pytest.raises(SerializationError, match="only be pickled when using RPC"):
            fail(layer)


def test_what_makes_no_sense_from_afar_says_so(w0: Agent) -> None:
    layer = RemoteModule("w1", nn.Linear, (2, 2), agent=w0)
    with pytest.raises(ValueError, match="remote_parameters"):
        layer.parameters()
    with pytest.raises(ValueError, match="register_forward_hook"):
        layer.register_forward_hook(print)
    for _ in range(3):  # whether or not it is made by then
        with pytest.raises(ValueError, match=r"returns an instance of <class nn\.Module>"):
            RemoteModule("w1", not_a_module, agent=w0)(1)  # type: ignore[arg-type]

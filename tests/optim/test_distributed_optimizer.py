"""`DistributedOptimizer` does what the same optimizer does in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from telegrad import autograd
from telegrad.agent import Agent
from telegrad.errors import PeerLost, UsageError, WorkersFailed
from telegrad.optim import DistributedOptimizer
from telegrad.refs import RRef, remote
from telegrad.testing import LocalCluster

SHAPES = [(3, 3), (3,), (3, 2), (2,)]
OWNERS = ["w1", "w2", "w1", "w0"]


@pytest.fixture
def transport() -> str:
    return "memory"


@pytest.fixture
def workers(cluster: Callable[..., LocalCluster]) -> LocalCluster:
    return cluster(3)


class Model:
    """The same four parameters twice: in this process, and on workers."""

    def __init__(self, agent: Agent) -> None:
        generator = torch.Generator().manual_seed(0)
        self.agent = agent
        self.here = [
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
            for shape in SHAPES
        ]
        self.there = [
            remote(owner, nn.Parameter, (parameter.detach(),), agent=agent)
            for owner, parameter in zip(OWNERS, self.here, strict=True)
        ]

    def loss(self, parameters: list[Any], seed: int) -> Tensor:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        w1, b1, w2, b2 = parameters
        return (((x @ w1 + b1).tanh() @ w2 + b2) ** 2).sum()

    def fetched(self) -> list[Tensor]:
        return [parameter.to_here() for parameter in self.there]

    def check(self) -> None:
        for here, there in zip(self.here, self.there, strict=True):
            torch.testing.assert_close(there.to_here().detach(), here.detach())


class Training:
    """Trains both copies of a model with the same optimizer and the same data."""

    def __init__(self, model: Model, local: Optimizer, distributed: DistributedOptimizer) -> None:
        self.model, self.local, self.distributed = model, local, distributed

    def step(self, seed: int, clip: float | None = None) -> None:
        self.local.zero_grad()
        self.model.loss(self.model.here, seed).backward()
        with autograd.context(agent=self.model.agent) as context_id:
            autograd.backward(context_id, [self.model.loss(self.model.fetched(), seed)])
            if clip is not None:
                norm = nn.utils.clip_grad_norm_(self.model.here, clip)
                assert float(self.distributed.clip_grad_norm_(clip, context_id)) == pytest.approx(
                    float(norm)
                )
            self.distributed.step(context_id)
        self.local.step()
        self.model.check()


@pytest.fixture
def model(workers: LocalCluster) -> Model:
    return Model(workers["w0"])


def both(model: Model, kind: Callable[..., Optimizer], **options: Any) -> Training:
    return Training(
        model, kind(model.here, **options), DistributedOptimizer(kind, model.there, **options)
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.01}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.01}),
        (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
        (torch.optim.Rprop, {"lr": 0.01}),
    ],
)
def test_it_steps_like_the_optimizer_itself(
    model: Model, kind: Callable[..., Optimizer], options: Any
) -> None:
    training = both(model, kind, **options)
    for seed in range(5):
        training.step(seed)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=10
        ),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2),
    ],
)
def test_schedulers_reach_the_workers(model: Model, make: Callable[[Optimizer], Any]) -> None:
    training = both(model, torch.optim.SGD, lr=0.01, momentum=0.9)
    schedulers = make(training.local), make(training.distributed)
    for seed in range(6):
        training.step(seed)
        for scheduler in schedulers:
            scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


def test_a_scheduler_that_watches_the_loss(model: Model) -> None:
    training = both(model, torch.optim.SGD, lr=0.01)
    schedulers = [
        torch.optim.lr_scheduler.ReduceLROnPlateau(each, patience=0)
        for each in (training.local, training.distributed)
    ]
    for seed in range(3):
        training.step(seed)
        for scheduler in schedulers:
            scheduler.step(1.0)
    assert training.distributed.param_groups[0]["lr"] < 0.01


def test_groups_with_options_of_their_own(model: Model) -> None:
    groups: list[dict[str, Any]] = [
        {"params": [0, 3], "lr": 0.1},
        {"params": [1, 2], "weight_decay": 0.5},
    ]

    def of(parameters: list[Any]) -> list[dict[str, Any]]:
        return [
            {**group, "params": [parameters[number] for number in group["params"]]}
            for group in groups
        ]

    local = torch.optim.AdamW(of(model.here), lr=0.01)
    distributed = DistributedOptimizer(torch.optim.AdamW, of(model.there), lr=0.01)
    training = Training(model, local, distributed)
    training.step(1)
    assert [group["lr"] for group in distributed.param_groups] == [0.1, 0.01]
    for optimizer in (local, distributed):
        optimizer.param_groups[1]["lr"] = 0.2
    training.step(2)
    assert "weight_decay: 0.5" in repr(distributed)


def test_a_group_can_be_added_later(model: Model) -> None:
    local = torch.optim.SGD(model.here[:1], lr=0.01, momentum=0.9)
    distributed = DistributedOptimizer(torch.optim.SGD, model.there[:1], lr=0.01, momentum=0.9)
    local.add_param_group({"params": model.here[1:], "lr": 0.1})
    distributed.add_param_group({"params": model.there[1:], "lr": 0.1})
    training = Training(model, local, distributed)
    training.step(1)
    training.step(2)
    assert len(distributed.remote_optimizers) == 3
    assert distributed.state_dict()["param_groups"][1]["params"] == [1, 2, 3]


@pytest.mark.parametrize("clip", [0.01, 1000.0])
def test_clipping_takes_the_norm_over_all_workers(model: Model, clip: float) -> None:
    training = both(model, torch.optim.SGD, lr=0.1)
    training.step(1, clip)


def test_clipping_refuses_what_is_not_a_number(model: Model) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, model.there, lr=0.1)
    with autograd.context(agent=model.agent) as context_id:
        autograd.backward(context_id, [model.loss(model.fetched(), 1) * float("nan")])
        with pytest.raises(UsageError, match="nan"):
            optimizer.clip_grad_norm_(1.0, context_id, error_if_nonfinite=True)


def test_gradients_of_several_contexts_add_up(model: Model) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, model.there, lr=0.1)
    local = torch.optim.SGD(model.here, lr=0.1)
    for seed in range(3):
        model.loss(model.here, seed).backward()
        with autograd.context(agent=model.agent) as context_id:
            autograd.backward(context_id, [model.loss(model.fetched(), seed)])
            optimizer.accumulate(context_id)
    norm = nn.utils.clip_grad_norm_(model.here, 0.5)
    assert float(optimizer.clip_grad_norm_(0.5)) == pytest.approx(float(norm))
    optimizer.step()
    local.step()
    model.check()
    optimizer.zero_grad()
    optimizer.step()  # there are no gradients
    model.check()


def test_micro_batches_in_one_context_add_up(model: Model) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, model.there, lr=0.1)
    with autograd.context(agent=model.agent) as context_id:
        for seed in range(3):
            model.loss(model.here, seed).backward()
            autograd.backward(context_id, [model.loss(model.fetched(), seed)])
        optimizer.step(context_id)
    torch.optim.SGD(model.here, lr=0.1).step()
    model.check()


def test_the_state_is_that_of_the_optimizer_itself(model: Model) -> None:
    training = both(model, torch.optim.Adam, lr=0.01)
    training.step(1)
    mine, own = training.distributed.state_dict(), training.local.state_dict()
    assert mine["param_groups"] == own["param_groups"]
    assert mine["state"].keys() == own["state"].keys()
    for number, state in own["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(mine["state"][number][name], value)


def test_the_state_can_be_loaded_from_either(model: Model) -> None:
    training = both(model, torch.optim.Adam, lr=0.01)
    training.step(1)
    for state in (training.distributed.state_dict(), training.local.state_dict()):
        distributed = DistributedOptimizer(torch.optim.Adam, model.there, lr=0.5)
        distributed.load_state_dict(state)
        assert distributed.param_groups[0]["lr"] == 0.01
        training = Training(model, training.local, distributed)
        training.step(2)


def test_a_state_of_another_shape_is_refused(model: Model) -> None:
    optimizer = DistributedOptimizer(torch.optim.Adam, model.there)
    with pytest.raises(UsageError, match="sizes"):
        optimizer.load_state_dict(torch.optim.Adam(model.here[:2]).state_dict())


def test_a_worker_that_a_context_never_came_to_stays_as_it_is(model: Model) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, model.there, lr=0.1)
    with autograd.context(agent=model.agent) as context_id:
        autograd.backward(context_id, [model.there[0].to_here().sum()])
        optimizer.step(context_id)
    with torch.no_grad():
        model.here[0].sub_(0.1)
    model.check()


def test_grad_is_left_alone(model: Model) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 7.0)
    optimizer = DistributedOptimizer(torch.optim.SGD, [RRef(parameter, agent=model.agent)], lr=1.0)
    with autograd.context(agent=model.agent) as context_id:
        autograd.backward(context_id, [(parameter * 3).sum()])
        optimizer.step(context_id)
    assert torch.equal(parameter.detach(), torch.full((2,), -2.0))
    assert torch.equal(parameter.grad, torch.full((2,), 7.0))


def train(parameter: RRef[Any], steps: int) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=1.0)
    for _ in range(steps):
        with autograd.context() as context_id:
            autograd.backward(context_id, [parameter.to_here().sum()])
            optimizer.step(context_id)


def test_steps_of_several_trainers_are_each_a_whole(workers: LocalCluster) -> None:
    w0 = workers["w0"]
    parameter = remote("w2", nn.Parameter, (torch.zeros(1000),), agent=w0)
    for training in [w0.submit(name, train, parameter, 20) for name in ("w0", "w1", "w2")]:
        training.wait()
    assert torch.equal(parameter.to_here().detach(), torch.full((1000,), -60.0))


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError(f"no step for {self.param_groups[0]['params'][0].shape}")


def test_every_error_is_reported(model: Model) -> None:
    optimizer = DistributedOptimizer(Failing, model.there, lr=0.1)
    with pytest.raises(WorkersFailed) as caught:
        optimizer.step()
    assert set(caught.value.failures) == {"w0", "w1", "w2"}
    assert all(isinstance(error, ValueError) for error in caught.value.failures.values())
    assert "no step for torch.Size([3, 3])" in str(caught.value)
    alone = DistributedOptimizer(Failing, model.there[:1], lr=0.1)
    with pytest.raises(ValueError, match="no step"):
        alone.step()


def test_a_worker_that_died_is_named(model: Model, workers: LocalCluster) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, model.there, lr=0.1)
    workers.kill("w2")
    with pytest.raises(PeerLost, match="w2"):
        optimizer.step()


def test_bad_arguments_say_what_to_do(model: Model) -> None:
    with pytest.raises(UsageError, match="empty"):
        DistributedOptimizer(torch.optim.SGD, [])
    with pytest.raises(UsageError, match="references"):
        DistributedOptimizer(torch.optim.SGD, [torch.zeros(1)])  # type: ignore[arg-type, list-item]
    with pytest.raises(ValueError, match="learning rate"):
        DistributedOptimizer(torch.optim.SGD, model.there[:1], lr=-1.0)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.there, lr=0.1)
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(lambda: 1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Could not find autograd context"):
        optimizer.step(5)


def test_hooks_run_where_the_optimizer_is_used(model: Model) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, model.there, lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "after"]


def test_parameters_without_gradients_are_left_out(workers: LocalCluster) -> None:
    agent = workers["w0"]
    used, unused = (remote("w1", nn.Parameter, (torch.ones(2),), agent=agent) for _ in range(2))
    elsewhere = remote("w2", nn.Parameter, (torch.ones(2),), agent=agent)
    optimizer = DistributedOptimizer(torch.optim.SGD, [used, unused, elsewhere], lr=1.0)
    with autograd.context(agent=agent) as context_id:
        autograd.backward(context_id, [used.to_here().sum() * 3])
        norm = optimizer.clip_grad_norm_(1.0, context_id)
        torch.testing.assert_close(float(norm), 3 * 2**0.5)
        optimizer.accumulate(context_id)
        optimizer.step(context_id)
    moved = 1 - 0.5**0.5
    torch.testing.assert_close(used.to_here().detach(), torch.full((2,), moved))
    for each in (unused, elsewhere):
        assert each.to_here().tolist() == [1, 1]
        assert agent.call(each.owner_name(), gradient_of, each) is None


def gradient_of(parameter: RRef[Any]) -> Any:
    return parameter.local_value().grad


def test_a_group_needs_parameters(workers: LocalCluster) -> None:
    made = remote("w1", nn.Parameter, (torch.ones(2),), agent=workers["w0"])
    groups: list[dict[str, Any]] = [{"params": [made]}, {"params": []}]
    with pytest.raises(UsageError, match="group without parameters"):
        DistributedOptimizer(torch.optim.SGD, groups, lr=1.0)

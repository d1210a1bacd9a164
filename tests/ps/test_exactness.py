"""Trainers with a parameter server compute what one process computes on all batches together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import ps
from telegrad.config import TRANSPORTS
from telegrad.errors import UsageError
from telegrad.ps.server import shard_optimizer
from telegrad.ps.server.service import ParameterShards
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE
from tests.ps import training
from tests.ps.training import Trainers, check_same, model

Clusters = Callable[..., LocalCluster]
Make = Callable[[LocalCluster], Trainers]

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]
IDS = [f"{kind.__name__}-{number}" for number, (kind, _) in enumerate(KINDS)]


def locally(kind: Any, options: dict[str, Any], trainers: int, steps: int) -> tuple[nn.Module, Any]:
    net = model()
    optimizer = kind(net.parameters(), **options)
    training.train(optimizer, net, range(steps), list(range(trainers)))
    return net, optimizer


def servers(count: int) -> list[str]:
    return [f"w{number}" for number in range(count)]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
@pytest.mark.parametrize("count", [1, 3])
def test_two_trainers_equal_one_process(
    cluster: Clusters, trainers_of: Make, kind: Any, options: dict[str, Any], count: int
) -> None:
    workers = cluster(count + 2)
    expected, _ = locally(kind, options, 2, 6)
    nets = trainers_of(workers).train(
        2, 6, count, optimizer=kind, servers=servers(count), **options
    )
    for net in nets:
        check_same(net, expected)


def test_the_loss_curve_is_that_of_one_process_with_the_large_batch(
    cluster: Clusters, trainers_of: Make
) -> None:
    def curve(optimizer: Any, net: nn.Module, numbers: list[int]) -> list[float]:
        found = []
        for step in range(15):
            optimizer.zero_grad()
            loss = training.loss(
                net, torch.cat([training.batch(step, number) for number in numbers])
            )
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    expected = model()
    whole = curve(torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), expected, [0, 1, 2])
    trainers = trainers_of(cluster(5))
    started = [
        trainers.start(
            f"w{2 + number}",
            partial(curve, numbers=[number]),
            servers=servers(2),
            trainers=3,
            lr=0.1,
            momentum=0.9,
        )
        for number in range(3)
    ]
    curves = [each.result(PATIENCE) for each in started]
    assert [sum(losses) / 3 for losses in zip(*curves, strict=True)] == pytest.approx(
        whole, rel=1e-9
    )
    assert whole[-1] < whole[0]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_many_blocks_are_as_good_as_one(
    pair: Any, monkeypatch: pytest.MonkeyPatch, kind: Any, options: dict[str, Any]
) -> None:
    """Parameters that begin in one block and end in another, with their states."""
    monkeypatch.setattr(shard_optimizer, "_BLOCK", 128)
    mine, remote, other, local = pair(kind, **options)
    for optimizer, net in ((remote, mine), (local, other)):
        training.train(optimizer, net, range(3), [0])
        optimizer.load_state_dict(optimizer.state_dict())
        training.train(optimizer, net, range(3, 6), [0])
    check_same(mine, other)
    state = remote.state_dict()["state"]
    for number, values in local.state_dict()["state"].items():
        # torch changes the dtype of some scalars when it loads them
        for key, value in values.items():
            torch.testing.assert_close(state[number][key], value, check_dtype=False)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rule", [ps.Sync(), ps.Sync(quorum=3), ps.Stale(1)], ids=repr)
def test_every_transport(cluster: Clusters, trainers_of: Make, transport: str, rule: Any) -> None:
    workers = cluster(5)
    nets = trainers_of(workers).train(
        3, 5, 2, servers="w[01]", consistency=rule, lr=0.1, momentum=0.9
    )
    # steps one by one, in any order: all that is sure is that everybody ends with the same
    if rule == ps.Stale(1):
        assert all(torch.isfinite(each).all() for net in nets for each in net.parameters())
    else:
        expected, _ = locally(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 3, 5)
        for net in nets:
            check_same(net, expected)


def test_shared_memory_is_used_where_it_can_be(cluster: Clusters) -> None:
    workers = cluster(2)
    with ps.Optimizer(model(), servers="w1", agent=workers["w0"], lr=0.1) as optimizer:
        assert "shared memory" in repr(optimizer._clients[0])
        training.train(optimizer, model(), range(1), [0])
    assert workers["w0"].statistics()["calls_made"] > 0


@pytest.mark.parametrize("transport", ["tcp"])
def test_elsewhere_calls_carry_everything(cluster: Clusters) -> None:
    workers = cluster(2)
    with ps.Optimizer(model(), servers="w1", agent=workers["w0"], lr=0.1) as optimizer:
        assert "by calls" in repr(optimizer._clients[0])


def test_everybody_starts_from_the_first_trainers_parameters(
    cluster: Clusters, trainers_of: Make
) -> None:
    workers = cluster(5)
    nets = trainers_of(workers).train(3, 0, 2, seeds=[0, 1, 2], servers="w[01]", lr=0.1)
    seeds = [model(seed) for seed in range(3)]
    for net in nets[1:]:
        check_same(net, nets[0])
    assert any(
        all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), seed.parameters(), strict=True))
        for seed in seeds
    )


# What an optimizer can do


@pytest.fixture
def pair(cluster: Clusters) -> Callable[..., tuple[nn.Module, ps.Optimizer, nn.Module, Any]]:
    """The same model twice: with a parameter server of two workers, and with a local optimizer."""
    workers = cluster(3)

    def make(
        kind: Any = torch.optim.SGD, **options: Any
    ) -> tuple[nn.Module, ps.Optimizer, nn.Module, Any]:
        mine, other = model(), model()
        remote = ps.Optimizer(
            mine, servers=["w1", "w2"], optimizer=kind, agent=workers["w0"], **options
        )
        return mine, remote, other, kind(other.parameters(), **options)

    return make


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=10
        ),
    ],
)
def test_schedulers_reach_the_servers(pair: Any, make: Callable[[Any], Any]) -> None:
    mine, remote, other, local = pair(lr=0.1, momentum=0.9)
    schedulers = make(remote), make(local)
    for step in range(6):
        for optimizer, net in ((remote, mine), (local, other)):
            training.train(optimizer, net, range(step, step + 1), [0])
        for scheduler in schedulers:
            scheduler.step()
    check_same(mine, other)
    assert remote.param_groups[0]["lr"] != 0.1


def test_clipping_and_accumulation(pair: Any) -> None:
    mine, remote, other, local = pair(lr=0.1)
    for net, optimizer in ((mine, remote), (other, local)):
        for step in range(4):
            optimizer.zero_grad()
            for piece in range(3):
                training.loss(net, training.batch(step, piece)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
    check_same(mine, other)


def test_gradients_that_the_user_made(pair: Any) -> None:
    mine, remote, other, local = pair(lr=0.1)
    for net, optimizer in ((mine, remote), (other, local)):
        for each in net.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        net.zero_grad()
        training.loss(net, training.batch(0, 0)).backward()
        optimizer.step()
    check_same(mine, other)


def give_gradients(net: nn.Module, step: int, without: set[int]) -> None:
    for number, each in enumerate(net.parameters()):
        each.grad = None if number in without else torch.full_like(each, 1.0 + step + number)


# which parameters have no gradient in each step
WITHOUT = [{2, 3}, set(), {0}, {2, 5}, {0, 1, 2, 3, 4, 5}, set()]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_parameters_without_gradients_are_left_alone(
    pair: Any, kind: Any, options: dict[str, Any]
) -> None:
    """Their momentum and step count stay too, also if the state is saved and loaded."""
    mine, remote, other, local = pair(kind, **options)
    for optimizer, net in ((remote, mine), (local, other)):
        for step, without in enumerate(WITHOUT):
            give_gradients(net, step, without)
            optimizer.step()
            if step == 3:
                remote.load_state_dict(remote.state_dict())
    check_same(mine, other)
    state, expected = remote.state_dict()["state"], local.state_dict()["state"]
    for number, values in expected.items():
        for key, value in values.items():
            torch.testing.assert_close(state[number][key], value, check_dtype=False)


def test_a_gradient_that_some_trainer_has_counts(cluster: Clusters, trainers_of: Make) -> None:
    """Like samples of one batch that do not all use a parameter."""
    without = [{0, 2, 3}, {2, 3, 5}]

    def work(number: int) -> training.Work:
        def run(optimizer: ps.Optimizer, net: nn.Module) -> nn.Module:
            for step in range(3):
                give_gradients(net, step, without[number])
                optimizer.step()
            return net

        return run

    trainers = trainers_of(cluster(4))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    started = [
        trainers.start(f"w{2 + number}", work(number), servers=servers(2), trainers=2, **options)
        for number in (0, 1)
    ]
    expected = model()
    local = torch.optim.SGD(expected.parameters(), **options)
    for step in range(3):
        give_gradients(expected, step, {2, 3})
        for number in (0, 5):
            gradient = list(expected.parameters())[number].grad
            assert gradient is not None
            gradient /= 2
        local.step()
    for each in started:
        check_same(each.result(PATIENCE), expected)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_its_state_is_that_of_the_optimizer_itself(
    pair: Any, kind: Any, options: dict[str, Any]
) -> None:
    mine, remote, other, local = pair(kind, **options)
    for optimizer, net in ((remote, mine), (local, other)):
        training.train(optimizer, net, range(3), [0])
    state, expected = remote.state_dict(), local.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert state["state"][number].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(state["state"][number][key], value)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
def test_state_from_elsewhere_is_taken(pair: Any, kind: Any, options: dict[str, Any]) -> None:
    mine, remote, other, local = pair(kind, **options)
    third = model()
    source = kind(third.parameters(), **options)
    training.train(source, third, range(3), [7])
    source.param_groups[0]["lr"] = 0.02
    for optimizer, net in ((remote, mine), (local, other)):
        optimizer.load_state_dict(source.state_dict())
        training.train(optimizer, net, range(2), [0])
    check_same(mine, other)
    assert remote.param_groups[0]["lr"] == 0.02


def test_groups_dtypes_and_frozen_parameters(cluster: Clusters) -> None:
    workers = cluster(3)
    results = []
    for remote in (True, False):
        net = model()
        net[2].to(torch.float32)
        net[4].weight.requires_grad_(False)
        groups: list[dict[str, Any]] = [
            {"params": list(net[0].parameters()), "lr": 0.2},
            {"params": [*net[2].parameters(), *net[4].parameters()]},
        ]
        options: dict[str, Any] = {"lr": 0.01, "momentum": 0.5}
        optimizer: Any
        if remote:
            optimizer = ps.Optimizer(groups, servers=["w1", "w2"], agent=workers["w0"], **options)
        else:
            optimizer = torch.optim.SGD(groups, **options)
        for _ in range(3):
            for each in net.parameters():
                each.grad = torch.ones_like(each) if each.requires_grad else None
            optimizer.step()
        results.append(net)
    check_same(*results)


def test_a_closure_is_evaluated_first(pair: Any) -> None:
    mine, remote, _, _ = pair(lr=0.1)

    def closure() -> float:
        remote.zero_grad()
        value = training.loss(mine, training.batch(0, 0))
        value.backward()
        return float(value.item())

    assert remote.step(closure) == pytest.approx(
        training.loss(model(), training.batch(0, 0)).item()
    )


def test_rules_are_checked(cluster: Clusters) -> None:
    workers = cluster(2)
    agent = workers["w0"]
    with pytest.raises(UsageError, match="no worker"):
        ps.Optimizer(model(), servers="ps*", agent=agent)
    with pytest.raises(UsageError, match="an agent"):
        ps.Optimizer(model(), servers="w1")
    with pytest.raises(UsageError, match="several times in a step"):
        ps.Optimizer(model(), servers="w1", optimizer=torch.optim.LBFGS, agent=agent)
    with pytest.raises(UsageError, match="quorum"):
        ps.Sync(quorum=0)
    with pytest.raises(UsageError, match="at least 1 step"):
        ps.Stale(0)
    with ps.Optimizer(model(), servers="w1", agent=agent, lr=0.1) as optimizer:
        with pytest.raises(UsageError, match="fixed"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(UsageError, match="disagree"):
            ps.Optimizer(nn.Linear(2, 2), servers="w1", agent=workers["w1"], lr=0.1)
    with pytest.raises(UsageError, match="closed"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "fused"), [({}, True), ({"foreach": False}, None), ({"fused": False}, False)]
)
def test_servers_step_in_one_pass_unless_told_otherwise(
    pair: Any, options: dict[str, Any], fused: bool | None
) -> None:
    _, remote, _, _ = pair(lr=0.1, **options)
    remote.load_state_dict(remote.state_dict())
    remote.param_groups[0]["lr"] = 0.2
    remote.step()
    assert remote.param_groups[0]["fused"] == options.get("fused")
    for server in ("w1", "w2"):
        assert remote._runtime.invoke(server, how_steps_are_made) == [fused]


def how_steps_are_made() -> list[Any]:
    return [
        unit.optimizer.param_groups[0]["fused"]
        for unit in ParameterShards.here().find("default")._optimizer._units
    ]


@pytest.mark.parametrize("rule", ["sync", ps.Sync, "stale:1", 3, False])
def test_a_rule_is_an_object_of_its_class(cluster: Clusters, rule: Any) -> None:
    pair = cluster(2)
    with pytest.raises(TypeError, match=r"consistency is ps.Sync\(\), ps.Async\(\) or"):
        ps.Optimizer(model(), servers="w1", consistency=rule, agent=pair["w0"], lr=0.1)
    with pytest.raises(TypeError, match=r"consistency is ps.Sync\(\), ps.Async\(\) or"):
        ps.Tables("w1", consistency=rule, agent=pair["w0"])


def test_wrong_arguments_do_not_reach_the_server(cluster: Clusters) -> None:
    pair = cluster(2)
    wrong: list[tuple[str, Any, str]] = [
        ("trainers", "2", "trainers is a number of at least 1, not '2'"),
        ("trainers", 0, "trainers is a number of at least 1, not 0"),
        ("checkpoint", "points", "checkpoint is a ps.Checkpoint"),
        ("servers", 3, "servers is the name of a worker, a pattern or a list of names, not 3"),
        ("servers", ["w1", 1], "servers is the name of a worker, a pattern or a list of names"),
        ("optimizer", torch.optim.SGD(model().parameters()), "optimizer is a class, such as"),
    ]
    for name, value, message in wrong:
        arguments: dict[str, Any] = {"servers": "w1", "agent": pair["w0"], "lr": 0.1, name: value}
        with pytest.raises(UsageError, match=message):
            ps.Optimizer(model(), **arguments)
    for rule in (ps.Stale, ps.Sync):
        with pytest.raises(UsageError, match="at least 1"):
            rule("a")  # type: ignore[arg-type]
    with ps.Optimizer(model(), servers="w1", agent=pair["w0"], lr=0.1) as optimizer:
        optimizer.step()


def test_the_first_difference_between_trainers_is_named(cluster: Clusters) -> None:
    pair = cluster(2)
    options: dict[str, Any] = {"servers": "w1", "name": "x", "lr": 0.1}
    with ps.Optimizer(nn.Linear(3, 3), agent=pair["w0"], **options):
        differences: list[tuple[Any, dict[str, Any], str]] = [
            (nn.Linear(1, 1), {}, r"'weight' of torch.float32 with shape \(1, 1\), and those"),
            (nn.Linear(3, 3).parameters(), {}, "this one has the parameter '0'"),
            (nn.Linear(3, 3, bias=False), {}, "this one has 1 parameter, and those before it have"),
            (nn.Linear(3, 3), {"optimizer": torch.optim.Adam}, "this one has the optimizer Adam"),
            (nn.Linear(3, 3), {"consistency": ps.Async()}, r"this one has consistency Async\(\)"),
        ]
        for trained, changed, message in differences:
            with pytest.raises(UsageError, match=message):
                ps.Optimizer(trained, agent=pair["w1"], **{**options, **changed})


def test_parameters_of_groups_are_fixed(cluster: Clusters) -> None:
    pair = cluster(2)

    def shorten(group: dict[str, Any]) -> None:
        del group["params"][1:]

    def replace(group: dict[str, Any]) -> None:
        group["params"] = [nn.Parameter(each.detach().clone()) for each in group["params"]]

    for change in (shorten, replace, lambda group: group["params"].reverse()):
        trained = nn.Linear(2, 2)
        with ps.Optimizer(trained, servers="w1", agent=pair["w0"], lr=0.1) as optimizer:
            trained(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            change(optimizer.param_groups[0])
            with pytest.raises(UsageError, match="the parameters in `param_groups` have changed"):
                optimizer.step()

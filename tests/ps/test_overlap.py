"""Gradients are sent while backward is running; the step uses their values at its start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import ps
from telegrad.errors import StaleReference
from telegrad.ps import gradient_buckets
from telegrad.ps.gradient_buckets import divide_into_buckets
from telegrad.ps.layout import ParameterLayout
from telegrad.ps.server.gradient_buffer import GradientBuffer
from telegrad.ps.server.service import ParameterShards
from telegrad.ps.server.shard import ParameterShard
from telegrad.ps.trainer.overlap import OverlappedPush
from telegrad.testing import LocalCluster
from telegrad.transport import flat_memory
from tests.local.gates import until
from tests.ps import training
from tests.ps.training import check_same, model

Clusters = Callable[..., LocalCluster]
Left = Callable[[], None]  # waits until all buckets that are ready were sent


@pytest.fixture
def transport() -> str:
    return "tcp"


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_buckets, "_SIZE", 128)


class Both:
    """The same model twice: with a parameter server over TCP, and with a local optimizer."""

    def __init__(self, cluster: LocalCluster, **options: Any) -> None:
        self.net, self.local_net = model(), model()
        self.remote = ps.Optimizer(
            self.net, ["w1", "w2"], agent=cluster["w0"], lr=0.1, momentum=0.9, **options
        )
        self.local = torch.optim.SGD(self.local_net.parameters(), lr=0.1, momentum=0.9)

    @property
    def overlapped(self) -> list[OverlappedPush]:
        pushes = [client._overlapped for client in self.remote._clients]
        return [push for push in pushes if push is not None]

    def wait(self) -> None:
        until(lambda: not any(push._sending for push in self.overlapped))

    def train(self, steps: int, body: Callable[[Any, nn.Module, int, Left], None]) -> None:
        for step in range(steps):
            body(self.local, self.local_net, step, lambda: None)
            body(self.remote, self.net, step, self.wait)
            check_same(self.net, self.local_net)


@pytest.fixture
def both(cluster: Clusters) -> Both:
    return Both(cluster(3))


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The gradients of each push: None, a tensor, or the buckets that were not sent before."""
    found: list[Any] = []
    real = ParameterShard.push

    def push(self: ParameterShard, *args: Any) -> Any:
        found.append(args[4])
        return real(self, *args)

    monkeypatch.setattr(ParameterShard, "push", push)
    return found


def backward(net: nn.Module, step: int, piece: int = 0) -> None:
    training.loss(net, training.batch(step, piece)).backward()


def plain(optimizer: Any, net: nn.Module, step: int, left: Left) -> None:
    optimizer.zero_grad()
    backward(net, step)
    left()
    optimizer.step()


def test_everything_may_leave_before_the_step(both: Both, pushed: list[Any]) -> None:
    both.train(3, plain)
    assert pushed == [{}] * 6
    assert all(len(push.buckets) > 2 for push in both.overlapped)


def accumulated(optimizer: Any, net: nn.Module, step: int, left: Left) -> None:
    optimizer.zero_grad()
    for piece in range(3):
        backward(net, step, piece)
        left()
    optimizer.step()


def test_accumulation(both: Both, pushed: list[Any]) -> None:
    """From the second step on, buckets are sent after the last backward pass."""
    both.train(3, accumulated)
    assert all(isinstance(each, Tensor) for each in pushed[:2])
    assert pushed[2:] == [{}] * 4


def clipped(optimizer: Any, net: nn.Module, step: int, left: Left) -> None:
    optimizer.zero_grad()
    backward(net, step)
    left()
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    optimizer.step()


def changed_by_hand(optimizer: Any, net: Any, step: int, left: Left) -> None:
    optimizer.zero_grad()
    backward(net, step)
    left()
    net[0].weight.grad.data.clamp_(-0.01, 0.01)  # no version counter sees these two
    net[2].bias.grad.numpy()[...] *= 3
    optimizer.step()


def replaced(optimizer: Any, net: Any, step: int, left: Left) -> None:
    optimizer.zero_grad()
    backward(net, step)
    left()
    for each in net[0].parameters():
        each.grad = torch.full_like(each, 0.5)
    net[4].bias.grad = None
    optimizer.step()


def zeroed(optimizer: Any, net: nn.Module, step: int, left: Left) -> None:
    """Gradients that were sent are zeroed before the step, so they do not count."""
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    backward(net, step, 7)
    left()
    optimizer.zero_grad(set_to_none=step % 2 == 1)
    backward(net, step)
    left()
    optimizer.step()


def no_gradients(optimizer: Any, net: nn.Module, step: int, left: Left) -> None:
    optimizer.zero_grad()
    backward(net, step)
    left()
    optimizer.zero_grad()
    optimizer.step()


def used_twice(optimizer: Any, net: nn.Module, step: int, left: Left) -> None:
    optimizer.zero_grad()
    (
        training.loss(net, training.batch(step, 0)) + training.loss(net, training.batch(step, 1))
    ).backward()
    left()
    optimizer.step()


def unused(optimizer: Any, net: nn.Module, step: int, left: Left) -> None:
    optimizer.zero_grad()
    assert isinstance(net, nn.Sequential)
    net[: 4 if step % 2 else 2](training.batch(step, 0)).square().sum().backward()
    left()
    optimizer.step()


CASES = [clipped, changed_by_hand, replaced, zeroed, no_gradients, used_twice, unused]


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_the_step_takes_what_is_there(both: Both, body: Any) -> None:
    both.train(5, body)


@pytest.mark.parametrize("body", [plain, accumulated, *CASES], ids=lambda body: body.__name__)
def test_compressed_gradients_are_those_of_a_run_without_overlap(
    cluster: Clusters, body: Any
) -> None:
    """Rounding errors are added once, whether a bucket was sent twice or not."""
    workers = cluster(3)
    small: dict[str, Any] = {"compression": torch.bfloat16}
    early, late = (
        Both(workers, name="early", **small),
        Both(workers, name="late", overlap=False, **small),
    )
    assert late.overlapped == []
    for step in range(5):
        body(early.remote, early.net, step, early.wait)
        body(late.remote, late.net, step, lambda: None)
        for mine, its in zip(early.net.parameters(), late.net.parameters(), strict=True):
            assert torch.equal(mine, its)


def test_who_always_clips_soon_stops_sending_early(both: Both, pushed: list[Any]) -> None:
    tries = []
    for step in range(8):
        both.remote.zero_grad()
        backward(both.net, step)
        both.wait()
        tries.append(bool(both.overlapped[0]._sent))
        nn.utils.clip_grad_norm_(both.net.parameters(), 0.01)
        both.remote.step()
    assert tries == [True, False, True, False, False, True, False, False]
    assert isinstance(pushed[-1], Tensor)


@pytest.mark.parametrize("transport", ["unix"])
def test_shared_memory_has_nothing_to_send(cluster: Clusters, pushed: list[Any]) -> None:
    both = Both(cluster(3))
    both.train(2, plain)
    assert both.overlapped == []
    assert pushed == [None] * 4


def test_a_server_that_comes_back_gets_everything(
    cluster: Clusters, tmp_path: Path, pushed: list[Any]
) -> None:
    workers = cluster(3)
    both = Both(workers, checkpoint=ps.Checkpoint(tmp_path, every=1, wait=True))

    def killed_before_the_step(optimizer: Any, net: nn.Module, step: int, left: Left) -> None:
        optimizer.zero_grad()
        backward(net, step)
        left()
        if step == 2 and optimizer is both.remote:
            workers.kill("w1")
            workers.join("w1", 1)
        optimizer.step()

    both.train(4, killed_before_the_step)
    assert sum(isinstance(each, Tensor) for each in pushed) == 1


def kept(optimizer: Any, net: Any, step: int, left: Left) -> None:
    """Accumulate two gradients, and keep a gradient of an earlier step."""
    if step % 2:
        net.kept = [each.grad for each in net.parameters()]
    optimizer.zero_grad(set_to_none=bool(step % 2))
    backward(net, step)
    left()
    backward(net, step, 1)
    left()
    optimizer.step()


@pytest.mark.parametrize("transport", ["unix"])
def test_a_server_that_comes_back_without_shared_memory_gets_buckets(
    cluster: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pushed: list[Any]
) -> None:
    """Gradients are views of shared memory by then."""
    workers = cluster(3)
    both = Both(workers, checkpoint=ps.Checkpoint(tmp_path, every=1, wait=True))
    both.train(4, kept)
    assert both.overlapped == []
    workers.kill("w1")
    monkeypatch.setattr(flat_memory, "open_shared", lambda handle: None)  # no descriptor is left
    workers.join("w1", 1)
    both.train(8, kept)
    assert len(both.overlapped) == 1
    assert any(isinstance(each, dict) for each in pushed)


def test_a_gradient_that_a_hook_removes_is_not_sent(cluster: Clusters) -> None:
    workers = cluster(2)
    nets: list[Any] = [model(), model()]
    for net in nets:
        net[0].weight.register_post_accumulate_grad_hook(remove_gradient)
    optimizer = ps.Optimizer(nets[0], ["w1"], agent=workers["w0"], lr=0.1)
    local = torch.optim.SGD(nets[1].parameters(), lr=0.1)
    for step in range(3):
        plain(optimizer, nets[0], step, lambda: None)
        plain(local, nets[1], step, lambda: None)
        check_same(*nets)
    assert torch.equal(nets[0][0].weight, next(model().parameters()))


def remove_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def test_a_model_with_dtypes_that_are_not_compressed(cluster: Clusters) -> None:
    workers = cluster(2)
    early, late = model(dtype=torch.bfloat16), model(dtype=torch.bfloat16)
    for net, overlap in ((early, True), (late, False)):
        optimizer = ps.Optimizer(
            net,
            ["w1"],
            agent=workers["w0"],
            name=f"overlap {overlap}",
            lr=0.1,
            compression=torch.bfloat16,
            overlap=overlap,
        )
        for step in range(3):
            optimizer.zero_grad()
            training.loss(net, training.batch(step, 0, dtype=torch.bfloat16)).backward()
            optimizer.step()
    for mine, its in zip(early.parameters(), late.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_trainer_that_leaves_takes_back_what_it_sent(both: Both) -> None:
    backward(both.net, 0)
    both.wait()
    shards = [both.remote._runtime.agent.call(server, staged) for server in ("w1", "w2")]
    assert shards == [1, 1]
    both.remote.close()
    assert [both.remote._runtime.agent.call(server, staged) for server in ("w1", "w2")] == [0, 0]


def staged() -> int:
    return len(ParameterShards.here().find("default")._gradient_buffers)


# The parts


def test_buckets_cover_every_element_once() -> None:
    entries = [
        (0, "a", torch.zeros(100)),
        (1, "b", torch.zeros(3, dtype=torch.float64)),
        (2, "c", torch.zeros(40)),
    ]
    for share in ParameterLayout.of([entries]).divide(2):
        found = divide_into_buckets(share)
        dtype_ranges = [
            each.of(torch.zeros(share.nbytes, dtype=torch.uint8)) for each in share.dtype_ranges
        ]
        for bucket in found:
            bucket.of(dtype_ranges).add_(1)
        assert all(bool((each == 1).all()) for each in dtype_ranges)
        assert {slot for bucket in found for slot in bucket.parameters} == {
            part.slot.index for part in share.parts
        }


def test_what_was_brought_for_another_step_does_not_count() -> None:
    (share,) = ParameterLayout.of([[(0, "a", torch.zeros(50))]]).divide(1)
    buffer = GradientBuffer(share)
    first, second = [
        torch.ones(bucket.last - bucket.first) for bucket in divide_into_buckets(share)
    ]
    buffer.add(1, {0: first})
    assert bool((share.parts[0].of(buffer.complete(1, {1: second})) == 1).all())
    buffer.add(2, {0: first})
    with pytest.raises(StaleReference):
        buffer.complete(3, {1: second})


def test_an_error_of_the_sender_is_heard_at_the_step() -> None:
    (share,) = ParameterLayout.of([[(0, "a", torch.zeros(50))]]).divide(1)

    def send(number: int, piece: Tensor) -> None:
        raise ArithmeticError("not today")

    push = OverlappedPush(share, lambda bucket: torch.zeros(1), send, lambda job: job())
    push.on_gradient_ready(0)
    with pytest.raises(ArithmeticError, match="not today"):
        push.stop_sending()
    assert (
        len(
            push.take_unsent(
                [
                    each.of(torch.zeros(share.nbytes, dtype=torch.uint8))
                    for each in share.dtype_ranges
                ]
            )
        )
        == 2
    )

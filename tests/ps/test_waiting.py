"""A trainer that waits for one server checks the others, and other trainers of its worker."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future as Result
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from telegrad import ps
from telegrad.errors import CallTimeout, JoinError, PeerLost
from telegrad.futures import Future
from telegrad.ps.server.service import ParameterShards
from telegrad.ps.server.shard import ParameterShard
from telegrad.ps.trainer import server_calls
from telegrad.ps.trainer.server_client import LocalClients
from telegrad.ps.trainer.service import still_trains
from telegrad.ps.trainer.shard_client import ShardClient
from telegrad.ps.trainer.trainer_registry import TrainerRegistry
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE, until
from tests.ps.test_recovery import kill, model, restart, step, trainers

Clusters = Callable[..., LocalCluster]
Start = Callable[..., Result[Any]]


@pytest.fixture(autouse=True)
def checks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_calls, "_CHECK_INTERVAL", 0.01)


@pytest.fixture
def start() -> Iterator[Start]:
    """Run functions on other threads."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def exact(folder: Path) -> dict[str, Any]:
    return {"checkpoint": ps.Checkpoint(folder, every=1, wait=True), "patience": PATIENCE}


def shard(workers: LocalCluster, server: str, name: str = "default") -> ParameterShard:
    return workers[server]._runtime.service(ParameterShards).find(name)


class HeldReply:
    """Hold back the first reply of one server to a kind of call of `ShardClient`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, server: str) -> None:
        self._future: Future[Any] | None = None
        self._reply: Future[Any] = Future()
        real = getattr(ShardClient, method)

        def hold(client: ShardClient, *args: Any) -> Any:
            future = real(client, *args)
            if client.server != server or self._future is not None:
                return future
            self._future = future
            return self._reply

        monkeypatch.setattr(ShardClient, method, hold)

    def wait(self) -> None:
        """Wait until the server has replied."""
        until(lambda: self._future is not None and self._future.done())

    def release(self) -> None:
        assert self._future is not None
        self._future.add_done_callback(lambda done: self._reply.set_result(done.value()))


def test_a_trainer_rejoins_a_server_that_lost_it_while_it_joined(
    cluster: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    workers, net = cluster(3), model()
    held = HeldReply(monkeypatch, "start_join", "w1")
    joining = start(ps.Optimizer, net, ["w0", "w1"], agent=workers["w2"], lr=1.0, **exact(tmp_path))
    held.wait()
    served = workers["w0"]._runtime.calls_served
    until(lambda: workers["w0"]._runtime.calls_served > served)  # it is asked, and knows it
    assert not joining.done()
    first = shard(workers, "w0")
    (trainer,) = first._coordinator.members
    first.leave(trainer)  # as if it had been restarted from an older checkpoint
    optimizer = joining.result(PATIENCE)
    assert step(net, optimizer) == [-1.0, -1.0]
    assert first.has_member(trainer)


@pytest.mark.parametrize("end", ["forgets", "is killed"])
def test_a_step_rejoins_a_server_that_lost_the_trainer_after_its_reply(
    cluster: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Start, end: str
) -> None:
    workers = cluster(3)
    options = {**exact(tmp_path), "consistency": ps.Async()}
    ((net, optimizer),) = trainers(workers, ["w2"], ["w0", "w1"], **options)
    assert step(net, optimizer) == [-1.0, -1.0]
    held = HeldReply(monkeypatch, "start_push", "w1")
    stepping = start(step, net, optimizer)
    held.wait()
    if end == "forgets":
        shard(workers, "w0").leave(optimizer._trainer)
    else:
        kill(workers, "w0")
        restart(workers, "w0")
    until(lambda: has_member(workers, "w0", optimizer._trainer))
    held.release()
    assert stepping.result(PATIENCE) == [-2.0, -2.0]
    assert step(net, optimizer) == [-3.0, -3.0]


def has_member(workers: LocalCluster, server: str, trainer: str, name: str = "default") -> bool:
    shards = workers[server]._runtime.service(ParameterShards)
    return shards.has(name) and shards.find(name).has_member(trainer)


def test_without_checkpoints_a_step_ends_with_a_server_that_had_replied(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    workers = cluster(3)
    ((net, optimizer),) = trainers(workers, ["w2"], ["w0", "w1"], consistency=ps.Async())
    held = HeldReply(monkeypatch, "start_push", "w1")
    stepping = start(step, net, optimizer)
    held.wait()
    workers.kill("w0")
    assert isinstance(stepping.exception(PATIENCE), PeerLost)
    held.release()  # a future that never completes keeps its callbacks


def test_a_trainer_that_waits_to_start_rejoins_the_servers_of_others(
    cluster: Clusters, tmp_path: Path, start: Start
) -> None:
    """The trainers of one worker share a thread: while one joins, the other makes no step."""
    workers = cluster(4)
    ((net, optimizer),) = trainers(workers, ["w2"], ["w0"], name="G", **exact(tmp_path))
    assert step(net, optimizer) == [-1.0, -1.0]
    nets = [model(), model()]
    options = {"name": "D", "trainers": 2, "lr": 1.0}
    waits = start(ps.Optimizer, nets[0], ["w1"], agent=workers["w2"], **options)
    until(lambda: workers["w1"]._runtime.service(ParameterShards).has("D"))
    shard(workers, "w0", "G").leave(optimizer._trainer)
    until(lambda: has_member(workers, "w0", optimizer._trainer, "G"))
    kill(workers, "w0")
    assert not waits.done()
    restart(workers, "w0")
    until(lambda: has_member(workers, "w0", optimizer._trainer, "G"))
    other = start(ps.Optimizer, nets[1], ["w1"], agent=workers["w3"], **options)
    pairs = list(zip(nets, [waits.result(PATIENCE), other.result(PATIENCE)], strict=True))
    steps = [start(step, *pair) for pair in pairs]
    assert [each.result(PATIENCE) for each in steps] == [[-1.0, -1.0]] * 2
    assert step(net, optimizer) == [-2.0, -2.0]


def test_a_new_trainer_cannot_join_servers_of_which_one_has_lost_its_part(
    cluster: Clusters, tmp_path: Path
) -> None:
    workers = cluster(4)
    options: dict[str, Any] = {"checkpoint": ps.Checkpoint(tmp_path, every=1, wait=True)}
    ((net, optimizer),) = trainers(workers, ["w2"], ["w0", "w1"], **options)
    step(net, optimizer)
    for server in ("w0", "w1"):
        kill(workers, server)
    shutil.rmtree(tmp_path / "default" / "w1")
    for server in ("w0", "w1"):
        restart(workers, server)
    with pytest.raises(JoinError, match="w1 was restarted without a readable checkpoint"):
        ps.Optimizer(model(), ["w0", "w1"], agent=workers["w3"], lr=1.0, **options)


def test_a_trainer_of_an_agent_that_has_closed_leaves_nobody(cluster: Clusters) -> None:
    workers = cluster(2)
    ((_, optimizer),) = trainers(workers, ["w1"], ["w0"])
    workers["w1"]._runtime.abort()
    optimizer.close()
    optimizer.close()
    assert still_trains("a trainer", "a server that has no agent") is False


def test_only_a_deadlock_is_explained(cluster: Clusters) -> None:
    registry = cluster(1)["w0"]._runtime.service(TrainerRegistry)
    registration = registry.register("parameter server", "a", "default", quorum=True)
    registration.explain_timeout(CallTimeout("too late"))
    registry.register("parameter server", "b", "default", quorum=True)
    with pytest.raises(CallTimeout, match="also trains parameter server 'b' with a quorum"):
        registration.explain_timeout(CallTimeout("too late"))


def test_default_names_avoid_names_in_use(cluster: Clusters) -> None:
    registry = cluster(1)["w0"]._runtime.service(TrainerRegistry)
    registry.register("parameter server", "default-2", "default", quorum=False)
    names = [
        registry.register("parameter server", None, "default", quorum=False).name for _ in range(2)
    ]
    assert names == ["default", "default-3"]
    assert "default-2" in repr(registry)


def test_the_parts_of_a_trainer_describe_themselves(cluster: Clusters) -> None:
    workers = cluster(2)
    ((net, optimizer),) = trainers(workers, ["w1"], ["w0"])
    step(net, optimizer)
    assert repr(optimizer).startswith("<ps.Optimizer 'default' of SGD on w0, Sync(")
    assert "1 step, staleness 0, 0 dropped" in repr(optimizer)
    assert "default" in repr(shard(workers, "w0"))
    assert optimizer._trainer in repr(workers["w1"]._runtime.service(LocalClients))
    assert "created by" in repr(workers["w0"]._runtime.service(ParameterShards))

"""Training continues when servers, trainers and disks fail, also several at once."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import current_agent, ps
from telegrad.errors import JoinError, UsageError
from telegrad.ps.server.checkpoint import CheckpointArchive
from telegrad.ps.server.registry import ShardRegistry
from telegrad.ps.server.service import ParameterShards
from telegrad.ps.server.shard import ParameterShard
from telegrad.ps.trainer.shard_client import PushRequest, ShardClient
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE, until
from tests.ps.accidents import snapshot, when_cut_off

Clusters = Callable[..., LocalCluster]


def model() -> nn.ParameterList:
    """Two parameters of equal size, one for each of two servers."""
    return nn.ParameterList([nn.Parameter(torch.zeros(64)) for _ in range(2)])


def step(net: nn.ParameterList, optimizer: ps.Optimizer) -> list[float]:
    for each in net:
        each.grad = torch.ones_like(each)
    optimizer.step()
    return [float(each[0].detach()) for each in net]


def trainers(
    workers: LocalCluster, names: list[str], servers: list[str], **options: Any
) -> list[Any]:
    nets = [model() for _ in names]
    with ThreadPoolExecutor(len(names)) as pool:
        made = [
            pool.submit(
                ps.Optimizer,
                net,
                servers,
                agent=workers[name],
                trainers=len(names),
                lr=1.0,
                **options,
            )
            for net, name in zip(nets, names, strict=True)
        ]
        return list(zip(nets, [each.result(PATIENCE) for each in made], strict=True))


def together(pairs: list[Any]) -> list[list[float]]:
    with ThreadPoolExecutor(len(pairs)) as pool:
        return [each.result(PATIENCE) for each in [pool.submit(step, *pair) for pair in pairs]]


def kill(workers: LocalCluster, name: str) -> None:
    """Kill a worker in the way of a process: its shards are lost, and it writes nothing more."""
    victim = workers[name]
    for shard in victim._runtime.service(ShardRegistry)._shards.values():
        shard._archive = None
    workers.kill(name)
    victim._runtime.service(ShardRegistry)._shards.clear()


def restart(workers: LocalCluster, name: str) -> None:
    workers.join(name, workers[name]._runtime.local_member.rank)


def test_a_removed_folder_does_not_block_trainers(cluster: Clusters, tmp_path: Path) -> None:
    """The list of members cannot be saved when a trainer leaves, which completes the round."""
    workers = cluster(3)
    folder = tmp_path / "points"
    pair, (net, leaving) = trainers(
        workers, ["w1", "w2"], ["w0"], checkpoint=ps.Checkpoint(folder, every=1000)
    )
    together([pair, (net, leaving)])
    shutil.rmtree(folder)
    folder.write_text("a file where a folder should be")
    shard = workers["w0"]._runtime.service(ParameterShards).find("default")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(step, *pair)
        until(lambda: len(shard.waiting) == 1)
        leaving.close()
        assert waiting.result(PATIENCE) == [-2.0, -2.0]
    with pytest.warns(UserWarning, match="could not be written into"):
        assert step(*pair) == [-3.0, -3.0]


def test_a_trainer_that_died_with_the_server_is_not_waited_for_in_any_model(
    cluster: Clusters, tmp_path: Path
) -> None:
    workers = cluster(3)
    point = ps.Checkpoint(tmp_path, every=1, wait=True)
    pairs = {
        name: trainers(workers, ["w1", "w2"], ["w0"], name=name, checkpoint=point)
        for name in ("G", "D")
    }
    for each in pairs.values():
        together(each)
    kill(workers, "w0")
    workers.kill("w2")
    restart(workers, "w0")
    with ThreadPoolExecutor(1) as pool:
        for each in pairs.values():
            assert pool.submit(step, *each[0]).result(PATIENCE) == [-2.0, -2.0]


def test_a_trainer_that_left_while_the_server_was_down_is_not_waited_for(
    cluster: Clusters, tmp_path: Path
) -> None:
    workers = cluster(3)
    point = ps.Checkpoint(tmp_path, every=1, wait=True)
    pair, (net, leaving) = trainers(workers, ["w1", "w2"], ["w0"], checkpoint=point)
    together([pair, (net, leaving)])
    kill(workers, "w0")
    leaving.close()
    restart(workers, "w0")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(step, *pair).result(PATIENCE) == [-2.0, -2.0]


@pytest.mark.parametrize("every", [1, 2])
def test_both_servers_die_while_the_second_makes_its_step(
    cluster: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """With one phase, the trainer has the reply of the first server and does not call it again."""
    workers = cluster(3)
    point = ps.Checkpoint(tmp_path, every=every, wait=True)
    ((net, optimizer),) = trainers(workers, ["w2"], ["w0", "w1"], checkpoint=point)
    for _ in range(2):
        step(net, optimizer)
    armed, reached, dead = threading.Event(), threading.Event(), threading.Event()
    real = ParameterShard.apply
    armed.set()

    def hold(self: ParameterShard, reports: list[Any]) -> None:
        agent = current_agent()
        if armed.is_set() and agent is not None and agent.name == "w1":
            armed.clear()
            reached.set()
            assert dead.wait(PATIENCE)
            raise RuntimeError("this worker is dead")
        real(self, reports)

    monkeypatch.setattr(ParameterShard, "apply", hold)
    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(step, net, optimizer)
        assert reached.wait(PATIENCE)
        until(lambda: workers["w0"]._runtime.service(ParameterShards).find("default").version == 3)
        when_cut_off(workers["w1"], dead.set)
        kill(workers, "w0")
        kill(workers, "w1")
        restart(workers, "w0")
        restart(workers, "w1")
        assert stepping.result(PATIENCE) == [-3.0, -3.0]
    assert step(net, optimizer) == [-4.0, -4.0]


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("rule", [ps.Sync(), ps.Async()], ids=repr)
def test_what_was_written_reaches_a_server_that_is_restarted(
    cluster: Clusters, tmp_path: Path, every: int, rule: Any
) -> None:
    workers = cluster(3)
    point = ps.Checkpoint(tmp_path, every=every, wait=True)
    ((net, optimizer),) = trainers(
        workers, ["w2"], ["w0", "w1"], checkpoint=point, consistency=rule
    )
    assert step(net, optimizer) == [-1.0, -1.0]
    with torch.no_grad():
        for each in net:
            each.fill_(10.0)
    kill(workers, "w0")
    restart(workers, "w0")
    assert step(net, optimizer) == [9.0, 9.0]
    kill(workers, "w1")
    restart(workers, "w1")
    assert step(net, optimizer) == [8.0, 8.0]


def test_a_skipped_round_stays_skipped_if_the_server_dies_before_it_answers(
    cluster: Clusters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All trainers learn that the step was skipped, also the one with finite gradients."""
    workers = cluster(3)
    point = ps.Checkpoint(tmp_path, every=1, wait=True)
    pairs = trainers(workers, ["w1", "w2"], ["w0"], checkpoint=point)
    together(pairs)
    armed, reached, dead = threading.Event(), threading.Event(), threading.Event()
    real = ParameterShard.reply_to_report
    armed.set()

    def hold(self: ParameterShard, report: Any) -> Any:
        if armed.is_set():
            armed.clear()
            reached.set()
            assert dead.wait(PATIENCE)
            raise RuntimeError("this worker is dead")
        return real(self, report)

    monkeypatch.setattr(ParameterShard, "reply_to_report", hold)
    infinite = pairs[0][1]
    infinite.found_inf = torch.ones(())  # as a GradScaler does it
    with ThreadPoolExecutor(1) as pool:
        stepping = pool.submit(together, pairs)
        assert reached.wait(PATIENCE)
        when_cut_off(workers["w0"], dead.set)
        kill(workers, "w0")
        restart(workers, "w0")
        assert stepping.result(PATIENCE) == [[-1.0, -1.0]] * 2
    del infinite.found_inf
    assert [(optimizer.skipped, optimizer.version) for _, optimizer in pairs] == [(1, 2)] * 2
    assert together(pairs) == [[-2.0, -2.0]] * 2


def test_an_optimizer_that_was_dropped_while_the_server_was_down_is_not_waited_for(
    cluster: Clusters, tmp_path: Path
) -> None:
    workers = cluster(3)
    point = ps.Checkpoint(tmp_path, every=1, wait=True)
    pairs = trainers(workers, ["w1", "w2"], ["w0"], checkpoint=point)
    together(pairs)
    kill(workers, "w0")
    del pairs[1]
    gc.collect()
    restart(workers, "w0")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(step, *pairs[0]).result(PATIENCE) == [-2.0, -2.0]


def test_a_step_that_was_interrupted_is_no_write_to_the_model(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has a newer version, in memory that the trainer compares its parameters with."""
    workers = cluster(2)
    ((net, optimizer),) = trainers(workers, ["w1"], ["w0"])
    step(net, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(ShardClient, "apply_reply", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(net, optimizer)
    assert step(net, optimizer) == [-2.0, -2.0]  # its gradients are of a round that is over
    assert optimizer.dropped == 1
    assert step(net, optimizer) == [-3.0, -3.0]


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("rule", [ps.Async(), ps.Stale(3)], ids=repr)
def test_a_trainer_joins_after_servers_with_different_versions_were_restarted(
    cluster: Clusters, tmp_path: Path, rule: Any
) -> None:
    workers = cluster(4)
    point = ps.Checkpoint(tmp_path, every=1, wait=True)
    ((net, optimizer),) = trainers(
        workers, ["w2"], ["w0", "w1"], checkpoint=point, consistency=rule
    )
    step(net, optimizer)
    ahead = optimizer._clients[0]
    # a trainer that dies between its calls to servers leaves such versions behind
    for number in range(2, 6):
        ahead.apply_reply(ahead.push(PushRequest(number, ahead.version, {})))
    for server in ("w0", "w1"):
        kill(workers, server)
        restart(workers, server)
    new = model()
    with ps.Optimizer(
        new, ["w0", "w1"], agent=workers["w3"], checkpoint=point, consistency=rule, lr=1.0
    ) as joined:
        assert [float(each[0].detach()) for each in new] == [-5.0, -1.0]
        assert step(new, joined) == [-6.0, -2.0]


@pytest.mark.parametrize("server", ["w0", "w1"])
@pytest.mark.parametrize("rule", [ps.Sync(), ps.Stale(3)], ids=repr)
def test_joining_waits_for_a_server_that_is_restarted(
    cluster: Clusters, tmp_path: Path, server: str, rule: Any
) -> None:
    workers = cluster(4)
    options: dict[str, Any] = {
        "checkpoint": ps.Checkpoint(tmp_path, every=1, wait=True),
        "consistency": rule,
    }
    ((net, optimizer),) = trainers(workers, ["w2"], ["w0", "w1"], **options)
    step(net, optimizer)
    optimizer.close()
    kill(workers, server)
    new = model()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(
            ps.Optimizer,
            new,
            ["w0", "w1"],
            agent=workers["w3"],
            lr=1.0,
            patience=PATIENCE,
            **options,
        )
        restart(workers, server)
        joined = joining.result(PATIENCE)
    assert step(new, joined) == [-2.0, -2.0]


def test_a_server_without_any_checkpoint_is_a_clear_error(
    cluster: Clusters, tmp_path: Path
) -> None:
    workers = cluster(2)
    ((net, optimizer),) = trainers(
        workers, ["w1"], ["w0"], checkpoint=ps.Checkpoint(tmp_path, every=1, wait=True)
    )
    kill(workers, "w0")
    shutil.rmtree(tmp_path)
    restart(workers, "w0")
    with pytest.raises(JoinError, match="without its part of parameter server 'default'"):
        step(net, optimizer)


# Damaged checkpoints and full disks


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": truncate,
    "flipped": flip,
    "missing": os.unlink,
    "empty": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("name", ["parameters.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_the_last_good_checkpoint_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    archive = CheckpointArchive(
        ps.Checkpoint(tmp_path, wait=True), "default", "w0", lambda job: job()
    )
    for version in (1, 2):
        archive.save(snapshot(version))
    DAMAGES[damage](tmp_path / "default" / "w0" / "2" / name)
    found = archive.newest()
    assert found is not None
    assert found.version == 1
    assert archive.readable() == [1]
    assert "cannot be used" in caplog.text


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_training_goes_on_after_a_damaged_checkpoint(
    cluster: Clusters, tmp_path: Path, damage: str
) -> None:
    workers = cluster(2)
    ((net, optimizer),) = trainers(
        workers, ["w1"], ["w0"], checkpoint=ps.Checkpoint(tmp_path, every=1, wait=True)
    )
    for _ in range(3):
        step(net, optimizer)
    kill(workers, "w0")
    DAMAGES[damage](tmp_path / "default" / "w0" / "3" / "parameters.safetensors")
    restart(workers, "w0")
    assert step(net, optimizer) == [-4.0, -4.0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    junk = folder / "junk"
    with junk.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            try:
                os.posix_fallocate(file.fileno(), file.tell(), 4096)
            except OSError:  # there is no space left
                return junk
    raise AssertionError("the disk is not full")


def test_training_goes_on_while_the_disk_is_full(cluster: Clusters, small_disk: Path) -> None:
    workers = cluster(2)
    point = ps.Checkpoint(small_disk / "points", every=1, wait=True)
    ((net, optimizer),) = trainers(workers, ["w1"], ["w0"], checkpoint=point)
    assert step(net, optimizer) == [-1.0, -1.0]
    junk = fill(small_disk)
    with pytest.warns(UserWarning, match="No space left on device.*goes back to version 1"):
        assert step(net, optimizer) == [-2.0, -2.0]
    kill(workers, "w0")
    restart(workers, "w0")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        # the trainer has brought back what the checkpoint lacks
        assert step(net, optimizer) == [-3.0, -3.0]
    junk.unlink()
    assert step(net, optimizer) == [-4.0, -4.0]  # and no warning, which would be an error
    assert (
        sorted(int(each.name) for each in (small_disk / "points/default/w0").glob("[0-9]*"))[-1]
        == 4
    )


def test_a_trainer_joins_only_if_the_list_of_trainers_can_be_written(
    cluster: Clusters, tmp_path: Path
) -> None:
    """A restarted server would make rounds without a trainer that is not in the list."""
    workers = cluster(3)
    point = ps.Checkpoint(tmp_path, every=1000)
    (first,) = trainers(workers, ["w1"], ["w0"], checkpoint=point)
    temporary = tmp_path / "default" / "w0" / "members.new"
    temporary.mkdir()  # where the server wants to write a file
    with pytest.raises(UsageError, match="the list of trainers cannot be written"):
        trainers(workers, ["w2"], ["w0"], checkpoint=point)
    assert step(*first) == [-1.0, -1.0]
    temporary.rmdir()
    (second,) = trainers(workers, ["w2"], ["w0"], checkpoint=point)
    assert together([first, second]) == [[-2.0, -2.0]] * 2


def test_a_folder_that_cannot_be_written_is_an_error_at_once(
    cluster: Clusters, small_disk: Path
) -> None:
    workers = cluster(2)
    fill(small_disk)
    # OSError: not even the folder can be made
    with pytest.raises((OSError, UsageError), match="No space left"):
        trainers(workers, ["w1"], ["w0"], checkpoint=ps.Checkpoint(small_disk / "points"))

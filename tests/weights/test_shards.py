"""Shards on either side: every slice arrives, equal to the bit, and nothing else is sent."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from telegrad.errors import UsageError
from telegrad.testing import LocalCluster
from telegrad.weights import Publisher, Subscriber
from telegrad.weights.boxes import local_of
from tests.conftest import Clusters
from tests.weights.conftest import PATIENCE, Subscribe
from tests.weights.meshes import Weights, shards, shards_by_name

FAST = {"heartbeat_interval": 0.2, "heartbeat_timeout": 2.0, "resume_timeout": 2.0}
MESHES: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "rows": ((3,), (Shard(0),)),
    "columns": ((2,), (Shard(1),)),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "rows twice": ((2, 2), (Shard(0), Shard(0))),
    "FSDP with tensor parallelism": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "replicas of columns": ((2, 2), (Replicate(), Shard(1))),
    "columns with replicas": ((3, 2), (Shard(1), Replicate())),
    "more workers than rows": ((4,), (Shard(0),)),
}


@pytest.fixture
def transport() -> str:
    return "unix"


def full_weights(seed: int = 0) -> Weights:
    """Sizes that no mesh divides. All bit patterns occur."""
    generator = torch.Generator().manual_seed(seed)

    def bits(*shape: int, dtype: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(256, (count,), dtype=torch.uint8, generator=generator)
        return data.view(dtype).view(shape)

    return {
        "a": bits(7, 11, dtype=torch.float32),
        "b": bits(13, 5, dtype=torch.bfloat16),
        "c": bits(3, 3, 2, dtype=torch.int64),
    }


def assign(weights: Weights, mine: Weights) -> None:
    """Set the shards of a worker to its parts of the whole weights."""
    for name, tensor in mine.items():
        local_of(tensor).copy_(local_of(weights[name]))


def same(left: Weights, right: Weights) -> bool:
    return all(
        torch.equal(
            local_of(left[name]).contiguous().view(torch.uint8),
            local_of(right[name]).contiguous().view(torch.uint8),
        )
        for name in left
    )


def open_publishers(cluster: LocalCluster, parts: list[Weights], **options: Any) -> list[Publisher]:
    return [
        Publisher(part, "policy", agent=cluster[f"w{rank}"], shard=(rank, len(parts)), **options)
        for rank, part in enumerate(parts)
    ]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        *((each, "columns") for each in MESHES),
        *(("rows", each) for each in MESHES),
        ("replicas of columns", "FSDP with tensor parallelism"),
        ("FSDP with tensor parallelism", "columns with replicas"),
    ],
)
def test_shards_reach_other_shards(left: str, right: str, subscribe: Subscribe) -> None:
    versions = [full_weights(seed) for seed in range(2)]
    versions.append({**versions[1], "b": versions[1]["b"].clone()})
    versions[2]["b"][3] = 1
    sent = [shards(each, *_mesh(left)) for each in versions]
    expected = [shards(each, *_mesh(right)) for each in versions]
    got = shards(
        {name: torch.zeros_like(each) for name, each in versions[0].items()}, *_mesh(right)
    )
    publishers_count = len(sent[0])
    with LocalCluster(publishers_count + len(got), transports=("unix",)) as cluster:
        mine = shards(versions[0], *_mesh(left))
        publishers = open_publishers(cluster, mine)
        subscribers = [
            subscribe(cluster, f"w{publishers_count + rank}", weights=part)
            for rank, part in enumerate(got)
        ]
        for version in range(3):
            for rank, publisher in enumerate(publishers):
                assign(sent[version][rank], mine[rank])
                publisher.publish(version)
            for rank, subscriber in enumerate(subscribers):
                assert subscriber.newer_than(version - 1).result(PATIENCE) == version
                assert subscriber.pull_into(got[rank]) == version
                assert same(got[rank], expected[version][rank])
        while subscribers:
            subscribers.pop().close()


def _mesh(name: str) -> tuple[Any, ...]:
    mesh, placements = MESHES[name]
    return mesh, *placements


def test_only_slices_are_sent(cluster: Clusters, subscribe: Subscribe) -> None:
    weights = {"w": torch.randn(400, 500)}
    sent = shards(weights, (2,), Shard(0))
    got = shards({"w": torch.zeros(400, 500)}, (4,), Shard(1))
    workers = cluster(7)
    publishers = open_publishers(workers, sent)
    subscribers = [subscribe(workers, f"w{2 + rank}", weights=got[rank]) for rank in range(4)]
    rows = subscribe(workers, "w6", slices={"w": slice(10, 20)})
    for publisher in publishers:
        publisher.publish()
    size = 400 * 500 * 4
    for rank, subscriber in enumerate(subscribers):
        subscriber.pull_into(got[rank], timeout=PATIENCE)
        assert torch.equal(local_of(got[rank]["w"]), weights["w"].chunk(4, dim=1)[rank])
        assert size / 4 <= subscriber.received.nbytes < 1.02 * size / 4
    out = {"w": torch.zeros(10, 500)}
    rows.pull_into(out, timeout=PATIENCE)
    assert torch.equal(out["w"], weights["w"][10:20])
    assert rows.state_dict()[1]["w"].shape == (10, 500)
    assert size / 40 <= rows.received.nbytes < 1.02 * size / 40
    # a delta has only what changed in the slices
    before = [subscriber.received.nbytes for subscriber in subscribers]
    local_of(sent[0]["w"])[:, 130] += 1
    for publisher in publishers:
        publisher.publish()
    for subscriber in subscribers:
        subscriber.newer_than(0).result(PATIENCE)
    added = [
        subscriber.received.nbytes - old
        for subscriber, old in zip(subscribers, before, strict=True)
    ]
    assert max(added) == added[1]
    assert added[1] < 2000
    assert max(added[:1] + added[2:]) < 200


def test_slices_can_be_viewed(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(3)
    weights = {"w": torch.arange(24.0).view(6, 4)}
    sent = shards(weights, (2,), Shard(0))
    publishers = open_publishers(workers, sent)
    slices = {"w": (slice(2, 5), slice(1, 3))}  # of both shards
    subscriber = subscribe(workers, "w2", slices=slices)
    for publisher in publishers:
        publisher.publish(1)
    with subscriber.view(timeout=PATIENCE) as (version, tensors):
        for part in sent:
            local_of(part["w"]).zero_()
        for publisher in publishers:
            publisher.publish(2)
        assert subscriber.newer_than(1).result(PATIENCE) == 2
        assert version == 1
        assert torch.equal(tensors["w"], weights["w"][2:5, 1:3])
    subscriber.close()
    rows = subscribe(workers, "w2", slices={"w": slice(1, 3)})  # of one shard
    with rows.view(timeout=PATIENCE) as (version, tensors):
        assert version == 2
        assert torch.equal(tensors["w"], torch.zeros(2, 4))


def test_plain_weights_on_one_side(cluster: Clusters, subscribe: Subscribe) -> None:
    weights = full_weights(3)
    workers = cluster(6)
    publisher = Publisher(weights, "policy", agent=workers["w0"])
    got = shards({name: torch.zeros_like(each) for name, each in weights.items()}, (2,), Shard(0))
    expected = shards(weights, (2,), Shard(0))
    sharded = [subscribe(workers, f"w{1 + rank}", weights=got[rank]) for rank in range(2)]
    plain = subscribe(workers, "w3")
    publisher.publish(1)
    for rank, subscriber in enumerate(sharded):
        subscriber.pull_into(got[rank], timeout=PATIENCE)
        assert same(got[rank], expected[rank])
    copy = {name: torch.zeros_like(each) for name, each in weights.items()}
    plain.pull_into(copy, timeout=PATIENCE)
    assert same(copy, weights)
    with pytest.raises(UsageError, match="as `weights`"):
        plain.pull_into(got[0])
    publisher.close()
    for each in (*sharded, plain):
        each.close()
    publishers = [
        Publisher(part, "policy", agent=workers[f"w{4 + rank}"], shard=(rank, 2))
        for rank, part in enumerate(expected)
    ]
    whole = subscribe(workers, "w1", weights=copy)
    for publisher in publishers:
        publisher.publish(2)
    copy["a"].zero_()
    assert whole.pull_into(copy, timeout=PATIENCE) == 2
    assert same(copy, weights)


def test_names_ties_and_plain_tensors(cluster: Clusters, subscribe: Subscribe) -> None:
    weights = {"w": torch.randn(6, 4), "scale": torch.tensor(3.0), "none": torch.empty(0, 2)}
    sent = shards_by_name(weights, (2,), {"w": [Shard(0)], "none": [Shard(0)]})
    for part in sent:
        part["tied"] = part["w"]
        part["absent"] = torch.empty(3, device="meta")
    got = shards({"v": torch.zeros(6, 4)}, (2,), Shard(1))
    target: list[Weights] = [
        {**part, "s": torch.zeros(()), "n": torch.empty(0, 2), "x": torch.empty(3, device="meta")}
        for part in got
    ]
    names = {"v": "tied", "s": "scale", "n": "none", "x": "absent"}
    workers = cluster(4)
    publishers = open_publishers(workers, sent)
    subscribers = [
        subscribe(workers, f"w{2 + rank}", weights=target[rank], names=names) for rank in range(2)
    ]
    for publisher in publishers:
        publisher.publish()
    for rank, subscriber in enumerate(subscribers):
        subscriber.pull_into(target[rank], timeout=PATIENCE)
        assert torch.equal(local_of(target[rank]["v"]), weights["w"].chunk(2, 1)[rank])
        assert target[rank]["s"] == 3
        subscriber.pull_into({"v": target[rank]["v"]}, names={"v": "tied"})
        with pytest.raises(UsageError, match="not among"):
            subscriber.pull_into({"w": torch.zeros(6, 4)}, names={"w": "w"})
        with pytest.raises(UsageError, match="other shards"):
            subscriber.pull_into({"v": torch.zeros(6, 4)})
        with pytest.raises(UsageError, match=r"the shape \(6, 5\)"):
            subscriber.pull_into({"v": torch.zeros(6, 5)})


def test_stages_of_a_pipeline(cluster: Clusters, subscribe: Subscribe) -> None:
    """Each trainer has other tensors, and one that all have."""
    sent = [{f"layer{rank}": torch.full((5,), rank), "all": torch.ones(2)} for rank in range(3)]
    copy = {f"layer{rank}": torch.zeros(5) for rank in range(3)} | {"all": torch.zeros(2)}
    workers = cluster(4)
    publishers = open_publishers(workers, sent)
    subscriber = subscribe(workers, "w3", weights=copy)
    for publisher in publishers:
        publisher.publish()
    subscriber.pull_into(copy, timeout=PATIENCE)
    assert all(copy[f"layer{rank}"].eq(rank).all() for rank in range(3))
    assert copy["all"].eq(1).all()


def test_pulls_never_mix_two_versions(cluster: Clusters, subscribe: Subscribe) -> None:
    count = 30
    sent = shards({"w": torch.zeros(30, 40)}, (3,), Shard(0))
    got = shards({"w": torch.zeros(30, 40)}, (2,), Shard(1))
    workers = cluster(5)
    publishers = open_publishers(workers, sent, history=0)
    subscribers = [subscribe(workers, f"w{3 + rank}", weights=got[rank]) for rank in range(2)]
    errors: list[Any] = []

    def publish(rank: int) -> None:
        for version in range(count + 1):
            local_of(sent[rank]["w"]).fill_(version)
            publishers[rank].publish(version)

    def pull(rank: int) -> None:
        version = -1
        while version < count and not errors:
            found = subscribers[rank].pull_into(got[rank], timeout=PATIENCE)
            values = local_of(got[rank]["w"]).unique().tolist()
            if found < version or values != [float(found)]:
                errors.append((version, found, values))
            version = found

    threads = [threading.Thread(target=publish, args=(rank,)) for rank in range(3)]
    threads += [threading.Thread(target=pull, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    assert errors == []


def test_a_version_is_there_when_all_shards_are(cluster: Clusters, subscribe: Subscribe) -> None:
    sent = shards({"w": torch.ones(4, 4)}, (2,), Shard(0))
    copy = {"w": torch.zeros(4, 4)}
    workers = cluster(3)
    first = Publisher(sent[0], "policy", agent=workers["w0"], shard=(0, 2))
    first.publish(1)
    subscriber = subscribe(workers, "w2", weights=copy, patience=5.0)
    second = Publisher(sent[1], "policy", agent=workers["w1"], shard=(1, 2))
    second.publish(0)
    second.publish(1)
    assert subscriber.pull_into(copy, timeout=PATIENCE) == 1
    assert copy["w"].eq(1).all()
    local_of(sent[0]["w"]).fill_(2)
    first.publish(2)
    future = subscriber.newer_than(1)
    assert subscriber.pull_into(copy) == 1
    assert copy["w"].eq(1).all()
    assert not future.done()
    local_of(sent[1]["w"]).fill_(2)
    second.publish(2)
    assert future.result(PATIENCE) == 2
    assert subscriber.pull_into(copy) == 2
    assert copy["w"].eq(2).all()


def test_a_shard_that_dies_and_returns(cluster: Clusters, subscribe: Subscribe) -> None:
    sent = shards({"w": torch.zeros(4, 4)}, (2,), Shard(0))
    copy = {"w": torch.zeros(4, 4)}
    workers = cluster(3, fixed_size=False, **FAST)
    publishers = open_publishers(workers, sent)
    subscriber = subscribe(workers, "w2", weights=copy, patience=5.0)
    versions = itertools.count()

    def publish(*ranks: int) -> int:
        version = next(versions)
        for rank in ranks:
            local_of(sent[rank]["w"]).fill_(version)
            publishers[rank].publish(version)
        return version

    def check(version: int) -> None:
        assert subscriber.newer_than(version - 1).result(PATIENCE) == version
        assert subscriber.pull_into(copy, timeout=PATIENCE) == version
        assert copy["w"].eq(version).all()

    check(publish(0, 1))
    for lost in (1, 0):
        publish(1 - lost)  # the other shard of this version is never published
        workers.kill(f"w{lost}")
        workers.join(f"w{lost}")
        publishers[lost] = Publisher(
            sent[lost], "policy", agent=workers[f"w{lost}"], shard=(lost, 2)
        )
        check(publish(0, 1))
        check(publish(0, 1))


def test_trainers_that_go_back_to_an_older_version(cluster: Clusters, subscribe: Subscribe) -> None:
    """All are restarted, with another number of shards, and use numbers again."""
    copy = {"w": torch.zeros(6, 4)}
    workers = cluster(4)
    subscriber = subscribe(workers, "w3", weights=copy, patience=5.0)
    for run, count in enumerate((2, 3, 1)):
        sent = shards({"w": torch.full((6, 4), run)}, (count,), Shard(0))
        publishers = open_publishers(workers, sent)
        for version in range(5):
            for publisher in publishers:
                publisher.publish(version)
        while not copy["w"].eq(run).all() or subscriber.version != 4:
            found = subscriber.pull_into(copy, timeout=PATIENCE)
            assert len(copy["w"].unique()) == 1
            assert 0 <= found < 5
        for publisher in publishers:
            publisher.close()
        subscriber.pull_into(copy)
        assert copy["w"].eq(run).all()


def test_slices_that_nobody_gets_are_no_longer_made(
    cluster: Clusters, subscribe: Subscribe
) -> None:
    workers = cluster(2)
    weights = {"w": torch.zeros(4, 4)}
    publisher = Publisher(weights, "policy", agent=workers["w0"])
    for version in range(3):
        subscriber = subscribe(workers, "w1", slices={"w": (slice(None), slice(version))[::-1]})
        publisher.publish(version)
        if version:
            subscriber.newer_than(version - 1).result(PATIENCE)
            assert publisher._slices._served
        subscriber.close()
    publisher.flush(PATIENCE)
    for version in itertools.count(3):  # the publisher hears of it in a moment
        publisher.publish(version)
        publisher.flush(PATIENCE)
        if not publisher._slices._served:
            break


def test_wrong_use_is_explained(cluster: Clusters, subscribe: Subscribe) -> None:
    workers = cluster(4)
    weights = {"w": torch.zeros(4, 4)}
    for shard in ((2, 2), (-1, 2), 3, ("x", 1)):
        with pytest.raises(UsageError, match="shard is"):
            Publisher(weights, "other", agent=workers["w0"], shard=shard)  # type: ignore[arg-type]
    (partial,) = shards({"w": torch.zeros(4, 4)}, (1,), Partial())
    with pytest.raises(UsageError, match="Shard or Replicate"):
        Publisher(partial, "other", agent=workers["w0"], shard=(0, 1))
    with pytest.raises(UsageError, match="Shard or Replicate"):
        Subscriber("other", agent=workers["w0"], weights=partial)
    (strided, _) = shards({"w": torch.zeros(8, 4)}, (2,), _StridedShard(0, split_factor=2))
    with pytest.raises(UsageError, match="not one contiguous box"):
        Publisher(strided, "other", agent=workers["w0"], shard=(0, 2))
    publishers = open_publishers(workers, shards(weights, (2,), Shard(0)))
    for publisher in publishers:
        publisher.publish()
    plain = subscribe(workers, "w2")
    with pytest.raises(UsageError, match="published as 2 shards"):
        plain.pull_into(weights, timeout=PATIENCE)
    with pytest.raises(UsageError, match="published as 2 shards"):
        plain.newer_than(None).result(PATIENCE)
    plain.close()
    for options, message in (
        ({"slices": {"v": slice(2)}}, "no tensor 'v'"),
        ({"slices": {"w": slice(0, 4, 2)}}, "step 1"),
        ({"slices": {"w": (slice(2), slice(2), slice(2))}}, r"shape \(4, 4\)"),
        ({"weights": {"w": torch.zeros(5, 4)}}, r"shape \(4, 4\)"),
        ({"weights": {}}, "no tensor of"),
    ):
        subscriber = subscribe(workers, "w3", **options)
        with pytest.raises(UsageError, match=message):
            subscriber.pull_into(weights, timeout=PATIENCE)
        subscriber.close()
    for slices in ({"w": (slice(2), 3)}, {"w": ...}, {"w": slice("x")}, {"w": slice(0.5)}, 5):
        with pytest.raises(UsageError, match="slices"):
            subscribe(workers, "w3", slices=slices)
    with pytest.raises(UsageError, match="itself"):
        subscribe(workers, "w0", slices={"w": slice(2)})
    subscriber = subscribe(workers, "w3", slices={"w": slice(2)})
    with pytest.raises(UsageError, match=r"have \(2, 4\)"):
        subscriber.pull_into(weights, timeout=PATIENCE)
    with pytest.raises(UsageError, match="same slices"):
        subscribe(workers, "w3")

"""Tables on servers train exactly like tables in one process; storage, fetching and errors."""

from __future__ import annotations

import copy
import json
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from telegrad import ps
from telegrad.errors import JoinError, PeerLost, StaleReference, UsageError
from telegrad.ps.embeddings import growable_array, lookup, row_index
from telegrad.ps.embeddings.messages import RowUpdate
from telegrad.ps.embeddings.row_batch import RowBatch
from telegrad.ps.embeddings.row_cache import RowCache
from telegrad.ps.embeddings.row_hash import initialize, owners
from telegrad.ps.embeddings.row_index import RowIndex
from telegrad.ps.embeddings.shard import TableShard
from telegrad.ps.server.registry import ShardRegistry
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE, until

# torch's own, about its optimizers
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

Clusters = Callable[..., LocalCluster]

ROWS, DIM = 50, 3
EVERY = torch.arange(ROWS)
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-13}


def table(
    kind: Any, cluster: LocalCluster, trainer: str = "w0", servers: Any = ("w1",), **options: Any
) -> Any:
    return kind(ROWS, DIM, servers, dtype=torch.float64, agent=cluster[trainer], **options)


def input_of(step: int, trainer: int = 0, bags: int = 6, length: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + trainer)
    return torch.randint(ROWS, (bags, length), generator=generator)


def loss_of(output: Tensor) -> Tensor:
    target = torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)
    return ((output.sin() - target) ** 2).sum(-1).mean()


def shard(cluster: LocalCluster, worker: str = "w1", name: str = "table") -> TableShard:
    return cluster[worker]._runtime.service(ShardRegistry).find(f"tables {name!r}", TableShard)


def in_one_process(
    start: Tensor, inputs: list[Tensor], make: Callable[[list[Tensor]], Any], mode: str
) -> Tensor:
    """Return the rows that torch computes in one process."""
    sparse = mode != "max"  # of which torch has no sparse gradient
    local = nn.EmbeddingBag.from_pretrained(start.clone(), freeze=False, sparse=sparse, mode=mode)
    optimizer = make(list(local.parameters()))
    for each in inputs:
        optimizer.zero_grad()
        loss_of(local(each)).backward()
        if not sparse:
            local.weight.grad = rows_of(local.weight.grad, each.unique())
        optimizer.step()
    return local.weight.detach()


def rows_of(gradient: Tensor | None, ids: Tensor) -> Tensor:
    assert gradient is not None
    return torch.sparse_coo_tensor(ids[None], gradient[ids], gradient.shape, check_invariants=True)


RULES: dict[str, tuple[Any, Callable[[list[Tensor]], Any]]] = {
    "SGD": (ps.RowSGD(lr=0.3), lambda weights: torch.optim.SGD(weights, lr=0.3)),
    "Adagrad": (
        ps.RowAdagrad(lr=0.3, per_element=True),
        lambda weights: torch.optim.Adagrad(weights, lr=0.3),
    ),
    "Adam": (ps.RowAdam(lr=0.03), lambda weights: torch.optim.SparseAdam(weights, lr=0.03)),
}


# Training is exact


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("servers", [["w1"], ["w1", "w2", "w3"]], ids=len)
def test_one_trainer_is_torch_itself(
    cluster: Clusters, rule: str, mode: str, servers: list[str]
) -> None:
    ours, theirs = RULES[rule]
    bag = table(ps.EmbeddingBag, cluster(4), servers=servers, mode=mode, optimizer=ours)
    start = bag.rows(EVERY)
    inputs = [input_of(step) for step in range(8)]
    for each in inputs:
        loss_of(bag(each)).backward()
        bag.tables.step()
    expected = in_one_process(start, inputs, theirs, mode=mode)
    torch.testing.assert_close(bag.rows(EVERY), expected, **EXACT)


@pytest.mark.parametrize("servers", [["w1"], ["w1", "w2"]], ids=len)
def test_adagrad_by_row(cluster: Clusters, servers: list[str]) -> None:
    """Against the rule, written down for one row after the other."""
    bag = table(
        ps.EmbeddingBag,
        cluster(3),
        servers=servers,
        mode="sum",
        optimizer=ps.RowAdagrad(lr=0.3, eps=1e-6),
    )
    rows, sums = bag.rows(EVERY), torch.zeros(ROWS, dtype=torch.float64)
    for step in range(8):
        loss_of(bag(input_of(step))).backward()
        bag.tables.step()
        leaf = rows.clone().requires_grad_()
        loss_of(F.embedding_bag(input_of(step), leaf, mode="sum")).backward()
        assert leaf.grad is not None
        for number in input_of(step).unique().tolist():
            gradient = leaf.grad[number]
            sums[number] += (gradient**2).mean()
            rows[number] -= 0.3 * gradient / (sums[number].sqrt() + 1e-6)
    torch.testing.assert_close(bag.rows(EVERY), rows, **EXACT)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("servers", [["w0"], ["w0", "w1"]], ids=len)
def test_trainers_together_are_one_with_the_large_batch(
    cluster: Clusters, rule: str, servers: list[str]
) -> None:
    workers = cluster(5)
    ours, theirs = RULES[rule]
    agents = ["w2", "w3", "w4"]

    def train(number: int) -> Tensor:
        bag = table(
            ps.EmbeddingBag,
            workers,
            agents[number],
            servers,
            mode="sum",
            optimizer=ours,
            trainers=3,
        )
        for step in range(6):
            loss_of(bag(input_of(step, number, bags=4 * (number < 2)))).backward()
            bag.tables.step()
        bag.tables.close()
        return bag.rows(EVERY)

    with ThreadPoolExecutor(3) as pool:
        ends = [
            each.result(PATIENCE) for each in [pool.submit(train, number) for number in range(3)]
        ]
    start = initialize(torch.empty(len(EVERY), DIM, dtype=torch.float64), EVERY, 0, 1.0)
    leaf = nn.Parameter(start.clone())
    optimizer = theirs([leaf])
    for step in range(6):  # the third trainer has empty batches: it counts, with zeros
        losses = [
            loss_of(F.embedding_bag(input_of(step, number, 4), leaf, mode="sum", sparse=True))
            for number in (0, 1)
        ]
        optimizer.zero_grad()
        (sum(losses) / 3).backward()  # type: ignore[union-attr]
        optimizer.step()
    for end in ends:
        torch.testing.assert_close(end, leaf.detach(), **EXACT)


@st.composite
def bags(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of an embedding bag that torch takes."""
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    count = sum(lengths)
    ids = draw(st.lists(st.integers(0, ROWS - 1), min_size=count, max_size=count))
    last = draw(st.booleans())
    ends = torch.tensor([0, *lengths]).cumsum(0)
    weights = (
        draw(st.lists(st.floats(-2, 2), min_size=count, max_size=count)) if mode == "sum" else None
    )
    return {
        "mode": mode,
        "include_last_offset": last,
        "padding_idx": draw(st.none() | st.integers(-ROWS, ROWS - 1)),
        "input": torch.tensor(ids, dtype=torch.int64),
        "offsets": ends if last else ends[:-1],
        "weights": None
        if weights is None or draw(st.booleans())
        else torch.tensor(weights, dtype=torch.float64),
    }


def test_bags_of_every_kind_are_torchs() -> None:
    with LocalCluster(3, transports=("memory",)) as workers:

        @given(bags())
        def check(case: dict[str, Any]) -> None:
            made = {key: case[key] for key in ("mode", "include_last_offset", "padding_idx")}
            bag = table(
                ps.EmbeddingBag,
                workers,
                servers=["w1", "w2"],
                optimizer=ps.RowSGD(lr=1.0),
                **made,
                name=repr(case),
            )
            start = bag.rows(EVERY)
            theirs = nn.EmbeddingBag.from_pretrained(start.clone(), freeze=False, **made)
            weights = [
                None if case["weights"] is None else case["weights"].clone().requires_grad_()
                for _ in range(2)
            ]
            both = zip((bag, theirs), weights, strict=True)
            outputs = [each(case["input"], case["offsets"], weight) for each, weight in both]
            torch.testing.assert_close(*outputs, **EXACT)
            for output in outputs:
                loss_of(output).backward()
            bag.tables.step()
            bag.tables.close()
            assert theirs.weight.grad is not None
            torch.testing.assert_close(bag.rows(EVERY), start - theirs.weight.grad, **EXACT)
            if weights[0] is not None and weights[1] is not None:
                torch.testing.assert_close(weights[0].grad, weights[1].grad, **EXACT)

        check()


def test_an_embedding_is_torchs(cluster: Clusters) -> None:
    ours = table(
        ps.Embedding, cluster(3), servers="w[12]", optimizer=ps.RowSGD(lr=1.0), padding_idx=-1
    )
    start = ours.rows(EVERY)
    assert not start[-1].any()
    theirs = nn.Embedding.from_pretrained(start.clone(), freeze=False, padding_idx=-1)
    input = torch.tensor([[1, 2, ROWS - 1], [2, 2, 40]], dtype=torch.int32)
    assert ours(input).shape == (2, 3, DIM)
    for each in (ours, theirs):
        loss_of(each(input)).backward()
    ours.tables.step()
    torch.testing.assert_close(ours.rows(EVERY), start - theirs.weight.grad, **EXACT)


# Gradients, as torch users expect them


def test_gradients_add_up_until_a_step(cluster: Clusters) -> None:
    bag = table(
        ps.EmbeddingBag, cluster(3), servers=["w1", "w2"], mode="sum", optimizer=ps.RowSGD(lr=1.0)
    )
    start = bag.rows(EVERY)
    leaf = start.clone().requires_grad_()
    for step in (1, 2):
        for rows in (bag(input_of(step)), F.embedding_bag(input_of(step), leaf, mode="sum")):
            loss_of(rows).backward()
    with torch.no_grad():
        bag(input_of(3))  # leaves nothing behind
    bag.tables.step()
    assert leaf.grad is not None
    torch.testing.assert_close(bag.rows(EVERY), start - leaf.grad, **EXACT)
    bag.tables.step()  # what was sent is not sent again
    torch.testing.assert_close(bag.rows(EVERY), start - leaf.grad, **EXACT)


def test_gradients_can_be_forgotten(cluster: Clusters) -> None:
    bag = table(ps.EmbeddingBag, cluster(2))
    start = bag.rows(EVERY)
    loss_of(bag(input_of(0))).backward()
    bag.tables.zero_grad()
    bag.tables.step()
    assert torch.equal(bag.rows(EVERY), start)


def test_gradients_can_be_read_and_replaced(cluster: Clusters) -> None:
    bag = table(ps.EmbeddingBag, cluster(2), mode="sum", optimizer=ps.RowSGD(lr=1.0), std=0.0)
    bag.tables.show_gradients(True)
    for _ in range(2):
        bag(torch.tensor([[5, 7]])).sum().backward()
    assert bag.weight.grad.tolist() == [[2.0] * DIM] * 2
    with pytest.raises(UsageError, match=r"2 rows of a table cannot be replaced .* \(3, 3\)"):
        bag.weight.grad = torch.zeros(3, DIM)
    bag.weight.grad = bag.weight.grad / 4
    bag.tables.step()
    assert bag.rows(torch.tensor([5, 6, 7]))[:, 0].tolist() == [-0.5, 0.0, -0.5]
    bag(torch.tensor([[5]])).sum().backward()
    del bag.weight.grad
    assert bag.weight.grad is None
    bag.tables.step()
    assert bag.rows(torch.tensor([5]))[0, 0].item() == -0.5


def test_a_copied_module_trains_the_same_rows(cluster: Clusters) -> None:
    weight = table(ps.EmbeddingBag, cluster(2)).weight
    copied = copy.deepcopy([weight, weight])
    assert copied[0] is copied[1]
    assert copied[0] is not weight
    assert (copied[0].shape, copied[0].tables) == (weight.shape, weight.tables)


def test_the_learning_rate_can_change(cluster: Clusters) -> None:
    bag = table(ps.EmbeddingBag, cluster(2), mode="sum", optimizer=ps.RowSGD(lr=1.0))
    start = bag.rows(EVERY)
    bag(torch.tensor([[5]])).sum().backward()
    bag.lr = 0.25
    assert (bag.lr, bag.optimizer) == (0.25, ps.RowSGD(lr=0.25))
    bag.tables.step()
    torch.testing.assert_close(bag.rows(torch.tensor([5])), start[5:6] - 0.25, **EXACT)


class Model(nn.Module):
    """A table and something dense."""

    def __init__(self, bag: Any) -> None:
        super().__init__()
        self.bag = bag
        self.dense = nn.Linear(DIM, 1).double()
        nn.init.constant_(self.dense.weight, 0.5)
        nn.init.zeros_(self.dense.bias)

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.dense(self.bag(input))
        return out


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizer_steps_the_tables_of_its_model(cluster: Clusters, closure: bool) -> None:
    workers = cluster(3)
    model = Model(table(ps.EmbeddingBag, workers, servers="w1", optimizer=ps.RowSGD(lr=0.3)))
    local = Model(nn.EmbeddingBag.from_pretrained(model.bag.rows(EVERY), freeze=False, sparse=True))
    theirs = torch.optim.SGD(local.parameters(), lr=0.3)
    with ps.Optimizer(model, "w2", lr=0.3, agent=workers["w0"]) as ours:
        for step in range(5):
            for net, optimizer in ((model, ours), (local, theirs)):

                def backward(
                    net: nn.Module = net, optimizer: Any = optimizer, step: int = step
                ) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(net(input_of(step)))
                    loss.backward()
                    return loss

                optimizer.step(backward) if closure else (backward(), optimizer.step())
        loss_of(model(input_of(9))).backward()
        ours.zero_grad()
        assert not model.bag.tables._gradients["table"]
    torch.testing.assert_close(model.bag.rows(EVERY), local.bag.weight.detach(), **EXACT)
    torch.testing.assert_close(model.dense.weight, local.dense.weight, **EXACT)
    with pytest.raises(UsageError, match="closed"):
        model.bag.tables.step()


# What is kept and what travels


def test_rows_cost_nothing_until_they_are_trained(cluster: Clusters) -> None:
    workers = cluster(2)
    huge = ps.Embedding(2**62, 64, "w1", agent=workers["w0"], name="huge")
    held = shard(workers, name="huge")._storages["huge"]
    asked = torch.tensor([0, 2**62 - 1, 123456789012345678])
    first = huge.rows(asked)
    with torch.no_grad():
        assert torch.equal(huge(asked), first)
    assert len(held) == 0
    huge(asked).sum().backward()
    huge.tables.step()
    assert len(held) == 3
    assert not torch.equal(huge.rows(asked), first)


@pytest.mark.parametrize("reserved", [0, 1 << 11])
def test_storage_grows(cluster: Clusters, monkeypatch: pytest.MonkeyPatch, reserved: int) -> None:
    """Beyond what could be reserved, which is nothing on some systems."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("cannot allocate memory")

    monkeypatch.setattr(growable_array, "_MAXIMUM_RESERVATION", reserved)
    if not reserved:
        monkeypatch.setattr(mmap, "mmap", refuse)
    bag = ps.EmbeddingBag(
        10**6, 8, "w1", mode="sum", optimizer=ps.RowAdagrad(lr=1.0), agent=cluster(2)["w0"]
    )
    start = bag.rows(torch.arange(5000))
    for first in range(0, 5000, 500):
        bag(torch.arange(first, first + 500)[None]).sum().backward()
        bag.tables.step()
    torch.testing.assert_close(bag.rows(torch.arange(5000)), start - 1)


def test_it_does_not_matter_who_makes_a_row_and_where(cluster: Clusters) -> None:
    workers = cluster(4)
    tables = [
        ps.Embedding(10**6, 5, servers, agent=workers["w0"], name=name, seed=seed)
        for name, servers, seed in (
            ("a", ["w1"], 0),
            ("b", ["w1", "w2", "w3"], 0),
            ("c", ["w1"], 1),
        )
    ]
    ids = torch.arange(0, 10**6, 1000)
    alone, spread, other = (each.rows(ids) for each in tables)
    assert torch.equal(alone, spread)
    assert not torch.isclose(alone, other).any()
    assert abs(float(alone.mean())) < 0.05
    assert abs(float(alone.std()) - 1) < 0.05
    tables[1](ids[500:]).sum().backward()
    counts = [len(shard(workers, worker, "b")._storages["b"]) for worker in ("w1", "w2", "w3")]
    assert sum(counts) == 500
    assert min(counts) > 120


def test_tables_are_fetched_and_updated_together(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster(3)
    calls: list[tuple[str, list[str]]] = []
    pull, push = TableShard.pull, TableShard.push

    def counted_pull(self: TableShard, requests: Any, store_new: bool) -> Any:
        calls.append(("pull", [each.table for each in requests]))
        return pull(self, requests, store_new)

    def counted_push(self: TableShard, trainer: str, step: int, version: int, updates: Any) -> Any:
        calls.append(("push", [each.table for each in updates]))
        return push(self, trainer, step, version, updates)

    monkeypatch.setattr(TableShard, "pull", counted_pull)
    monkeypatch.setattr(TableShard, "push", counted_push)
    tables = ps.Tables(["w1", "w2"], agent=workers["w0"])
    bags = [ps.EmbeddingBag(ROWS, width, tables, mode="sum") for width in (2, 3, 4)]
    inputs = [torch.arange(10 * (number + 1)).view(5, -1) for number in range(3)]
    for _ in range(2):
        ps.prefetch(zip(bags, inputs, strict=True))
        sum(bag(input).sum() for bag, input in zip(bags, inputs, strict=True)).backward()  # type: ignore[union-attr]
        tables.step()
    names = ["table0", "table1", "table2"]
    assert calls == 2 * [("pull", names), ("pull", names), ("push", names), ("push", names)]
    ps.prefetch([(bags[0], inputs[0])])
    stale = bags[0].rows(inputs[0])
    bags[0](inputs[0].clone()).sum().backward()
    tables.step()
    # what was fetched before a step is not used after it
    assert not torch.equal(bags[0](inputs[0]), stale.sum(1))


def test_rows_are_used_again_for_some_steps(cluster: Clusters) -> None:
    workers = cluster(3)
    cached, plain = (
        table(
            ps.Embedding,
            workers,
            worker,
            optimizer=ps.RowSGD(lr=1.0),
            consistency=ps.Async(),
            reuse=reuse,
        )
        for worker, reuse in (("w0", 2), ("w2", 0))
    )
    asked = torch.tensor([3, 4])
    start = plain.rows(asked)
    seen = []
    for _ in range(5):
        seen.append(cached(asked).detach())
        cached.tables.step()
        plain(asked).sum().backward()
        plain.tables.step()
    expected = [start, start, start, start - 3, start - 3]
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(cached(asked), start - 5, **EXACT)  # who only looks sees what is


def test_few_rows_are_used_again() -> None:
    cache = RowCache(steps=1, limit=4, dim=1, dtype=torch.float64)
    for now, ids in ((0, [1, 2, 3]), (1, [3, 4]), (2, [5, 6, 7])):
        tensor = torch.tensor(ids)
        cache.add(tensor, 10.0 * now + tensor[:, None].double(), now)
    known, rows = cache.find(torch.tensor([1, 3, 5, 6, 7]), 2)
    assert known.tolist() == [False, False, True, True, True]
    assert rows.flatten().tolist() == [25, 26, 27]
    cache.add(torch.arange(9), torch.zeros(9, 1, dtype=torch.float64), 2)  # more than fit
    assert cache.find(torch.tensor([5]), 3)[1].tolist() == [[25.0]]


def test_rows_that_are_still_valid_stay_when_others_expire() -> None:
    cache = RowCache(steps=1, limit=4, dim=1, dtype=torch.float64)
    for now, ids in ((0, [1, 2]), (1, [3, 4]), (2, [5, 6])):
        tensor = torch.tensor(ids)
        cache.add(tensor, 10.0 * now + tensor[:, None].double(), now)
    known, rows = cache.find(torch.tensor([1, 2, 3, 4, 5, 6]), 2)
    assert known.tolist() == [False, False, True, True, True, True]
    assert rows.flatten().tolist() == [13, 14, 25, 26]
    assert repr(cache) == "<RowCache: 4 of 4 rows, valid for 1 steps>"


@pytest.fixture(params=[row_index._INT32_BITS, row_index._MINIMUM_BITS])
def int32_bits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let large indexes use 64-bit integers, or let those do it that a test can make."""
    with patch.object(row_index, "_INT32_BITS", request.param):
        yield


@pytest.mark.usefixtures("int32_bits")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 2**62) | st.integers(0, 30), max_size=200), max_size=12))
def test_an_index_is_a_dictionary(batches: list[list[int]]) -> None:
    index, known = RowIndex(), dict[int, int]()
    for batch in batches:
        new = [number for number in dict.fromkeys(batch) if number not in known]
        assert (index.find(np.array(new, np.int64)) == -1).all()
        index.add(np.array(new, np.int64))
        known.update({number: len(known) + place for place, number in enumerate(new)})
        asked = np.array(list(known), np.int64)
        assert index.find(asked).tolist() == list(known.values())
        assert index.ids.tolist() == list(known)


def test_patterns_of_numbers_are_spread_evenly() -> None:
    for step in (1, 2, 1024, 10**12):
        counts = owners(torch.arange(0, 4000 * step, step), 4).bincount(minlength=4)
        assert counts.min() > 850


# Rows as such


def test_rows_can_be_put_and_exported(cluster: Clusters) -> None:
    workers = cluster(3)
    source = table(ps.Embedding, workers, servers=["w1", "w2"], name="a")
    source(EVERY[10:20]).sum().backward()
    source.tables.step()
    target = table(ps.Embedding, workers, servers=["w1"], name="b", seed=1)
    seen = 0
    for ids, rows in source.export(rows=3):
        assert len(ids) <= 3
        seen += len(ids)
        target.put(ids, rows)
    assert seen == 10
    assert torch.equal(target.rows(EVERY[10:20]), source.rows(EVERY[10:20]))
    assert not torch.equal(target.rows(EVERY[:10]), source.rows(EVERY[:10]))


def test_a_state_dict_names_the_table(cluster: Clusters) -> None:
    workers = cluster(2)
    bag = table(ps.EmbeddingBag, workers, name="a")
    state = Model(bag).state_dict()
    assert state.keys() == {"bag._extra_state", "dense.weight", "dense.bias"}
    assert json.loads(bytes(state["bag._extra_state"].tolist())) == {
        "name": "a",
        "rows": ROWS,
        "dim": DIM,
    }
    Model(bag).load_state_dict(state)
    with pytest.raises(UsageError, match="'b'"):
        Model(table(ps.EmbeddingBag, workers, name="b")).load_state_dict(state)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda bag: bag(torch.tensor([[ROWS]])),
            f"'table' has rows 0 to {ROWS - 1}, .* row {ROWS}: make",
        ),
        (lambda bag: bag(torch.tensor([[-1, 2]])), "asks for row -1"),
        (lambda bag: bag(torch.tensor([[1.0]])), "int64 or int32"),
        (lambda bag: bag.put(torch.tensor([1, 1]), torch.zeros(2, DIM)), "once each"),
        (lambda bag: bag.put(torch.tensor([1]), torch.zeros(1, DIM + 1)), "once each"),
        (lambda bag: bag.tables.change_optimizer("table", ps.RowAdam()), "cannot become"),
        (lambda bag: ps.EmbeddingBag(ROWS, DIM, bag.tables, name="table"), "another name"),
        (lambda bag: ps.EmbeddingBag(ROWS, DIM, bag.tables, trainers=2), "not to each table"),
        (lambda bag: ps.EmbeddingBag(0, DIM, bag.tables), "1 or more rows"),
        (lambda bag: ps.EmbeddingBag(ROWS, DIM, bag.tables, padding_idx=ROWS), "padding_idx"),
        (lambda bag: ps.EmbeddingBag(ROWS, DIM, bag.tables, mode="median"), "sum, mean or max"),
        (lambda bag: ps.RowAdam(betas=(0.9, 1.0)), "out of its range"),
    ],
)
def test_mistakes_are_named(cluster: Clusters, wrong: Callable[[Any], Any], message: str) -> None:
    bag = table(ps.EmbeddingBag, cluster(2))
    with pytest.raises(UsageError, match=message):
        wrong(bag)


def test_trainers_must_agree(cluster: Clusters) -> None:
    workers = cluster(3)
    table(ps.EmbeddingBag, workers, consistency=ps.Async())
    with pytest.raises(UsageError, match=r"disagree: Sync.* but this server has Async"):
        table(ps.EmbeddingBag, workers, "w2")
    with pytest.raises(UsageError, match="disagree about a table"):
        table(ps.EmbeddingBag, workers, "w2", consistency=ps.Async(), seed=1)


def test_tables_of_several_groups_are_not_fetched_together(cluster: Clusters) -> None:
    workers = cluster(2)
    pair = [table(ps.Embedding, workers, name=name) for name in "ab"]
    with pytest.raises(UsageError, match="same `Tables`"):
        ps.prefetch((each, EVERY) for each in pair)


def test_no_inputs_are_fetched_from_nowhere() -> None:
    assert ps.prefetch([]) is None  # type: ignore[func-returns-value]


def test_tables_are_closed_with_their_block_and_once(cluster: Clusters) -> None:
    workers = cluster(2)
    with ps.Tables(["w1"], agent=workers["w0"]) as tables:
        assert tables  # also without a table
        bag = ps.EmbeddingBag(ROWS, DIM, tables, name="a", mode="max")
        assert "50, 3, name='a', optimizer=" in repr(bag)
        assert "mode='max'" in repr(bag)
        assert repr(tables).startswith("<ps.Tables 'tables': 1 on w1, Sync(")
        assert "'a': 0 of 50 rows" in repr(shard(workers, name=tables.name))
    tables.close()
    assert bag.rows(EVERY).shape == (ROWS, DIM)


def test_a_server_refuses_another_kind_of_optimizer(cluster: Clusters) -> None:
    workers = cluster(2)
    table(ps.EmbeddingBag, workers, optimizer=ps.RowSGD(lr=1.0))
    storage = shard(workers)._storages["table"]
    with pytest.raises(UsageError, match="which cannot become RowAdam"):
        storage.change_optimizer(ps.RowAdam())


def test_a_server_goes_back_to_a_version_in_which_a_table_did_not_exist(cluster: Clusters) -> None:
    workers = cluster(2)
    tables = ps.Tables(["w1"], agent=workers["w0"])
    options: dict[str, Any] = {"optimizer": ps.RowSGD(lr=1.0), "std": 0.0, "mode": "sum"}
    first = ps.EmbeddingBag(ROWS, DIM, tables, name="first", **options)
    push(first)
    server = shard(workers, name=tables.name)
    saved = server._snapshot()
    second = ps.EmbeddingBag(ROWS, DIM, tables, name="second", **options)
    push(first)
    push(second)
    assert (row(first), row(second)) == (-2.0, -1.0)
    with server._lock:
        server._load(saved)
    assert (row(first), row(second)) == (-1.0, 0.0)


# Who waits for whom


def push(bag: Any, gradient: float = 1.0) -> None:
    """A step in which the gradient of row 7 is this."""
    (bag(torch.tensor([[7]])) * gradient).sum().backward()
    bag.tables.step()


def row(bag: Any) -> float:
    return float(bag.rows(torch.tensor([7]))[0, 0])


def pair(workers: LocalCluster, rule: Any) -> list[Any]:
    options = {"consistency": rule, "trainers": 2, "optimizer": ps.RowSGD(lr=1.0), "std": 0.0}
    with ThreadPoolExecutor(2) as pool:
        made = [
            pool.submit(table, ps.EmbeddingBag, workers, worker, ["w0"], **options)
            for worker in ("w1", "w2")
        ]
        return [each.result(PATIENCE) for each in made]


def waits(workers: LocalCluster) -> Callable[[], bool]:
    return lambda: len(shard(workers, "w0").waiting) == 1


def test_a_round_waits_for_every_trainer(cluster: Clusters) -> None:
    workers = cluster(3)
    a, b = pair(workers, ps.Sync())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(push, a, 1.0)
        until(waits(workers))
        assert (row(b), first.done()) == (0.0, False)
        push(b, 3.0)
        first.result(PATIENCE)
    assert (row(a), a.tables.version, a.tables.staleness) == (-2.0, 1, 0)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_who_is_gone_is_not_waited_for(cluster: Clusters, end: str) -> None:
    workers = cluster(3)
    a, b = pair(workers, ps.Sync())
    with ThreadPoolExecutor(2) as pool:
        if end == "close":
            first = pool.submit(push, a)
            until(waits(workers))
            b.tables.close()
        else:  # with its gradient on the server, which goes with it
            doomed = pool.submit(push, b, 100.0)
            until(waits(workers))
            workers.kill("w2")
            # the server notices the loss on a thread of its own
            until(lambda: not waits(workers)())
            first = pool.submit(push, a)
            assert isinstance(doomed.exception(PATIENCE), PeerLost | RuntimeError)
        first.result(PATIENCE)
    assert row(a) == -1.0


def test_async_waits_for_nobody_and_says_how_stale(cluster: Clusters) -> None:
    a, b = pair(cluster(3), ps.Async())
    a(torch.tensor([[7]])).sum().backward()  # fetched before, sent after the steps of the other
    push(b)
    push(b)
    a.tables.step()
    assert (row(a), a.tables.staleness, b.tables.staleness) == (-3.0, 2, 0)


def test_who_is_too_far_ahead_waits(cluster: Clusters) -> None:
    workers = cluster(3)
    a, b = pair(workers, ps.Stale(2))
    with ThreadPoolExecutor(1) as pool:
        push(a)
        second = pool.submit(push, a)
        until(waits(workers))
        assert row(b) == -2.0
        push(b)
        second.result(PATIENCE)


def test_who_comes_after_the_quorum_is_dropped(cluster: Clusters) -> None:
    workers = cluster(3)
    a, b = pair(workers, ps.Sync(quorum=1))
    b(torch.tensor([[7]])).sum().backward()
    push(a)
    b.tables.step()
    assert (row(a), a.tables.dropped, b.tables.dropped) == (-1.0, 0, 1)
    push(b)
    assert (row(a), b.tables.dropped) == (-2.0, 1)


def test_a_newcomer_trains_along(cluster: Clusters) -> None:
    workers = cluster(3)
    options = {"optimizer": ps.RowSGD(lr=1.0), "std": 0.0}
    a = table(ps.EmbeddingBag, workers, "w1", ["w0"], **options)
    push(a)
    b = table(ps.EmbeddingBag, workers, "w2", ["w0"], **options)
    assert row(b) == -1.0
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(push, a, 1.0)
        push(b, 3.0)
        other.result(PATIENCE)
    assert row(b) == -3.0


def test_missing_trainers_are_named(cluster: Clusters) -> None:
    workers = cluster(2, join_timeout=0.1)
    with pytest.raises(JoinError, match="tables 'table' did not start"):
        table(ps.EmbeddingBag, workers, trainers=2)


def test_what_is_pushed_again_counts_once(cluster: Clusters) -> None:
    workers = cluster(2)
    bag = table(ps.EmbeddingBag, workers, optimizer=ps.RowSGD(lr=1.0), std=0.0)
    push(bag)
    (client,) = bag.tables._clients
    update = RowUpdate("table", torch.tensor([7]), torch.ones(1, DIM, dtype=torch.float64))
    for _ in range(2):
        assert client.push(1, 0, [update]).wait().version == 1
    assert row(bag) == -1.0
    assert client.push(2, 1, [update]).wait().version == 2
    assert row(bag) == -2.0


def test_rows_that_the_server_does_not_have_can_be_updated(cluster: Clusters) -> None:
    """As after a restart of the server between a pull and a push."""
    workers = cluster(2)
    bag = table(ps.EmbeddingBag, workers, optimizer=ps.RowSGD(lr=1.0))
    start = bag.rows(EVERY)
    gradients = torch.ones(ROWS, DIM, dtype=torch.float64)
    shard(workers)._storages["table"].update([(EVERY, gradients)], trainers=2)
    torch.testing.assert_close(bag.rows(EVERY), start - 0.5, **EXACT)


def test_a_table_that_is_gone_is_named(cluster: Clusters) -> None:
    workers = cluster(2)
    bag = table(ps.EmbeddingBag, workers)
    shard(workers)._storages.clear()
    with pytest.raises(StaleReference, match="no table 'table'"):
        bag(EVERY[:, None])


# Gathering


def inputs_of_bags(case: str) -> tuple[Tensor, Tensor | None, bool]:
    generator = torch.Generator().manual_seed(1)
    if case == "matrix":
        return torch.randint(0, 30, (6, 5), generator=generator), None, False
    flat = torch.randint(0, 30, (20,), generator=generator)
    if case == "offsets":  # two bags are empty, the last one and one in the middle
        return flat, torch.tensor([0, 4, 4, 9, 20]), False
    return flat, torch.tensor([0, 7, 7, 20]), True


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("case", ["matrix", "offsets", "last offset"])
def test_bags_and_their_gradients_are_those_of_torch(case: str, mode: str, servers: int) -> None:
    input, offsets, last = inputs_of_bags(case)
    batch = RowBatch.of(input.reshape(-1), servers)
    places = batch.positions.view(input.shape)
    leaves = [torch.randn(len(batch.ids), 4, dtype=torch.float64).requires_grad_()]
    leaves.append(leaves[0].detach().clone().requires_grad_())
    ours = lookup.embedding_bag(leaves[0], batch, places, offsets, mode, last)
    theirs = F.embedding_bag(places, leaves[1], offsets, mode=mode, include_last_offset=last)
    assert torch.equal(ours, theirs)
    weights = torch.randn_like(ours)
    firsts = [
        torch.autograd.grad(output, leaf, weights, create_graph=True)[0]
        for output, leaf in zip((ours, theirs), leaves, strict=True)
    ]
    torch.testing.assert_close(*firsts)
    assert torch.autograd.gradcheck(
        lambda rows: lookup.embedding_bag(rows, batch, places, offsets, mode, last), (leaves[0],)
    )


@pytest.mark.parametrize("servers", [1, 3])
def test_embeddings_and_their_gradients_are_those_of_torch(servers: int) -> None:
    input = torch.randint(0, 30, (6, 5))
    batch = RowBatch.of(input.reshape(-1), servers)
    rows = torch.randn(len(batch.ids), 4, dtype=torch.float64).requires_grad_()
    ours = lookup.embedding(rows, batch, input.shape)
    theirs = F.embedding(batch.positions.view(input.shape), rows)
    assert torch.equal(ours, theirs)
    weights = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, rows, weights), torch.autograd.grad(theirs, rows, weights)
    )
    assert torch.autograd.gradgradcheck(
        lambda leaf: lookup.embedding(leaf, batch, input.shape), (rows,)
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 2, 5, 9, 2**40, 2**62 + 1, 2**63 - 1]), max_size=40),
    st.integers(1, 3),
)
def test_a_batch_has_each_row_once_and_knows_where_it_is_used(
    numbers: list[int], servers: int
) -> None:
    ids = torch.tensor(numbers, dtype=torch.int64)
    batch = RowBatch.of(ids, servers)
    assert torch.equal(batch.ids[batch.positions], ids)
    assert sorted(batch.ids.tolist()) == sorted(set(numbers))
    assert sum(batch.counts) == len(batch.ids)
    ends = [*batch.starts.tolist()[1:], len(ids)] if len(ids) else []
    for number, (start, end) in enumerate(zip(batch.starts.tolist(), ends, strict=True)):
        positions = batch.order[start:end].tolist()
        assert positions == [at for at, each in enumerate(numbers) if each == batch.ids[number]]


def test_first_values_are_normally_distributed() -> None:
    values = initialize(torch.empty(20_000, 50), torch.arange(20_000), seed=3, std=2.0)
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 2.0) < 0.01
    assert abs(float((values.abs() < 2.0).float().mean()) - 0.6827) < 0.005
    assert float(values.abs().max()) < 9.0
    correlations = torch.corrcoef(values.t()) - torch.eye(50)
    assert float(correlations.abs().max()) < 0.05

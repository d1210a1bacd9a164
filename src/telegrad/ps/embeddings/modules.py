"""`Embedding` and `EmbeddingBag`: modules whose rows are on parameter servers.

A forward pass fetches the rows that it uses, as a leaf of the autograd graph. When a backward pass
has computed the leaf's gradient, a hook gives it to the `RowGradients` of the table, and the next
step of `Tables` sends it.

State of a module: `_prefetched`, rows that were fetched for inputs of the current step; `_cache`,
rows that later steps may use again, or None. Both are used only by the thread that trains.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from telegrad.errors import UsageError
from telegrad.ps.embeddings import lookup
from telegrad.ps.embeddings.messages import TableSpec
from telegrad.ps.embeddings.row_batch import RowBatch
from telegrad.ps.embeddings.row_cache import RowCache
from telegrad.ps.embeddings.row_gradients import RowsParameter
from telegrad.ps.embeddings.row_optimizers import RowAdagrad, RowOptimizer
from telegrad.ps.embeddings.tables import Tables

_ID_DTYPES = (torch.int64, torch.int32)


class _FetchedRows(NamedTuple):
    """Rows that were fetched for one input."""

    input: Tensor
    batch: RowBatch
    rows: Tensor
    requires_grad: bool
    step: int


class Table(nn.Module):
    """Base class of both embedding modules: rows on servers that are fetched for each batch."""

    name: str
    tables: Tables
    weight: RowsParameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        servers: Tables | str | Sequence[str],
        *,
        optimizer: RowOptimizer | None = None,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
        seed: int = 0,
        std: float = 1.0,
        reuse: int = 0,
        reuse_rows: int = 100_000,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_embeddings < 1 or embedding_dim < 1 or not dtype.is_floating_point:
            raise UsageError(
                "a table has 1 or more rows of 1 or more floats, not "
                f"{num_embeddings} x {embedding_dim} of {dtype}"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx: int | None = self._normalized_padding_idx(padding_idx)
        self.dtype = dtype
        if isinstance(servers, Tables):
            if options:
                raise UsageError(f"pass {', '.join(options)} to `Tables`, not to each table")
            self.tables = servers
            self.name = name or f"table{len(servers)}"
        else:
            self.tables = Tables(servers, name=name, default_name="table", **options)
            self.name = self.tables.name
        spec = TableSpec(
            self.name, num_embeddings, embedding_dim, dtype, seed, std, self.padding_idx
        )
        self._optimizer: RowOptimizer = optimizer or RowAdagrad()
        self._gradients = self.tables.define(spec, self._optimizer)
        self.weight = RowsParameter.of(self._gradients, self.tables, embedding_dim, dtype)
        self._prefetched: list[_FetchedRows] = []
        self._cache = RowCache(reuse, reuse_rows, embedding_dim, dtype) if reuse else None

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, name={self.name!r}, "
            f"optimizer={self._optimizer}"
        )

    def _normalized_padding_idx(self, padding_idx: int | None) -> int | None:
        """Return the index of the padding row, which may be given from the end as in torch."""
        if padding_idx is None:
            return None
        if not -self.num_embeddings <= padding_idx < self.num_embeddings:
            raise UsageError(f"padding_idx {padding_idx} is not one of {self.num_embeddings} rows")
        return padding_idx % self.num_embeddings

    # The optimizer

    @property
    def optimizer(self) -> RowOptimizer:
        return self._optimizer

    @property
    def lr(self) -> float:
        """The learning rate. A new value is sent to the servers with the next step."""
        return self._optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer = replace(self._optimizer, lr=value)
        self.tables.change_optimizer(self.name, self._optimizer)

    # Rows by their ids

    def rows(self, ids: Tensor) -> Tensor:
        """Return the current values of these rows on the servers."""
        batch = self._batch(ids)
        (rows,) = self.tables.fetch([(self.name, batch)], store_new=False)
        return rows[batch.positions].view(*ids.shape, self.embedding_dim)

    def put(self, ids: Tensor, values: Tensor) -> None:
        """Replace rows, for example by those of another model. Their optimizer state stays."""
        batch = self._batch(ids)
        if len(batch.ids) != ids.numel() or values.shape != (*ids.shape, self.embedding_dim):
            raise UsageError(
                f"ids of rows of table {self.name!r} to put must occur once each, with "
                f"{self.embedding_dim} values each"
            )
        given = values.detach().cpu().reshape(-1, self.embedding_dim)
        ordered = torch.empty(len(batch.ids), self.embedding_dim, dtype=self.dtype)
        ordered[batch.positions] = given.to(ordered.dtype)
        self.tables.write_rows(self.name, batch, ordered)

    def export(self, rows: int = 100_000) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ids and values of every row that was trained or put, up to `rows` at a time."""
        return self.tables.stored_rows(self.name, rows)

    # state_dict, copies and pickles

    def get_extra_state(self) -> Tensor:
        """Return the identity of the table for a `state_dict`.

        The rows stay on the servers: see `export` and `Checkpoint`. The identity is JSON in a
        tensor, because file formats such as safetensors hold only tensors.
        """
        return torch.frombuffer(bytearray(json.dumps(self._identity).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise `UsageError` if a `state_dict` belongs to another table."""
        identity = json.loads(bytes(state.cpu().tolist()).decode())
        if identity != self._identity:
            raise UsageError(f"a state of table {identity} cannot be loaded into {self._identity}")

    @property
    def _identity(self) -> dict[str, Any]:
        return {"name": self.name, "rows": self.num_embeddings, "dim": self.embedding_dim}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weight"]  # it has no elements

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({**state_dict, f"{prefix}weight": self.weight}, prefix, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        """Return a module that uses the same rows, which are on the servers."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._parameters = {"weight": copy.deepcopy(self.weight, memo)}
        copied._prefetched = []
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"table {self.name!r} belongs to this worker and cannot be pickled: save the model's "
            "state_dict(), and the rows with a Checkpoint of the servers or table.export()"
        )

    # Forward pass

    def _fetch(self, input: Tensor) -> _FetchedRows:
        """Return the rows for an input, which `prefetch` may have fetched already."""
        now = torch.is_grad_enabled(), self.tables.steps
        for position, fetched in enumerate(self._prefetched):
            if fetched.input is input and (fetched.requires_grad, fetched.step) == now:
                return self._prefetched.pop(position)
        prefetch([(self, input)])
        return self._prefetched.pop()

    def _leaf(self, fetched: _FetchedRows) -> Tensor:
        """Return the rows as a leaf that gives its gradient to the `RowGradients`."""
        rows = fetched.rows.to(fetched.input.device)
        if fetched.requires_grad:
            # the hook refers to these only, so that the graph does not keep the module alive
            gradients, batch, dtype = self._gradients, fetched.batch, self.dtype
            rows.requires_grad_()

            def collect_gradient(leaf: Tensor) -> None:
                assert leaf.grad is not None
                gradients.add(batch, leaf.grad.detach().to("cpu", dtype))
                leaf.grad = None

            rows.register_post_accumulate_grad_hook(collect_gradient)  # type: ignore[no-untyped-call]
        return rows

    def _batch(self, ids: Tensor) -> RowBatch:
        if ids.dtype not in _ID_DTYPES:
            raise UsageError(
                f"ids of rows of table {self.name!r} must be int64 or int32, not {ids.dtype}"
            )
        flat = ids.detach().reshape(-1).to("cpu", torch.int64)
        if flat.numel():
            low, high = (int(each) for each in flat.aminmax())
            if low < 0 or high >= self.num_embeddings:
                raise UsageError(
                    f"table {self.name!r} has rows 0 to {self.num_embeddings - 1}, but the batch "
                    f"asks for row {low if low < 0 else high}: make the table larger (rows take "
                    "no memory until they are trained), or take the ids modulo its size"
                )
        return RowBatch.of(flat, self.tables.servers)

    def _padding_position(self, batch: RowBatch) -> int | None:
        """Return the position of the padding row in a batch, or None."""
        if self.padding_idx is None:
            return None
        found = (batch.ids == self.padding_idx).nonzero()
        return int(found) if len(found) else None


class Embedding(Table):
    """`torch.nn.Embedding` with its rows on parameter servers.

    `servers` are workers, a pattern or a list of names, or the `Tables` that this table is trained
    with; `options` are those of `Tables`. A row is stored when it is first trained. Its initial
    values are normally distributed with `std`, and depend only on `seed` and its id. With `reuse`,
    a fetched row is used for so many more steps; the cache holds `reuse_rows` rows.

    >>> from telegrad.testing import LocalCluster
    >>> with LocalCluster(2) as cluster:
    ...     options = dict(optimizer=RowAdagrad(lr=0.5), std=0.0, agent=cluster["w0"])
    ...     table = Embedding(10**9, 2, "w1", **options)
    ...     table(torch.tensor([7, 123456789])).sum().backward()
    ...     table.tables.step()
    ...     table.rows(torch.tensor([7, 8])).tolist()
    [[-0.5, -0.5], [0.0, 0.0]]
    """

    def forward(self, input: Tensor) -> Tensor:
        fetched = self._fetch(input)
        rows, batch = self._leaf(fetched), fetched.batch
        padding = self._padding_position(batch)
        if padding is None and lookup.is_possible(rows):
            return lookup.embedding(rows, batch, input.shape)
        return functional.embedding(
            batch.positions.view(input.shape).to(input.device), rows, padding
        )


class EmbeddingBag(Table):
    """`torch.nn.EmbeddingBag` with its rows on parameter servers.

    See `Embedding` for the arguments that are not those of torch.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        servers: Tables | str | Sequence[str],
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise UsageError(f"mode must be sum, mean or max, not {mode!r}")
        super().__init__(num_embeddings, embedding_dim, servers, **options)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        fetched = self._fetch(input)
        rows, batch = self._leaf(fetched), fetched.batch
        positions = batch.positions.view(input.shape).to(input.device)
        padding = self._padding_position(batch)
        is_plain = padding is None and per_sample_weights is None and self.mode != "max"
        if is_plain and lookup.is_possible(rows) and input.numel():
            return lookup.embedding_bag(
                rows, batch, positions, offsets, self.mode, self.include_last_offset
            )
        return functional.embedding_bag(
            positions,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def prefetch(inputs: Iterable[tuple[Table, Tensor]]) -> None:
    """Fetch the rows for the next inputs of several tables, with one call to each server.

    The tables must belong to the same `Tables`. Inputs are compared by identity: pass the same
    tensor objects to the tables afterwards.
    """
    pairs = list(inputs)
    if not pairs:
        return
    tables = pairs[0][0].tables
    if any(table.tables is not tables for table, _ in pairs):
        raise UsageError("rows can be fetched together only for tables of the same `Tables`")
    requires_grad, step = torch.is_grad_enabled(), tables.steps
    batches = [table._batch(input) for table, input in pairs]
    # for each table that has a cache: which rows are cached, and their values
    cached: list[tuple[Tensor, Tensor] | None] = []
    requests: list[tuple[str, RowBatch]] = []
    for (table, _), batch in zip(pairs, batches, strict=True):
        if table._cache is None or not requires_grad:
            cached.append(None)
            requests.append((table.name, batch))
        else:
            is_cached, values = table._cache.find(batch.ids, step)
            cached.append((is_cached, values))
            requests.append((table.name, batch.only(~is_cached)))
    replies = tables.fetch(requests, requires_grad)
    for (table, input), batch, hit, (_, missing), rows in zip(
        pairs, batches, cached, requests, replies, strict=True
    ):
        if table._cache is not None and hit is not None:
            table._cache.add(missing.ids, rows, step)
            rows = _merge(*hit, rows)
        table._prefetched = [each for each in table._prefetched if each.step == step]
        table._prefetched.append(_FetchedRows(input, batch, rows, requires_grad, step))


def _merge(is_cached: Tensor, cached: Tensor, fetched: Tensor) -> Tensor:
    """Return the rows of a batch from the cached and the fetched ones."""
    rows = fetched.new_empty(len(is_cached), fetched.shape[1])
    rows[is_cached] = cached
    rows[~is_cached] = fetched
    return rows

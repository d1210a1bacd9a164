"""`Embedding` and `EmbeddingBag` whose rows live on parameter servers.

What a forward pass uses is fetched and becomes a leaf of the graph. When a backward pass has reached it, its gradient
is left with the `Tables`, which send it in their next step.

State: `_ahead`, inputs of this step whose rows have been fetched already; `_recent`, rows to be used again. Both belong
to the thread that trains.
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
from telegrad.ps.embeddings.row_batch import RowBatch
from telegrad.ps.embeddings.row_cache import RowCache
from telegrad.ps.embeddings.row_gradients import RowsParameter
from telegrad.ps.embeddings.row_optimizers import RowAdagrad, RowOptimizer
from telegrad.ps.embeddings.row_storage import TableSpec
from telegrad.ps.embeddings.tables import Tables

_INTEGERS = (torch.int64, torch.int32)


class _FetchedRows(NamedTuple):
    input: Tensor
    batch: RowBatch
    rows: Tensor
    trained: bool
    step: int


class Table(nn.Module):
    """What both kinds of embedding are: rows on servers, fetched for each batch."""

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
                f"a table has 1 or more rows of 1 or more floats, not {num_embeddings} x {embedding_dim}"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = self._inside(padding_idx)
        self.dtype = dtype
        if isinstance(servers, Tables):
            if options:
                raise UsageError(f"{', '.join(options)} are said once, to `Tables`")
            self.tables = servers
            self.name = name or f"table{len(servers)}"
        else:
            self.tables = Tables(servers, name=name, default_name="table", **options)
            self.name = self.tables.name
        shape = TableSpec(
            self.name, num_embeddings, embedding_dim, dtype, seed, std, self.padding_idx
        )
        self._optimizer: RowOptimizer = optimizer or RowAdagrad()
        self._gradients = self.tables.define(shape, self._optimizer)
        self.weight = RowsParameter.of(self._gradients, self.tables, embedding_dim, dtype)
        self._ahead: list[_FetchedRows] = []
        self._recent = RowCache(reuse, reuse_rows, embedding_dim, dtype) if reuse else None

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, name={self.name!r}, optimizer={self._optimizer}"

    def _inside(self, padding: int | None) -> int | None:
        if padding is None:
            return None
        if not -self.num_embeddings <= padding < self.num_embeddings:
            raise UsageError(f"padding_idx {padding} is not one of {self.num_embeddings} rows")
        return padding % self.num_embeddings

    # How it is trained

    @property
    def optimizer(self) -> RowOptimizer:
        return self._optimizer

    @property
    def lr(self) -> float:
        """May be set; servers know with the next step."""
        return self._optimizer.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer = replace(self._optimizer, lr=value)
        self.tables.change(self.name, self._optimizer)

    # Rows by their numbers

    def rows(self, ids: Tensor) -> Tensor:
        """These rows as they are on the servers now."""
        batch = self._batch(ids)
        (rows,) = self.tables.fetch([(self.name, batch)], keep=False)
        return rows[batch.places].view(*ids.shape, self.embedding_dim)

    def put(self, ids: Tensor, values: Tensor) -> None:
        """Replace rows, for example by those of another model. What the optimizer keeps of them stays."""
        batch = self._batch(ids)
        if len(batch.ids) != ids.numel() or values.shape != (*ids.shape, self.embedding_dim):
            raise UsageError(
                f"rows of table {self.name!r} are put once each, as {self.embedding_dim} numbers"
            )
        lines = values.detach().cpu().reshape(-1, self.embedding_dim)
        ordered = torch.empty(len(batch.ids), self.embedding_dim, dtype=self.dtype)
        ordered[batch.places] = lines.to(ordered.dtype)
        self.tables.put(self.name, batch, ordered)

    def export(self, rows: int = 100_000) -> Iterator[tuple[Tensor, Tensor]]:
        """Every row that was ever trained or put, with its number, so many `rows` at a time."""
        return self.tables.parts(self.name, rows)

    def get_extra_state(self) -> Tensor:
        """A `state_dict` says which table this is. Its rows stay where they are: see `export` and `Checkpoint`.

        It says so in a tensor, JSON in UTF-8, since file formats such as safetensors have nothing else.
        """
        return torch.frombuffer(bytearray(json.dumps(self._about).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        about = json.loads(bytes(state.cpu().tolist()).decode())
        if about != self._about:
            raise UsageError(f"a state of {about} is not one of {self._about}")

    @property
    def _about(self) -> dict[str, Any]:
        return {"name": self.name, "rows": self.num_embeddings, "dim": self.embedding_dim}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}weight"]  # it has no elements

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({**state_dict, f"{prefix}weight": self.weight}, prefix, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        """Return a module that uses the same rows, which are on servers."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._parameters = {"weight": copy.deepcopy(self.weight, memo)}
        made._ahead = []
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"table {self.name!r} is a part of this worker and cannot be pickled: save the model's state_dict(), "
            "and the rows by a Checkpoint of the servers or table.export()"
        )

    # Inside a forward pass

    def _fetched(self, input: Tensor) -> _FetchedRows:
        now = torch.is_grad_enabled(), self.tables.steps
        for number, ahead in enumerate(self._ahead):
            if ahead.input is input and (ahead.trained, ahead.step) == now:
                return self._ahead.pop(number)
        prefetch([(self, input)])
        return self._ahead.pop()

    def _leaf(self, fetched: _FetchedRows) -> Tensor:
        """The rows, such that their gradients come here."""
        rows = fetched.rows.to(fetched.input.device)
        if fetched.trained:
            gradients, batch, dtype = self._gradients, fetched.batch, self.dtype
            rows.requires_grad_()

            def leave(leaf: Tensor) -> None:
                assert leaf.grad is not None
                gradients.add(batch, leaf.grad.detach().to("cpu", dtype))
                leaf.grad = None

            rows.register_post_accumulate_grad_hook(leave)  # type: ignore[no-untyped-call]
        return rows

    def _batch(self, ids: Tensor) -> RowBatch:
        if ids.dtype not in _INTEGERS:
            raise UsageError(
                f"table {self.name!r} is asked for rows by int64 or int32, not by {ids.dtype}"
            )
        flat = ids.detach().reshape(-1).to("cpu", torch.int64)
        if flat.numel():
            low, high = (int(each) for each in flat.aminmax())
            if low < 0 or high >= self.num_embeddings:
                raise UsageError(
                    f"table {self.name!r} has rows 0 to {self.num_embeddings - 1}, but the batch asks for row "
                    f"{low if low < 0 else high}: make the table larger (rows cost nothing until they are trained), or "
                    "take the numbers modulo its size"
                )
        return RowBatch.of(flat, self.tables.servers)

    def _padding(self, batch: RowBatch) -> int | None:
        """Where the row for padding is among those of a batch."""
        if self.padding_idx is None:
            return None
        found = (batch.ids == self.padding_idx).nonzero()
        return int(found) if len(found) else None


class Embedding(Table):
    """`torch.nn.Embedding` with its rows on parameter servers.

    `servers` are workers, a pattern or names, or the `Tables` that this one is to be trained with; `options` are those
    of `Tables`. Rows are made when they are first trained, normally distributed with `std`, each by `seed` and its
    number. With `reuse`, rows are fetched again only after so many steps; `reuse_rows` of them fit.

    >>> from telegrad.testing import LocalCluster
    >>> with LocalCluster(2) as cluster:
    ...     table = Embedding(10**9, 2, "w1", optimizer=RowAdagrad(lr=0.5), std=0.0, agent=cluster["w0"])
    ...     table(torch.tensor([7, 123456789])).sum().backward()
    ...     table.tables.step()
    ...     table.rows(torch.tensor([7, 8])).tolist()
    [[-0.5, -0.5], [0.0, 0.0]]
    """

    def forward(self, input: Tensor) -> Tensor:
        fetched = self._fetched(input)
        rows, batch = self._leaf(fetched), fetched.batch
        padding = self._padding(batch)
        if padding is None and lookup.is_possible(rows):
            return lookup.embedding(rows, batch, input.shape)
        return functional.embedding(batch.places.view(input.shape).to(input.device), rows, padding)


class EmbeddingBag(Table):
    """`torch.nn.EmbeddingBag` with its rows on parameter servers; see `Embedding` for what is not torch's."""

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
            raise UsageError(f"a mode is sum, mean or max, not {mode!r}")
        super().__init__(num_embeddings, embedding_dim, servers, **options)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        fetched = self._fetched(input)
        rows, batch = self._leaf(fetched), fetched.batch
        places, padding = batch.places.view(input.shape).to(input.device), self._padding(batch)
        plain = padding is None and per_sample_weights is None and self.mode != "max"
        if plain and lookup.is_possible(rows) and input.numel():
            return lookup.embedding_bag(
                rows, batch, places, offsets, self.mode, self.include_last_offset
            )
        return functional.embedding_bag(
            places,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def prefetch(wanted: Iterable[tuple[Table, Tensor]]) -> None:
    """Fetch the rows for inputs that tables are given next, with one call to each server for all of them.

    The tables must be of the same `Tables`. Inputs are known by identity: give the tables these very tensors.
    """
    pairs = list(wanted)
    if not pairs:
        return
    tables = pairs[0][0].tables
    if any(table.tables is not tables for table, _ in pairs):
        raise UsageError(
            "rows of tables that are not of the same `Tables` cannot be fetched together"
        )
    trained, step = torch.is_grad_enabled(), tables.steps
    batches = [table._batch(input) for table, input in pairs]
    known = [
        None if table._recent is None or not trained else table._recent.find(batch.ids, step)
        for (table, _), batch in zip(pairs, batches, strict=True)
    ]
    missing = [
        batch if there is None else batch.only(~there[0])
        for batch, there in zip(batches, known, strict=True)
    ]
    names = [table.name for table, _ in pairs]
    found = tables.fetch(list(zip(names, missing, strict=True)), trained)
    for (table, input), batch, there, less, rows in zip(
        pairs, batches, known, missing, found, strict=True
    ):
        if table._recent is not None and there is not None:
            table._recent.note(less.ids, rows, step)
            rows = _merged(*there, rows)
        table._ahead = [each for each in table._ahead if each.step == step]
        table._ahead.append(_FetchedRows(input, batch, rows, trained, step))


def _merged(known: Tensor, recent: Tensor, fetched: Tensor) -> Tensor:
    rows = fetched.new_empty(len(known), fetched.shape[1])
    rows[known] = recent
    rows[~known] = fetched
    return rows

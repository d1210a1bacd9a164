"""`Tables`: a trainer's view of embedding tables that are trained together.

State: `_definitions`, the tables by name; `_sent_optimizers`, the optimizer of each table that the
servers know; `_gradients`, the gradients of each table since the last step; `_shows_gradients`,
whether an `Optimizer` steps the tables; `_pending_pushes`, the calls of a step that is under way;
`_acknowledged`, the last step that all servers have replied to. Used by one thread at a time,
except `_gradients`, to which backward passes on any thread add.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from telegrad import plurals
from telegrad.errors import CallTimeout, UsageError
from telegrad.futures import Future
from telegrad.ps.checkpoint_policy import Checkpoint
from telegrad.ps.consistency import Consistency, Sync, waits_for_quorum
from telegrad.ps.embeddings.messages import (
    RowRequest,
    RowUpdate,
    TableDefinition,
    TableSpec,
    TablesSpec,
)
from telegrad.ps.embeddings.row_batch import RowBatch
from telegrad.ps.embeddings.row_gradients import RowGradients
from telegrad.ps.embeddings.row_optimizers import RowOptimizer
from telegrad.ps.embeddings.table_client import TableClient
from telegrad.ps.messages import PushReply, make_trainer_id
from telegrad.ps.trainer.joining import (
    check_rules,
    close_on_shutdown,
    find_servers,
    join,
    leave,
    require_runtime,
    start_leaving,
)
from telegrad.ps.trainer.server_calls import ServerCall, gather_replies
from telegrad.ps.trainer.trainer_registry import TrainerRegistry
from telegrad.timeouts import duration

if TYPE_CHECKING:
    from telegrad.agent import Agent

_trainer_counter = itertools.count(1)


class Tables:
    """Tables on the same servers that are trained together, with one call to each server.

    `servers` are workers: a pattern of names, or a list of names. Trainers that pass the same
    `name` train together, with the same `consistency` rules as `telegrad.ps.Optimizer`. They start
    when `trainers` of them have joined. `step` sends the gradients of the backward passes; if a
    model with such tables has a `telegrad.ps.Optimizer`, its `step` does that. With `checkpoint`,
    a trainer waits up to `patience` seconds for a server that is restarted.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        consistency: Consistency | None = None,
        name: str | None = None,
        trainers: int = 1,
        checkpoint: Checkpoint | None = None,
        patience: float = 300.0,
        agent: Agent | None = None,
        default_name: str = "tables",
    ) -> None:
        self.steps: int = 0
        self.staleness: int = 0
        self.dropped: int = 0
        self._runtime = require_runtime(agent)
        patience = duration(patience, "patience")
        self._consistency = Sync() if consistency is None else consistency
        check_rules(self._consistency, trainers, checkpoint)
        self._definitions: dict[str, TableDefinition] = {}
        self._sent_optimizers: dict[str, RowOptimizer] = {}
        self._gradients: dict[str, RowGradients] = {}
        self._shows_gradients = False
        self._pending_pushes: list[ServerCall[PushReply]] = []
        self._acknowledged = 0
        self._is_member = True
        trainer = make_trainer_id(self._runtime.local_member.incarnation, next(_trainer_counter))
        workers = find_servers(self._runtime, servers)
        self._registration = self._runtime.service(TrainerRegistry).register(
            "tables", name, default_name, waits_for_quorum(self._consistency)
        )
        self.name: str = self._registration.name
        self._clients: list[TableClient] = []
        for index, server in enumerate(workers):
            spec = TablesSpec(
                self.name, index, tuple(workers), self._consistency, trainers, checkpoint
            )
            self._clients.append(
                TableClient(self._runtime, trainer, server, spec, self._registration, patience)
            )
        try:
            self._join(None if checkpoint is None else patience)
        except BaseException:
            self._registration.release(unused=True)
            raise
        self._registration.leave_when_collected(self, partial(start_leaving, self._clients))
        close_on_shutdown(self._runtime, self)

    def __repr__(self) -> str:
        servers = ", ".join(client.server for client in self._clients)
        return (
            f"<ps.Tables {self.name!r}: {len(self._definitions)} on {servers}, "
            f"{self._consistency}: {plurals.count(self.steps, 'step')}, "
            f"staleness {self.staleness}, "
            f"{self.dropped} dropped>"
        )

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._definitions)

    def __bool__(self) -> bool:
        return True

    @property
    def servers(self) -> int:
        """The number of servers."""
        return len(self._clients)

    @property
    def version(self) -> int:
        """The number of steps that the servers had made when they last replied."""
        return min(client.version for client in self._clients)

    def close(self) -> None:
        """Leave, so that other trainers no longer wait for this one. Rows can still be read."""
        if self._is_member:
            leave(self._runtime, self._clients)
            self._registration.release()
        self._is_member = False

    # Used by the modules

    def define(self, spec: TableSpec, optimizer: RowOptimizer) -> RowGradients:
        """Create a table. Return the object that collects its gradients."""
        if spec.name in self._definitions:
            raise UsageError(f"{self.name!r} already has a table {spec.name!r}: pass another name")
        definition = TableDefinition(spec, optimizer)
        self._call_all([partial(client.define, [definition]) for client in self._clients])
        self._definitions[spec.name] = definition
        self._sent_optimizers[spec.name] = optimizer
        gradients = self._gradients[spec.name] = RowGradients(self.servers)
        gradients.shown = self._shows_gradients
        self._set_idle()
        return gradients

    def change_optimizer(self, table: str, optimizer: RowOptimizer) -> None:
        """Train a table with other options of the same optimizer from the next step on."""
        spec, before = self._definitions[table]
        if optimizer.state_spec(spec.dim).keys() != before.state_spec(spec.dim).keys():
            raise UsageError(
                f"table {table!r} is trained with {before}, which cannot become {optimizer}"
            )
        self._definitions[table] = TableDefinition(spec, optimizer)

    def fetch(self, requests: Sequence[tuple[str, RowBatch]], store_new: bool) -> list[Tensor]:
        """Return the rows of each batch, with one call to each server that has some of them.

        `store_new`: the rows are to be trained, so the servers store those that are new.
        """
        by_server: list[list[RowRequest]] = [[] for _ in self._clients]
        for table, batch in requests:
            for server_requests, ids in zip(by_server, batch.split(batch.ids), strict=True):
                if len(ids):
                    server_requests.append(RowRequest(table, ids))
        calls, used = [], []
        for client, server_requests in zip(self._clients, by_server, strict=True):
            if server_requests:
                calls.append(
                    self._start_call(client, partial(client.pull, server_requests, store_new))
                )
                used.append(client)
        replies = gather_replies(self._runtime, calls)
        # of each server: its rows for each batch that has some there, in order
        rows = {
            client.server: iter(client.apply_pull(reply))
            for client, reply in zip(used, replies, strict=True)
        }
        found = []
        for table, batch in requests:
            pieces = [
                next(rows[client.server])
                for client, count in zip(self._clients, batch.counts, strict=True)
                if count
            ]
            found.append(_concatenate(pieces, self._definitions[table].spec))
        return found

    def write_rows(self, table: str, batch: RowBatch, values: Tensor) -> None:
        """Replace the values of the rows of a batch."""
        by_server = zip(self._clients, batch.split(batch.ids), batch.split(values), strict=True)
        self._call_all(
            [partial(client.write_rows, table, ids, rows) for client, ids, rows in by_server]
        )

    def stored_rows(self, table: str, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the ids and values of all rows that servers store, up to `count` at a time."""
        for client in self._clients:
            start = 0
            while True:
                ids, rows = client.stored_rows(table, start, count)
                if not len(ids):
                    break
                yield ids, rows
                start += len(ids)

    # Steps

    def show_gradients(self, shown: bool) -> None:
        """Show gradients as `grad` of the tables' parameters, because an `Optimizer` steps them."""
        self._shows_gradients = shown
        self._registration.set_quorum(not shown and waits_for_quorum(self._consistency))
        for gradients in self._gradients.values():
            gradients.shown = shown

    def zero_grad(self) -> None:
        """Drop gradients that have not been sent."""
        for gradients in self._gradients.values():
            gradients.clear()

    def step(self) -> None:
        """Send the gradients, and wait as the consistency rule requires."""
        self.begin_step()
        self.finish_step()

    def begin_step(self, skip: bool = False) -> None:
        """Send the gradients. `skip`: they are not finite, so the round makes no step."""
        if not self._is_member:
            raise UsageError(f"tables {self.name!r} are closed")
        updates: list[list[RowUpdate]] = [[] for _ in self._clients]
        for table, gradients in self._gradients.items():
            if gradients and not skip:
                batch, gradient = gradients.sum()
                optimizer = self._changed_optimizer(table)
                for server_updates, ids, server_gradient in zip(
                    updates, batch.split(batch.ids), batch.split(gradient), strict=True
                ):
                    server_updates.append(RowUpdate(table, ids, server_gradient, optimizer))
            # with an `Optimizer` they stay until `zero_grad`, like those of other parameters
            if not self._shows_gradients:
                gradients.clear()
        self.steps += 1
        definitions = list(self._definitions.values())
        pushes = []
        for client, version, server_updates in zip(
            self._clients, self._push_versions(), updates, strict=True
        ):
            call = partial(client.push, self.steps, version, None if skip else server_updates)
            ensure_member = partial(client.ensure_member, definitions, self.steps)
            pushes.append(self._start_call(client, call, ensure_member))
        self._pending_pushes = pushes

    def finish_step(self) -> None:
        """Wait for the replies to `begin_step`."""
        pushes, self._pending_pushes = self._pending_pushes, []
        try:
            replies = gather_replies(self._runtime, pushes)
        except CallTimeout as error:
            self._registration.explain_timeout(error)
            raise
        for client, reply in zip(self._clients, replies, strict=True):
            client.apply_reply(reply)
        self._acknowledged = self.steps
        self._set_idle()
        self.staleness = max(reply.staleness for reply in replies)
        self.dropped += any(reply.dropped for reply in replies)

    # Internal

    def _join(self, patience: float | None) -> None:
        try:
            join(self._runtime, f"tables {self.name!r}", self._clients, lambda: None, patience)
            self._set_idle()
        except BaseException:
            self._is_member = False
            raise

    def _set_idle(self) -> None:
        """Let clients rejoin servers that are restarted between steps."""
        if not self._pending_pushes:
            for client in self._clients:
                client.set_idle(list(self._definitions.values()), self._acknowledged)

    def _changed_optimizer(self, table: str) -> RowOptimizer | None:
        """Return the optimizer of a table if the servers do not know it; they are sent it now."""
        optimizer = self._definitions[table].optimizer
        if optimizer == self._sent_optimizers[table]:
            return None
        self._sent_optimizers[table] = optimizer
        return optimizer

    def _push_versions(self) -> list[int]:
        """Return for each server the version that the gradients were computed with.

        With rounds, versions are the same on all servers, and the oldest rows determine it.
        """
        if not isinstance(self._consistency, Sync):
            return [client.version for client in self._clients]
        fetched = [client.version for client in self._clients if client.has_rows]
        return [min(fetched, default=self.version)] * self.servers

    def _start_call(
        self,
        client: TableClient,
        call: Callable[[], Future[Any]],
        ensure_member: Callable[[Any], None] | None = None,
    ) -> ServerCall[Any]:
        """Start a call that is repeated if the server is lost and comes back."""
        tables = list(self._definitions.values())
        acknowledged = self._acknowledged

        def retry(error: Exception) -> Future[Any]:
            if not self._is_member:
                raise error
            return client.retry(call, tables, acknowledged, error)

        return ServerCall(call(), retry, ensure_member or _ignore_membership)

    def _call_all(self, calls: Sequence[Callable[[], Future[Any]]]) -> None:
        """Make one call to each server, and wait for all of them."""
        started = [
            self._start_call(client, call)
            for client, call in zip(self._clients, calls, strict=True)
        ]
        gather_replies(self._runtime, started)


def _ignore_membership(_: Any) -> None:
    """Do nothing: this call does not wait for other trainers."""


def _concatenate(pieces: list[Tensor], spec: TableSpec) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else torch.empty(0, spec.dim, dtype=spec.dtype)

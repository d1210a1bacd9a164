"""`TableShard`: the part of a group of tables that one server holds.

State, all of it under the lock of `BaseShard`: `_storages`, the rows of each table; `_restored`,
the contents of tables in a checkpoint that no trainer has defined yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from telegrad.errors import StaleReference, UsageError
from telegrad.futures import Future
from telegrad.ps.embeddings.messages import RowRequest, RowUpdate, TableDefinition, TablesSpec
from telegrad.ps.embeddings.row_storage import RowStorage
from telegrad.ps.messages import PushReply
from telegrad.ps.server.base_shard import SINGLE_SERVER, BaseShard, ServerRole, run_actions
from telegrad.ps.server.checkpoint import CheckpointArchive, ShardSnapshot
from telegrad.ps.server.coordinator import StepReport

_log = logging.getLogger(__name__)


class TableShard(BaseShard):
    def __init__(
        self,
        spec: TablesSpec,
        run: str,
        archive: CheckpointArchive | None,
        role: ServerRole = SINGLE_SERVER,
    ) -> None:
        super().__init__(spec.consistency, spec.trainers, run, archive, role)
        self.spec = spec
        self._storages: dict[str, RowStorage] = {}
        self._restored: dict[str, tuple[dict[str, Tensor], int]] = {}

    def __repr__(self) -> str:
        storages = list(self._storages.values())
        return f"<TableShard of tables {self.spec.name!r}: {storages}, {self._coordinator!r}>"

    def define(self, tables: Iterable[TableDefinition]) -> None:
        """Create tables. Raise `UsageError` if one exists with other properties."""
        with self._lock:
            for spec, optimizer in tables:
                known = self._storages.get(spec.name)
                if known is None:
                    storage = self._storages[spec.name] = RowStorage(spec, optimizer)
                    if spec.name in self._restored:
                        storage.restore(*self._restored.pop(spec.name))
                elif known.spec != spec:
                    raise UsageError(
                        f"trainers disagree about a table: {spec} is known as {known.spec}"
                    )

    # Membership

    def announce(self, trainer: str, spec: TablesSpec) -> int:
        """Return the round from which on this server waits for the trainer."""
        if (spec.servers, spec.consistency) != (self.spec.servers, self.spec.consistency):
            raise UsageError(
                f"the trainers of tables {self.spec.name!r} disagree: {spec.consistency} on "
                f"{', '.join(spec.servers)}, but this server has {self.spec.consistency} on "
                f"{', '.join(self.spec.servers)}"
            )
        with self._lock:
            return self._coordinator.announce(trainer)

    def join(self, trainer: str, first_round: int) -> Future[PushReply]:
        """Let a trainer join. The future completes when it may start, in `first_round`."""
        future: Future[PushReply] = Future()
        with self._lock:
            actions = self._join(trainer, first_round, future)
        run_actions(actions)
        return future

    def rejoin(self, trainer: str, first_round: int, acknowledged: int, version: int) -> PushReply:
        """Let a trainer rejoin after this server was restarted."""
        with self._lock:
            if version > self.version and self._coordinator.applied:
                _log.warning(
                    "%s steps of tables %r are lost: they were not in the checkpoint of a server "
                    "that was restarted",
                    version - self.version,
                    self.spec.name,
                )
            actions = self._rejoin(trainer, first_round, acknowledged, version, {})
            reply = PushReply(self.version)
        run_actions(actions)
        return reply

    # Rows and gradients

    def pull(self, requests: Sequence[RowRequest], store_new: bool) -> tuple[int, list[Tensor]]:
        """Return the version and the requested rows. `store_new` stores rows that are new."""
        with self._lock:
            return self.version, [self._find(table).read(ids, store_new) for table, ids in requests]

    def push(
        self, trainer: str, step: int, version: int, updates: list[RowUpdate] | None
    ) -> Future[PushReply]:
        """Report gradients; None if they are not finite, so that the round makes no step."""
        future: Future[PushReply] = Future()
        report = StepReport(trainer, step, version, updates, future)
        with self._lock:
            # fail here, where only this trainer gets the error
            for update in updates or ():
                self._find(update.table)
            actions = self._carry_out(self._coordinator.report(report))
        run_actions(actions)
        return future

    def write_rows(self, table: str, ids: Tensor, values: Tensor) -> None:
        """Replace the values of rows."""
        with self._lock:
            self._find(table).write(ids, values)

    def stored_rows(self, table: str, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the ids and values of `count` stored rows from position `start` on."""
        with self._lock:
            return self._find(table).stored_rows(start, count)

    # Checkpoints

    def restore(
        self, snapshot: ShardSnapshot, expected: Sequence[str] = (), started: bool = False
    ) -> None:
        """Start with a snapshot. If it is of the same run, wait for the `expected` trainers."""
        (metadata,) = snapshot.groups
        server_index, servers = metadata["servers"]
        if (server_index, servers) != (self.spec.server_index, len(self.spec.servers)):
            raise UsageError(
                f"the checkpoint of tables {self.spec.name!r} is of server {server_index + 1} of "
                f"{servers}, not {self.spec.server_index + 1} of {len(self.spec.servers)}: resume "
                "with the same servers"
            )
        with self._lock:
            self._load(snapshot)
            self._restore(snapshot, expected, started)

    def _load(self, snapshot: ShardSnapshot) -> None:
        (metadata,) = snapshot.groups
        for table, steps in metadata["tables"].items():
            prefix = f"{table}/"
            contents = {
                key.removeprefix(prefix): each
                for key, each in snapshot.values.items()
                if key.startswith(prefix)
            }
            if table in self._storages:
                self._storages[table].restore(contents, steps)
            else:
                self._restored[table] = contents, steps
        for table, storage in self._storages.items():
            if table not in metadata["tables"]:  # it was defined after the snapshot
                self._storages[table] = RowStorage(storage.spec, storage.optimizer)

    def _snapshot(self) -> ShardSnapshot:
        tables = {
            name: (storage.contents(), storage.steps) for name, storage in self._storages.items()
        }
        tables.update(self._restored)  # no trainer has defined them yet
        values = {
            f"{name}/{key}": each
            for name, (contents, _) in tables.items()
            for key, each in contents.items()
        }
        metadata: dict[str, Any] = {
            "servers": [self.spec.server_index, len(self.spec.servers)],
            "tables": {name: steps for name, (_, steps) in tables.items()},
        }
        return ShardSnapshot(
            self.version,
            self._run,
            values,
            [],
            [metadata],
            dict(self._coordinator.applied),
            self._unconfirmed_reports,
        )

    # Internal, under the lock

    def _find(self, table: str) -> RowStorage:
        storage = self._storages.get(table)
        if storage is None:
            raise StaleReference(f"this server has no table {table!r}: it was restarted")
        return storage

    def apply(self, reports: list[StepReport]) -> None:
        """Make a step with the mean gradients of the reports."""
        by_table: dict[str, list[RowUpdate]] = {}
        for report in reports:
            for update in report.payload or ():
                by_table.setdefault(update.table, []).append(update)
        # changed options are applied even if the step itself is skipped
        for table, updates in by_table.items():
            for update in updates:
                if update.optimizer is not None:
                    self._storages[table].change_optimizer(update.optimizer)
        if any(report.payload is None for report in reports):
            return
        for table, updates in by_table.items():
            gradients = [(update.ids, update.gradients) for update in updates]
            self._storages[table].update(gradients, len(reports))

"""`TableShard`: what one server holds of a group of tables.

State, all of it under the lock of a `BaseShard`: the storages by name, and `_restored`, what a checkpoint had of tables
that no trainer has named yet.
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
        plan: TablesSpec,
        run: str,
        archive: CheckpointArchive | None,
        role: ServerRole = SINGLE_SERVER,
    ) -> None:
        super().__init__(plan.consistency, plan.trainers, run, archive, role)
        self.plan = plan
        self._storages: dict[str, RowStorage] = {}
        self._restored: dict[str, tuple[dict[str, Tensor], int]] = {}

    def __repr__(self) -> str:
        return f"<TableShard of tables {self.plan.name!r}: {list(self._storages.values())}, {self._coordinator!r}>"

    def define(self, tables: Iterable[TableDefinition]) -> None:
        """Have these tables; those that are here already must be the same."""
        with self._lock:
            for shape, rule in tables:
                known = self._storages.get(shape.name)
                if known is None:
                    self._storages[shape.name] = self._made(RowStorage(shape, rule))
                elif known.shape != shape:
                    raise UsageError(
                        f"trainers disagree about a table: {shape} is known as {known.shape}"
                    )

    def _made(self, storage: RowStorage) -> RowStorage:
        if storage.shape.name in self._restored:
            storage.restore(*self._restored.pop(storage.shape.name))
        return storage

    # Who takes part

    def announce(self, trainer: str, plan: TablesSpec) -> int:
        if (plan.servers, plan.consistency) != (self.plan.servers, self.plan.consistency):
            raise UsageError(
                f"the trainers of tables {self.plan.name!r} disagree: {plan.consistency} on {', '.join(plan.servers)}, "
                f"but there is {self.plan.consistency} on {', '.join(self.plan.servers)}"
            )
        with self._lock:
            return self._coordinator.announce(trainer)

    def enter(self, trainer: str, first: int) -> Future[PushReply]:
        """A trainer is here; the answer comes when it may start, which is in round `first`."""
        future: Future[PushReply] = Future()
        with self._lock:
            actions = self._enter(trainer, first, future)
        run_actions(actions)
        return future

    def resume(self, trainer: str, first: int, acknowledged: int, version: int) -> PushReply:
        """A trainer comes back to a server that was restarted."""
        with self._lock:
            if version > self.version and self._coordinator.applied:
                lost = f"{version - self.version} steps of tables {self.plan.name!r}"
                _log.warning(
                    "%s were not in the checkpoint of a server that was restarted, and are lost",
                    lost,
                )
            actions = self._resume(trainer, first, acknowledged, version, {})
            answer = PushReply(self.version)
        run_actions(actions)
        return answer

    # What they bring and get

    def pull(self, wanted: Sequence[RowRequest], keep: bool) -> tuple[int, list[Tensor]]:
        """The version, and these rows of each table; `keep`: they are to be trained."""
        with self._lock:
            return self.version, [self._find(table).read(ids, keep) for table, ids in wanted]

    def push(
        self, trainer: str, step: int, version: int, updates: list[RowUpdate] | None
    ) -> Future[PushReply]:
        """Gradients of rows; None if they are not finite, and the round that they are part of makes no step."""
        future: Future[PushReply] = Future()
        report = StepReport(trainer, step, version, updates, future)
        with self._lock:
            for update in updates or ():
                self._find(update.table)
            actions = self._carry_out(self._coordinator.report(report))
        run_actions(actions)
        return future

    def put(self, table: str, ids: Tensor, values: Tensor) -> None:
        with self._lock:
            self._find(table).write(ids, values)

    def part(self, table: str, start: int, count: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            return self._find(table).part(start, count)

    # Checkpoints

    def restore(
        self, snapshot: ShardSnapshot, expected: Sequence[str] = (), started: bool = False
    ) -> None:
        """Begin where a snapshot ends. Of the same run, the trainers that took part are waited for."""
        (about,) = snapshot.groups
        number, servers = about["servers"]
        if (number, servers) != (self.plan.number, len(self.plan.servers)):
            raise UsageError(
                f"the checkpoint of tables {self.plan.name!r} is of server {number + 1} of {servers}, not "
                f"{self.plan.number + 1} of {len(self.plan.servers)}: resume with the same servers"
            )
        with self._lock:
            self._load(snapshot)
            self._restore(snapshot, expected, started)

    def _load(self, snapshot: ShardSnapshot) -> None:
        (about,) = snapshot.groups
        for table, steps in about["tables"].items():
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
            if table not in about["tables"]:  # it was defined after that snapshot was made
                self._storages[table] = RowStorage(storage.shape, storage.rule)

    def _snapshot(self) -> ShardSnapshot:
        tables = {
            name: (storage.contents(), storage.steps) for name, storage in self._storages.items()
        }
        tables.update(self._restored)  # that no trainer has named yet
        values = {
            f"{name}/{key}": each
            for name, (contents, _) in tables.items()
            for key, each in contents.items()
        }
        about: dict[str, Any] = {
            "servers": [self.plan.number, len(self.plan.servers)],
            "tables": {name: steps for name, (_, steps) in tables.items()},
        }
        applied = dict(self._coordinator.applied)
        return ShardSnapshot(
            self.version, self._run, values, [], [about], applied, self._last_round
        )

    # Inside, under the lock

    def _find(self, table: str) -> RowStorage:
        storage = self._storages.get(table)
        if storage is None:
            raise StaleReference(f"this server has no table {table!r}")
        return storage

    def apply(self, reports: list[StepReport]) -> None:
        by_table: dict[str, list[RowUpdate]] = {}
        for report in reports:
            for update in report.content or ():
                by_table.setdefault(update.table, []).append(update)
        for table, updates in by_table.items():
            for update in updates:
                if update.rule is not None:
                    self._storages[table].change(update.rule)
        if any(report.content is None for report in reports):
            return
        for table, updates in by_table.items():
            gradients = [(update.ids, update.gradients) for update in updates]
            self._storages[table].update(gradients, len(reports))

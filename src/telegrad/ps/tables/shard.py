"""`Shard`: what one server holds of a group of tables, and the trainers that train them together.

State, all of it under `_lock`: the storages by name, the attendance, and `_restored`, what a checkpoint had of tables
that no trainer has named yet. Futures are completed after the lock is released.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from telegrad.errors import StaleReference, UsageError
from telegrad.futures import Future
from telegrad.ps.checkpoint import Archive, Snapshot
from telegrad.ps.messages import Answer
from telegrad.ps.tables.attendance import Attendance, Report, complete
from telegrad.ps.tables.messages import Definition, Plan, Update, Wanted
from telegrad.ps.tables.storage import Storage


class Shard:
    def __init__(self, plan: Plan, run: str, archive: Archive | None) -> None:
        """`run` names the group of workers; a snapshot of the same run brings back the trainers that took part."""
        self.plan = plan
        self._run = run
        self._archive = archive
        self._lock = threading.Lock()
        self._storages: dict[str, Storage] = {}
        self._restored: dict[str, tuple[dict[str, Tensor], int]] = {}
        self._attendance = Attendance(plan.consistency, plan.trainers, self._apply, self._save_if_due)
        self._saved = -1  # the last version that was given to the archive

    def __repr__(self) -> str:
        return f"<Shard of tables {self.plan.name!r}: {list(self._storages.values())}, {self._attendance!r}>"

    @property
    def waiting(self) -> list[str]:
        """Who has reported and is not answered."""
        return self._attendance.waiting

    @property
    def version(self) -> int:
        return self._attendance.version

    def define(self, tables: Iterable[Definition]) -> None:
        """Have these tables; those that are here already must be the same."""
        with self._lock:
            for shape, rule in tables:
                known = self._storages.get(shape.name)
                if known is None:
                    self._storages[shape.name] = self._made(Storage(shape, rule))
                elif known.shape != shape:
                    raise UsageError(f"trainers disagree about a table: {shape} is known as {known.shape}")

    def _made(self, storage: Storage) -> Storage:
        if storage.shape.name in self._restored:
            storage.restore(*self._restored.pop(storage.shape.name))
        return storage

    # Who takes part

    def announce(self, trainer: str, plan: Plan) -> int:
        if (plan.servers, plan.consistency) != (self.plan.servers, self.plan.consistency):
            raise UsageError(
                f"the trainers of tables {self.plan.name!r} disagree: {plan.consistency} on {plan.servers} servers, "
                f"but there is {self.plan.consistency} on {self.plan.servers}"
            )
        with self._lock:
            return self._attendance.announce(trainer)

    def enter(self, trainer: str, first: int) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self._lock:
            outcomes = self._attendance.enter(trainer, first, future)
            self._note_members()
        complete(outcomes)
        return future

    def resume(self, trainer: str, acknowledged: int, version: int) -> Answer:
        """A trainer comes back to a server that was restarted."""
        with self._lock:
            outcomes = self._attendance.resume(trainer, acknowledged, version)
            self._note_members()
            answer = Answer(self.version)
        complete(outcomes)
        return answer

    def leave(self, trainer: str) -> None:
        with self._lock:
            known = trainer in self._attendance.members
            outcomes = self._attendance.leave(trainer)
            if known:
                self._note_members()
        complete(outcomes)

    def lose(self, worker: str) -> None:
        """A worker is gone, by its incarnation, and with it every trainer there."""
        with self._lock:
            trainers = self._attendance.of(worker)
        for trainer in trainers:
            self.leave(trainer)

    # What they bring and get

    def pull(self, wanted: Sequence[Wanted], keep: bool) -> tuple[int, list[Tensor]]:
        """The version, and these rows of each table; `keep`: they are to be trained."""
        with self._lock:
            return self.version, [self._find(table).read(ids, keep) for table, ids in wanted]

    def push(self, trainer: str, step: int, version: int, updates: list[Update]) -> Future[Answer]:
        report = Report(trainer, step, version, updates, Future())
        with self._lock:
            for update in updates:
                self._find(update.table)
            outcomes = self._attendance.take(report)
        complete(outcomes)
        return report.future

    def put(self, table: str, ids: Tensor, values: Tensor) -> None:
        with self._lock:
            self._find(table).write(ids, values)

    def part(self, table: str, start: int, count: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            return self._find(table).part(start, count)

    # Checkpoints

    def restore(self, snapshot: Snapshot, expected: Iterable[str]) -> None:
        """Begin where a snapshot ends. Of the same run, the trainers that took part are waited for."""
        (about,) = snapshot.groups
        if about["servers"] != [self.plan.number, self.plan.servers]:
            raise UsageError(
                f"the checkpoint of tables {self.plan.name!r} is of server {about['servers'][0] + 1} of "
                f"{about['servers'][1]}, not {self.plan.number + 1} of {self.plan.servers}: "
                "resume with the same servers"
            )
        with self._lock:
            for table, steps in about["tables"].items():
                prefix = f"{table}/"
                contents = {
                    key.removeprefix(prefix): each for key, each in snapshot.values.items() if key.startswith(prefix)
                }
                self._restored[table] = contents, steps
            same = snapshot.run == self._run
            self._attendance.restore(snapshot.version, snapshot.applied if same else {}, expected if same else ())
            self._saved = snapshot.version

    def save(self) -> None:
        """Put what is here now into the archive."""
        with self._lock:
            self._save()

    def close(self) -> None:
        """The worker leaves: save what it has, and wait until that is on disk."""
        if self._archive is not None:
            self.save()
            self._archive.finish()

    # Inside, under the lock

    def _find(self, table: str) -> Storage:
        storage = self._storages.get(table)
        if storage is None:
            raise StaleReference(f"this server has no table {table!r}")
        return storage

    def _apply(self, reports: list[Report]) -> None:
        by_table: dict[str, list[Update]] = {}
        for report in reports:
            for update in report.content:
                by_table.setdefault(update.table, []).append(update)
        for table, updates in by_table.items():
            for update in updates:
                if update.rule is not None:
                    self._storages[table].change(update.rule)
        for table, updates in by_table.items():
            gradients = [(update.ids, update.gradients) for update in updates]
            self._storages[table].update(gradients, len(reports))

    def _save_if_due(self) -> None:
        if self._archive is not None and self.version % self._archive.rule.every == 0:
            self._save()

    def _note_members(self) -> None:
        if self._archive is not None:
            self._archive.note_members(self._attendance.members)
            if not self._attendance.members:
                self._save()

    def _save(self) -> None:
        if self._archive is None or self.version == self._saved:
            return
        values = {
            f"{name}/{key}": each
            for name, storage in self._storages.items()
            for key, each in storage.contents().items()
        }
        about: dict[str, Any] = {
            "servers": [self.plan.number, self.plan.servers],
            "tables": {name: storage.steps for name, storage in self._storages.items()},
        }
        self._archive.save(Snapshot(self.version, self._run, values, [], [about], dict(self._attendance.applied)))
        self._saved = self.version

"""`TableClient`: a trainer's client for one server that holds rows of embedding tables.

State besides that of `ServerClient`: `version`, the oldest version of the rows that the trainer
uses; `has_rows`, whether it has fetched rows since the last reply to a push; `_last_tables` and
`_last_step`, the tables and the last step for rejoining between steps, under `_busy_lock`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from telegrad.futures import Future
from telegrad.ps.embeddings import service
from telegrad.ps.embeddings.messages import RowRequest, RowUpdate, TableDefinition, TablesSpec
from telegrad.ps.messages import PushReply
from telegrad.ps.trainer.server_client import ServerClient
from telegrad.ps.trainer.trainer_registry import TrainerRegistration

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

T = TypeVar("T")


class TableClient(ServerClient[TablesSpec]):
    def __init__(
        self,
        runtime: AgentRuntime,
        trainer: str,
        server: str,
        spec: TablesSpec,
        registration: TrainerRegistration,
        patience: float,
    ) -> None:
        super().__init__(runtime, trainer, server, spec, service, registration, patience)
        self.has_rows = False
        self._last_tables: Sequence[TableDefinition] = ()
        self._last_step = 0

    def __repr__(self) -> str:
        return (
            f"<TableClient to tables {self.spec.name!r} on {self.server!r}: version {self.version}>"
        )

    # Joining

    def start_join(self, first_round: int, timeout: float) -> Future[PushReply]:
        self._first_round = first_round
        arguments = (self.spec.name, self._trainer, first_round)
        return self._runtime.start(self.server, service.join, arguments, None, timeout)

    def finish_join(self, reply: PushReply) -> None:
        self.apply_reply(reply)

    def _rejoin(self, tables: Sequence[TableDefinition], acknowledged: int, version: int) -> None:
        """Rejoin a server that was restarted. `acknowledged`: the last step it replied to."""
        arguments = (
            self.spec,
            list(tables),
            self._trainer,
            self._first_round,
            acknowledged,
            version,
        )
        self._runtime.invoke(self.server, service.rejoin, arguments)

    def _rejoin_between_steps(self) -> None:
        self._rejoin(self._last_tables, self._last_step, self.version)

    def set_idle(self, tables: Sequence[TableDefinition], step: int) -> None:
        """Allow `rejoin_if_idle`: a step is complete, or a table was defined between steps."""
        with self._busy_lock:
            self._busy, self._last_tables, self._last_step = False, tables, step

    def ensure_member(self, tables: Sequence[TableDefinition], step: int, reply: PushReply) -> None:
        """Rejoin the server if it was restarted after its reply to this step."""
        self._ensure_member(partial(self._rejoin, tables, step, reply.version))

    def retry(
        self,
        call: Callable[[], Future[T]],
        tables: Sequence[TableDefinition],
        acknowledged: int,
        error: Exception,
    ) -> Future[T]:
        """Wait for a lost server, rejoin it, and repeat a call that failed with `error`."""

        def rejoin() -> None:
            self._rejoin(tables, acknowledged, self.version)

        return self._rejoin_and_retry(rejoin, call, error)

    # Tables and rows

    def define(self, tables: list[TableDefinition]) -> Future[None]:
        return self._start(service.define, tables)

    def pull(self, requests: list[RowRequest], store_new: bool) -> Future[tuple[int, list[Tensor]]]:
        """Fetch rows. `store_new`: the server stores those that it has not stored yet."""
        return self._start(service.pull, requests, store_new)

    def apply_pull(self, reply: tuple[int, list[Tensor]]) -> list[Tensor]:
        """Return the rows of a reply to `pull`."""
        version, rows = reply
        if not self.has_rows:
            self.version, self.has_rows = max(self.version, version), True
        return rows

    def push(self, step: int, version: int, updates: list[RowUpdate] | None) -> Future[PushReply]:
        """Send the gradients of a step; None if they are not finite."""
        with self._busy_lock:
            self._busy = True
        arguments = (self.spec.name, self._trainer, step, version, updates)
        return self._runtime.start(
            self.server, service.push, arguments, None, self._registration.step_timeout
        )

    def apply_reply(self, reply: PushReply) -> None:
        """Take over the version of a reply to `push` or `start_join`."""
        self.version, self.has_rows = reply.version, False
        if reply.problem is not None:
            warnings.warn(
                f"tables {self.spec.name!r} on {self.server!r}: {reply.problem}", stacklevel=4
            )

    def write_rows(self, table: str, ids: Tensor, values: Tensor) -> Future[None]:
        """Replace the values of rows."""
        return self._start(service.write_rows, table, ids, values)

    def stored_rows(self, table: str, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the ids and values of `count` stored rows from position `start` on."""
        rows: tuple[Tensor, Tensor] = self._start(service.stored_rows, table, start, count).wait()
        return rows

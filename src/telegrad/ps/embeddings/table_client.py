"""`TableClient`: a trainer's side of one server that holds tables.

State: `version`, which the rows that the trainer has in use are of at least; `current`, whether rows have been fetched
since the last answer to a push. Used by the thread that trains.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from telegrad.errors import CallTimeout
from telegrad.futures import Future
from telegrad.ps.embeddings import service
from telegrad.ps.embeddings.messages import RowRequest, RowUpdate, TableDefinition, TablesSpec
from telegrad.ps.messages import PushReply
from telegrad.ps.trainer.joining import LOSS_ERRORS, LocalTrainers, retry_until_answered, settled

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


T = TypeVar("T")


class TableClient:
    def __init__(self, agent: AgentRuntime, trainer: str, server: str, plan: TablesSpec) -> None:
        self.server = server
        self.plan = plan
        self.version = 0
        self.current = False
        self.step_limit: Callable[[], float | None] = lambda: None  # seconds
        self._agent = agent
        self._me = trainer
        self._busy = True  # it joins, or is in the middle of a step
        self._change = threading.Lock()  # of `_busy`
        self._idle: tuple[Sequence[TableDefinition], int] = (), 0  # the tables, and the last step
        self._first = 0  # the round, or clock, that this trainer has started with

    def __repr__(self) -> str:
        return (
            f"<TableClient to tables {self.plan.name!r} on {self.server!r}: version {self.version}>"
        )

    # Coming and going

    def announce(self) -> int:
        self._agent.service(LocalTrainers).sides[self._me, self.server] = self
        return int(self._agent.invoke(self.server, service.announce, (self.plan, self._me)))

    def enter(self, first: int, timeout: float) -> Future[PushReply]:
        self._first = first
        return self._agent.start(
            self.server, service.enter, (self.plan.name, self._me, first), None, timeout
        )

    def define(self, tables: list[TableDefinition]) -> Future[None]:
        return self._start(service.define, tables)

    def entered(self, answer: PushReply) -> None:
        self.pushed(answer)

    def leave(self) -> Future[None]:
        self._agent.service(LocalTrainers).sides.pop((self._me, self.server), None)
        return self._start(service.leave, self._me)

    # Rows

    def pull(self, wanted: list[RowRequest], keep: bool) -> Future[tuple[int, list[Tensor]]]:
        return self._start(service.pull, wanted, keep)

    def pulled(self, answer: tuple[int, list[Tensor]]) -> list[Tensor]:
        version, rows = answer
        if not self.current:
            self.version, self.current = max(self.version, version), True
        return rows

    def push(self, step: int, version: int, updates: list[RowUpdate] | None) -> Future[PushReply]:
        with self._change:
            self._busy = True
        arguments = (self.plan.name, self._me, step, version, updates)
        return self._agent.start(self.server, service.push, arguments, None, self.step_limit())

    def pushed(self, answer: PushReply) -> PushReply:
        self.version, self.current = answer.version, False
        if answer.problem is not None:
            warnings.warn(
                f"tables {self.plan.name!r} on {self.server!r}: {answer.problem}", stacklevel=4
            )
        return answer

    def put(self, table: str, ids: Tensor, values: Tensor) -> Future[None]:
        return self._start(service.put, table, ids, values)

    def part(self, table: str, start: int, count: int) -> tuple[Tensor, Tensor]:
        part: tuple[Tensor, Tensor] = self._start(service.part, table, start, count).wait()
        return part

    def again(
        self,
        call: Callable[[], Future[T]],
        tables: Sequence[TableDefinition],
        acknowledged: int,
        patience: float,
        error: Exception,
    ) -> Future[T]:
        """Wait until a server that is gone has come back, and make a call that it has not answered."""
        if self.plan.checkpoint is None:
            raise error

        def attempt(reached: Callable[[], None]) -> Future[T]:
            self._come_back(tables, acknowledged, self.version)
            reached()
            return settled(call())

        return retry_until_answered(attempt, patience)

    def is_member(self) -> bool:
        """Return whether the server knows this trainer."""
        return bool(self._agent.invoke(self.server, service.has_member, (self.plan.name, self._me)))

    def come_back_if_idle(self) -> None:
        """Come back to a server that was restarted, unless there is a step under way, which does that itself."""
        with self._change:
            if self._busy or self.plan.checkpoint is None:
                return
            try:
                self._come_back(*self._idle, self.version)
            except (CallTimeout, *LOSS_ERRORS):
                return  # it was restarted again

    def rest(self, tables: Sequence[TableDefinition], step: int) -> None:
        """Note that a step is over, or that there is a new table."""
        with self._change:
            self._busy, self._idle = False, (tables, step)

    def stay(self, tables: Sequence[TableDefinition], step: int, answer: PushReply) -> None:
        """Make sure that a server that has answered this step still has this trainer, which other servers may need."""
        try:
            if self.is_member():
                return
        except CallTimeout:
            return  # it is there, and busy
        except LOSS_ERRORS:
            if self.plan.checkpoint is None:
                raise
        try:
            self._come_back(tables, step, answer.version)
        except (CallTimeout, *LOSS_ERRORS):
            return  # it is tried again as long as another server has not answered

    def _come_back(
        self, tables: Sequence[TableDefinition], acknowledged: int, version: int
    ) -> None:
        arguments = (self.plan, list(tables), self._me, self._first, acknowledged, version)
        self._agent.invoke(self.server, service.resume, arguments)

    def _start(self, function: Any, *args: Any) -> Future[Any]:
        return self._agent.start(self.server, function, (self.plan.name, *args), None, None)

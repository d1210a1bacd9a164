"""`Attachment`: a trainer's side of one server that holds tables.

State: `version`, which the rows that the trainer has in use are of at least; `current`, whether rows have been fetched
since the last answer to a push. Used by the thread that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from telegrad.errors import PeerLost, StaleReference
from telegrad.futures import Future
from telegrad.ps.joining import Again, insist, settled
from telegrad.ps.messages import Answer
from telegrad.ps.tables import service
from telegrad.ps.tables.messages import Definition, Plan, Update, Wanted

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent


T = TypeVar("T")


class Attachment:
    def __init__(self, agent: Agent, trainer: str, server: str, plan: Plan) -> None:
        self.server = server
        self.plan = plan
        self.version = 0
        self.current = False
        self._agent = agent
        self._me = trainer

    def __repr__(self) -> str:
        return f"<Attachment to tables {self.plan.name!r} on {self.server!r}: version {self.version}>"

    # Coming and going

    def announce(self) -> int:
        return int(self._agent.invoke(self.server, service.announce, (self.plan, self._me)))

    def enter(self, first: int, timeout: float) -> Future[Answer]:
        return self._agent.start(self.server, service.enter, (self.plan.name, self._me, first), None, timeout)

    def define(self, tables: list[Definition]) -> Future[None]:
        return self._start(service.define, tables)

    def leave(self) -> Future[None]:
        return self._start(service.leave, self._me)

    # Rows

    def pull(self, wanted: list[Wanted], keep: bool) -> Future[tuple[int, list[Tensor]]]:
        return self._start(service.pull, wanted, keep)

    def pulled(self, answer: tuple[int, list[Tensor]]) -> list[Tensor]:
        version, rows = answer
        if not self.current:
            self.version, self.current = max(self.version, version), True
        return rows

    def push(self, step: int, version: int, updates: list[Update]) -> Future[Answer]:
        return self._start(service.push, self._me, step, version, updates)

    def pushed(self, answer: Answer) -> Answer:
        self.version, self.current = answer.version, False
        return answer

    def put(self, table: str, ids: Tensor, values: Tensor) -> Future[None]:
        return self._start(service.put, table, ids, values)

    def part(self, table: str, start: int, count: int) -> tuple[Tensor, Tensor]:
        part: tuple[Tensor, Tensor] = self._start(service.part, table, start, count).wait()
        return part

    def again(
        self, call: Callable[[], Future[T]], tables: Sequence[Definition], acknowledged: int, patience: float
    ) -> Again[T]:
        """Wait until a server that is gone has come back, and make a call that it has not answered."""

        def again(error: Exception) -> Future[T]:
            if self.plan.checkpoint is None:
                raise error
            return insist(attempt, patience, (PeerLost, StaleReference))

        def attempt() -> Future[T]:
            arguments = (self.plan, list(tables), self._me, acknowledged, self.version)
            self._agent.invoke(self.server, service.resume, arguments)
            return settled(call())

        return again

    def _start(self, function: Any, *args: Any) -> Future[Any]:
        return self._agent.start(self.server, function, (self.plan.name, *args), None, None)

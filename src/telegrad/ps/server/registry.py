"""`ShardRegistry`: everything that one worker holds of parameter servers and tables, by what it is part of.

State: the holdings, added under `lock`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from telegrad.errors import CallTimeout, JoinError, StaleReference, TelegradError
from telegrad.futures import Future
from telegrad.ps.messages import worker_of
from telegrad.ps.server.base_shard import BaseShard
from telegrad.ps.trainer.joining import pauses, still_trains
from telegrad.runtime import active_runtime
from telegrad.server.functions import DeferredReply

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

H = TypeVar("H", bound=BaseShard)


class ShardRegistry:
    """One per agent."""

    def __init__(self, agent: AgentRuntime) -> None:
        self.agent = agent
        self.lock = threading.Lock()
        self._all: dict[str, BaseShard] = {}
        agent.on_loss(self._lost)
        agent.on_close(self._close)

    def __repr__(self) -> str:
        return f"<ShardRegistry of {self.agent.name}: {list(self._all.values())}>"

    @classmethod
    def here(cls) -> ShardRegistry:
        agent = active_runtime()
        if agent is None:  # it was called in the moment in which it closes
            raise StaleReference("a worker that holds part of a parameter server is leaving")
        return agent.service(cls)

    def has(self, what: str) -> bool:
        return what in self._all

    def part(self, what: str) -> BaseShard:
        """What is held of `what`, which is how people would call it: "parameter server 'default'"."""
        if what not in self._all:
            raise StaleReference(f"worker {self.agent.name!r} holds nothing of {what}")
        return self._all[what]

    def find(self, what: str, kind: type[H]) -> H:
        """What is held of `what`, which is of this kind."""
        found = self.part(what)
        assert isinstance(found, kind)
        return found

    def add(self, what: str, holding: BaseShard) -> None:
        self._all[what] = holding

    def check(self, holding: BaseShard, *workers: str) -> None:
        """A call of a worker, or of a trainer there, may be served after its loss was noticed: it must not stay."""
        for worker in map(worker_of, workers):
            if self.agent.is_lost(worker):
                holding.lose(worker)

    def refuse_lost(self, trainer: str) -> None:
        """Raise an error if the worker of a trainer was given up: it would be forgotten again at once."""
        if self.agent.is_lost(worker_of(trainer)):
            raise JoinError(
                f"worker {self.agent.name!r} has given up the worker of this trainer, which was silent for too long or "
                "has closed its connections; close the optimizer and make a new one"
            )

    def expect(self, holding: BaseShard, trainers: Iterable[str]) -> None:
        """Find out which of the trainers of an earlier life of this server are still there.

        Call it when the holding has been added. A loss that was noticed before is not announced again.
        """
        for worker in set(map(worker_of, trainers)):
            self.agent.watch(worker)
        self.check(holding, *trainers)
        for trainer in trainers:
            self.agent.threads.start(partial(self._ask_trainer, holding, trainer))

    def _ask_trainer(self, holding: BaseShard, trainer: str) -> None:
        """Do not wait for a trainer that has left while this server was down."""
        worker = self.agent.directory.name_of(worker_of(trainer))
        for _ in pauses():
            if self.agent.closing or trainer not in holding.known:
                return
            try:
                there = self.agent.invoke(worker, still_trains, (trainer, self.agent.name))
            except CallTimeout:
                continue
            except TelegradError:
                there = False
            if not there:
                holding.leave(trainer)
            return

    def _close(self) -> None:
        for holding in self._all.values():
            holding.close()
        self._all.clear()

    def _lost(self, name: str, incarnation: str) -> None:
        for holding in list(self._all.values()):
            self.agent.threads.start(lambda holding=holding: holding.lose(incarnation))  # type: ignore[misc]


def value_or_deferred(future: Future[Any]) -> Any:
    return future.wait() if future.done() else DeferredReply(future)

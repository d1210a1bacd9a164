"""`Holdings`: everything that one worker holds of parameter servers and tables, by what it is part of.

State: the holdings, added under `lock`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

from telegrad.agent.current import active_agent
from telegrad.agent.targets import Later
from telegrad.errors import StaleReference
from telegrad.futures import Future
from telegrad.ps.holding import Holding
from telegrad.ps.messages import worker_of

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent

H = TypeVar("H", bound=Holding)


class Holdings:
    """One per agent."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.lock = threading.Lock()
        self._all: dict[str, Holding] = {}
        agent.on_loss(self._lost)
        agent.on_close(self._close)

    def __repr__(self) -> str:
        return f"<Holdings of {self.agent.name}: {list(self._all.values())}>"

    @classmethod
    def here(cls) -> Holdings:
        agent = active_agent()
        if agent is None:  # it was called in the moment in which it closes
            raise StaleReference("a worker that holds part of a parameter server is leaving")
        return agent.service(cls)

    def has(self, what: str) -> bool:
        return what in self._all

    def part(self, what: str) -> Holding:
        """What is held of `what`, which is how people would call it: "parameter server 'default'"."""
        if what not in self._all:
            raise StaleReference(f"worker {self.agent.name!r} holds nothing of {what}")
        return self._all[what]

    def find(self, what: str, kind: type[H]) -> H:
        """What is held of `what`, which is of this kind."""
        found = self.part(what)
        assert isinstance(found, kind)
        return found

    def add(self, what: str, holding: Holding) -> None:
        self._all[what] = holding

    def check(self, holding: Holding, *workers: str) -> None:
        """A call of a worker, or of a trainer there, may be served after its loss was noticed: it must not stay."""
        for worker in map(worker_of, workers):
            if self.agent.is_lost(worker):
                holding.lose(worker)

    def _close(self) -> None:
        for holding in self._all.values():
            holding.close()
        self._all.clear()

    def _lost(self, name: str, incarnation: str) -> None:
        for holding in list(self._all.values()):
            self.agent.threads.start(lambda holding=holding: holding.lose(incarnation))  # type: ignore[misc]


def now_or_later(future: Future[Any]) -> Any:
    return future.wait() if future.done() else Later(future)

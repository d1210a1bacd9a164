"""`Council`: how several servers agree on whose reports make up a round.

The first of them leads. A server that follows it and has a complete round asks it which of the reports count, and makes
its step when it knows. Servers that were restarted find their way back by asking: a follower repeats its question; one
that leads asks its followers what round they are in, because they may have finished one that it has forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad.agent.targets import trusted
from telegrad.errors import PeerLost, StaleReference
from telegrad.ps.holding import Holding
from telegrad.ps.holdings import Holdings, now_or_later
from telegrad.ps.joining import pauses
from telegrad.ps.messages import Steps

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent


class Council:
    """Of the servers that hold `what`. `patient`: one that is gone may come back."""

    def __init__(self, agent: Agent, what: str, servers: Sequence[str], patient: bool) -> None:
        self._agent = agent
        self._what = what
        self._servers = servers
        self._patient = patient

    def __repr__(self) -> str:
        return f"<Council of {self._what}: {', '.join(self._servers)}>"

    @property
    def followers(self) -> Sequence[str]:
        return self._servers[1:] if self._agent.name == self._servers[0] else ()

    @property
    def ask(self) -> Callable[[int, Steps], None] | None:
        """How this server asks the one that leads, if that is another."""
        return None if self._agent.name == self._servers[0] else self._start_asking

    def look_around(self) -> None:
        """This server was restarted: if it leads, it asks in which round the others are, until one is finished."""
        for follower in self.followers:
            self._agent.threads.start(partial(self._look_at, follower))

    def _start_asking(self, number: int, held: Steps) -> None:
        self._agent.threads.start(partial(self._ask, number, held))

    def _ask(self, number: int, held: Steps) -> None:
        me = self._agent.me
        for holding in self._tries(lambda holding: holding.is_open(number)):
            arguments = (self._what, me.name, me.incarnation, number, held)
            steps = self._answer(self._servers[0], which, arguments)
            if steps is not None:
                holding.decide(number, steps)

    def _look_at(self, follower: str) -> None:
        for holding in self._tries(lambda holding: holding.unsure):
            standing = self._answer(follower, where, (self._what,))
            if standing is not None:
                holding.hear_of(follower, *standing)

    def _answer(self, server: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        """None if the server is not there."""
        try:
            return self._agent.invoke(server, function, arguments, None, None)
        except (PeerLost, StaleReference):
            return None

    def _tries(self, needed: Callable[[Holding], bool]) -> Iterator[Holding]:
        """What is held here, again and again while there is need, and hope."""
        holdings = self._agent.service(Holdings)
        for _ in pauses():
            if self._agent.closing or not holdings.has(self._what):
                return
            holding = holdings.part(self._what)
            if not needed(holding):
                return
            yield holding
            if not (self._patient and needed(holding)):
                return


@trusted
def which(what: str, name: str, server: str, number: int, held: Steps) -> Any:
    """A follower asks which of the reports that it has count in its round."""
    holdings = Holdings.here()
    holding = holdings.part(what)
    decided = holding.hear(name, server, number, held)
    holdings.check(holding, server)
    return now_or_later(decided)


@trusted
def where(what: str) -> tuple[str, int]:
    """This server's incarnation, and the round that it is in."""
    holdings = Holdings.here()
    return holdings.agent.me.incarnation, holdings.part(what).version

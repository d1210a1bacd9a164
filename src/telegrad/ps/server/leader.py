"""`LeaderProtocol`: how several servers agree on whose reports make up a round.

The first of them leads. Another sends it votes (`coordinator.RoundVote`) and gets verdicts. Servers that were restarted
find their way back by asking: a follower repeats its vote; a leader asks its followers which round they are in, because
they may have finished one that it has forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad.errors import PeerLost, StaleReference
from telegrad.ps.server.base_shard import BaseShard, ServerRole
from telegrad.ps.server.coordinator import RoundVote
from telegrad.ps.server.registry import ShardRegistry, value_or_deferred
from telegrad.ps.trainer.joining import pauses
from telegrad.server.functions import trusted

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class LeaderProtocol:
    """Of the servers that hold `what`. `patient`: one that is gone may come back."""

    def __init__(
        self, agent: AgentRuntime, what: str, servers: Sequence[str], patient: bool
    ) -> None:
        self._agent = agent
        self._what = what
        self._servers = servers
        self._patient = patient

    def __repr__(self) -> str:
        return f"<LeaderProtocol of {self._what}: {', '.join(self._servers)}>"

    @property
    def _followers(self) -> Sequence[str]:
        return self._servers[1:] if self._agent.name == self._servers[0] else ()

    @property
    def role(self) -> ServerRole:
        """What this server is."""
        ask = None if self._agent.name == self._servers[0] else self._start_asking
        return ServerRole(self._agent.local_member.incarnation, self._followers, ask)

    def look_around(self) -> None:
        """If this server leads and was restarted, ask in which round the others are, until one is finished."""
        for follower in self._followers:
            self._agent.threads.start(partial(self._look_at, follower))

    def _start_asking(self, vote: RoundVote) -> None:
        self._agent.threads.start(partial(self._ask, vote))

    def _ask(self, vote: RoundVote) -> None:
        for holding in self._tries(lambda holding: holding.is_asking(vote)):
            verdict = self._answer(
                self._servers[0], send_vote, (self._what, self._agent.name, vote)
            )
            if verdict is not None:
                holding.answered(vote.sequence, verdict)
                return

    def _look_at(self, follower: str) -> None:
        for holding in self._tries(lambda holding: holding.unsure):
            standing = self._answer(follower, current_round, (self._what,))
            if standing is not None:
                holding.hear_of(follower, *standing)

    def _answer(self, server: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Return None if the server is not there."""
        try:
            return self._agent.invoke(server, function, arguments, None, None)
        except (PeerLost, StaleReference):
            return None

    def _tries(self, needed: Callable[[BaseShard], bool]) -> Iterator[BaseShard]:
        """Yield what is held here, again and again while there is need, and hope."""
        holdings = self._agent.service(ShardRegistry)
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
def send_vote(what: str, name: str, vote: RoundVote) -> Any:
    """Take the vote of a follower; the answer is the verdict."""
    holdings = ShardRegistry.here()
    holding = holdings.part(what)
    decided = holding.hear(name, vote)
    holdings.check(holding, vote.server)
    return value_or_deferred(decided)


@trusted
def current_round(what: str) -> tuple[str, int]:
    """Return this server's incarnation, and the round that it is in."""
    holdings = ShardRegistry.here()
    return holdings.agent.local_member.incarnation, holdings.part(what).round

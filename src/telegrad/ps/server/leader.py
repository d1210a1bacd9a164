"""`LeaderProtocol`: calls between the servers of a model by which they agree on each round.

The first server leads. `LeaderCoordinator` and `FollowerCoordinator` decide; this module sends
their messages.

| call | from | to | repeated while |
|---|---|---|---|
| `send_vote` | follower | leader | the vote is pending: the leader may be restarted |
| `current_round` | restarted leader | each follower | the leader may be behind |

Each call runs on a thread of its own. The protocol has no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad.errors import PeerLost, StaleReference
from telegrad.messages.remote_functions import trusted
from telegrad.ps.server.base_shard import BaseShard, ServerRole
from telegrad.ps.server.decisions import RoundVote
from telegrad.ps.server.registry import ShardRegistry, value_or_deferred
from telegrad.ps.trainer.joining import pauses

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class LeaderProtocol:
    """The calls of one server. `what` is the key of its shard in the `ShardRegistry`.

    `patient`: a server that is lost may be restarted, so calls to it are repeated.
    """

    def __init__(
        self, agent: AgentRuntime, what: str, servers: Sequence[str], patient: bool
    ) -> None:
        self._agent = agent
        self._shard_key = what
        self._servers = servers
        self._patient = patient

    def __repr__(self) -> str:
        return f"<LeaderProtocol of {self._shard_key}: {', '.join(self._servers)}>"

    @property
    def _leads(self) -> bool:
        return self._agent.name == self._servers[0]

    @property
    def _followers(self) -> Sequence[str]:
        return self._servers[1:] if self._leads else ()

    @property
    def role(self) -> ServerRole:
        """The role of this server."""
        send = None if self._leads else self._start_sending
        return ServerRole(self._agent.local_member.incarnation, self._followers, send)

    def look_around(self) -> None:
        """Ask each follower for its round, if this server leads and may be behind."""
        for follower in self._followers:
            self._agent.threads.start(partial(self._ask_for_round, follower))

    def _ask_for_round(self, follower: str) -> None:
        for shard in self._attempts(lambda shard: shard.may_be_behind):
            found = self._call(follower, current_round, (self._shard_key,))
            if found is not None:
                shard.receive_round(follower, *found)

    def _start_sending(self, vote: RoundVote) -> None:
        self._agent.threads.start(partial(self._send_vote, vote))

    def _send_vote(self, vote: RoundVote) -> None:
        for shard in self._attempts(lambda shard: shard.is_vote_pending(vote)):
            arguments = (self._shard_key, self._agent.name, vote)
            verdict = self._call(self._servers[0], send_vote, arguments)
            if verdict is not None:
                shard.receive_verdict(vote.sequence, verdict)
                return

    def _call(self, server: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Call a function on a server. Return None if the server or its shard is not there."""
        try:
            return self._agent.invoke(server, function, arguments, None, None)
        except (PeerLost, StaleReference):
            return None

    def _attempts(self, needed: Callable[[BaseShard], bool]) -> Iterator[BaseShard]:
        """Yield the shard of this server before each attempt, while `needed` returns True.

        Stop when the agent closes, the shard is removed, or, without `patient`, after one attempt.
        """
        registry = self._agent.service(ShardRegistry)
        for _ in pauses():
            if self._agent.closing or not registry.has(self._shard_key):
                return
            shard = registry.get(self._shard_key)
            if not needed(shard):
                return
            yield shard
            if not (self._patient and needed(shard)):
                return


@trusted
def send_vote(what: str, name: str, vote: RoundVote) -> Any:
    """Receive the vote of follower `name`. Reply with the verdict, when there is one."""
    registry = ShardRegistry.here()
    shard = registry.get(what)
    verdict = shard.receive_vote(name, vote)
    registry.check(shard, vote.server)
    return value_or_deferred(verdict)


@trusted
def current_round(what: str) -> tuple[str, int]:
    """Return the incarnation of this server and the number of its current round."""
    registry = ShardRegistry.here()
    return registry.agent.local_member.incarnation, registry.get(what).current_round

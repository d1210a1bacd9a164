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
from telegrad.ps.backoff import attempts
from telegrad.ps.server.base_shard import BaseShard, ServerRole
from telegrad.ps.server.coordinator import RoundVote
from telegrad.ps.server.registry import ShardRegistry, value_or_deferred

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class LeaderProtocol:
    """The calls of one server. `shard_key` is the key of its shard in the `ShardRegistry`.

    `retry`: a server that is lost may be restarted, so calls to it are repeated.
    """

    def __init__(
        self, runtime: AgentRuntime, shard_key: str, servers: Sequence[str], retry: bool
    ) -> None:
        self._runtime = runtime
        self._shard_key = shard_key
        self._servers = servers
        self._retry = retry

    def __repr__(self) -> str:
        return f"<LeaderProtocol of {self._shard_key}: {', '.join(self._servers)}>"

    @property
    def _leads(self) -> bool:
        return self._runtime.name == self._servers[0]

    @property
    def _followers(self) -> Sequence[str]:
        return self._servers[1:] if self._leads else ()

    @property
    def role(self) -> ServerRole:
        """The role of this server."""
        send = None if self._leads else self._start_sending
        return ServerRole(self._runtime.local_member.incarnation, self._followers, send)

    def ask_followers_for_round(self) -> None:
        """Ask each follower for its round, if this server leads and may be behind."""
        for follower in self._followers:
            self._runtime.threads.start(partial(self._ask_for_round, follower))

    def _ask_for_round(self, follower: str) -> None:
        for shard in self._attempts(lambda shard: shard.may_be_behind):
            found = self._call(follower, current_round, (self._shard_key,))
            if found is not None:
                shard.receive_round(follower, *found)

    def _start_sending(self, vote: RoundVote) -> None:
        self._runtime.threads.start(partial(self._send_vote, vote))

    def _send_vote(self, vote: RoundVote) -> None:
        for shard in self._attempts(lambda shard: shard.is_vote_pending(vote)):
            arguments = (self._shard_key, self._runtime.name, vote)
            verdict = self._call(self._servers[0], send_vote, arguments)
            if verdict is not None:
                shard.receive_verdict(vote.sequence, verdict)
                return

    def _call(self, server: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Call a function on a server. Return None if the server or its shard is not there."""
        try:
            return self._runtime.invoke(server, function, arguments, None, None)
        except (PeerLost, StaleReference):
            return None

    def _attempts(self, needed: Callable[[BaseShard], bool]) -> Iterator[BaseShard]:
        """Yield the shard of this server before each attempt, while `needed` returns True.

        Stop when the agent closes, the shard is removed, or, without `retry`, after one attempt.
        """
        registry = self._runtime.service(ShardRegistry)
        for _ in attempts():
            if self._runtime.closing or not registry.has(self._shard_key):
                return
            shard = registry.get(self._shard_key)
            if not needed(shard):
                return
            yield shard
            if not (self._retry and needed(shard)):
                return


@trusted
def send_vote(shard_key: str, name: str, vote: RoundVote) -> Any:
    """Receive the vote of follower `name`. Reply with the verdict, when there is one."""
    registry = ShardRegistry.here()
    shard = registry.get(shard_key)
    verdict = shard.receive_vote(name, vote)
    registry.remove_if_lost(shard, vote.server)
    return value_or_deferred(verdict)


@trusted
def current_round(shard_key: str) -> tuple[str, int]:
    """Return the incarnation of this server and the number of its current round."""
    registry = ShardRegistry.here()
    return registry.runtime.local_member.incarnation, registry.get(shard_key).current_round

"""`EndedContexts`: ids of ended contexts that peers still have to release.

A call to a peer carries some of these ids (`take`). Ids that no call has taken after
`_ANNOUNCE_DELAY` are sent in a call of their own.

State: `_pending` and `_timer_is_set`, under `_lock`. No lock is held while a peer is called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad.wire.handshake import Incarnation

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

MAX_IDS_PER_CALL = 7  # ids of ended contexts that one call carries
CALL_TIMEOUT = 30.0  # seconds
_ANNOUNCE_DELAY = 0.01  # seconds


class EndedContexts:
    """The ids of ended contexts that one agent has to send to its peers.

    `release` is the function that releases contexts on a peer. It takes the incarnation of the
    peer and a list of ids.
    """

    def __init__(
        self, agent: AgentRuntime, release: Callable[[Incarnation, list[int]], None]
    ) -> None:
        self._agent = agent
        self._release = release
        # By the incarnation of a peer: its name, and the ids that it has to release.
        self._pending: dict[str, tuple[str, list[int]]] = {}
        self._timer_is_set = False
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Return True if a peer still has to release a context."""
        return bool(self._pending)

    def __repr__(self) -> str:
        return f"<EndedContexts of {self._agent.name!r}: {len(self._pending)} peers to inform>"

    def add(self, context_id: int, peers: dict[str, str]) -> None:
        """Inform peers, given by incarnation and name, that a context has ended."""
        own_incarnation = self._agent.local_member.incarnation
        with self._lock:
            for incarnation, name in peers.items():
                if incarnation != own_incarnation:
                    self._pending.setdefault(incarnation, (name, []))[1].append(context_id)
            if self._timer_is_set or not self._pending or self._agent.closing:
                return
            self._timer_is_set = True
        self._agent.clock.call_at(time.monotonic() + _ANNOUNCE_DELAY, self._on_timer)

    def take(self, incarnation: Incarnation) -> list[int]:
        """Remove and return ids for a call that is about to be sent to a peer."""
        with self._lock:
            _, pending = self._pending.get(incarnation, ("", []))
            taken, pending[:] = pending[:MAX_IDS_PER_CALL], pending[MAX_IDS_PER_CALL:]
            if not pending:
                self._pending.pop(incarnation, None)
            return taken

    def _on_timer(self) -> None:
        with self._lock:
            self._timer_is_set = False
            if not self._pending:
                return  # calls have carried all ids
        self._agent.threads.start(self._announce)

    def _announce(self) -> None:
        """Send all pending ids in calls of their own."""
        with self._lock:
            pending, self._pending = self._pending, {}
        for incarnation, (name, context_ids) in pending.items():
            if not self._agent.closing:
                arguments = (incarnation, context_ids)
                self._agent.start(name, self._release, arguments, None, CALL_TIMEOUT, internal=True)

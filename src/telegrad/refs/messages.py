"""Notes from users to owners (lend, release, void): delivered in order and applied once, whatever happens on the way.

A note is an ordinary call that is not waited for. Each pair of workers has one numbered sequence. The receiver applies
notes in order, holds early ones back and ignores repeats; the sender sends a batch again until it is acknowledged or
the owner is lost.

State: outgoing sequences under their own lock, so that notes leave in the order of their numbers; incoming ones under
the lock of `MessageInbox`.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from telegrad.errors import CallTimeout, PeerLost, TelegradError

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

# ("lend", key, holder) | ("release", key, holder, count) | ("void", key, reason)
ReferenceMessage = tuple[Any, ...]

_RETRY = 30.0
_log = logging.getLogger(__name__)


class MessageOutbox:
    """Notes of this agent to one owner."""

    def __init__(
        self, agent: AgentRuntime, owner_name: str, owner: str, deliver: Callable[..., None]
    ) -> None:
        self._agent = agent
        self._name = owner_name
        self._owner = owner
        self._deliver = deliver  # the function that the owner runs
        self._number = 0
        self._lock = threading.Lock()
        self._unacknowledged: set[int] = set()

    def __repr__(self) -> str:
        return f"<MessageOutbox to {self._name}: {self._number} sent, {len(self._unacknowledged)} not acknowledged>"

    @property
    def unacknowledged(self) -> int:
        """Batches of notes that the owner has not acknowledged."""
        return len(self._unacknowledged)

    def send(self, notes: list[ReferenceMessage]) -> None:
        """Send notes after all that were sent before."""
        with self._lock:
            self._number += 1
            self._unacknowledged.add(self._number)
            self._transmit(self._number, notes)

    def _transmit(self, number: int, notes: list[ReferenceMessage]) -> None:
        agent = self._agent
        args = (self._owner, agent.local_member.incarnation, number, notes)
        try:
            future = agent.start(self._name, self._deliver, args, None, _RETRY, internal=True)
        # this agent is closing, or the owner is unknown: nobody counts any more
        except TelegradError as error:
            self._finished(number, error)
            return
        future.add_done_callback(lambda done: self._acknowledged(number, notes, done))

    def _acknowledged(self, number: int, notes: list[ReferenceMessage], done: Any) -> None:
        try:
            done.value()
        except CallTimeout:
            self._transmit(number, notes)
        except Exception as error:
            self._finished(number, error)
        else:
            self._finished(number, None)

    def _finished(self, number: int, error: Exception | None) -> None:
        self._unacknowledged.discard(number)
        if error is not None and not isinstance(error, PeerLost):
            _log.debug("notes to %s were not delivered: %s", self._name, error)


class MessageInbox:
    """Notes from all users of this agent's objects."""

    def __init__(self, apply: Callable[[ReferenceMessage], None]) -> None:
        self._apply = apply
        self._done: defaultdict[str, int] = defaultdict(int)
        self._early: defaultdict[str, dict[int, list[ReferenceMessage]]] = defaultdict(dict)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<MessageInbox: {len(self._done)} senders, {sum(map(len, self._early.values()))} batches held back>"

    def receive(self, sender: str, number: int, notes: list[ReferenceMessage]) -> None:
        with self._lock:
            if number <= self._done[sender]:
                return  # a repeat
            early = self._early[sender]
            early[number] = notes
            while self._done[sender] + 1 in early:
                self._done[sender] += 1
                for note in early.pop(self._done[sender]):
                    self._apply(note)

    def forget(self, sender: str) -> None:
        with self._lock:
            self._done.pop(sender, None)
            self._early.pop(sender, None)

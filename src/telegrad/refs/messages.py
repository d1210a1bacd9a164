"""Notes from users to owners (lend, release, void): delivered in order and applied once, whatever happens on the way.

A note is an ordinary call that is not waited for. Each pair of workers has one numbered sequence.
The receiver applies notes in order, holds early ones back and ignores repeats; the sender sends a
batch again until it is acknowledged or the owner is lost.

State: outgoing sequences under their own lock, so that notes leave in the order of their numbers;
incoming ones under the lock of `MessageInbox`.
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

_RETRY_AFTER = 30.0
_log = logging.getLogger(__name__)


class MessageOutbox:
    """Notes of this agent to one owner."""

    def __init__(
        self, runtime: AgentRuntime, owner_name: str, owner: str, deliver: Callable[..., None]
    ) -> None:
        self._runtime = runtime
        self._owner_name = owner_name
        self._owner = owner
        self._deliver = deliver  # the function that the owner runs
        self._last_sequence_number = 0
        self._lock = threading.Lock()
        self._unacknowledged: set[int] = set()

    def __repr__(self) -> str:
        return (
            f"<MessageOutbox to {self._owner_name}: {self._last_sequence_number} sent, "
            f"{len(self._unacknowledged)} not acknowledged>"
        )

    @property
    def unacknowledged(self) -> int:
        """Batches of notes that the owner has not acknowledged."""
        return len(self._unacknowledged)

    def send(self, messages: list[ReferenceMessage]) -> None:
        """Send notes after all that were sent before."""
        with self._lock:
            self._last_sequence_number += 1
            self._unacknowledged.add(self._last_sequence_number)
            self._transmit(self._last_sequence_number, messages)

    def _transmit(self, sequence_number: int, messages: list[ReferenceMessage]) -> None:
        runtime = self._runtime
        args = (self._owner, runtime.local_member.incarnation, sequence_number, messages)
        try:
            future = runtime.start(
                self._owner_name, self._deliver, args, None, _RETRY_AFTER, internal=True
            )
        # this agent is closing, or the owner is unknown: nobody counts any more
        except TelegradError as error:
            self._finished(sequence_number, error)
            return
        future.add_done_callback(lambda done: self._acknowledged(sequence_number, messages, done))

    def _acknowledged(
        self, sequence_number: int, messages: list[ReferenceMessage], done: Any
    ) -> None:
        try:
            done.value()
        except CallTimeout:
            self._transmit(sequence_number, messages)
        except Exception as error:
            self._finished(sequence_number, error)
        else:
            self._finished(sequence_number, None)

    def _finished(self, sequence_number: int, error: Exception | None) -> None:
        self._unacknowledged.discard(sequence_number)
        if error is not None and not isinstance(error, PeerLost):
            _log.debug("notes to %s were not delivered: %s", self._owner_name, error)


class MessageInbox:
    """Notes from all users of this agent's objects."""

    def __init__(self, apply: Callable[[ReferenceMessage], None]) -> None:
        self._apply = apply
        self._applied: defaultdict[str, int] = defaultdict(int)
        self._held_back: defaultdict[str, dict[int, list[ReferenceMessage]]] = defaultdict(dict)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        held_back = sum(map(len, self._held_back.values()))
        return f"<MessageInbox: {len(self._applied)} senders, {held_back} batches held back>"

    def receive(self, sender: str, sequence_number: int, messages: list[ReferenceMessage]) -> None:
        with self._lock:
            if sequence_number <= self._applied[sender]:
                return  # a repeat
            held_back = self._held_back[sender]
            held_back[sequence_number] = messages
            while self._applied[sender] + 1 in held_back:
                self._applied[sender] += 1
                for message in held_back.pop(self._applied[sender]):
                    self._apply(message)

    def forget(self, sender: str) -> None:
        with self._lock:
            self._applied.pop(sender, None)
            self._held_back.pop(sender, None)

"""Messages from users to owners about references, delivered in order and applied once.

There are three kinds: *lend* (a reference is about to be sent to another user), *release* (a user
gives references up) and *void* (an object will never be created). A batch of messages is an
ordinary call whose reply is its acknowledgement; no thread waits for it. Each pair of workers has
one sequence of batches. The sender repeats a batch until it is acknowledged or the owner is lost.
The receiver applies batches in order, holds back those that arrive early and ignores repeats.

State: the sequence of a `MessageOutbox`, under its lock, which is held while a batch is sent so
that batches leave in order; the sequences of a `MessageInbox`, under its lock.
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

# ("lend", key, user) | ("release", key, user, count) | ("void", key, reason)
ReferenceMessage = tuple[Any, ...]

_RETRY_AFTER = 30.0  # seconds without an acknowledgement
_log = logging.getLogger(__name__)


class MessageOutbox:
    """Messages from this agent to one owner."""

    def __init__(
        self, runtime: AgentRuntime, owner_name: str, owner: str, deliver: Callable[..., None]
    ) -> None:
        self._runtime = runtime
        self._owner_name = owner_name
        self._owner = owner
        self._deliver = deliver  # the function that the owner runs for each batch
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
        """The number of batches that the owner has not acknowledged."""
        return len(self._unacknowledged)

    def send(self, messages: list[ReferenceMessage]) -> None:
        """Send a batch of messages after all earlier batches."""
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
        except TelegradError as error:
            # this agent is closing, or the owner has left: the counts no longer matter
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
            _log.debug("reference messages to %s were not delivered: %s", self._owner_name, error)


class MessageInbox:
    """Messages from all users of this agent's objects, applied in order and once."""

    def __init__(self, apply: Callable[[ReferenceMessage], None]) -> None:
        self._apply = apply
        # the last sequence number that was applied, by sender
        self._applied: defaultdict[str, int] = defaultdict(int)
        self._held_back: defaultdict[str, dict[int, list[ReferenceMessage]]] = defaultdict(dict)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        held_back = sum(map(len, self._held_back.values()))
        return f"<MessageInbox: {len(self._applied)} senders, {held_back} batches held back>"

    def receive(self, sender: str, sequence_number: int, messages: list[ReferenceMessage]) -> None:
        """Apply a batch and those that it was missing for; ignore one that was applied before."""
        with self._lock:
            if sequence_number <= self._applied[sender]:
                return  # sent again because the acknowledgement was late
            held_back = self._held_back[sender]
            held_back[sequence_number] = messages
            while self._applied[sender] + 1 in held_back:
                self._applied[sender] += 1
                for message in held_back.pop(self._applied[sender]):
                    self._apply(message)

    def forget(self, sender: str) -> None:
        """Forget the batches of a lost worker."""
        with self._lock:
            self._applied.pop(sender, None)
            self._held_back.pop(sender, None)

"""`ReferenceManager` connects the reference counts with an agent. Each agent has at most one.

It sends and applies messages between users and owners, sweeps dropped references and audits counts
on the clock, and removes the references of lost workers. The functions at the end of this module
are called by other workers. The owner's counts are in `owned_objects`.

`HeldReferences` has the references that are alive on this worker, to its own objects and to those
of others. For every object of another worker, `UserCount` holds how many references have arrived
here and how many are still alive. When none is alive, *sweep* returns the number received, which
the owner then subtracts from its count. References die inside the garbage collector, at any moment
and in any thread. A weak reference (`ReferenceWatch`) notices that, and its callback only appends
to a queue, without a lock. `sweep` processes the queue later.

Messages from users to owners are delivered in order and applied once (`MessageOutbox`,
`MessageInbox`). There are three kinds: *lend* (a reference is about to be sent to another user),
*release* (a user gives references up) and *void* (an object will never be created). A batch of
messages is an ordinary call whose reply is its acknowledgement; no thread waits for it. Each pair
of workers has one sequence of batches. The sender repeats a batch until it is acknowledged or the
owner is lost. The receiver applies batches in order, holds back those that arrive early and ignores
repeats.

State:
- `ReferenceManager`: the outboxes, under `_lock`; what `audit` remembers, replaced as a whole.
  `OwnedObjects` and `HeldReferences` share one reentrant lock: the garbage collector may run a
  destructor while one of them holds it, and that destructor may use the other.
- `HeldReferences`: counts and sequence numbers, under the lock that is passed in. `_dropped` and
  `_watches` are changed by single operations that are atomic in CPython, without a lock.
- `MessageOutbox`: its sequence, under its lock, which is held while a batch is sent so that batches
  leave in order. `MessageInbox`: its sequences, under its lock.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from telegrad.errors import (
    CallTimeout,
    InternalError,
    PeerLost,
    StaleReference,
    TelegradError,
    error_text,
)
from telegrad.free_threading import snapshot
from telegrad.locks import new_lock, new_reentrant_lock
from telegrad.messages.remote_functions import internal
from telegrad.refs.owned_objects import ObjectKey, OwnedObjects
from telegrad.runtime import active_runtime
from telegrad.wire.handshake import Incarnation

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


# ("lend", key, user) | ("release", key, user, count) | ("void", key, reason)
ReferenceMessage = tuple[Any, ...]
_RETRY_AFTER = 30.0  # seconds without an acknowledgement
_SWEEP_EVERY = 0.05  # seconds
_SWEEP_THRESHOLD = 1000  # dead references
_AUDIT_EVERY = 5.0  # seconds
_AUDIT_TIMEOUT = 30.0  # seconds
_log = logging.getLogger(__name__)


class ReferenceWatch(weakref.ref[Any]):
    """A weak reference that notices when an `RRef` dies.

    Its callback is a C function, so no signal handler can interrupt it.
    """

    __slots__ = ("key", "owner")

    owner: Incarnation
    key: ObjectKey


@dataclass(eq=False)
class UserCount:
    """The number of references of this worker to one object of another worker."""

    received: int = 0
    alive: int = 0


class HeldReferences:
    """All references that are alive on one agent.

    `lock` is shared with `OwnedObjects` (see `ReferenceManager`).
    """

    def __init__(self, local_incarnation: Incarnation, lock: threading.RLock) -> None:
        self._local_incarnation = local_incarnation
        self._lock = lock
        self._counts: dict[tuple[Incarnation, ObjectKey], UserCount] = {}
        # the `ReferenceWatch` of each reference that died since the last sweep
        self._dropped: deque[weakref.ref[Any]] = deque()
        # keeps each `ReferenceWatch` alive, by its id
        self._watches: dict[int, ReferenceWatch] = {}
        # of the objects that this worker has created elsewhere, by owner
        self._last_sequence_number: defaultdict[Incarnation, int] = defaultdict(int)

    def __repr__(self) -> str:
        return f"<HeldReferences: {len(self._counts)}, {len(self._dropped)} to sweep>"

    def next_key(self, owner: Incarnation) -> ObjectKey:
        """Return the key for an object that this worker is about to create at `owner`."""
        with self._lock:
            self._last_sequence_number[owner] += 1
            return ObjectKey(self._local_incarnation, self._last_sequence_number[owner])

    def receive(self, owner: Incarnation, key: ObjectKey) -> None:
        """Count a reference that has arrived here, or that `remote` has made."""
        with self._lock:
            count = self._counts.setdefault((owner, key), UserCount())
            count.received += 1
            count.alive += 1

    def cancel(self, owner: Incarnation, key: ObjectKey) -> None:
        """Remove the count of an object whose creation `remote` could not send."""
        with self._lock:
            self._counts.pop((owner, key), None)

    def watch(self, rref: Any, owner: Incarnation, key: ObjectKey) -> None:
        """Put a reference into the queue of `sweep` when it dies."""
        reference_watch = ReferenceWatch(rref, self._dropped.append)
        reference_watch.owner = owner
        reference_watch.key = key
        self._watches[id(reference_watch)] = reference_watch

    @property
    def dropped(self) -> int:
        """The number of references that have died since the last sweep."""
        return len(self._dropped)

    def sweep(self) -> tuple[list[tuple[Incarnation, ObjectKey, int]], list[ObjectKey]]:
        """Process the references that have died since the last sweep.

        Return what to release, as (owner, key, number of references), and the key of each dead
        reference to an object of this worker.
        """
        released: list[tuple[Incarnation, ObjectKey, int]] = []
        own_keys: list[ObjectKey] = []
        with self._lock:
            for _ in range(len(self._dropped)):
                reference_watch = self._dropped.popleft()
                assert isinstance(reference_watch, ReferenceWatch)
                self._watches.pop(id(reference_watch), None)
                owner, key = reference_watch.owner, reference_watch.key
                if owner == self._local_incarnation:
                    own_keys.append(key)
                    continue
                count = self._counts.get((owner, key))
                if count is None:
                    continue  # the owner was lost
                count.alive -= 1
                if count.alive <= 0:  # negative if a signal interrupted `receive`
                    del self._counts[owner, key]
                    released.append((owner, key, count.received))
        return released, own_keys

    def holds(self, owner: Incarnation, keys: list[ObjectKey]) -> list[bool]:
        """Return, for each key of `owner`, whether this worker still has to release it."""
        with self._lock:
            dropped = {
                (reference_watch.owner, reference_watch.key)
                for reference_watch in snapshot(self._dropped)
                if isinstance(reference_watch, ReferenceWatch)
            }
            return [(owner, key) in self._counts or (owner, key) in dropped for key in keys]

    def remove_owner(self, owner: Incarnation) -> None:
        """Forget all objects of a lost worker."""
        with self._lock:
            for count_owner, key in list(self._counts):
                if count_owner == owner:
                    del self._counts[count_owner, key]

    def statistics(self) -> dict[str, int]:
        """Return counters for `Agent.statistics`."""
        with self._lock:
            return {"held_objects": len(self._counts)}


class MessageOutbox:
    """Messages from this agent to one owner."""

    def __init__(
        self,
        runtime: AgentRuntime,
        owner_name: str,
        owner: Incarnation,
        deliver: Callable[..., None],
    ) -> None:
        self._runtime = runtime
        self._owner_name = owner_name
        self._owner = owner
        self._deliver = deliver  # the function that the owner runs for each batch
        self._last_sequence_number = 0
        self._lock = new_lock()
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
        self._applied: defaultdict[Incarnation, int] = defaultdict(int)
        self._held_back: defaultdict[Incarnation, dict[int, list[ReferenceMessage]]] = defaultdict(
            dict
        )
        self._lock = new_lock()

    def __repr__(self) -> str:
        held_back = sum(map(len, list(self._held_back.values())))
        return f"<MessageInbox: {len(self._applied)} senders, {held_back} batches held back>"

    def receive(
        self, sender: Incarnation, sequence_number: int, messages: list[ReferenceMessage]
    ) -> None:
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

    def forget(self, sender: Incarnation) -> None:
        """Forget the batches of a lost worker."""
        with self._lock:
            self._applied.pop(sender, None)
            self._held_back.pop(sender, None)


class ReferenceManager:
    """The owned objects, held references and reference messages of one agent."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self.runtime = runtime
        local_incarnation = runtime.local_member.incarnation
        lock = new_reentrant_lock()
        self.owned = OwnedObjects(local_incarnation, lock)
        self.held = HeldReferences(local_incarnation, lock)
        self.inbox = MessageInbox(self._apply_message)
        self._outboxes: dict[str, MessageOutbox] = {}
        self._lock = new_lock()
        # counts whose user did not know the object: (user, key) -> time of the last change
        self._missing_at_last_audit: dict[tuple[Incarnation, ObjectKey], float] = {}
        self._watched_workers: set[str] = set()
        # objects that `remote` has created and whose owners have not confirmed that
        self.pending_creations: set[ObjectKey] = set()
        runtime.on_loss(self._on_worker_lost)
        runtime.on_close(self._report_leftovers)
        runtime.on_end(self.owned.close)
        runtime.add_statistics(self.statistics)
        runtime.clock.call_every(_SWEEP_EVERY, self._start_sweep)
        runtime.clock.call_every(_AUDIT_EVERY, lambda: runtime.threads.start(self.audit))
        self._sweeping = False

    @classmethod
    def of(cls, runtime: AgentRuntime | None) -> ReferenceManager:
        """Return the manager of an agent."""
        if runtime is None:
            raise InternalError("references need an agent")
        return runtime.service(cls)

    def __repr__(self) -> str:
        return (
            f"<ReferenceManager of {self.runtime.name}: {self.owned!r}, {self.held!r}, "
            f"{self.inbox!r}, {list(self._outboxes.values())}>"
        )

    def send_messages(
        self, owner_name: str, owner: Incarnation, *messages: ReferenceMessage
    ) -> None:
        """Send messages to an owner; apply them directly if this worker is the owner."""
        if owner == self.runtime.local_member.incarnation:
            for message in messages:
                self._apply_message(message)
            return
        with self._lock:
            outbox = self._outboxes.get(owner)
            if outbox is None:
                outbox = self._outboxes[owner] = MessageOutbox(
                    self.runtime, owner_name, owner, _deliver
                )
        outbox.send(list(messages))

    def lend(self, owner_name: str, owner: Incarnation, key: ObjectKey, user: Incarnation) -> None:
        """Tell an owner that a reference is about to be sent to `user`."""
        self.send_messages(owner_name, owner, ("lend", key, user))

    def sweep(self) -> None:
        """Release the references that have died since the last sweep."""
        local_incarnation = self.runtime.local_member.incarnation
        by_owner: dict[Incarnation, list[ReferenceMessage]] = {}
        released, own_keys = self.held.sweep()
        self.owned.drop_local_references(own_keys)
        for owner, key, count in released:
            by_owner.setdefault(owner, []).append(("release", key, local_incarnation, count))
        for owner, messages in by_owner.items():
            self.send_messages(self._name_of(owner), owner, *messages)

    def sweep_if_many(self) -> None:
        """Sweep soon if many references have died.

        A loop that makes and drops references would otherwise outrun the periodic sweep.
        """
        if self.held.dropped > _SWEEP_THRESHOLD and not self._sweeping:
            self._sweeping = True
            self.runtime.clock.call_at(time.monotonic(), self._sweep_now)

    def _sweep_now(self) -> None:
        try:
            self._start_sweep()
        finally:
            self._sweeping = False

    def void_creation(
        self, owner_name: str, owner: Incarnation, key: ObjectKey, error: BaseException | None
    ) -> None:
        """Tell an owner that an object will never be created, because its creation failed here."""
        self.send_messages(
            owner_name,
            owner,
            ("void", key, f"{type(error).__name__}: {error_text(error or Exception())}"),
        )

    def audit(self) -> None:
        """Ask users about counts that have not changed for a while.

        Remove a count if its user does not know the object in two audits and the count has not
        changed between them: a reference may still be under way at the first one.
        """
        if self.runtime.closing:
            return
        missing: dict[tuple[Incarnation, ObjectKey], float] = {}
        for user, keys in self.owned.unchanged_counts(time.monotonic()).items():
            holds = self._ask_user(user, [key for key, _ in keys])
            for (key, changed_at), is_held in zip(keys, holds, strict=True):
                if is_held:
                    continue
                if self._missing_at_last_audit.get((user, key)) == changed_at:
                    self.owned.clear_count(key, user, changed_at)
                else:
                    missing[user, key] = changed_at
        self._missing_at_last_audit = missing

    def statistics(self) -> dict[str, int]:
        """Return counters for `Agent.statistics`."""
        unacknowledged = sum(outbox.unacknowledged for outbox in list(self._outboxes.values()))
        return {
            **self.owned.statistics(),
            **self.held.statistics(),
            "unconfirmed_creations": len(self.pending_creations),
            "unacknowledged_reference_messages": unacknowledged,
        }

    def _report_leftovers(self) -> None:
        """Log which references are left when the agent closes."""
        counts = {**self.owned.statistics(), **self.held.statistics()}
        left = {name: count for name, count in counts.items() if count}
        if left:
            _log.info("worker %r leaves while references are alive: %s", self.runtime.name, left)

    def _ask_user(self, user: Incarnation, keys: list[ObjectKey]) -> list[bool]:
        """Return, for each key, whether a user has references to that object."""
        local_incarnation = self.runtime.local_member.incarnation
        if user == local_incarnation:  # a message to this worker itself that never arrived
            return [False] * len(keys)
        try:
            reply = self.runtime.start(
                self._name_of(user),
                _which_are_held,
                (local_incarnation, keys),
                None,
                _AUDIT_TIMEOUT,
                internal=True,
            )
            held: list[bool] = reply.wait()
        except TelegradError:
            # keep the counts; if the user is lost, `_on_worker_lost` removes them
            return [True] * len(keys)
        return held

    def _name_of(self, incarnation: Incarnation) -> str:
        return self.runtime.directory.name_of(incarnation)

    def _start_sweep(self) -> None:
        if self.held.dropped:
            self.runtime.threads.start(self.sweep)

    def _on_worker_lost(self, name: str, incarnation: Incarnation) -> None:
        self._outboxes.pop(incarnation, None)
        self.inbox.forget(incarnation)
        self.owned.remove_worker(incarnation)
        self.held.remove_owner(incarnation)

    def _watch_worker(self, user: Incarnation) -> None:
        """Watch a worker that got a reference from another worker than this owner.

        This worker may have no connection to it and would not notice its loss.
        """
        if user not in self._watched_workers and user != self.runtime.local_member.incarnation:
            self._watched_workers.add(user)
            self.runtime.watch(user)

    def _apply_message(self, message: ReferenceMessage) -> None:
        """Apply a message of a user to the owned objects."""
        kind, key, *rest = message
        if kind == "lend":
            self.owned.lend(key, *rest)
            self._watch_worker(rest[0])
        elif kind == "release":
            self.owned.release(key, *rest)
        elif kind == "void":
            self.owned.void(key, *rest)
        else:
            raise InternalError(f"unknown reference message {message}")


def owner_manager(owner: Incarnation) -> ReferenceManager:
    """Return the manager of the agent that runs this call.

    Raise `StaleReference` if that agent is not the incarnation `owner`: the worker was restarted.
    """
    manager = ReferenceManager.of(active_runtime())
    if manager.runtime.local_member.incarnation != owner:
        raise StaleReference(
            f"the reference belongs to an earlier incarnation of worker {manager.runtime.name!r}, "
            "which has restarted; its objects no longer exist, create them again"
        )
    return manager


@internal
def _deliver(
    owner: Incarnation, sender: Incarnation, sequence_number: int, messages: list[ReferenceMessage]
) -> None:
    """Receive messages of a user."""
    owner_manager(owner).inbox.receive(sender, sequence_number, messages)


@internal
def _which_are_held(owner: Incarnation, keys: list[ObjectKey]) -> list[bool]:
    """Answer an audit of `owner`."""
    return ReferenceManager.of(active_runtime()).held.holds(owner, keys)

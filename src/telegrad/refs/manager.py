"""`ReferenceManager` connects the reference counts with an agent. Each agent has at most one.

It sends and applies messages between users and owners, sweeps dropped references and audits counts
on the clock, and removes the references of lost workers. The functions at the end of this module
are called by other workers.

State: the outboxes, under `_lock`; what `audit` remembers, replaced as a whole. `OwnedObjects` and
`HeldReferences` share one reentrant lock: the garbage collector may run a destructor while one of
them holds it, and that destructor may use the other.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from telegrad.errors import InternalError, StaleReference, TelegradError, error_text
from telegrad.messages.remote_functions import internal
from telegrad.refs.held_references import HeldReferences
from telegrad.refs.messages import MessageInbox, MessageOutbox, ReferenceMessage
from telegrad.refs.owned_objects import ObjectKey, OwnedObjects
from telegrad.runtime import active_runtime

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_SWEEP_EVERY = 0.05  # seconds
_SWEEP_THRESHOLD = 1000  # dead references
_AUDIT_EVERY = 5.0  # seconds
_AUDIT_TIMEOUT = 30.0  # seconds

_log = logging.getLogger(__name__)


class ReferenceManager:
    """The owned objects, held references and reference messages of one agent."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self.runtime = runtime
        local_incarnation = runtime.local_member.incarnation
        lock = threading.RLock()
        self.owned = OwnedObjects(local_incarnation, lock)
        self.held = HeldReferences(local_incarnation, lock)
        self.inbox = MessageInbox(self._apply_message)
        self._outboxes: dict[str, MessageOutbox] = {}
        self._lock = threading.Lock()
        # counts whose user did not know the object: (user, key) -> time of the last change
        self._missing_at_last_audit: dict[tuple[str, ObjectKey], float] = {}
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

    def send_messages(self, owner_name: str, owner: str, *messages: ReferenceMessage) -> None:
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

    def lend(self, owner_name: str, owner: str, key: ObjectKey, user: str) -> None:
        """Tell an owner that a reference is about to be sent to `user`."""
        self.send_messages(owner_name, owner, ("lend", key, user))

    def sweep(self) -> None:
        """Release the references that have died since the last sweep."""
        local_incarnation = self.runtime.local_member.incarnation
        by_owner: dict[str, list[ReferenceMessage]] = {}
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
        self, owner_name: str, owner: str, key: ObjectKey, error: BaseException | None
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
        missing: dict[tuple[str, ObjectKey], float] = {}
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

    def _ask_user(self, user: str, keys: list[ObjectKey]) -> list[bool]:
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

    def _name_of(self, incarnation: str) -> str:
        return self.runtime.directory.name_of(incarnation)

    def _start_sweep(self) -> None:
        if self.held.dropped:
            self.runtime.threads.start(self.sweep)

    def _on_worker_lost(self, name: str, incarnation: str) -> None:
        self._outboxes.pop(incarnation, None)
        self.inbox.forget(incarnation)
        self.owned.remove_worker(incarnation)
        self.held.remove_owner(incarnation)

    def _watch_worker(self, user: str) -> None:
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


def owner_manager(owner: str) -> ReferenceManager:
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
    owner: str, sender: str, sequence_number: int, messages: list[ReferenceMessage]
) -> None:
    """Receive messages of a user."""
    owner_manager(owner).inbox.receive(sender, sequence_number, messages)


@internal
def _which_are_held(owner: str, keys: list[ObjectKey]) -> list[bool]:
    """Answer an audit of `owner`."""
    return ReferenceManager.of(active_runtime()).held.holds(owner, keys)

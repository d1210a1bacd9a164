"""`ReferenceManager`: everything an agent has to do with references. One per agent, made on first use.

It joins the books (`ownership`) with the agent: notes go out and come in, dropped references are
swept on the clock, lost workers are written off, balances that look wrong are audited, and the
functions at the end of this file are what other workers call.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from telegrad.errors import InternalError, StaleReference, TelegradError, text_of
from telegrad.refs.held_references import HeldReferences
from telegrad.refs.messages import MessageInbox, MessageOutbox, ReferenceMessage
from telegrad.refs.owned_objects import ObjectKey, OwnedObjects
from telegrad.runtime import active_runtime
from telegrad.server.functions import internal

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_SWEEP_EVERY = 0.05
_SWEEP_THRESHOLD = 1000
_AUDIT_EVERY = 5.0
_AUDIT_TIMEOUT = 30.0

_log = logging.getLogger(__name__)


class ReferenceManager:
    def __init__(self, runtime: AgentRuntime) -> None:
        self.runtime = runtime
        local_incarnation = runtime.local_member.incarnation
        # One lock for both sides: the garbage collector may run a destructor while one of them is
        # locked, and that may use the other.
        lock = threading.RLock()
        self.owned = OwnedObjects(local_incarnation, lock)
        self.held = HeldReferences(local_incarnation, lock)
        self.inbox = MessageInbox(self._apply_message)
        self._outboxes: dict[str, MessageOutbox] = {}
        self._lock = threading.Lock()
        self._missing_at_last_audit: dict[tuple[str, ObjectKey], float] = {}
        self._watched_workers: set[str] = set()
        self.pending_creations: set[ObjectKey] = (
            set()
        )  # creations that their owners have not confirmed
        runtime.on_loss(self._on_worker_lost)
        runtime.on_close(self._report_leftovers)
        runtime.on_end(self.owned.close)
        runtime.add_statistics(self.statistics)
        runtime.clock.every(_SWEEP_EVERY, self._tick)
        runtime.clock.every(_AUDIT_EVERY, lambda: runtime.threads.start(self.audit))
        self._sweeping = False

    @classmethod
    def of(cls, runtime: AgentRuntime | None) -> ReferenceManager:
        if runtime is None:
            raise InternalError("references need an agent")
        return runtime.service(cls)

    def __repr__(self) -> str:
        return (
            f"<ReferenceManager of {self.runtime.name}: {self.owned!r}, {self.held!r}, "
            f"{self.inbox!r}, {list(self._outboxes.values())}>"
        )

    def send_messages(self, owner_name: str, owner: str, *messages: ReferenceMessage) -> None:
        """Tell an owner something; our own books are told directly."""
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
        """A reference is about to be sent to `user`: its owner must know before it leaves."""
        self.send_messages(owner_name, owner, ("lend", key, user))

    def sweep(self) -> None:
        """Give back what died here since the last time."""
        local_incarnation = self.runtime.local_member.incarnation
        by_owner: dict[str, list[ReferenceMessage]] = {}
        released, own_keys = self.held.sweep()
        self.owned.drop_local_references(own_keys)
        for owner, key, count in released:
            by_owner.setdefault(owner, []).append(("release", key, local_incarnation, count))
        for owner, messages in by_owner.items():
            self.send_messages(self._name_of(owner), owner, *messages)

    def sweep_if_many(self) -> None:
        """Let the clock sweep at once if many references have died: a loop that makes and drops them is faster."""
        if self.held.dropped > _SWEEP_THRESHOLD and not self._sweeping:
            self._sweeping = True
            self.runtime.clock.at(time.monotonic(), self._sweep_now)

    def _sweep_now(self) -> None:
        try:
            self._tick()
        finally:
            self._sweeping = False

    def void_creation(
        self, owner_name: str, owner: str, key: ObjectKey, error: BaseException | None
    ) -> None:
        """Tell an owner that an object will never be created: its creation failed here before it was sent."""
        self.send_messages(
            owner_name,
            owner,
            ("void", key, f"{type(error).__name__}: {text_of(error or Exception())}"),
        )

    def audit(self) -> None:
        """Ask holders whose balance has not moved for a while whether they really hold; twice, then write off."""
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
        unacknowledged = sum(outbox.unacknowledged for outbox in list(self._outboxes.values()))
        return {
            **self.owned.statistics(),
            **self.held.statistics(),
            "unconfirmed_creations": len(self.pending_creations),
            "unacknowledged_reference_messages": unacknowledged,
        }

    def _report_leftovers(self) -> None:
        counts = {**self.owned.statistics(), **self.held.statistics()}
        left = {name: count for name, count in counts.items() if count}
        if left:
            _log.info("worker %r leaves while references are alive: %s", self.runtime.name, left)

    def _ask_user(self, user: str, keys: list[ObjectKey]) -> list[bool]:
        local_incarnation = self.runtime.local_member.incarnation
        if user == local_incarnation:  # a message to ourselves that never arrived
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
            # no answer is no evidence; if it is lost, that is found elsewhere
            return [True] * len(keys)
        return held

    def _name_of(self, incarnation: str) -> str:
        return self.runtime.directory.name_of(incarnation)

    def _tick(self) -> None:
        if self.held.dropped:
            self.runtime.threads.start(self.sweep)

    def _on_worker_lost(self, name: str, incarnation: str) -> None:
        self._outboxes.pop(incarnation, None)
        self.inbox.forget(incarnation)
        self.owned.remove_worker(incarnation)
        self.held.remove_owner(incarnation)

    def _watch_worker(self, user: str) -> None:
        """Somebody else gave this worker a reference to an object of ours: its death must not go unnoticed."""
        if user not in self._watched_workers and user != self.runtime.local_member.incarnation:
            self._watched_workers.add(user)
            self.runtime.watch(user)

    def _apply_message(self, message: ReferenceMessage) -> None:
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
    """Inside a call that is meant for the owner of a reference: its keeper, if this still is that owner."""
    manager = ReferenceManager.of(active_runtime())
    if manager.runtime.local_member.incarnation != owner:
        raise StaleReference(
            f"the reference belongs to an earlier life of worker {manager.runtime.name!r}, which has restarted since; "
            "its objects are gone"
        )
    return manager


@internal
def _deliver(
    owner: str, sender: str, sequence_number: int, messages: list[ReferenceMessage]
) -> None:
    owner_manager(owner).inbox.receive(sender, sequence_number, messages)


@internal
def _which_are_held(owner: str, keys: list[ObjectKey]) -> list[bool]:
    return ReferenceManager.of(active_runtime()).held.holds(owner, keys)

"""`ReferenceManager`: everything an agent has to do with references. One per agent, made on first use.

It joins the books (`ownership`) with the agent: notes go out and come in, dropped references are swept on the clock,
lost workers are written off, balances that look wrong are audited, and the functions at the end of this file are what
other workers call.
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
_SWEEP_AT = 1000
_AUDIT_EVERY = 5.0
_PATIENCE = 30.0

_log = logging.getLogger(__name__)


class ReferenceManager:
    def __init__(self, agent: AgentRuntime) -> None:
        self.agent = agent
        me = agent.local_member.incarnation
        # One lock for both sides: the garbage collector may run a destructor while one of them is
        # locked, and that may use the other.
        lock = threading.RLock()
        self.owned = OwnedObjects(me, lock)
        self.held = HeldReferences(me, lock)
        self.inbox = MessageInbox(self._apply)
        self._outboxes: dict[str, MessageOutbox] = {}
        self._lock = threading.Lock()
        self._suspected: dict[tuple[str, ObjectKey], float] = {}
        self._watched: set[str] = set()
        self.pending: set[ObjectKey] = set()  # creations that their owners have not confirmed
        agent.on_loss(self._lost)
        agent.on_close(self._report_leftovers)
        agent.on_end(self.owned.close)
        agent.add_statistics(self.statistics)
        agent.clock.every(_SWEEP_EVERY, self._tick)
        agent.clock.every(_AUDIT_EVERY, lambda: agent.threads.start(self.audit))
        self._sweeping = False

    @classmethod
    def of(cls, agent: AgentRuntime | None) -> ReferenceManager:
        if agent is None:
            raise InternalError("references need an agent")
        return agent.service(cls)

    def __repr__(self) -> str:
        return (
            f"<ReferenceManager of {self.agent.name}: {self.owned!r}, {self.held!r}, "
            f"{self.inbox!r}, {list(self._outboxes.values())}>"
        )

    def note(self, owner_name: str, owner: str, *notes: ReferenceMessage) -> None:
        """Tell an owner something; our own books are told directly."""
        if owner == self.agent.local_member.incarnation:
            for note in notes:
                self._apply(note)
            return
        with self._lock:
            outbox = self._outboxes.get(owner)
            if outbox is None:
                outbox = self._outboxes[owner] = MessageOutbox(
                    self.agent, owner_name, owner, _deliver
                )
        outbox.send(list(notes))

    def export(self, owner_name: str, owner: str, key: ObjectKey, holder: str) -> None:
        """A reference is about to be sent to `holder`: its owner must know before it leaves."""
        self.note(owner_name, owner, ("lend", key, holder))

    def sweep(self) -> None:
        """Give back what died here since the last time."""
        me = self.agent.local_member.incarnation
        by_owner: dict[str, list[ReferenceMessage]] = {}
        released, own = self.held.sweep()
        self.owned.drop(own)
        for owner, key, count in released:
            by_owner.setdefault(owner, []).append(("release", key, me, count))
        for owner, notes in by_owner.items():
            self.note(self._name_of(owner), owner, *notes)

    def sweep_if_many(self) -> None:
        """Let the clock sweep at once if many references have died: a loop that makes and drops them is faster."""
        if self.held.dropped > _SWEEP_AT and not self._sweeping:
            self._sweeping = True
            self.agent.clock.at(time.monotonic(), self._sweep_now)

    def _sweep_now(self) -> None:
        try:
            self._tick()
        finally:
            self._sweeping = False

    def void(
        self, owner_name: str, owner: str, key: ObjectKey, error: BaseException | None
    ) -> None:
        """Tell an owner that an object will never be created: its creation failed here before it was sent."""
        self.note(
            owner_name,
            owner,
            ("void", key, f"{type(error).__name__}: {text_of(error or Exception())}"),
        )

    def audit(self) -> None:
        """Ask holders whose balance has not moved for a while whether they really hold; twice, then write off."""
        if self.agent.closing:
            return
        suspected: dict[tuple[str, ObjectKey], float] = {}
        for holder, keys in self.owned.suspects(time.monotonic()).items():
            known = self._ask(holder, [key for key, _ in keys])
            for (key, moved), is_known in zip(keys, known, strict=True):
                if is_known:
                    continue
                if self._suspected.get((holder, key)) == moved:
                    self.owned.write_off(key, holder, moved)
                else:
                    suspected[holder, key] = moved
        self._suspected = suspected

    def statistics(self) -> dict[str, int]:
        unacknowledged = sum(outbox.unacknowledged for outbox in list(self._outboxes.values()))
        return {
            **self.owned.statistics(),
            **self.held.statistics(),
            "unconfirmed_creations": len(self.pending),
            "unacknowledged_reference_messages": unacknowledged,
        }

    def _report_leftovers(self) -> None:
        counts = {**self.owned.statistics(), **self.held.statistics()}
        left = {name: count for name, count in counts.items() if count}
        if left:
            _log.info("worker %r leaves while references are alive: %s", self.agent.name, left)

    def _ask(self, holder: str, keys: list[ObjectKey]) -> list[bool]:
        me = self.agent.local_member.incarnation
        if holder == me:  # a message to ourselves that never arrived
            return [False] * len(keys)
        try:
            question = self.agent.start(
                self._name_of(holder), _known, (me, keys), None, _PATIENCE, internal=True
            )
            answer: list[bool] = question.wait()
        except TelegradError:
            # no answer is no evidence; if it is lost, that is found elsewhere
            return [True] * len(keys)
        return answer

    def _name_of(self, incarnation: str) -> str:
        return self.agent.directory.name_of(incarnation)

    def _tick(self) -> None:
        if self.held.dropped:
            self.agent.threads.start(self.sweep)

    def _lost(self, name: str, incarnation: str) -> None:
        self._outboxes.pop(incarnation, None)
        self.inbox.forget(incarnation)
        self.owned.lost(incarnation)
        self.held.lost(incarnation)

    def _watch(self, holder: str) -> None:
        """Somebody else gave this worker a reference to an object of ours: its death must not go unnoticed."""
        if holder not in self._watched and holder != self.agent.local_member.incarnation:
            self._watched.add(holder)
            self.agent.watch(holder)

    def _apply(self, note: ReferenceMessage) -> None:
        kind, key, *rest = note
        if kind == "lend":
            self.owned.lend(key, *rest)
            self._watch(rest[0])
        elif kind == "release":
            self.owned.release(key, *rest)
        elif kind == "void":
            self.owned.void(key, *rest)
        else:
            raise InternalError(f"an unknown note {note}")


def owner_manager(owner: str) -> ReferenceManager:
    """Inside a call that is meant for the owner of a reference: its keeper, if this still is that owner."""
    keeper = ReferenceManager.of(active_runtime())
    if keeper.agent.local_member.incarnation != owner:
        raise StaleReference(
            f"the reference belongs to an earlier life of worker {keeper.agent.name!r}, which has restarted since; "
            "its objects are gone"
        )
    return keeper


@internal
def _deliver(owner: str, sender: str, number: int, notes: list[ReferenceMessage]) -> None:
    owner_manager(owner).inbox.receive(sender, number, notes)


@internal
def _known(owner: str, keys: list[ObjectKey]) -> list[bool]:
    return ReferenceManager.of(active_runtime()).held.known(owner, keys)

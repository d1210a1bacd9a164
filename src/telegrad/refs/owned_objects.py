"""Who refers to what: the books that keep an object alive exactly while a live worker refers to it.

Every object has one owner. The owner's `OwnedObject` counts, for every other worker, how often a reference was sent to
it minus how many of those it has given up (`balance`), and its own live references (`here`). The object goes when none
is left.

- The owner counts a reference when it packs it for a peer.
- A user that passes a reference on tells the owner first (`lend`). Its notes to an owner are numbered and applied in
  order (see `notes`), so the owner hears of the new holder before it can hear that the old one gave up.
- A reference that comes to its owner as an argument needs no note: the caller's own lives until the call has ended.
- A user that has dropped its last reference gives back all it has received of it (`release`). Dropping happens inside
  the garbage collector, so it only appends to a queue; `sweep` does the rest, on the clock.
- A worker that is lost gives up everything at once.
- A message with a reference that never arrived leaves a balance that nobody will give back. The owner asks now and then
  (`audit`) about balances that have not moved for a while, and writes off what the other side does not know.

Creation: `remote` names the object before the owner knows of it: (its creator, a number that counts up without gaps per
owner). So an unknown key is either still on its way, and one waits for it, or is gone for good; `SequenceSet` tells
which.

State: entries, arrivals and holdings, under `_lock`; the queue of dropped references is a deque and takes no lock.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from telegrad.errors import PeerLost, StaleReference
from telegrad.futures import Future

AUDIT_AFTER = 10.0
_settling = threading.Lock()
_LEFT = "this worker has left the group while the object was being created"


class ObjectKey(NamedTuple):
    """The name of an object at its owner: the incarnation that created it and a number."""

    creator: str
    number: int


class SequenceSet:
    """Which numbers of a sequence have arrived, in any order. A number that never comes costs one gap, no more."""

    def __init__(self) -> None:
        self._upto = 0
        self._end_of: dict[int, int] = {}  # ranges beyond the first gap, by their first number
        self._start_of: dict[int, int] = {}  # and by their last

    def add(self, number: int) -> None:
        if number == self._upto + 1 and not self._end_of:
            self._upto = number
            return
        if number in self:
            return
        start = self._start_of.pop(number - 1, number)
        end = self._end_of.pop(number + 1, number)
        if start == self._upto + 1:
            self._upto = end
            self._end_of.pop(start, None)
            self._start_of.pop(end, None)
        else:
            self._end_of[start], self._start_of[end] = end, start

    def __contains__(self, number: int) -> bool:
        if number <= self._upto:
            return True
        return any(start <= number <= end for start, end in self._end_of.items())


class OwnedObject:
    """An object at its owner. Only those that somebody waits for have a future: making one takes long.

    State: what the object is, under `_settling`; set once. The rest belongs to the books.
    """

    __slots__ = (
        "_error",
        "_future",
        "_object",
        "balance",
        "created",
        "done",
        "here",
        "key",
        "moved",
    )

    def __init__(self, key: ObjectKey, created: bool = False, here: int = 0) -> None:
        self.key = key
        self.created = created
        self.here = here
        self.balance: dict[str, int] = {}
        self.moved = time.monotonic()
        self.done = False
        self._object: Any = None
        self._error: Exception | None = None
        self._future: Future[Any] | None = None

    def settle(self, value: Any, error: Exception | None) -> None:
        """The object is there, or it will never be; the first who says so is right."""
        try:
            with _settling:
                if not self.done:
                    self._object, self._error, self.done = value, error, True
        finally:  # whatever was raised meanwhile: whoever waits must be woken
            if self.done and self._future is not None:
                self._future._settle(self._object, self._error)

    @property
    def future(self) -> Future[Any]:
        """A future for the object."""
        made: Future[Any] = Future()
        with _settling:
            future = self._future = self._future or made
        if self.done:
            future._settle(self._object, self._error)
        return future

    def value(self, timeout: float | None = None) -> Any:
        """The object, within `timeout` seconds; raises what its creation raised."""
        if not self.done:
            return self.future.result(timeout)
        if self._error is not None:
            raise self._error
        return self._object

    def count(self, holder: str, change: int) -> None:
        """A holder received or gave up references. A balance may be negative for a moment: notes overtake messages."""
        left = self.balance.get(holder, 0) + change
        self.moved = time.monotonic()
        if left:
            self.balance[holder] = left
        else:
            self.balance.pop(holder, None)

    @property
    def wanted(self) -> bool:
        return (
            not self.created or self.here > 0 or any(count > 0 for count in self.balance.values())
        )


class OwnedObjects:
    """The objects that one agent owns."""

    def __init__(self, me: str, lock: threading.RLock) -> None:
        self._me = me
        self._lock = lock
        self._entries: dict[ObjectKey, OwnedObject] = {}
        self._closed = False  # what has not arrived will not come
        self._arrivals: defaultdict[str, SequenceSet] = defaultdict(SequenceSet)
        self._lost: set[str] = set()
        self._next = 0

    def __repr__(self) -> str:
        return f"<OwnedObjects: {len(self._entries)}>"

    def next_key(self) -> ObjectKey:
        """A name for an object that this worker is about to create."""
        with self._lock:
            self._next += 1
            return ObjectKey(self._me, self._next)

    def own(self, value: Any) -> ObjectKey:
        """A new object of this worker, with one reference here."""
        with self._lock:
            self._next += 1
            key = ObjectKey(self._me, self._next)
            self._arrivals[self._me].add(self._next)
            entry = self._entries[key] = OwnedObject(key, created=True, here=1)
        entry.settle(value, None)
        return key

    def create(self, key: ObjectKey) -> OwnedObject:
        """A creator's `remote` has arrived: its reference counts from now on, the value follows."""
        with self._lock:
            self._arrivals[key.creator].add(key.number)
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = OwnedObject(key)
            entry.created = True
            if key.creator == self._me:
                entry.here += 1
            elif key.creator not in self._lost:
                entry.count(key.creator, +1)
            return entry

    def void(self, key: ObjectKey, reason: str) -> None:
        """A `remote` that failed before it was sent: nobody will ever create this number."""
        with self._lock:
            self._arrivals[key.creator].add(key.number)
            entry = self._entries.get(key)
            if entry is None or entry.created:
                return
            del self._entries[key]
        entry.settle(None, StaleReference(f"this object was never created: {reason}"))

    def settle(self, entry: OwnedObject) -> None:
        """The value is there; if nobody wants it any more, it goes."""
        with self._lock:
            self._discard_unwanted(entry)

    def find(self, key: ObjectKey) -> OwnedObject:
        """The entry of an object; for one that is still on its way, an entry whose value will come."""
        with self._lock:
            entry = self._entry(key)
            if entry is not None:
                return entry
            if key.number in self._arrivals[key.creator]:
                raise StaleReference(
                    f"the object {key.number} of this reference no longer exists at its owner"
                )
            raise PeerLost(
                "the worker that was creating this object died before its request arrived"
            )

    def _entry(self, key: ObjectKey) -> OwnedObject | None:
        """Return the entry of an object, or a new one if it is on its way; None if it is gone or will never come."""
        entry = self._entries.get(key)
        if (
            entry is None
            and key.creator not in self._lost
            and key.number not in self._arrivals[key.creator]
        ):
            entry = self._entries[key] = OwnedObject(key)
            if self._closed:
                entry.settle(None, PeerLost(_LEFT))
        return entry

    def receive(self, key: ObjectKey) -> None:
        """A reference has arrived here."""
        with self._lock:
            entry = self.find(key)
            entry.here += 1
            entry.count(self._me, -1)

    def come_home(self, key: ObjectKey) -> None:
        """A reference to an object of this worker has arrived, from one who holds another meanwhile."""
        with self._lock:
            self.find(key).here += 1

    def cancel(self, key: ObjectKey) -> None:
        """Undo the making of a reference that `remote` could not send."""
        with self._lock:
            self._entries.pop(key, None)
            self._arrivals[self._me].add(key.number)

    def drop(self, keys: Iterable[ObjectKey]) -> None:
        """References of this worker have died, one per key."""
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    entry.here -= 1
                    self._discard_unwanted(entry)

    def lend(self, key: ObjectKey, holder: str) -> None:
        """A reference is on its way to `holder`."""
        with self._lock:
            entry = self._entry(key)
            if entry is not None and holder not in self._lost:
                entry.count(holder, +1)
                self._discard_unwanted(entry)

    def release(self, key: ObjectKey, holder: str, count: int) -> None:
        """A holder gives up `count` references."""
        with self._lock:
            entry = self._entry(key)
            if entry is not None and holder not in self._lost:
                entry.count(holder, -count)
                self._discard_unwanted(entry)

    def lost(self, holder: str) -> None:
        """A worker is gone: its references count no longer, and what it had not created yet never comes."""
        orphans = []
        with self._lock:
            self._lost.add(holder)
            for entry in list(self._entries.values()):
                if not entry.created and entry.key.creator == holder:
                    orphans.append(self._entries.pop(entry.key))
                    continue
                entry.balance.pop(holder, None)
                self._discard_unwanted(entry)
        for entry in orphans:
            entry.settle(None, PeerLost("the worker that was creating this object died"))

    def close(self) -> None:
        """This worker leaves: what is still on its way will not come, and whoever waits for it here is told."""
        with self._lock:
            self._closed = True
            unfinished = [entry for entry in self._entries.values() if not entry.done]
        for entry in unfinished:
            entry.settle(None, PeerLost(_LEFT))

    def suspects(self, now: float) -> dict[str, list[tuple[ObjectKey, float]]]:
        """Balances that have not moved for a while, by holder."""
        found: defaultdict[str, list[tuple[ObjectKey, float]]] = defaultdict(list)
        with self._lock:
            for entry in self._entries.values():
                if now - entry.moved > AUDIT_AFTER:
                    for holder, count in entry.balance.items():
                        if count > 0:
                            found[holder].append((entry.key, entry.moved))
        return found

    def write_off(self, key: ObjectKey, holder: str, moved: float) -> None:
        """The holder knows nothing of this object, and nothing has moved since it was asked."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.moved == moved:
                entry.balance.pop(holder, None)
                self._discard_unwanted(entry)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "owned_objects": sum(entry.created for entry in self._entries.values()),
                "references_of_others": sum(len(entry.balance) for entry in self._entries.values()),
                "objects_not_created": sum(not entry.created for entry in self._entries.values()),
            }

    def _discard_unwanted(self, entry: OwnedObject) -> None:
        if not entry.wanted and entry.done:
            self._entries.pop(entry.key, None)

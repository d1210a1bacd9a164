"""Who refers to what: the books that keep an object alive exactly while a live worker refers to it.

Every object has one owner. The owner's `OwnedObject` counts, for every other worker, how often a
reference was sent to it minus how many of those it has given up (`user_counts`), and its own live
references (`local_count`). The object goes when none is left.

- The owner counts a reference when it packs it for a peer.
- A user that passes a reference on tells the owner first (`lend`). Its notes to an owner are
  numbered and applied in order (see `notes`), so the owner hears of the new holder before it can
  hear that the old one gave up.
- A reference that comes to its owner as an argument needs no note: the caller's own lives until the
  call has ended.
- A user that has dropped its last reference gives back all it has received of it (`release`).
  Dropping happens inside the garbage collector, so it only appends to a queue; `sweep` does the
  rest, on the clock.
- A worker that is lost gives up everything at once.
- A message with a reference that never arrived leaves a balance that nobody will give back. The
  owner asks now and then (`audit`) about balances that have not moved for a while, and writes off
  what the other side does not know.

Creation: `remote` names the object before the owner knows of it: (its creator, a number that counts
up without gaps per owner). So an unknown key is either still on its way, and one waits for it, or
is gone for good; `SequenceSet` tells which.

State: entries, arrivals and holdings, under `_lock`; the queue of dropped references is a deque and
takes no lock.
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
_settle_lock = threading.Lock()
_LEFT_GROUP = "this worker has left the group while the object was being created"


class ObjectKey(NamedTuple):
    """The name of an object at its owner: the incarnation that created it and a number."""

    creator: str
    sequence_number: int


class SequenceSet:
    """Which numbers of a sequence have arrived, in any order. A number that never comes costs one gap, no more."""

    def __init__(self) -> None:
        self._contiguous_end = 0
        self._range_ends: dict[int, int] = {}  # ranges beyond the first gap, by their first number
        self._range_starts: dict[int, int] = {}  # and by their last

    def add(self, sequence_number: int) -> None:
        if sequence_number == self._contiguous_end + 1 and not self._range_ends:
            self._contiguous_end = sequence_number
            return
        if sequence_number in self:
            return
        start = self._range_starts.pop(sequence_number - 1, sequence_number)
        end = self._range_ends.pop(sequence_number + 1, sequence_number)
        if start == self._contiguous_end + 1:
            self._contiguous_end = end
            self._range_ends.pop(start, None)
            self._range_starts.pop(end, None)
        else:
            self._range_ends[start], self._range_starts[end] = end, start

    def __contains__(self, sequence_number: int) -> bool:
        if sequence_number <= self._contiguous_end:
            return True
        return any(start <= sequence_number <= end for start, end in self._range_ends.items())


class OwnedObject:
    """An object at its owner. Only those that somebody waits for have a future: making one takes long.

    State: what the object is, under `_settle_lock`; set once. The rest belongs to the books.
    """

    __slots__ = (
        "_error",
        "_future",
        "_value",
        "changed_at",
        "created",
        "done",
        "key",
        "local_count",
        "user_counts",
    )

    def __init__(self, key: ObjectKey, created: bool = False, local_count: int = 0) -> None:
        self.key = key
        self.created = created
        self.local_count = local_count
        self.user_counts: dict[str, int] = {}
        self.changed_at = time.monotonic()
        self.done = False
        self._value: Any = None
        self._error: Exception | None = None
        self._future: Future[Any] | None = None

    def settle(self, value: Any, error: Exception | None) -> None:
        """The object is there, or it will never be; the first who says so is right."""
        try:
            with _settle_lock:
                if not self.done:
                    self._value, self._error, self.done = value, error, True
        finally:  # whatever was raised meanwhile: whoever waits must be woken
            if self.done and self._future is not None:
                self._future._settle(self._value, self._error)

    @property
    def future(self) -> Future[Any]:
        """A future for the object."""
        made: Future[Any] = Future()
        with _settle_lock:
            future = self._future = self._future or made
        if self.done:
            future._settle(self._value, self._error)
        return future

    def value(self, timeout: float | None = None) -> Any:
        """The object, within `timeout` seconds; raises what its creation raised."""
        if not self.done:
            return self.future.result(timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def add_to_count(self, user: str, change: int) -> None:
        """A holder received or gave up references. A balance may be negative for a moment: notes overtake messages."""
        left = self.user_counts.get(user, 0) + change
        self.changed_at = time.monotonic()
        if left:
            self.user_counts[user] = left
        else:
            self.user_counts.pop(user, None)

    @property
    def is_referenced(self) -> bool:
        return (
            not self.created
            or self.local_count > 0
            or any(count > 0 for count in self.user_counts.values())
        )


class OwnedObjects:
    """The objects that one agent owns."""

    def __init__(self, local_incarnation: str, lock: threading.RLock) -> None:
        self._local_incarnation = local_incarnation
        self._lock = lock
        self._objects: dict[ObjectKey, OwnedObject] = {}
        self._closed = False  # what has not arrived will not come
        self._arrivals: defaultdict[str, SequenceSet] = defaultdict(SequenceSet)
        self._lost: set[str] = set()
        self._last_sequence_number = 0

    def __repr__(self) -> str:
        return f"<OwnedObjects: {len(self._objects)}>"

    def next_key(self) -> ObjectKey:
        """A name for an object that this worker is about to create."""
        with self._lock:
            self._last_sequence_number += 1
            return ObjectKey(self._local_incarnation, self._last_sequence_number)

    def own(self, value: Any) -> ObjectKey:
        """A new object of this worker, with one reference here."""
        with self._lock:
            self._last_sequence_number += 1
            key = ObjectKey(self._local_incarnation, self._last_sequence_number)
            self._arrivals[self._local_incarnation].add(self._last_sequence_number)
            owned_object = self._objects[key] = OwnedObject(key, created=True, local_count=1)
        owned_object.settle(value, None)
        return key

    def create(self, key: ObjectKey) -> OwnedObject:
        """A creator's `remote` has arrived: its reference counts from now on, the value follows."""
        with self._lock:
            self._arrivals[key.creator].add(key.sequence_number)
            owned_object = self._objects.get(key)
            if owned_object is None:
                owned_object = self._objects[key] = OwnedObject(key)
            owned_object.created = True
            if key.creator == self._local_incarnation:
                owned_object.local_count += 1
            elif key.creator not in self._lost:
                owned_object.add_to_count(key.creator, +1)
            return owned_object

    def void(self, key: ObjectKey, reason: str) -> None:
        """A `remote` that failed before it was sent: nobody will ever create this number."""
        with self._lock:
            self._arrivals[key.creator].add(key.sequence_number)
            owned_object = self._objects.get(key)
            if owned_object is None or owned_object.created:
                return
            del self._objects[key]
        owned_object.settle(None, StaleReference(f"this object was never created: {reason}"))

    def remove_if_unreferenced(self, owned_object: OwnedObject) -> None:
        """The value is there; if nobody wants it any more, it goes."""
        with self._lock:
            self._remove_if_unreferenced(owned_object)

    def find(self, key: ObjectKey) -> OwnedObject:
        """The entry of an object; for one that is still on its way, an entry whose value will come."""
        with self._lock:
            owned_object = self._find_or_expect(key)
            if owned_object is not None:
                return owned_object
            if key.sequence_number in self._arrivals[key.creator]:
                raise StaleReference(
                    f"the object {key.sequence_number} of this reference no longer exists at its owner"
                )
            raise PeerLost(
                "the worker that was creating this object died before its request arrived"
            )

    def _find_or_expect(self, key: ObjectKey) -> OwnedObject | None:
        """Return the entry of an object, or a new one if it is on its way; None if it is gone or will never come."""
        owned_object = self._objects.get(key)
        if (
            owned_object is None
            and key.creator not in self._lost
            and key.sequence_number not in self._arrivals[key.creator]
        ):
            owned_object = self._objects[key] = OwnedObject(key)
            if self._closed:
                owned_object.settle(None, PeerLost(_LEFT_GROUP))
        return owned_object

    def receive(self, key: ObjectKey) -> None:
        """A reference has arrived here."""
        with self._lock:
            owned_object = self.find(key)
            owned_object.local_count += 1
            owned_object.add_to_count(self._local_incarnation, -1)

    def add_local_reference(self, key: ObjectKey) -> None:
        """A reference to an object of this worker has arrived, from one who holds another meanwhile."""
        with self._lock:
            self.find(key).local_count += 1

    def cancel(self, key: ObjectKey) -> None:
        """Undo the making of a reference that `remote` could not send."""
        with self._lock:
            self._objects.pop(key, None)
            self._arrivals[self._local_incarnation].add(key.sequence_number)

    def drop_local_references(self, keys: Iterable[ObjectKey]) -> None:
        """References of this worker have died, one per key."""
        with self._lock:
            for key in keys:
                owned_object = self._objects.get(key)
                if owned_object is not None:
                    owned_object.local_count -= 1
                    self._remove_if_unreferenced(owned_object)

    def lend(self, key: ObjectKey, user: str) -> None:
        """A reference is on its way to `user`."""
        with self._lock:
            owned_object = self._find_or_expect(key)
            if owned_object is not None and user not in self._lost:
                owned_object.add_to_count(user, +1)
                self._remove_if_unreferenced(owned_object)

    def release(self, key: ObjectKey, user: str, count: int) -> None:
        """A holder gives up `count` references."""
        with self._lock:
            owned_object = self._find_or_expect(key)
            if owned_object is not None and user not in self._lost:
                owned_object.add_to_count(user, -count)
                self._remove_if_unreferenced(owned_object)

    def remove_worker(self, user: str) -> None:
        """A worker is gone: its references count no longer, and what it had not created yet never comes."""
        never_created = []
        with self._lock:
            self._lost.add(user)
            for owned_object in list(self._objects.values()):
                if not owned_object.created and owned_object.key.creator == user:
                    never_created.append(self._objects.pop(owned_object.key))
                    continue
                owned_object.user_counts.pop(user, None)
                self._remove_if_unreferenced(owned_object)
        for owned_object in never_created:
            owned_object.settle(None, PeerLost("the worker that was creating this object died"))

    def close(self) -> None:
        """This worker leaves: what is still on its way will not come, and whoever waits for it here is told."""
        with self._lock:
            self._closed = True
            not_created = [
                owned_object for owned_object in self._objects.values() if not owned_object.done
            ]
        for owned_object in not_created:
            owned_object.settle(None, PeerLost(_LEFT_GROUP))

    def unchanged_counts(self, now: float) -> dict[str, list[tuple[ObjectKey, float]]]:
        """Balances that have not moved for a while, by holder."""
        found: defaultdict[str, list[tuple[ObjectKey, float]]] = defaultdict(list)
        with self._lock:
            for owned_object in self._objects.values():
                if now - owned_object.changed_at > AUDIT_AFTER:
                    for user, count in owned_object.user_counts.items():
                        if count > 0:
                            found[user].append((owned_object.key, owned_object.changed_at))
        return found

    def clear_count(self, key: ObjectKey, user: str, changed_at: float) -> None:
        """The holder knows nothing of this object, and nothing has moved since it was asked."""
        with self._lock:
            owned_object = self._objects.get(key)
            if owned_object is not None and owned_object.changed_at == changed_at:
                owned_object.user_counts.pop(user, None)
                self._remove_if_unreferenced(owned_object)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "owned_objects": sum(
                    owned_object.created for owned_object in self._objects.values()
                ),
                "references_of_others": sum(
                    len(owned_object.user_counts) for owned_object in self._objects.values()
                ),
                "objects_not_created": sum(
                    not owned_object.created for owned_object in self._objects.values()
                ),
            }

    def _remove_if_unreferenced(self, owned_object: OwnedObject) -> None:
        if not owned_object.is_referenced and owned_object.done:
            self._objects.pop(owned_object.key, None)

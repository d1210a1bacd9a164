"""The objects that this worker owns, and how many references each worker has to them.

Every object has one owner, which keeps it alive while any live worker refers to it. For each
object the owner keeps an `OwnedObject`. Its `user_counts` holds, for every other worker, the
number of references that were sent to that worker minus the number that it has released. Its
`local_count` is the number of references that are alive on the owner itself. The owner removes
the object when no count is positive.

The counts change as follows:

- The owner adds one when it packs a reference for a peer.
- A user that passes a reference on tells the owner first (*lend*). Messages from a user to an
  owner are numbered and applied in order (see `manager`), so the owner counts the new user before
  it can learn that the old one has released its reference.
- A reference that is sent to its owner as an argument of a call needs no message: the caller's
  own reference lives until the call has ended.
- A user that has dropped its last reference gives back all that it has received of it (*release*).
  References die inside the garbage collector, so their end is only appended to a queue, which
  *sweep* processes (see `manager`).
- All counts of a worker that is lost are removed at once.
- A message that carries a reference and never arrives leaves a count that no user will release. The
  owner asks users about counts that have not changed for a while (*audit*, see `manager`) and
  removes those that the user does not know.

`remote` chooses the key of the new object before the owner knows of it: the creator's incarnation
and a sequence number that has no gaps per creator and owner. An unknown key therefore belongs to
an object that either is still to be created, in which case the owner waits for it, or no longer
exists. `SequenceSet` distinguishes the two. If a creation fails before it is sent, its creator
tells the owner that this key will never be used (*void*). The owner keeps the last reasons, for
calls that use such a key later.

State: `OwnedObjects` and the counts of its objects, under the lock that is passed to it; the value
of an `OwnedObject`, under `_settle_lock`, set once.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from telegrad.errors import PeerLost, StaleReference
from telegrad.futures import Future
from telegrad.locks import new_lock
from telegrad.wire.handshake import Incarnation

AUDIT_AFTER = 10.0  # seconds without a change after which a count is audited
_settle_lock = new_lock()
_MAX_VOID_REASONS = 1000
_LEFT_GROUP = "this worker has left the group while the object was being created"


class ObjectKey(NamedTuple):
    """The name of an object at its owner: the incarnation of its creator and a sequence number."""

    creator: Incarnation
    sequence_number: int


class SequenceSet:
    """The sequence numbers that have arrived, in any order.

    Stores ranges: a number that never arrives costs one range.
    """

    def __init__(self) -> None:
        self._contiguous_end = 0  # all numbers up to this one have arrived
        self._range_ends: dict[int, int] = {}  # ranges after the first gap: first -> last
        self._range_starts: dict[int, int] = {}  # the same ranges: last -> first

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
    """An object at its owner: its value, or the error of its creation, and its reference counts.

    The future is made on demand, because it is expensive and few objects are waited for.

    State: value and error, under `_settle_lock`, set once. `OwnedObjects` guards the rest.
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
        self.user_counts: dict[Incarnation, int] = {}
        self.changed_at = time.monotonic()
        self.done = False
        self._value: Any = None
        self._error: Exception | None = None
        self._future: Future[Any] | None = None

    def complete(self, value: Any, error: Exception | None) -> None:
        """Set the value, or the error of the creation. Only the first call has an effect."""
        try:
            with _settle_lock:
                if not self.done:
                    self._value, self._error, self.done = value, error, True
        finally:  # wake waiting threads even if a signal handler raised
            if self.done and self._future is not None:
                self._future._try_complete(self._value, self._error)

    @property
    def future(self) -> Future[Any]:
        """Return the future for the value."""
        new_future: Future[Any] = Future()
        with _settle_lock:
            future = self._future = self._future or new_future
        if self.done:
            future._try_complete(self._value, self._error)
        return future

    def value(self, timeout: float | None = None) -> Any:
        """Return the value; wait at most `timeout` seconds. Raise the error of the creation."""
        if not self.done:
            return self.future.result(timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def add_to_count(self, user: Incarnation, change: int) -> None:
        """Change the number of references that a user has.

        It may be negative for a moment: a release can overtake the message that was counted.
        """
        count = self.user_counts.get(user, 0) + change
        self.changed_at = time.monotonic()
        if count:
            self.user_counts[user] = count
        else:
            self.user_counts.pop(user, None)

    @property
    def is_referenced(self) -> bool:
        """Return True if the object must be kept: it has references or is still to be created."""
        return (
            not self.created
            or self.local_count > 0
            or any(count > 0 for count in self.user_counts.values())
        )


class OwnedObjects:
    """All objects that one agent owns, by key.

    `lock` is shared with `HeldReferences` (see `ReferenceManager`).
    """

    def __init__(self, local_incarnation: Incarnation, lock: threading.RLock) -> None:
        self._local_incarnation = local_incarnation
        self._lock = lock
        self._objects: dict[ObjectKey, OwnedObject] = {}
        self._closed = False  # no more creations will arrive
        # sequence numbers that were created or voided, by creator
        self._arrived: defaultdict[Incarnation, SequenceSet] = defaultdict(SequenceSet)
        self._void_reasons: dict[ObjectKey, str] = {}  # the last ones, oldest first
        self._lost_workers: set[str] = set()
        self._last_sequence_number = 0

    def __repr__(self) -> str:
        return f"<OwnedObjects: {len(self._objects)}>"

    def next_key(self) -> ObjectKey:
        """Return the key for an object that this worker is about to create for itself."""
        with self._lock:
            self._last_sequence_number += 1
            return ObjectKey(self._local_incarnation, self._last_sequence_number)

    def add(self, value: Any) -> ObjectKey:
        """Add an object of this worker, with one local reference. Return its key."""
        with self._lock:
            self._last_sequence_number += 1
            key = ObjectKey(self._local_incarnation, self._last_sequence_number)
            self._arrived[self._local_incarnation].add(self._last_sequence_number)
            owned_object = self._objects[key] = OwnedObject(key, created=True, local_count=1)
        owned_object.complete(value, None)
        return key

    def create(self, key: ObjectKey) -> OwnedObject:
        """Add the object that a `remote` call creates, and count the reference of its creator."""
        with self._lock:
            self._arrived[key.creator].add(key.sequence_number)
            owned_object = self._objects.get(key)
            if owned_object is None:
                owned_object = self._objects[key] = OwnedObject(key)
            owned_object.created = True
            if key.creator == self._local_incarnation:
                owned_object.local_count += 1
            elif key.creator not in self._lost_workers:
                owned_object.add_to_count(key.creator, +1)
            return owned_object

    def void(self, key: ObjectKey, reason: str) -> None:
        """Record that an object will never be created; `reason` says why its creation failed."""
        with self._lock:
            owned_object = self._objects.get(key)
            is_known = key.sequence_number in self._arrived[key.creator]
            if is_known or (owned_object is not None and owned_object.created):
                return
            self._arrived[key.creator].add(key.sequence_number)
            self._void_reasons[key] = reason
            if len(self._void_reasons) > _MAX_VOID_REASONS:
                del self._void_reasons[next(iter(self._void_reasons))]
            if owned_object is None:
                return
            del self._objects[key]
        owned_object.complete(None, _never_created(reason))

    def remove_if_unreferenced(self, owned_object: OwnedObject) -> None:
        """Remove an object that has its value if no references are left."""
        with self._lock:
            self._remove_if_unreferenced(owned_object)

    def find(self, key: ObjectKey) -> OwnedObject:
        """Return an object, which may still be without a value.

        Raise `StaleReference` if it no longer exists and `PeerLost` if it will never be created.
        """
        with self._lock:
            owned_object = self._find_or_expect(key)
            if owned_object is not None:
                return owned_object
            if key in self._void_reasons:
                raise _never_created(self._void_reasons[key])
            if key.sequence_number in self._arrived[key.creator]:
                raise StaleReference(
                    f"the object {key.sequence_number} of this reference no longer exists "
                    "at its owner"
                )
            raise PeerLost(
                "the worker that was creating this object died before its request arrived"
            )

    def _find_or_expect(self, key: ObjectKey) -> OwnedObject | None:
        """Return an object, or a new one without a value if it is still to be created.

        Return None if it no longer exists or will never be created.
        """
        owned_object = self._objects.get(key)
        if (
            owned_object is None
            and key.creator not in self._lost_workers
            and key.sequence_number not in self._arrived[key.creator]
        ):
            owned_object = self._objects[key] = OwnedObject(key)
            if self._closed:
                owned_object.complete(None, PeerLost(_LEFT_GROUP))
        return owned_object

    def receive(self, key: ObjectKey) -> None:
        """Count a reference that was lent to this worker and has arrived."""
        with self._lock:
            owned_object = self.find(key)
            owned_object.local_count += 1
            owned_object.add_to_count(self._local_incarnation, -1)

    def add_local_reference(self, key: ObjectKey) -> None:
        """Count a reference that arrived without a `lend`: its sender keeps its own meanwhile."""
        with self._lock:
            self.find(key).local_count += 1

    def cancel(self, key: ObjectKey) -> None:
        """Remove the object of a `remote` call to this worker that could not be sent."""
        with self._lock:
            self._objects.pop(key, None)
            self._arrived[self._local_incarnation].add(key.sequence_number)

    def drop_local_references(self, keys: Iterable[ObjectKey]) -> None:
        """Subtract one local reference for each key."""
        with self._lock:
            for key in keys:
                owned_object = self._objects.get(key)
                if owned_object is not None:
                    owned_object.local_count -= 1
                    self._remove_if_unreferenced(owned_object)

    def lend(self, key: ObjectKey, user: Incarnation) -> None:
        """Count a reference that is about to be sent to `user`."""
        with self._lock:
            owned_object = self._find_or_expect(key)
            if owned_object is not None and user not in self._lost_workers:
                owned_object.add_to_count(user, +1)
                self._remove_if_unreferenced(owned_object)

    def release(self, key: ObjectKey, user: Incarnation, count: int) -> None:
        """Subtract `count` references that a user has given up."""
        with self._lock:
            owned_object = self._find_or_expect(key)
            if owned_object is not None and user not in self._lost_workers:
                owned_object.add_to_count(user, -count)
                self._remove_if_unreferenced(owned_object)

    def remove_worker(self, user: Incarnation) -> None:
        """Remove the references of a lost worker, and fail the creations that it had begun."""
        never_created = []
        with self._lock:
            self._lost_workers.add(user)
            for owned_object in list(self._objects.values()):
                if not owned_object.created and owned_object.key.creator == user:
                    never_created.append(self._objects.pop(owned_object.key))
                    continue
                owned_object.user_counts.pop(user, None)
                self._remove_if_unreferenced(owned_object)
        for owned_object in never_created:
            owned_object.complete(None, PeerLost("the worker that was creating this object died"))

    def close(self) -> None:
        """Fail all objects without a value: this worker leaves, so they will not be created."""
        with self._lock:
            self._closed = True
            without_value = [
                owned_object for owned_object in self._objects.values() if not owned_object.done
            ]
        for owned_object in without_value:
            owned_object.complete(None, PeerLost(_LEFT_GROUP))

    def unchanged_counts(self, now: float) -> dict[Incarnation, list[tuple[ObjectKey, float]]]:
        """Return the objects whose counts have not changed for a while, by user.

        Each comes with the time of its last change, for `clear_count`.
        """
        found: defaultdict[Incarnation, list[tuple[ObjectKey, float]]] = defaultdict(list)
        with self._lock:
            for owned_object in self._objects.values():
                if now - owned_object.changed_at > AUDIT_AFTER:
                    for user, count in owned_object.user_counts.items():
                        if count > 0:
                            found[user].append((owned_object.key, owned_object.changed_at))
        return found

    def clear_count(self, key: ObjectKey, user: Incarnation, changed_at: float) -> None:
        """Remove the count of a user that does not know the object, unless it has changed."""
        with self._lock:
            owned_object = self._objects.get(key)
            if owned_object is not None and owned_object.changed_at == changed_at:
                owned_object.user_counts.pop(user, None)
                self._remove_if_unreferenced(owned_object)

    def statistics(self) -> dict[str, int]:
        """Return counters for `Agent.statistics`."""
        with self._lock:
            objects = list(self._objects.values())
            created = sum(owned_object.created for owned_object in objects)
            return {
                "owned_objects": created,
                "references_of_others": sum(len(each.user_counts) for each in objects),
                "objects_not_created": len(objects) - created,
            }

    def _remove_if_unreferenced(self, owned_object: OwnedObject) -> None:
        """Like `remove_if_unreferenced`, for a caller that has the lock."""
        if not owned_object.is_referenced and owned_object.done:
            self._objects.pop(owned_object.key, None)


def _never_created(reason: str) -> StaleReference:
    return StaleReference(f"this object was never created: {reason}")

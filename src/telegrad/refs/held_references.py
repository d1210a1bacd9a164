"""The references that are alive on this worker, to its own objects and to those of others.

For every object of another worker, `UserCount` holds how many references have arrived here and how
many are still alive. When none is alive, *sweep* returns the number received, which the owner then
subtracts from its count (see `owned_objects`).

References die inside the garbage collector, at any moment and in any thread. A weak reference
(`ReferenceWatch`) notices that, and its callback only appends to a queue, without a lock. `sweep`
processes the queue later.

State: counts and sequence numbers, under the lock that is passed in. `_dropped` and `_watches` are
changed by single operations that are atomic in CPython, without a lock.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from telegrad.free_threading import snapshot
from telegrad.refs.owned_objects import ObjectKey


class ReferenceWatch(weakref.ref[Any]):
    """A weak reference that notices when an `RRef` dies.

    Its callback is a C function, so no signal handler can interrupt it.
    """

    __slots__ = ("key", "owner")

    owner: str
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

    def __init__(self, local_incarnation: str, lock: threading.RLock) -> None:
        self._local_incarnation = local_incarnation
        self._lock = lock
        self._counts: dict[tuple[str, ObjectKey], UserCount] = {}
        # the `ReferenceWatch` of each reference that died since the last sweep
        self._dropped: deque[weakref.ref[Any]] = deque()
        # keeps each `ReferenceWatch` alive, by its id
        self._watches: dict[int, ReferenceWatch] = {}
        # of the objects that this worker has created elsewhere, by owner
        self._last_sequence_number: defaultdict[str, int] = defaultdict(int)

    def __repr__(self) -> str:
        return f"<HeldReferences: {len(self._counts)}, {len(self._dropped)} to sweep>"

    def next_key(self, owner: str) -> ObjectKey:
        """Return the key for an object that this worker is about to create at `owner`."""
        with self._lock:
            self._last_sequence_number[owner] += 1
            return ObjectKey(self._local_incarnation, self._last_sequence_number[owner])

    def receive(self, owner: str, key: ObjectKey) -> None:
        """Count a reference that has arrived here, or that `remote` has made."""
        with self._lock:
            count = self._counts.setdefault((owner, key), UserCount())
            count.received += 1
            count.alive += 1

    def cancel(self, owner: str, key: ObjectKey) -> None:
        """Remove the count of an object whose creation `remote` could not send."""
        with self._lock:
            self._counts.pop((owner, key), None)

    def watch(self, rref: Any, owner: str, key: ObjectKey) -> None:
        """Put a reference into the queue of `sweep` when it dies."""
        reference_watch = ReferenceWatch(rref, self._dropped.append)
        reference_watch.owner = owner
        reference_watch.key = key
        self._watches[id(reference_watch)] = reference_watch

    @property
    def dropped(self) -> int:
        """The number of references that have died since the last sweep."""
        return len(self._dropped)

    def sweep(self) -> tuple[list[tuple[str, ObjectKey, int]], list[ObjectKey]]:
        """Process the references that have died since the last sweep.

        Return what to release, as (owner, key, number of references), and the key of each dead
        reference to an object of this worker.
        """
        released: list[tuple[str, ObjectKey, int]] = []
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

    def holds(self, owner: str, keys: list[ObjectKey]) -> list[bool]:
        """Return, for each key of `owner`, whether this worker still has to release it."""
        with self._lock:
            dropped = {
                (reference_watch.owner, reference_watch.key)
                for reference_watch in snapshot(self._dropped)
                if isinstance(reference_watch, ReferenceWatch)
            }
            return [(owner, key) in self._counts or (owner, key) in dropped for key in keys]

    def remove_owner(self, owner: str) -> None:
        """Forget all objects of a lost worker."""
        with self._lock:
            for count_owner, key in list(self._counts):
                if count_owner == owner:
                    del self._counts[count_owner, key]

    def statistics(self) -> dict[str, int]:
        """Return counters for `Agent.statistics`."""
        with self._lock:
            return {"held_objects": len(self._counts)}

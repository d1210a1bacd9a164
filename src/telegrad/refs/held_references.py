"""References that are alive on this worker."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from telegrad.interpreter import snapshot
from telegrad.refs.owned_objects import ObjectKey


class ReferenceWatch(weakref.ref[Any]):
    """Watches a reference. Its callback is a C function, so no signal handler can interrupt it."""

    __slots__ = ("key", "owner")

    owner: str
    key: ObjectKey


@dataclass(eq=False)
class UserCount:
    """References of this worker to an object of another."""

    received: int = 0
    alive: int = 0


class HeldReferences:
    """The references that one agent holds: to objects of other workers and to its own."""

    def __init__(self, local_incarnation: str, lock: threading.RLock) -> None:
        self._local_incarnation = local_incarnation
        self._lock = lock
        self._counts: dict[tuple[str, ObjectKey], UserCount] = {}
        # the `ReferenceWatch` of each reference that died
        self._dropped: deque[weakref.ref[Any]] = deque()
        self._watches: dict[int, ReferenceWatch] = {}
        self._last_sequence_number: defaultdict[str, int] = defaultdict(int)

    def __repr__(self) -> str:
        return f"<HeldReferences: {len(self._counts)}, {len(self._dropped)} to sweep>"

    def next_key(self, owner: str) -> ObjectKey:
        """A name for an object that this worker is about to create at `owner`."""
        with self._lock:
            self._last_sequence_number[owner] += 1
            return ObjectKey(self._local_incarnation, self._last_sequence_number[owner])

    def receive(self, owner: str, key: ObjectKey) -> None:
        """A reference has arrived here (or was made here by `remote`)."""
        with self._lock:
            count = self._counts.setdefault((owner, key), UserCount())
            count.received += 1
            count.alive += 1

    def cancel(self, owner: str, key: ObjectKey) -> None:
        """Undo the making of a reference that `remote` could not send."""
        with self._lock:
            self._counts.pop((owner, key), None)

    def watch(self, rref: Any, owner: str, key: ObjectKey) -> None:
        """Notice when a reference dies. The garbage collector tells, at any moment, in any thread: it takes no lock."""
        reference_watch = ReferenceWatch(rref, self._dropped.append)
        reference_watch.owner = owner
        reference_watch.key = key
        self._watches[id(reference_watch)] = reference_watch

    @property
    def dropped(self) -> int:
        """References that died and are not counted yet."""
        return len(self._dropped)

    def sweep(self) -> tuple[list[tuple[str, ObjectKey, int]], list[ObjectKey]]:
        """Count the references that died since the last time; return what is to be given back, and what is ours."""
        released: list[tuple[str, ObjectKey, int]] = []
        own: list[ObjectKey] = []
        with self._lock:
            for _ in range(len(self._dropped)):
                reference_watch = self._dropped.popleft()
                assert isinstance(reference_watch, ReferenceWatch)
                self._watches.pop(id(reference_watch), None)
                owner, key = reference_watch.owner, reference_watch.key
                if owner == self._local_incarnation:
                    own.append(key)
                    continue
                count = self._counts.get((owner, key))
                if count is None:
                    continue  # its owner was lost
                count.alive -= 1
                if count.alive <= 0:  # less if `receive` was interrupted
                    del self._counts[owner, key]
                    released.append((owner, key, count.received))
        return released, own

    def holds(self, owner: str, keys: list[ObjectKey]) -> list[bool]:
        """Which of these objects of `owner` this worker refers to, or is about to give back."""
        with self._lock:
            dropped = {
                (reference_watch.owner, reference_watch.key)
                for reference_watch in snapshot(self._dropped)
                if isinstance(reference_watch, ReferenceWatch)
            }
            return [(owner, key) in self._counts or (owner, key) in dropped for key in keys]

    def remove_owner(self, owner: str) -> None:
        """A worker is gone, and its objects with it."""
        with self._lock:
            for count_owner, key in list(self._counts):
                if count_owner == owner:
                    del self._counts[count_owner, key]

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {"held_objects": len(self._counts)}

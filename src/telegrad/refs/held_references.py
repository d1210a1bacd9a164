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

    def __init__(self, me: str, lock: threading.RLock) -> None:
        self._me = me
        self._lock = lock
        self._holdings: dict[tuple[str, ObjectKey], UserCount] = {}
        # the `ReferenceWatch` of each reference that died
        self._dropped: deque[weakref.ref[Any]] = deque()
        self._watching: dict[int, ReferenceWatch] = {}
        self._next_for: defaultdict[str, int] = defaultdict(int)

    def __repr__(self) -> str:
        return f"<HeldReferences: {len(self._holdings)}, {len(self._dropped)} to sweep>"

    def next_key(self, owner: str) -> ObjectKey:
        """A name for an object that this worker is about to create at `owner`."""
        with self._lock:
            self._next_for[owner] += 1
            return ObjectKey(self._me, self._next_for[owner])

    def receive(self, owner: str, key: ObjectKey) -> None:
        """A reference has arrived here (or was made here by `remote`)."""
        with self._lock:
            holding = self._holdings.setdefault((owner, key), UserCount())
            holding.received += 1
            holding.alive += 1

    def cancel(self, owner: str, key: ObjectKey) -> None:
        """Undo the making of a reference that `remote` could not send."""
        with self._lock:
            self._holdings.pop((owner, key), None)

    def watch(self, rref: Any, owner: str, key: ObjectKey) -> None:
        """Notice when a reference dies. The garbage collector tells, at any moment, in any thread: it takes no lock."""
        lifetime = ReferenceWatch(rref, self._dropped.append)
        lifetime.owner = owner
        lifetime.key = key
        self._watching[id(lifetime)] = lifetime

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
                lifetime = self._dropped.popleft()
                assert isinstance(lifetime, ReferenceWatch)
                self._watching.pop(id(lifetime), None)
                owner, key = lifetime.owner, lifetime.key
                if owner == self._me:
                    own.append(key)
                    continue
                holding = self._holdings.get((owner, key))
                if holding is None:
                    continue  # its owner was lost
                holding.alive -= 1
                if holding.alive <= 0:  # less if `receive` was interrupted
                    del self._holdings[owner, key]
                    released.append((owner, key, holding.received))
        return released, own

    def known(self, owner: str, keys: list[ObjectKey]) -> list[bool]:
        """Which of these objects of `owner` this worker refers to, or is about to give back."""
        with self._lock:
            dropped = {
                (each.owner, each.key)
                for each in snapshot(self._dropped)
                if isinstance(each, ReferenceWatch)
            }
            return [(owner, key) in self._holdings or (owner, key) in dropped for key in keys]

    def lost(self, owner: str) -> None:
        """A worker is gone, and its objects with it."""
        with self._lock:
            for owned_by, key in list(self._holdings):
                if owned_by == owner:
                    del self._holdings[owned_by, key]

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {"held_objects": len(self._holdings)}

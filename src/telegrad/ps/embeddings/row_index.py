"""`RowIndex`: a hash table from row ids to slots. Rows get slots in the order of their insertion.

It uses open addressing with linear probing, and searches and inserts many rows at once with numpy:
each iteration probes one place for every row, and the rows that are not done probe the next place
in the next iteration. Few rows take more than a handful of iterations.

State: `_places`, pairs of a key (the id plus 1; 0 if the place is free) and its slot. At most half
of the places are taken, so every search ends. `ids`, the ids by slot, a view of `_ids_buffer`. Used
by one thread at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from telegrad.ps.embeddings.row_hash import hash_ids

Ids = NDArray[np.int64]

_FREE = 0  # pages of zeroed memory take no space until they are written
_MINIMUM_BITS = 8


class RowIndex:
    """Map row ids to slots.

    >>> index = RowIndex()
    >>> index.add(np.array([70, 10]))
    >>> index.find(np.array([10, 30, 70])).tolist()
    [1, -1, 0]
    """

    def __init__(self) -> None:
        self.ids: Ids = np.empty(0, np.int64)
        self._ids_buffer = np.empty(0, np.int64)
        self._allocate(_MINIMUM_BITS)

    def __repr__(self) -> str:
        return f"<RowIndex: {len(self.ids)} rows, {self._mask + 1} places>"

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Ids) -> Ids:
        """Return the slot of each row, or -1."""
        return self.search(ids)[0]

    def search(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the slot of each row, or -1, and the place where its search ended."""
        keys = ids + 1
        places = self._first_places(ids)
        found_keys = self._places.take(2 * places)
        slots = self._places.take(2 * places + 1)
        slots[found_keys == _FREE] = -1
        pending = np.flatnonzero((found_keys != keys) & (found_keys != _FREE))
        while pending.size:
            next_places = (places[pending] + 1) & self._mask
            places[pending] = next_places
            found_keys = self._places.take(2 * next_places)
            found_slots = self._places.take(2 * next_places + 1)
            found_slots[found_keys == _FREE] = -1
            slots[pending] = found_slots
            pending = pending[(found_keys != keys[pending]) & (found_keys != _FREE)]
        return slots, places

    def add(self, ids: Ids, places: Ids | None = None) -> None:
        """Give the next slots to rows, which must be unique and not in the index yet.

        `places` are those where a search for them ended, if there was one.
        """
        first = len(self.ids)
        self._append(ids)
        if 2 * len(self.ids) > self._mask + 1:
            self._grow()
            places = None
        if places is None:
            places = self._first_places(ids)
        self._insert(ids, np.arange(first, len(self.ids)), places)

    def _append(self, ids: Ids) -> None:
        count = len(self.ids)
        if count + len(ids) > len(self._ids_buffer):
            larger = np.empty(max(2 * len(self._ids_buffer), count + len(ids)), np.int64)
            larger[:count] = self.ids
            self._ids_buffer = larger
        self._ids_buffer[count : count + len(ids)] = ids
        self.ids = self._ids_buffer[: count + len(ids)]

    def _grow(self) -> None:
        """Allocate places for twice as many rows, and move the rows there.

        They move in the order of their places, so that memory is read and written sequentially.
        """
        taken = np.flatnonzero(self._places[::2])
        keys, slots = self._places.take(2 * taken), self._places.take(2 * taken + 1)
        self._allocate(max(_MINIMUM_BITS, (4 * len(self.ids) - 1).bit_length()))
        ids = keys - 1
        self._insert(ids, slots, self._first_places(ids))

    def _insert(self, ids: Ids, slots: Ids, places: Ids) -> None:
        """Insert rows, each into the first free place from `places` on.

        If several rows write to the same free place, the last one gets it, and the others go on.
        """
        keys = ids + 1
        while keys.size:
            is_free = self._places.take(2 * places) == _FREE
            self._places[2 * places[is_free]] = keys[is_free]
            is_done = self._places.take(2 * places) == keys
            self._places[2 * places[is_done] + 1] = slots[is_done]
            rest = ~is_done
            keys, slots, places = keys[rest], slots[rest], (places[rest] + 1) & self._mask

    def _allocate(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._mask = (1 << bits) - 1
        self._places = np.zeros(2 << bits, np.int64)

    def _first_places(self, ids: Ids) -> Ids:
        return (hash_ids(ids) >> self._shift).view(np.int64)

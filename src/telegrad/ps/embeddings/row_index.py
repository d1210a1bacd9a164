"""`RowIndex`: a hash table from row ids to slots. Rows get slots in the order of their insertion.

It uses open addressing with linear probing, and searches and inserts many rows at once with numpy:
each iteration probes one place for every row, and the rows that are not done probe the next place
in the next iteration. Few rows take more than a handful of iterations.

State: `_places`, each with the slot of a row plus 1, or 0 if it is free. At most half of the places
are taken, so every search ends. `ids`, the ids by slot, a view of `_ids_buffer`. A place has no id,
because memory that is written for the first time takes longer than looking the id up. Used by one
thread at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from telegrad.ps.embeddings.row_hash import hash_ids

Ids = NDArray[np.int64]

_FREE = -1  # the slot in a free place; pages of zeroed memory take no space until they are written
_MINIMUM_BITS = 8
_INT32_BITS = 31  # of the number of places, if all slots fit into 32-bit integers


class RowIndex:
    """Map row ids to slots.

    >>> index = RowIndex()
    >>> index.add(np.array([70, 10]))
    >>> index.find(np.array([10, 30, 70])).tolist()
    [1, -1, 0]
    """

    def __init__(self) -> None:
        self.ids: Ids = np.empty(0, np.int64)
        self._ids_buffer = np.empty(1, np.int64)
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
        places = self._first_places(ids)
        slots = self._slots_in(places)
        pending = np.flatnonzero(self._is_another(slots, ids))
        while pending.size:
            next_places = (places[pending] + 1) & self._mask
            places[pending] = next_places
            found = slots[pending] = self._slots_in(next_places)
            pending = pending[self._is_another(found, ids[pending])]
        return slots, places

    def _slots_in(self, places: Ids) -> Ids:
        """Return the slots in places, or `_FREE`."""
        slots: Ids = self._places.take(places).astype(np.int64)
        slots -= 1
        return slots

    def _is_another(self, slots: Ids, ids: Ids) -> NDArray[np.bool_]:
        """Return where a slot is taken by another row than that of `ids`."""
        is_another: NDArray[np.bool_] = self._ids_buffer.take(slots, mode="clip") != ids
        is_another &= slots != _FREE
        return is_another

    def add(self, ids: Ids, places: Ids | None = None) -> None:
        """Give the next slots to rows, which must be unique and not in the index yet.

        `places` are those where a search for them ended, if there was one.
        """
        first = len(self.ids)
        self._append(ids)
        if 2 * len(self.ids) > self._mask + 1:
            self._allocate((4 * len(self.ids) - 1).bit_length())
            first, places = 0, None
        if places is None:
            places = self._first_places(self.ids[first:])
        self._insert(np.arange(first, len(self.ids)), places)

    def _append(self, ids: Ids) -> None:
        count = len(self.ids)
        if count + len(ids) > len(self._ids_buffer):
            larger = np.empty(max(2 * len(self._ids_buffer), count + len(ids)), np.int64)
            larger[:count] = self.ids
            self._ids_buffer = larger
        self._ids_buffer[count : count + len(ids)] = ids
        self.ids = self._ids_buffer[: count + len(ids)]

    def _insert(self, slots: Ids, places: Ids) -> None:
        """Insert rows, each into the first free place from `places` on.

        If several rows write to the same free place, the last one gets it, and the others go on.
        """
        while slots.size:
            is_free = self._places.take(places) == 0
            self._places[places[is_free]] = slots[is_free] + 1
            rest = self._slots_in(places) != slots
            slots, places = slots[rest], (places[rest] + 1) & self._mask

    def _allocate(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._mask = (1 << bits) - 1
        self._places: NDArray[Any] = np.zeros(
            1 << bits, np.int32 if bits <= _INT32_BITS else np.int64
        )

    def _first_places(self, ids: Ids) -> Ids:
        return (hash_ids(ids) >> self._shift).view(np.int64)

"""`RowIndex`: which slot of the storage each row is in. Rows get slots in the order in which they come.

A hash table with open addressing and linear probing that is searched and filled for many rows at once: all of them look
at a place each, those that found nothing look at the next one, and so on; few take more than a handful of turns.

State: `_places`, for each place a row's number plus 1 and its slot, one after the other, with 0 where there is
nothing; at most half of them are taken, so every search ends. `ids`, the rows by slot. An index is used by
one thread at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from telegrad.ps.embeddings.row_hash import spread

Ids = NDArray[np.int64]

_NOTHING = 0  # memory that is zero at first costs nothing until it is used
_SMALLEST = 8  # bits


class RowIndex:
    """
    >>> index = RowIndex()
    >>> index.add(np.array([70, 10]))
    >>> index.find(np.array([10, 30, 70])).tolist()
    [1, -1, 0]
    """

    def __init__(self) -> None:
        self.ids: Ids = np.empty(0, np.int64)
        self._room = np.empty(0, np.int64)
        self._clear(_SMALLEST)

    def __repr__(self) -> str:
        return f"<RowIndex: {len(self.ids)} rows, {self._mask + 1} places>"

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Ids) -> Ids:
        """The slot of each of these rows, -1 for those that have none."""
        return self.search(ids)[0]

    def search(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the slot of each of these rows, -1 if it has none, and the place where its search ended."""
        keys = ids + 1
        places = self._first(ids)
        there = self._places.take(2 * places)
        slots = self._places.take(2 * places + 1)
        slots[there == _NOTHING] = -1
        open_ = np.flatnonzero((there != keys) & (there != _NOTHING))
        while open_.size:
            here = (places[open_] + 1) & self._mask
            places[open_] = here
            there = self._places.take(2 * here)
            found = self._places.take(2 * here + 1)
            found[there == _NOTHING] = -1
            slots[open_] = found
            open_ = open_[(there != keys[open_]) & (there != _NOTHING)]
        return slots, places

    def add(self, ids: Ids, places: Ids | None = None) -> None:
        """Give the next slots to these rows, of which none may be here already or twice among them.

        `places` are those where a search for them ended.
        """
        first = len(self.ids)
        self._append(ids)
        if 2 * len(self.ids) > self._mask + 1:
            self._grow()
            places = None
        self._fill(
            ids, np.arange(first, len(self.ids)), self._first(ids) if places is None else places
        )

    def _append(self, ids: Ids) -> None:
        count = len(self.ids)
        if count + len(ids) > len(self._room):
            larger = np.empty(max(2 * len(self._room), count + len(ids)), np.int64)
            larger[:count] = self.ids
            self._room = larger
        self._room[count : count + len(ids)] = ids
        self.ids = self._room[: count + len(ids)]

    def _grow(self) -> None:
        """Make room for twice as many rows.

        Those that are here move in the order of their places, so memory is read and written from start to end.
        """
        taken = np.flatnonzero(self._places[::2])
        keys, slots = self._places.take(2 * taken), self._places.take(2 * taken + 1)
        self._clear(max(_SMALLEST, (4 * len(self.ids) - 1).bit_length()))
        ids = keys - 1
        self._fill(ids, slots, self._first(ids))

    def _fill(self, ids: Ids, slots: Ids, places: Ids) -> None:
        """Whoever finds its place free writes itself there; of several, the last. The others go on."""
        keys = ids + 1
        while keys.size:
            free = self._places.take(2 * places) == _NOTHING
            self._places[2 * places[free]] = keys[free]
            done = self._places.take(2 * places) == keys
            self._places[2 * places[done] + 1] = slots[done]
            late = ~done
            keys, slots, places = keys[late], slots[late], (places[late] + 1) & self._mask

    def _clear(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._mask = (1 << bits) - 1
        self._places = np.zeros(2 << bits, np.int64)

    def _first(self, ids: Ids) -> Ids:
        return (spread(ids) >> self._shift).view(np.int64)

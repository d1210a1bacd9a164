"""`Index`: which slot of the storage each row is in. Rows get slots in the order in which they come.

A hash table with open addressing that is searched and filled for many rows at once: all of them look at a place each,
those that found nothing look at their next one, and so on; few take more than a handful of turns.

State: `_places`, pairs of a row's number and its slot, with -1 where there is nothing; at most half of them are
taken, so every search ends. `ids`, the rows by slot. An index is used by one thread at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from telegrad.ps.tables.hashing import spread

Ids = NDArray[np.int64]

_NOTHING = -1
_SMALLEST = 8  # bits


class Index:
    """
    >>> index = Index()
    >>> index.add(np.array([70, 10]))
    >>> index.find(np.array([10, 30, 70])).tolist()
    [1, -1, 0]
    """

    def __init__(self) -> None:
        self.ids: Ids = np.empty(0, np.int64)
        self._room = np.empty(0, np.int64)
        self._clear(_SMALLEST)

    def __repr__(self) -> str:
        return f"<Index: {len(self.ids)} rows, {len(self._places)} places>"

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Ids) -> Ids:
        """The slot of each of these rows, -1 for those that have none."""
        places = self._first(ids)
        rows, slots = self._look(places)
        found = np.where(rows == ids, slots, _NOTHING)
        open_ = np.flatnonzero((rows != ids) & (rows != _NOTHING))
        turn = 0
        while open_.size:
            turn += 1
            places[open_] = here = self._next(places[open_], turn)
            rows, slots = self._look(here)
            hit = rows == ids[open_]
            found[open_[hit]] = slots[hit]
            open_ = open_[~hit & (rows != _NOTHING)]
        return found

    def add(self, ids: Ids) -> None:
        """Give the next slots to these rows, of which none may be here already or twice among them."""
        first = len(self.ids)
        self._append(ids)
        if 2 * len(self.ids) > len(self._places):
            self._clear(max(_SMALLEST, (4 * len(self.ids) - 1).bit_length() - 1))
            first = 0
        self._fill(self.ids[first:], first)

    def _append(self, ids: Ids) -> None:
        count = len(self.ids)
        if count + len(ids) > len(self._room):
            larger = np.empty(max(2 * len(self._room), count + len(ids)), np.int64)
            larger[:count] = self.ids
            self._room = larger
        self._room[count : count + len(ids)] = ids
        self.ids = self._room[: count + len(ids)]

    def _fill(self, ids: Ids, first: int) -> None:
        """Whoever finds its place free writes itself there; of several, the last. The others go on."""
        places = self._first(ids)
        waiting = np.arange(len(ids))
        turn = 0
        while waiting.size:
            here = places[waiting]
            free = self._places[here, 0] == _NOTHING
            writing, there = waiting[free], here[free]
            self._places[there, 0] = ids[writing]
            won = self._places[there, 0] == ids[writing]
            self._places[there[won], 1] = first + writing[won]
            free[free] = won
            waiting = waiting[~free]
            turn += 1
            places[waiting] = self._next(places[waiting], turn)

    def _clear(self, bits: int) -> None:
        self._shift = np.uint64(64 - bits)
        self._places = np.full((1 << bits, 2), _NOTHING, np.int64)

    def _first(self, ids: Ids) -> Ids:
        return (spread(ids) >> self._shift).view(np.int64)

    def _next(self, places: Ids, turn: int) -> Ids:
        """One further, then two, then three: that comes to every place once."""
        return (places + turn) & (len(self._places) - 1)

    def _look(self, places: Ids) -> tuple[Ids, Ids]:
        pairs = self._places.take(places, axis=0)
        return pairs[:, 0], pairs[:, 1]

"""`Leases`: what a reader uses is given back even if an exception comes at any point.

A signal handler may raise between any two instructions, for instance `KeyboardInterrupt` between
the reply of an owner and the `try` that gives its memory back. So a reader chooses the name of its
ticket and makes a `Lease` before it asks. If nothing refers to the lease any more, its end is noted
by one C call, in which no signal handler runs, and the next call of `release_ended` gives back what
it stood for. To give back a ticket that was never issued is harmless.

State: `_open` has the leases that were not given back, `_ended` those to give back. All operations
on them are atomic, so there is no lock.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

Release = Callable[[str], object]

_numbers = itertools.count(1)


class Lease:
    """The right of a reader to what an owner keeps under the name `ticket`."""

    __slots__ = ("__weakref__", "ticket")

    def __init__(self, ticket: str) -> None:
        self.ticket = ticket


class Leases:
    """The leases of one reader. `release` of a lease may be called several times."""

    def __init__(self, reader: str) -> None:
        self._reader = reader
        self._open: dict[weakref.ref[Lease], tuple[Release, str]] = {}
        self._ended: deque[weakref.ref[Lease]] = deque()

    def __repr__(self) -> str:
        return f"<Leases of {self._reader}: {len(self._open)}, {len(self._ended)} ended>"

    def open(self, release: Release) -> Lease:
        """Return a lease with a new ticket, which `release` gives back."""
        lease = Lease(f"{self._reader}/{next(_numbers)}")
        self._open[weakref.ref(lease, self._ended.append)] = release, lease.ticket
        return lease

    def release_ended(self) -> None:
        """Give back what ended leases stand for."""
        while True:
            try:
                reference = self._ended[0]
            except IndexError:
                return
            if reference in self._open:
                release, ticket = self._open[reference]
                release(ticket)
            self._open.pop(reference, None)
            with suppress(ValueError):  # another thread has done the same
                self._ended.remove(reference)

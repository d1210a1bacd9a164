"""`StalenessFilter`: drop what was computed with weights that are too old.

State: the counters and `_newest_seen`. There is no lock: a filter is used by one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from telegrad.errors import UsageError


class HasVersion(Protocol):
    """Something that was computed with a version of the weights."""

    @property
    def version(self) -> int: ...


class VersionSource(Protocol):
    """A `Publisher`, a `Subscriber`, or another object that knows the newest version."""

    @property
    def version(self) -> int | None: ...


V = TypeVar("V", bound=HasVersion)


class StalenessFilter:
    """Passes on what was computed with one of the newest versions.

    What is filtered has an attribute `version`: replies of `function.versioned`, or trajectories
    of your own. It is dropped if it is more than `max_staleness` versions behind the newest one,
    which `newest` knows: a `Publisher`, a `Subscriber`, or any object with an attribute `version`.
    Without it, the newest version is the newest that the filter has seen.

    >>> from telegrad.weights import Versioned
    >>> fresh = StalenessFilter(max_staleness=1)
    >>> answers = [Versioned("a", 4), Versioned("b", 6), Versioned("c", 5), Versioned("d", 4)]
    >>> [answer.value for answer in fresh(answers)]
    ['a', 'b', 'c']
    >>> fresh.passed, fresh.dropped
    (3, 1)
    """

    def __init__(self, newest: VersionSource | None = None, *, max_staleness: int) -> None:
        if max_staleness < 0:
            raise UsageError(f"max_staleness is a number of versions, not {max_staleness!r}")
        self.max_staleness = max_staleness
        self.passed: int = 0
        """How many were new enough."""
        self.dropped: int = 0
        """How many were too old."""
        self._newest = newest
        self._newest_seen = -1

    def __repr__(self) -> str:
        return (
            f"<StalenessFilter max_staleness={self.max_staleness}: "
            f"{self.passed} passed, {self.dropped} dropped>"
        )

    def __call__(self, answers: Iterable[V]) -> Iterator[V]:
        """Yield the answers that are new enough. Each is judged when it is reached."""
        return (answer for answer in answers if self.accepts(answer))

    def staleness(self, answer: HasVersion) -> int:
        """Return how many versions an answer is behind the newest."""
        self._newest_seen = max(self._newest_seen, answer.version)
        newest = self._newest_seen if self._newest is None else self._newest.version
        return 0 if newest is None else max(newest - answer.version, 0)

    def accepts(self, answer: HasVersion) -> bool:
        """Return whether an answer is new enough, and count it."""
        is_fresh = self.staleness(answer) <= self.max_staleness
        self.passed += is_fresh
        self.dropped += not is_fresh
        return is_fresh

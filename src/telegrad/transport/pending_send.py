"""Bytes that a stream channel is sending."""

from __future__ import annotations


class PendingSend:
    """Bytes on their way out: what was owed, then what was corked, then one frame of our own."""

    __slots__ = ("before", "corked", "popped", "progress", "views")

    def __init__(self, views: list[memoryview], before: int = 0, corked: int = 0) -> None:
        self.views = views  # what has not left, as far as `progress` was accounted for
        # bytes before the own frame that have not left; negative once that has begun
        self.before = before
        self.corked = corked  # frames of the queue of corked ones that are part of this
        self.popped: list[bytes] = []  # those of them that were taken from the queue
        self.progress: list[int] = []  # bytes that left since the last `advance`

    def advance(self) -> None:
        """Account for the bytes that have left."""
        sent = sum(self.progress)
        views = self.views
        before = self.before - sent
        index = 0
        while index < len(views) and sent >= views[index].nbytes:
            sent -= views[index].nbytes
            index += 1
        views = views[index:]
        if sent:
            views[0] = views[0][sent:]
        self.views, self.before, self.progress = views, before, []

    def rest(self) -> bytes:
        """Return what must still go out: the own frame counts only if it has begun."""
        if self.before < 0:
            return b"".join(self.views)
        parts, left = [], self.before
        for view in self.views:
            if left <= 0:
                break
            parts.append(view[:left])
            left -= view.nbytes
        return b"".join(parts)

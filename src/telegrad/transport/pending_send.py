"""Bytes that a stream channel is sending."""

from __future__ import annotations


class PendingSend:
    """Bytes on their way out: what was owed, then what was corked, then one frame of our own."""

    __slots__ = ("bytes_before_frame", "corked_count", "popped_frames", "sent_counts", "views")

    def __init__(
        self, views: list[memoryview], bytes_before_frame: int = 0, corked_count: int = 0
    ) -> None:
        self.views = views  # what has not left, as far as `sent_counts` was accounted for
        # bytes before the own frame that have not left; negative once that has begun
        self.bytes_before_frame = bytes_before_frame
        self.corked_count = corked_count  # frames of the queue of corked ones that are part of this
        self.popped_frames: list[bytes] = []  # those of them that were taken from the queue
        self.sent_counts: list[int] = []  # bytes that left since the last `advance`

    def advance(self) -> None:
        """Account for the bytes that have left."""
        sent = sum(self.sent_counts)
        views = self.views
        bytes_before_frame = self.bytes_before_frame - sent
        index = 0
        while index < len(views) and sent >= views[index].nbytes:
            sent -= views[index].nbytes
            index += 1
        views = views[index:]
        if sent:
            views[0] = views[0][sent:]
        self.views, self.bytes_before_frame, self.sent_counts = views, bytes_before_frame, []

    def unsent_bytes(self) -> bytes:
        """Return what must still go out: the own frame counts only if it has begun."""
        if self.bytes_before_frame < 0:
            return b"".join(self.views)
        parts, left = [], self.bytes_before_frame
        for view in self.views:
            if left <= 0:
                break
            parts.append(view[:left])
            left -= view.nbytes
        return b"".join(parts)

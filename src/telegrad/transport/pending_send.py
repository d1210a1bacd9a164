"""`PendingSend`: the bytes that a stream channel is sending.

The caller records the bytes that the kernel accepted in `sent_counts`, in the same C call that
sends them. So the record is complete even if a signal handler raises right after that call.
"""

from __future__ import annotations


class PendingSend:
    """Bytes to send: the rest of earlier frames, then corked frames, then one frame of the caller.

    Used under the send lock of its channel.
    """

    __slots__ = ("bytes_before_frame", "corked_count", "popped_frames", "sent_counts", "views")

    def __init__(
        self, views: list[memoryview], bytes_before_frame: int = 0, corked_count: int = 0
    ) -> None:
        self.views = views  # not sent yet, as far as `sent_counts` was processed
        # unsent bytes before the caller's frame; negative once that frame has begun
        self.bytes_before_frame = bytes_before_frame
        self.corked_count = corked_count  # frames of the channel's queue that are included
        self.popped_frames: list[bytes] = []  # those that were removed from the queue
        self.sent_counts: list[int] = []  # bytes sent since the last `advance`

    def advance(self) -> None:
        """Remove the bytes that `sent_counts` records from `views`."""
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
        # no call between these stores, so no signal handler runs between them
        self.views, self.bytes_before_frame, self.sent_counts = views, bytes_before_frame, []

    def unsent_bytes(self) -> bytes:
        """Return the bytes that must be sent later: the caller's frame only if it has begun."""
        if self.bytes_before_frame < 0:
            return b"".join(self.views)
        parts, left = [], self.bytes_before_frame
        for view in self.views:
            if left <= 0:
                break
            parts.append(view[:left])
            left -= view.nbytes
        return b"".join(parts)

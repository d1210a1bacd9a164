"""`OverlappedPush`: send buckets of gradients to a server while backward is still running.

A step must send the gradients that are in the flat memory when `step` is called. A bucket that was
sent before is compared with them, bit by bit, and sent again if it has changed since: because
gradients were accumulated further, clipped, or written to. So sending early is always correct, but
may be wasted. `OverlappedPush` adapts to that: it sends a bucket after as many backward passes as
the last step had, and when a bucket was wasted, it sends none for some steps.

State, under `_changed`: `_passes`, the backward passes over each parameter since the last step;
`_unfinished`, the number of parameters that each bucket waits for; `_queue`, buckets to send;
`_sent`, copies of the buckets that the server has; `_expected_passes`, `_pause` and `_pause_left`,
see above. One thread at a time sends (`_sending`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from telegrad import thread_roles
from telegrad.errors import PeerLost, StaleReference
from telegrad.ps.gradient_buckets import GradientBucket, divide_into_buckets
from telegrad.ps.layout import ServerRange

_LONGEST_PAUSE = 64  # steps


class OverlappedPush:
    """The buckets for one server.

    `copy` returns the contents of a bucket, possibly compressed, in memory of its own. `send` sends
    them to the server and waits. `start` runs a function on another thread.
    """

    def __init__(
        self,
        server_range: ServerRange,
        copy: Callable[[GradientBucket], Tensor],
        send: Callable[[int, Tensor], None],
        start: Callable[[Callable[[], None]], None],
    ) -> None:
        self.buckets = divide_into_buckets(server_range)
        self._copy, self._send, self._start = copy, send, start
        self._buckets_of: dict[int, list[GradientBucket]] = {}  # by parameter
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                self._buckets_of.setdefault(parameter, []).append(bucket)
        self._changed = threading.Condition()
        self._expected_passes = 1  # backward passes before a bucket is sent
        self._pause = 0  # steps for which no bucket is sent after one was wasted,
        self._pause_left = 0  # and how many of them are left
        self._queue: list[GradientBucket] = []
        self._sending = False
        self._error: Exception | None = None
        self._reset()

    def __repr__(self) -> str:
        pause = f", pausing for {self._pause_left} steps" if self._pause_left else ""
        return (
            f"<OverlappedPush: {len(self._sent)} of {len(self.buckets)} buckets were sent{pause}>"
        )

    def _reset(self) -> None:
        self._passes: dict[int, int] = {}
        self._unfinished = [len(bucket.parameters) for bucket in self.buckets]
        self._sent: dict[int, Tensor] = {}

    def on_gradient_ready(self, parameter: int) -> None:
        """Send buckets that are complete now: a gradient was copied to the flat memory."""
        with self._changed:
            passes = self._passes[parameter] = self._passes.get(parameter, 0) + 1
            if passes != self._expected_passes or self._pause_left:
                return
            for bucket in self._buckets_of.get(parameter, ()):
                self._unfinished[bucket.bucket_index] -= 1
                if not self._unfinished[bucket.bucket_index]:
                    self._queue.append(bucket)
            if not self._queue or self._sending:
                return
            self._sending = True
        self._start(self._send_queue)

    def stop_sending(self) -> None:
        """Wait for the bucket that is being sent, and send no more: the step has begun.

        Raise the error of a failed send.
        """
        role = thread_roles.pause()
        try:
            with self._changed:
                self._queue.clear()
                self._changed.wait_for(lambda: not self._sending)
                error, self._error = self._error, None
        finally:
            thread_roles.resume(role)
        if error is not None:
            raise error

    def take_unsent(self, gradients: Sequence[Tensor]) -> list[GradientBucket]:
        """Return the buckets that the server does not have with their present contents.

        `gradients` are those of the step, one tensor for each dtype range. The next step begins.
        """
        with self._changed:
            sent = self._sent
            unsent = [
                bucket
                for bucket in self.buckets
                if bucket.bucket_index not in sent
                or not _is_same(sent[bucket.bucket_index], bucket.of(gradients))
            ]
            self._adapt(wasted=len(unsent) + len(sent) > len(self.buckets))
            self._reset()
        return unsent

    def discard(self) -> None:
        """Forget what was sent, because the step is skipped. The next step begins."""
        with self._changed:
            self._reset()

    def _adapt(self, wasted: bool) -> None:
        """Decide when the buckets of the next step are sent. `wasted`: one was sent twice."""
        passes = max(self._passes.values(), default=self._expected_passes)
        # after another number of passes, the waste is explained by that number
        if wasted and passes == self._expected_passes:
            self._pause = self._pause_left = min(max(2 * self._pause, 1), _LONGEST_PAUSE)
        elif self._pause_left:
            self._pause_left -= 1
        elif self._sent and not wasted:
            self._pause = 0
        self._expected_passes = passes

    def _send_queue(self) -> None:
        """Send the buckets of the queue, on a thread of its own, until there are no more."""
        while True:
            with self._changed:
                if not self._queue:
                    self._sending = False
                    self._changed.notify_all()
                    return
                bucket = self._queue.pop(0)
            try:
                contents = self._copy(bucket)
                self._send(bucket.bucket_index, contents)
                with self._changed:
                    self._sent[bucket.bucket_index] = contents
            except (PeerLost, StaleReference):  # the step gets the same error and handles it
                with self._changed:
                    self._queue.clear()
            except Exception as error:
                with self._changed:
                    self._queue.clear()
                    self._error = error


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Compare bits. Dtype ranges consist of whole 64-bit words, which are compared fastest."""
    return torch.equal(one.view(torch.int64), other.view(torch.int64))

"""Gradients that travel by calls, in *buckets*: each leaves when its gradients are ready, while backward goes on.

What counts is what lies in the flat memory when `step` is called, and nothing else. A bucket that left early is
compared with that, bit by bit, and is sent again if it has changed since, however that came about: accumulated further,
clipped, written to by hand. So leaving early is never wrong, only in vain, and `OverlappedPush` learns when it is: a
bucket leaves after as many backward passes as the last step had, and when one was sent in vain, all stay for some
steps.

State of an `OverlappedPush`, under `_changed`: `_passes`, how often backward has passed each parameter since the last
step; `_open`, how many parameters each bucket still waits for; `_queue`, what is ready; `_sent`, what the server has,
as it was sent. One thread at a time sends (`_sending`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from telegrad import blocking
from telegrad.errors import PeerLost, StaleReference
from telegrad.ps.gradient_buckets import GradientBucket, divide_into_buckets
from telegrad.ps.layout import ServerRange

_LONGEST = 64  # steps without another try


class OverlappedPush:
    """What leaves for one server before the step that it is for.

    `copy` makes what travels of a bucket, in memory of its own; `send` brings it to the server and waits; `start` runs
    a job on another thread.
    """

    def __init__(
        self,
        share: ServerRange,
        copy: Callable[[GradientBucket], Tensor],
        send: Callable[[int, Tensor], None],
        start: Callable[[Callable[[], None]], None],
    ) -> None:
        self.buckets = divide_into_buckets(share)
        self._copy, self._send, self._start = copy, send, start
        self._of_slot: dict[int, list[GradientBucket]] = {}
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._of_slot.setdefault(slot, []).append(bucket)
        self._changed = threading.Condition()
        self._due = 1  # backward passes before a bucket leaves
        self._pause = 0  # steps that buckets stay after they were sent in vain,
        self._staying = 0  # and how many of them are left
        self._queue: list[GradientBucket] = []
        self._sending = False
        self._error: Exception | None = None
        self._reset()

    def __repr__(self) -> str:
        state = f", staying for {self._staying} steps" if self._staying else ""
        return (
            f"<OverlappedPush: {len(self._sent)} of {len(self.buckets)} buckets have left{state}>"
        )

    def _reset(self) -> None:
        self._passes: dict[int, int] = {}
        self._open = [len(bucket.slots) for bucket in self.buckets]
        self._sent: dict[int, Tensor] = {}

    def ready(self, slot: int) -> None:
        """Backward has passed a parameter; its gradient lies in the flat memory."""
        with self._changed:
            passes = self._passes[slot] = self._passes.get(slot, 0) + 1
            if passes != self._due or self._staying:
                return
            for bucket in self._of_slot.get(slot, ()):
                self._open[bucket.number] -= 1
                if not self._open[bucket.number]:
                    self._queue.append(bucket)
            if not self._queue or self._sending:
                return
            self._sending = True
        self._start(self._send_all)

    def stop(self) -> None:
        """The step has come: what has not begun to leave goes with it."""
        role = blocking.pause()
        try:
            with self._changed:
                self._queue.clear()
                self._changed.wait_for(lambda: not self._sending)
                error, self._error = self._error, None
        finally:
            blocking.resume(role)
        if error is not None:
            raise error

    def missing(self, runs: Sequence[Tensor]) -> list[GradientBucket]:
        """The step takes this, run by run: which buckets does the server not have so? Then the next step begins."""
        with self._changed:
            sent = self._sent
            found = [
                bucket
                for bucket in self.buckets
                if bucket.number not in sent or not _same(sent[bucket.number], bucket.of(runs))
            ]
            self._learn(in_vain=len(found) + len(sent) > len(self.buckets))
            self._reset()
        return found

    def forget(self) -> None:
        """The step takes nothing of what has left. The next step begins."""
        with self._changed:
            self._reset()

    def _learn(self, in_vain: bool) -> None:
        passes = max(self._passes.values(), default=self._due)
        if in_vain and passes == self._due:
            self._pause = self._staying = min(max(2 * self._pause, 1), _LONGEST)
        elif self._staying:
            self._staying -= 1
        elif self._sent and not in_vain:
            self._pause = 0
        self._due = passes

    def _send_all(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._sending = False
                    self._changed.notify_all()
                    return
                bucket = self._queue.pop(0)
            try:
                piece = self._copy(bucket)
                self._send(bucket.number, piece)
                with self._changed:
                    self._sent[bucket.number] = piece
            except (PeerLost, StaleReference):  # the step will hear of it too, and knows what to do
                with self._changed:
                    self._queue.clear()
            except Exception as error:
                with self._changed:
                    self._queue.clear()
                    self._error = error


def _same(one: Tensor, other: Tensor) -> bool:
    """Are they equal bit by bit? Runs have whole words, and words are compared fastest."""
    return torch.equal(one.view(torch.int64), other.view(torch.int64))

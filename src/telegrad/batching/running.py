"""`BatchRole`: what a thread is while it runs a batch.

Before the batch blocks in a wait that we know of, its queue lets the next batch run. Inside, `current_caller` is the
one worker that all calls come from, if it is one, and `current_deadline` is when nobody waits any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from telegrad import blocking
from telegrad.batching.calls import BatchedCall
from telegrad.current import thread_state
from telegrad.deadline import Deadline
from telegrad.errors import InternalError


class BatchOwner(Protocol):
    """What a turn needs of its queue."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class BatchRole:
    """`outer` is what the thread was before."""

    __slots__ = ("_queue", "outer")

    def __init__(self, queue: BatchOwner) -> None:
        self._queue = queue
        self.outer: blocking.ThreadRole | None = None

    def pause(self) -> None:
        self._queue.pause()
        if self.outer is not None:
            self.outer.pause()

    def resume(self) -> None:
        if self.outer is not None:
            self.outer.resume()
        self._queue.resume()

    def hold(self) -> None:
        self._queue.pause()
        if self.outer is not None:
            self.outer.hold()

    def release(self) -> None:
        if self.outer is not None:
            self.outer.release()
        self._queue.resume()

    def more(self) -> bool:
        return False  # whatever this thread reads next, it reads after this batch

    def afterwards(self, key: Hashable, job: Callable[[], None]) -> None:
        raise InternalError("a batch leaves nothing for later")

    def at(self, key: Hashable, moment: float, job: Callable[[], None]) -> bool:
        return self.outer is not None and self.outer.at(key, moment, job)


@contextlib.contextmanager
def running_batch(turn: BatchRole, batch: list[BatchedCall]) -> Iterator[None]:
    """This thread runs a batch, some or all of which others brought."""
    before = thread_state.runtime, thread_state.caller, thread_state.deadline
    thread_state.runtime, thread_state.caller, thread_state.deadline = (
        batch[0].agent,
        _caller(batch),
        _deadline(batch),
    )
    turn.outer = blocking.take(turn)
    try:
        yield
    finally:
        blocking.take(turn.outer)
        thread_state.runtime, thread_state.caller, thread_state.deadline = before


def _caller(batch: list[BatchedCall]) -> str | None:
    caller = batch[0].caller
    same = isinstance(caller, str) and all(entry.caller == caller for entry in batch)
    return caller if same else None  # type: ignore[return-value]


def _deadline(batch: list[BatchedCall]) -> Deadline | None:
    latest = batch[0].deadline
    for entry in batch:
        if entry.deadline is None or latest is None:
            return None
        latest = max(latest, entry.deadline)
    return latest

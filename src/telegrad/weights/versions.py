"""`VersionStore`: the versions that one worker has and passes on.

A publisher and every worker that receives for its host have one. It has the image of the newest
complete version and the recent deltas as streams of parts. A stream may still be arriving: readers
get each part as soon as it is there, so a chain of workers forwards a version while receiving it.

A reader holds a ticket for what it reads. Streams live as long as a ticket refers to them. An image
is not written again while a ticket refers to it. If the reader is lost, its images are discarded:
its process may be frozen in the middle of a copy.

State, all under `_lock`: `_current`, the newest complete image; `_free`, images to write next;
`_chain`, the recent streams, each of which begins where the one before ends; `_tickets`;
`_waiters`, futures of readers that wait for a newer version. Futures are completed without the
lock. What must never be true: an image in `_free`, or returned by `take_image`, has a ticket.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from telegrad.cuda.flat_memory import DeviceHandle
from telegrad.errors import StaleReference, UsageError
from telegrad.futures import Future
from telegrad.transport import flat_memory
from telegrad.transport.flat_memory import SegmentHandle
from telegrad.weights.changes import ChangeLog, LogInfo, capacity_of
from telegrad.weights.deltas import Part
from telegrad.weights.layout import Layout
from telegrad.weights.streams import (
    ArrivingStream,
    Image,
    Pacer,
    SnapshotStream,
    Stream,
    StreamInfo,
)

_MOST_LOGS = 8  # that are kept, and up to this part of the bytes of the weights:
_LOGS_SHARE = 4
_RELEASED = 1000  # tickets that are remembered
_CLOSED = "the worker no longer passes on these weights"


class Update(NamedTuple):
    """What leads a reader to the newest version. The ticket is for the parts of the streams."""

    ticket: int
    streams: tuple[StreamInfo, ...]


class SharedVersion(NamedTuple):
    """A complete version in the memory of a worker of this host."""

    version: int
    handle: SegmentHandle | DeviceHandle | None  # None: it is not in shared memory
    logs: tuple[LogInfo, ...] | None = None  # which lead to it from what the reader has


@dataclass(eq=False)
class _Ticket:
    reader: str
    is_update: bool
    streams: tuple[Stream, ...] = ()
    images: list[Image] = field(default_factory=list)
    logs: list[ChangeLog] | None = None
    # when each part that was requested may be sent, and its bytes, by stream and index
    reserved: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)


class Advance(NamedTuple):
    """The image before the newest one, and what the changes are written to."""

    base: Image
    stream: ArrivingStream
    log: ChangeLog | None


class _Waiter(NamedTuple):
    reader: str
    have: int | None
    for_update: bool
    future: Future[Update | int | None]
    limit: int | None = None


class VersionStore:
    """The versions of one `epoch`, the life of one publisher."""

    _spare_images = 2  # that are kept

    def __init__(
        self, epoch: str, layout: Layout, *, shared: bool, history: int, bandwidth: float | None
    ) -> None:
        self.epoch = epoch
        self.layout = layout
        self._shared = shared
        self._history = history  # bytes of deltas that are kept
        self.bandwidth = bandwidth  # bytes per second
        self._pacer = Pacer(bandwidth)
        self._current: Image | None = None
        self._free: list[Image] = []
        self._chain: deque[ArrivingStream] = deque()
        self._logs: deque[ChangeLog] = deque()
        self._free_logs: list[Image] = []
        self._wants_logs = False
        self._tickets: dict[int | str, _Ticket] = {}
        self._ticket_ids = itertools.count(1)
        self._released: deque[int | str] = deque(maxlen=_RELEASED)
        self._waiters: list[_Waiter] = []
        self._closed = False
        self._lock = threading.Lock()
        self.has_readers = False
        self.on_first_reader: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return (
            f"<VersionStore {self.epoch}: version {self.version}, {list(self._chain)}, "
            f"{len(self._tickets)} tickets, {len(self._waiters)} waiters>"
        )

    @property
    def version(self) -> int | None:
        """The newest complete version."""
        current = self._current
        return None if current is None else current.version

    # For the worker that writes the versions

    def take_image(self) -> Image:
        """Return memory for a version that nobody reads. `complete` or `give_back` returns it."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._allocate()

    def _allocate(self) -> Image:
        return self._allocate_host(self.layout.nbytes)

    def _allocate_host(self, nbytes: int) -> Image:
        memory = flat_memory.allocate_shared(nbytes) if self._shared else None
        if memory is None:
            return Image(flat_memory.allocate_private(nbytes), None, None)
        return Image(memory.contents, memory.handle, memory)

    def give_back(self, image: Image) -> None:
        """Return memory that no reader has seen."""
        with self._lock:
            self._free.append(image)

    def current(self) -> Image | None:
        """Return the newest complete image. Only the writer calls this: it is not kept alive."""
        return self._current

    def begin(self, info: StreamInfo) -> ArrivingStream:
        """Add a stream whose parts follow. Readers are told of it at once."""
        stream = ArrivingStream(info)
        with self._lock:
            if info.base is None:
                self._chain.clear()
            self._chain.append(stream)
            ready = self._ready_updates()
        _complete(ready)
        return stream

    def complete(self, image: Image, version: int, log: ChangeLog | None = None) -> None:
        """Make an image the newest complete version. `log` has what changed."""
        with self._lock:
            image.version = version
            if log is not None:
                self._add_log(log)
            old, self._current = self._current, image
            if old is not None and not old.readers and not old.is_discarded:
                self._free.append(old)
            self._drop_history()
            ready = self._ready_updates()
        _complete(ready)

    def advance(self, image: Image, version: int) -> Advance | None:
        """Make an image the newest version at once, before its delta is made.

        Return the image before it, which stays unchanged until `end_delta`, and the stream for the
        delta; None if this is the first version.
        """
        base = self._current  # only this thread changes it
        if base is None:
            self.complete(image, version)
            return None
        log = self.open_log(base.version, version)
        stream = ArrivingStream(StreamInfo(base.version, version))
        with self._lock:
            base.readers += 1
            self._chain.append(stream)
        self.complete(image, version, log)
        return Advance(base, stream, log)

    def open_log(self, base: int, version: int) -> ChangeLog | None:
        """Return a log for the changes between two versions; None if no reader wants it."""
        if not self._wants_logs:
            return None
        with self._lock:
            image = self._free_logs.pop() if self._free_logs else None
        if image is None:
            image = self._allocate_host(capacity_of(self.layout.nbytes))
            image.is_log = True
        return ChangeLog(image, base, version)

    def end_log(self, log: ChangeLog) -> None:
        """Let readers use a log, or copy everything if it was given up. May be repeated."""
        if log.is_complete:
            return
        log.finish()
        with self._lock:
            log.is_complete = True
            waiters, log.waiters = log.waiters, []
            if log.is_given_up and log in self._logs:
                self._drop_logs(self._logs.index(log) + 1)
            limit = self.layout.nbytes // _LOGS_SHARE
            while len(self._logs) > _MOST_LOGS or (
                len(self._logs) > 1 and sum(each.used for each in self._logs) > limit
            ):
                self._drop_logs(1)
        _complete(waiters)

    def end_delta(self, base: Image) -> None:
        """Note that a delta is made, so that the image before it may be written again."""
        with self._lock:
            self._unpin(base)

    def remove_unfinished(self, reason: str) -> None:
        """Remove the streams after the newest complete version: they will not arrive."""
        with self._lock:
            version = self.version
            removed = [
                each for each in self._chain if version is None or each.info.version > version
            ]
            self._chain = deque(each for each in self._chain if each not in removed)
        for stream in removed:
            stream.finish(reason)

    def close(self) -> None:
        """Let all readers fail: there is a newer epoch, or this worker leaves."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, []
        self.remove_unfinished(_CLOSED)
        for waiter in waiters:
            waiter.future.set_exception(StaleReference(_CLOSED))

    # For readers

    def wait_for_update(
        self, reader: str, have: int | None, limit: int | None = None
    ) -> Future[Update | int | None]:
        """Return a future for what leads from version `have` to the newest one.

        With a `limit`: to the newest one up to this version, or to a later one if there is none.
        """
        return self._wait(_Waiter(reader, have, True, Future(), limit))

    def wait_for_version(self, reader: str, have: int | None) -> Future[Update | int | None]:
        """Return a future for the newest complete version, once it is newer than `have`."""
        return self._wait(_Waiter(reader, have, False, Future()))

    def note_reader(self) -> None:
        """Note that someone reads these versions."""
        with self._lock:
            is_first, self.has_readers = not self.has_readers, True
        if is_first:
            self.on_first_reader()

    def expire(self, future: Future[Update | int | None]) -> None:
        """Complete a future of a waiter with None, so that the reader knows that this one lives."""
        with self._lock:
            found = [each for each in self._waiters if each.future is future]
            self._waiters = [each for each in self._waiters if each.future is not future]
        for waiter in found:
            waiter.future.set_result(None)

    def part(self, ticket: int, stream: int, index: int) -> Part | Future[Part | None] | None:
        """Return a part of a stream of a ticket, or a future of it."""
        with self._lock:
            found = self._tickets.get(ticket)
            streams = () if found is None else found.streams
        if stream >= len(streams):
            raise StaleReference("these weights are no longer kept for this reader")
        return streams[stream].get(index)

    def due(self, ticket: int, stream: int, index: int, part: Part) -> float:
        """Return when a part may be sent, so that the bandwidth is not exceeded.

        A part is counted once for each ticket: its reader repeats a request that takes long.
        """
        with self._lock:
            found = self._tickets.get(ticket)
            if found is None:  # nobody waits for it any more
                return 0.0
            if (stream, index) not in found.reserved:
                when = self._pacer.reserve(part.nbytes)
                found.reserved[stream, index] = when, part.nbytes
            return found.reserved[stream, index][0]

    def acquire(
        self, reader: str, ticket: str, have: int | None = None
    ) -> SharedVersion | Future[SharedVersion]:
        """Let a reader use the newest complete image until it releases this ticket of its own.

        If its tensors hold version `have`, it also gets what changed since then, if that is known,
        in a future if it is about to be known. A message that acquires may be later than the one
        that releases.
        """
        with self._lock:
            image = self._current
            if image is None:
                raise StaleReference("there is no version of these weights yet")
            if ticket in self._released:
                raise StaleReference("the reader no longer needs this version")
            self._wants_logs = self._wants_logs or have is not None
            if ticket not in self._tickets:  # the call may be repeated
                logs = None if have is None else self._logs_between(have, image.version)
                images = [image, *(log.image for log in logs or ())]
                self._add_ticket(_Ticket(reader, False, logs=logs), images, ticket)
            found = self._tickets[ticket]
            pending = [log for log in found.logs or () if not log.is_complete]
            if not pending:
                return _shared_version(found)
            future: Future[SharedVersion] = Future()

            def complete() -> None:
                future._try_complete(_shared_version(found), None)

            pending[-1].waiters.append(complete)
            return future

    def without_logs(self, ticket: str, future: Future[SharedVersion]) -> None:
        """Let a reader wait no longer for what changed: it copies everything."""
        with self._lock:
            found = self._tickets.get(ticket)
        if found is not None:
            future._try_complete(_shared_version(found)._replace(logs=None), None)

    def logs_of(self, ticket: str) -> list[ChangeLog]:
        """Return the logs of a ticket of `acquire`."""
        with self._lock:
            return self._tickets[ticket].logs or []

    def image_of(self, ticket: str) -> Image:
        """Return the image of a ticket of `acquire`."""
        with self._lock:
            return self._tickets[ticket].images[0]

    def release(self, ticket: int | str) -> bool:
        """End the use of what a ticket stands for. May be repeated.

        Return whether the ticket was valid until now: not if its reader was taken for lost.
        """
        with self._lock:
            found = self._tickets.pop(ticket, None)
            if found is not None:
                self._end(found)
            else:
                self._released.append(ticket)
        return found is not None

    def reader_lost(self, reader: str) -> None:
        """Remove a reader. What it was reading is not written again: it may only be frozen."""
        with self._lock:
            waiters = [each for each in self._waiters if each.reader == reader]
            self._waiters = [each for each in self._waiters if each.reader != reader]
            for number, ticket in list(self._tickets.items()):
                if ticket.reader == reader:
                    del self._tickets[number]
                    for image in ticket.images:
                        image.is_discarded = image.is_discarded or not ticket.is_update
                    self._end(ticket)
        for waiter in waiters:
            waiter.future.set_result(None)

    # Under the lock

    def _wait(self, waiter: _Waiter) -> Future[Update | int | None]:
        with self._lock:
            if self._closed:
                raise StaleReference(_CLOSED)
            self._waiters.append(waiter)
            ready = self._ready_updates()
        _complete(ready)
        self.note_reader()
        return waiter.future

    def _ready_updates(self) -> list[Callable[[], None]]:
        """Remove the waiters for which there is something newer. Return how to complete them."""
        ready: list[Callable[[], None]] = []
        waiting = []
        for waiter in self._waiters:
            value: Update | int | None = None
            if waiter.for_update:
                value = self._find_update(waiter)
            elif is_newer(self.version, waiter.have):
                value = self.version
            if value is None:
                waiting.append(waiter)
            else:
                ready.append(_completion(waiter.future, value))
        self._waiters = waiting
        return ready

    def _find_update(self, waiter: _Waiter) -> Update | None:
        newest = self._chain[-1].info.version if self._chain else self.version
        if not is_newer(newest, waiter.have):
            return None
        recent = [] if waiter.have is None else self._streams_from(waiter.have)
        streams: list[Stream] = list(recent)
        images = []
        if not recent or sum(each.nbytes for each in recent) > self.layout.nbytes:
            if self._chain and self._chain[0].info.base is None:  # a snapshot is arriving
                streams = list(self._chain)
            elif self._current is not None:
                images = [self._current]
                after = self._streams_from(self._current.version)
                streams = [SnapshotStream(self._current), *after]
        if not streams:
            return None
        if waiter.limit is not None:
            limit = waiter.limit
            streams[1:] = [each for each in streams[1:] if each.info.version <= limit]
        ticket = _Ticket(waiter.reader, True, tuple(streams))
        number = next(self._ticket_ids)
        self._add_ticket(ticket, images, number)
        return Update(number, tuple(stream.info for stream in streams))

    def _streams_from(self, base: int) -> list[ArrivingStream]:
        """Return the streams that lead from a version to the newest."""
        for index, stream in enumerate(self._chain):
            if stream.info.base == base:
                return list(itertools.islice(self._chain, index, None))
        return []

    def _add_ticket(self, ticket: _Ticket, images: list[Image], number: int | str) -> None:
        if ticket.is_update:  # a reader follows one update at a time
            for key, other in list(self._tickets.items()):
                if other.is_update and other.reader == ticket.reader:
                    self._end(self._tickets.pop(key))
        ticket.images = images
        for image in images:
            image.readers += 1
        self._tickets[number] = ticket

    def _end(self, ticket: _Ticket) -> None:
        """Let what only this ticket stood for be used again. It was removed."""
        for image in ticket.images:
            self._unpin(image)
        now = time.monotonic()
        self._pacer.give_back(sum(size for due, size in ticket.reserved.values() if due > now))

    def _unpin(self, image: Image) -> None:
        image.readers -= 1
        if not image.readers and image is not self._current and not image.is_discarded:
            free = self._free_logs if image.is_log else self._free
            free.append(image)

    def _drop_history(self) -> None:
        """Keep the newest deltas up to the limit. Snapshots that have arrived are in the image."""
        version = self.version
        while self._chain and (
            (self._chain[0].info.base is None and self._chain[0].info.version == version)
            or (
                len(self._chain) > 1
                and self._chain[0].info.version != version
                and sum(each.nbytes for each in self._chain) > self._history
            )
        ):
            self._chain.popleft()
        del self._free[self._spare_images :]  # more were needed while readers were slow
        del self._free_logs[self._spare_images :]

    def _add_log(self, log: ChangeLog) -> None:
        if self._logs and self._logs[-1].version != log.base:
            self._drop_logs(len(self._logs))
        log.image.readers += 1
        self._logs.append(log)

    def _drop_logs(self, count: int) -> None:
        for _ in range(count):
            self._unpin(self._logs.popleft().image)

    def _logs_between(self, have: int, version: int) -> list[ChangeLog] | None:
        """Return the logs that lead from one version to another; None if they are not there."""
        if have == version:
            return []
        logs = [log for log in self._logs if have <= log.base and log.version <= version]
        return logs if logs and (logs[0].base, logs[-1].version) == (have, version) else None


def _shared_version(ticket: _Ticket) -> SharedVersion:
    image, logs = ticket.images[0], ticket.logs
    if logs is None or any(log.is_given_up for log in logs):
        return SharedVersion(image.version, image.handle)
    infos = tuple(log.info for log in logs if log.is_complete)
    return SharedVersion(image.version, image.handle, infos)


def _completion(
    future: Future[Update | int | None], value: Update | int | None
) -> Callable[[], None]:
    return lambda: future.set_result(value)


def _complete(ready: list[Callable[[], None]]) -> None:
    for complete in ready:
        complete()


def as_version(version: object) -> int:
    """Return a version as an int. Other numbers, such as those of NumPy, may be given for it."""
    try:
        return operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"a version is an integer, not {version!r}") from None


def is_newer(version: int | None, than: int | None) -> bool:
    """Return whether a version is newer than another one. None: there is none."""
    return version is not None and (than is None or version > than)

"""`Receiver`: keeps the newest version of some weights available to one worker.

There is one for each name and agent, for all its subscribers. Its thread joins the publisher, which
assigns a source. Either the source is on this host: then the versions are read from its memory. Or
this worker receives for its host: then it fetches the parts of each update, applies them to an
image of its own, and passes them on. If the source fails, the thread joins again. If the publisher
is gone, the thread searches for one, and a version that this worker received stays readable.

State, under `_lock`: `_reader`, how to read the newest version, its `_version` and `_epoch`;
`_futures` of those that wait for a newer one; `_closed`. The thread alone writes the rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad import thread_roles
from telegrad.errors import (
    CallCancelled,
    CallTimeout,
    ProtocolError,
    StaleReference,
    TelegradError,
    UsageError,
)
from telegrad.futures import Future
from telegrad.weights import deltas, service
from telegrad.weights.deltas import Part
from telegrad.weights.reading import ReadVersion, SharedReader, read_own
from telegrad.weights.service import JoinReply, WeightsRegistry
from telegrad.weights.versions import Update, VersionStore, is_newer

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_POLL = 2.0  # seconds after which a source replies that there is nothing new
_WINDOW = 4  # parts that are requested at a time
_FIRST_DELAY, _LONGEST_DELAY = 0.01, 0.5  # seconds between attempts

_log = logging.getLogger(__name__)


class ReceiverCounters(NamedTuple):
    """What a worker has received over connections since it subscribed."""

    versions: int = 0
    snapshots: int = 0
    nbytes: int = 0


Reader = Callable[[], Any]  # returns a context manager of `ReadVersion`


class Receiver:
    """The newest version of the weights `name`. `patience` is how long a source may be silent."""

    def __init__(
        self, runtime: AgentRuntime, name: str, publisher: str | None, patience: float
    ) -> None:
        self.name = name
        self.counters = ReceiverCounters()
        self._runtime = runtime
        self._registry = runtime.service(WeightsRegistry)
        self._publisher = publisher  # a worker; None: search for it
        self._found: str | None = None
        self._patience = patience
        self._poll = min(_POLL, patience)
        self._me = str(runtime.local_member.incarnation)
        self._store: VersionStore | None = None
        self._needs_snapshot = False
        self._shared = SharedReader(runtime, name, self._me, patience)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._reader: Reader | None = None
        self._version: int | None = None
        self._epoch = ""
        self._futures: list[tuple[int | None, Future[int]]] = []
        self._closed = False
        if self._registry.publisher(name) is not None:
            raise UsageError(f"worker {runtime.name!r} publishes {name!r} itself")
        runtime.threads.start(self._run)

    def __repr__(self) -> str:
        return f"<Receiver of {self.name!r}: version {self._version}, from {self._found}>"

    # For subscribers

    @property
    def version(self) -> int | None:
        """The newest version that can be read."""
        return self._version

    def newer_than(self, version: int | None) -> Future[int]:
        """Return a future for the newest version once it is newer than `version`."""
        future: Future[int] = Future()
        with self._lock:
            if not self._closed and not is_newer(self._version, version):
                self._futures.append((version, future))
                return future
            newest = self._version
        if is_newer(newest, version) and newest is not None:
            future.set_result(newest)
        else:
            future.set_exception(CallCancelled("the subscriber is closed"))
        return future

    @contextmanager
    def read(self, timeout: float | None) -> Iterator[ReadVersion]:
        """Return the newest version. Wait for the first one, or for a source, up to `timeout`."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            reader = self._wait_for_reader(until)
            opened = reader()
            try:
                found: ReadVersion = opened.__enter__()
            except TelegradError:
                if until is not None and time.monotonic() >= until:
                    raise
                # the source has just failed, and the thread is about to notice it
                self._pause(_FIRST_DELAY)
                continue
            break
        try:
            yield found
        finally:
            opened.__exit__(None, None, None)

    def close(self, leave: bool) -> None:
        """End the thread, and let those that wait fail. `leave`: tell the publisher."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            futures, self._futures = self._futures, []
            self._reader = None
            self._shared.close()
            self._changed.notify_all()
        for _, future in futures:
            if not future.done():
                future.set_exception(CallCancelled("the subscriber was closed"))
        if self._registry.publisher(self.name) is None:
            self._registry.set_store(self.name, None)
        if leave and self._found is not None:
            arguments = (self.name, self._runtime.name)
            self._runtime.start(self._found, service.leave, arguments, internal=True)

    def _wait_for_reader(self, until: float | None) -> Reader:
        role = thread_roles.pause()
        try:
            with self._changed:
                while self._reader is None and not self._closed:
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        raise CallTimeout(f"no version of the weights {self.name!r} has arrived")
                    self._changed.wait(left)
                if self._closed or self._reader is None:
                    raise UsageError(f"the subscriber of {self.name!r} is closed")
                return self._reader
        finally:
            thread_roles.resume(role)

    # The thread

    def _run(self) -> None:
        try:
            self._run_until_closed()
        finally:
            self._store = None

    def _run_until_closed(self) -> None:
        failed: str | None = None
        delay = _FIRST_DELAY
        trouble_since: float | None = None
        while not self._has_ended():
            source: str | None = None
            progress = self._version
            try:
                publisher = self._find_publisher()
                if publisher is not None:
                    host = self._runtime.local_member.host if self._shared.is_possible else None
                    arguments = (self.name, self._runtime.name, host, failed)
                    reply: JoinReply = self._call(publisher, service.join, *arguments)
                    source, failed = reply.source.worker, None
                    self._found = publisher
                    self._follow(reply)
            except StaleReference as error:
                # The source has not joined yet, or has left. If that lasts, it has failed.
                _log.debug("%s: %s", self.name, error)
                trouble_since = trouble_since or time.monotonic()
                if time.monotonic() > trouble_since + self._patience:
                    failed, trouble_since = source, None
            except TelegradError as error:
                _log.info("the weights %r of %s: %s", self.name, source, error)
                failed = source
            except RuntimeError:
                if not self._has_ended():
                    raise
            if self._version != progress:
                delay, trouble_since = _FIRST_DELAY, None
            self._pause(delay)
            delay = min(1.5 * delay, _LONGEST_DELAY)

    def _has_ended(self) -> bool:
        return self._closed or self._runtime.closing

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if not self._closed:
                self._changed.wait(seconds)

    def _call(self, to: str, function: Callable[..., Any], *args: Any, extra: float = 0.0) -> Any:
        return self._runtime.start(
            to, function, args, timeout=self._patience + extra, internal=True
        ).wait()

    def _find_publisher(self) -> str | None:
        """Return the worker that publishes these weights; None if there is none at present."""
        if self._publisher is not None:
            return self._publisher
        runtime = self._runtime
        names = [member.name for member in runtime.directory.members(refresh=True)]
        found: Future[str | None] = Future()
        left = len(names)
        lock = threading.Lock()

        def on_reply(name: str, done: Any) -> None:
            nonlocal left
            publishes = done.exception() is None and done.value() is not None
            with lock:
                left -= 1
                is_last = not left
            if publishes or is_last:
                found._try_complete(name if publishes else None, None)

        for name in names:
            future = runtime.start(
                name, service.publishes, (self.name,), timeout=self._patience, internal=True
            )
            future.add_done_callback(partial(on_reply, name))
        return found.wait()

    def _follow(self, reply: JoinReply) -> None:
        if reply.source.is_shared:
            self._follow_shared(reply)
        else:
            self._follow_as_receiver(reply)

    def _follow_shared(self, reply: JoinReply) -> None:
        """Follow a worker of this host, whose memory the subscribers read."""
        have: int | None = None
        if reply.epoch == self._epoch and self._version is not None:
            have = self._version - 1  # the source may be at this version, but not before it
        arguments, mapped = (self.name, reply.epoch, self._me), ""
        while not self._has_ended():
            version: int | None = self._call(
                reply.source.worker,
                service.next_version,
                *arguments,
                have,
                self._poll,
                extra=self._poll,
            )
            if version is not None:
                if reply.source.worker != mapped:
                    with self._shared.read(reply):  # raises if the memory cannot be mapped
                        mapped = reply.source.worker
                have = version
                self._announce(reply.epoch, version, partial(self._shared.read, reply))
                if self._store is not None:
                    self._registry.set_store(self.name, None)
                    self._store = None

    def _follow_as_receiver(self, reply: JoinReply) -> None:
        """Receive for this host, and pass on what is received."""
        store = self._store
        if store is None or store.epoch != reply.epoch:
            store = VersionStore(
                reply.epoch,
                reply.layout,
                shared=self._shared.is_possible,
                history=reply.history,
                bandwidth=reply.bandwidth,
            )
            self._store = store
            self._registry.set_store(self.name, store)
        source, arguments = reply.source.worker, (self.name, reply.epoch, self._me)
        while not self._has_ended():
            have = None if self._needs_snapshot else store.version
            update: Update | None = self._call(
                source, service.next_update, *arguments, have, self._poll, extra=self._poll
            )
            if update is not None:
                self._receive(store, source, update)
                self._needs_snapshot = False
                version = update.streams[-1].version
                self._announce(reply.epoch, version, partial(read_own, store, self._me))

    def _receive(self, store: VersionStore, source: str, update: Update) -> None:
        """Build the newest version from an update, and pass its parts on as they arrive."""
        image, base = store.take_image(), store.current()
        old = image.contents if base is None else base.contents
        arriving = [store.begin(info) for info in update.streams]
        try:
            for number, stream in enumerate(arriving):
                for part in self._fetch(store, source, update.ticket, number):
                    stream.append(part)
                    deltas.apply(part, old, image.contents)
                    self._count(part)
                stream.finish()
                old = image.contents
            store.complete(image, update.streams[-1].version)
        except BaseException as error:
            self._needs_snapshot = isinstance(error, ProtocolError)
            store.remove_unfinished("the source of these weights has failed")
            store.give_back(image)
            raise
        snapshots = sum(info.base is None for info in update.streams)
        self.counters = self.counters._replace(
            versions=self.counters.versions + 1, snapshots=self.counters.snapshots + snapshots
        )

    def _count(self, part: Part) -> None:
        self.counters = self.counters._replace(nbytes=self.counters.nbytes + part.nbytes)

    def _fetch(self, store: VersionStore, source: str, ticket: int, stream: int) -> Iterator[Part]:
        """Return the parts of a stream. Several are requested at a time."""

        def request(index: int) -> Future[Part | None]:
            arguments = (self.name, store.epoch, ticket, stream, index)
            return self._runtime.start(
                source, service.part, arguments, timeout=self._patience, internal=True
            )

        requested = deque((index, request(index)) for index in range(_WINDOW))
        while True:
            index, future = requested.popleft()
            try:
                part = future.wait()
            except CallTimeout:
                # It may only be slow: it waits for its own source, or the bandwidth is limited.
                self._call(source, service.is_alive, self.name, store.epoch)
                requested.appendleft((index, request(index)))
                continue
            if part is None:
                for _, unused in requested:
                    unused.cancel()
                return
            requested.append((index + len(requested) + 1, request(index + len(requested) + 1)))
            yield part

    # Reading

    def _announce(self, epoch: str, version: int, reader: Reader) -> None:
        """Let subscribers read a version, unless they could read a newer one before."""
        with self._changed:
            if self._closed or (epoch == self._epoch and is_newer(self._version, version)):
                return
            self._epoch, self._version, self._reader = epoch, version, reader
            due = [each for wanted, each in self._futures if is_newer(version, wanted)]
            self._futures = [each for each in self._futures if not is_newer(version, each[0])]
            self._changed.notify_all()
        for future in due:
            future._try_complete(version, None)

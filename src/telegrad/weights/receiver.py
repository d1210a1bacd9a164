"""`Receiver`: keeps the newest version of some weights available to one worker.

There is one for each name and agent, for all its subscribers. Its thread joins the publisher, which
assigns a source. Either the source is on this host: then the versions are read from its memory. Or
this worker receives for its host: then it fetches the parts of each update, applies them to an
image of its own, and passes them on. If the source fails, the thread joins again. If the publisher
is gone, the thread searches for one, and a version that this worker received stays readable.

If several workers publish the same name, the one that was started last is followed: each tells all
workers when it starts. If the publisher has declared this worker lost, those that wait get that
error until there is another publisher.

State: that of `NewestVersion`. `_newest_publisher`, the last start of a publisher that is known,
is written under `_lock`. The thread alone writes the rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad.errors import (
    CallTimeout,
    PeerLost,
    ProtocolError,
    StaleReference,
    TelegradError,
    UsageError,
)
from telegrad.futures import Future
from telegrad.weights import deltas, service
from telegrad.weights.deltas import Part
from telegrad.weights.device_images import device_key
from telegrad.weights.newest import FIRST_DELAY, LONGEST_DELAY, NewestVersion, Reader
from telegrad.weights.reading import SharedReader, read_own
from telegrad.weights.service import (
    JoinReply,
    PublishedAsShards,
    WeightsRegistry,
    publisher_of,
)
from telegrad.weights.versions import Update, VersionStore

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_POLL = 2.0  # seconds after which a source replies that there is nothing new
_WINDOW = 4  # parts that are requested at a time

_log = logging.getLogger(__name__)


class OtherPublisher(Exception):
    """Another worker publishes the same weights and was started later."""

    def __init__(self, worker: str, followed: str) -> None:
        super().__init__(
            f"workers {followed!r} and {worker!r} publish them, and {worker!r} was started later; "
            "subscribers follow it, unless they name another one with publisher="
        )
        self.worker = worker


class ReceiverCounters(NamedTuple):
    """What a worker has received over connections since it subscribed."""

    versions: int = 0
    snapshots: int = 0
    nbytes: int = 0


class Receiver(NewestVersion):
    """The newest version of the weights `name`. `patience` is how long a source may be silent."""

    wanted: object = None  # all of them

    def __init__(
        self,
        runtime: AgentRuntime,
        name: str,
        publisher: str | None,
        patience: float,
        uuid: str | None = None,
    ) -> None:
        self._me = str(runtime.local_member.incarnation)
        super().__init__(name, self._me)
        self.counters = ReceiverCounters()
        self._runtime = runtime
        self._registry = runtime.service(WeightsRegistry)
        self._publisher = publisher  # a worker; None: search for it
        self._found: str | None = None
        self._followed_epoch = ""
        self._newest_publisher: tuple[str, str] | None = None  # epoch and worker
        self._patience = patience
        self.uuid = uuid  # of the GPU on which subscribers read
        self._poll = min(_POLL, patience)
        self._store: VersionStore | None = None
        self._needs_snapshot = False
        self._shared = SharedReader(runtime, name, self._me, patience, self._leases)
        if self._registry.publisher(name) is not None:
            raise UsageError(f"worker {runtime.name!r} publishes {name!r} itself")
        if publisher is None:
            self._registry.add_follower(name, self.publisher_started)
        runtime.threads.start(self._run)

    def __repr__(self) -> str:
        return f"<Receiver of {self.name!r}: version {self._version}, from {self._found}>"

    def close(self, leave: bool) -> None:
        """End the thread, and let those that wait fail. `leave`: tell the publisher."""
        if not self._end():
            return
        self._registry.remove_follower(self.name, self.publisher_started)
        self._shared.close()
        if self._registry.publisher(self.name) is None:
            self._registry.set_store(self.name, None)
        if leave:
            self._leave()

    def publisher_started(self, epoch: str, worker: str) -> None:
        """Note that a worker has begun to publish these weights."""
        with self._changed:
            known = self._newest_publisher
            if known is None or known[0] < epoch:
                self._newest_publisher = epoch, worker
            self._changed.notify_all()

    # The thread

    def _run(self) -> None:
        try:
            self._run_until_closed()
        finally:
            self._store = None

    def _run_until_closed(self) -> None:
        failed: str | None = None
        delay = FIRST_DELAY
        trouble_since: float | None = None
        while not self._has_ended():
            source: str | None = None
            publisher: str | None = None
            progress = self._version
            try:
                publisher = self._find_publisher()
                if publisher is not None:
                    self._found = publisher
                    reply = self._join(publisher, failed)
                    source, failed = reply.source.worker, None
                    self._followed_epoch = reply.epoch
                    self.publisher_started(reply.epoch, publisher)
                    self._follow(reply)
            except OtherPublisher as other:
                _log.warning("the weights %r: %s", publisher_of(self.name), str(other))
                self._leave(other.worker)
                delay = FIRST_DELAY
            except PublishedAsShards as error:
                self._fail(error)
            except StaleReference as error:
                # The source has not joined yet, or has left. If that lasts, it has failed.
                _log.debug("%s: %s", self.name, error)
                trouble_since = trouble_since or time.monotonic()
                self._forget_newest_publisher()
                if time.monotonic() > trouble_since + self._patience:
                    failed, trouble_since = source, None
            except TelegradError as error:
                _log.info("the weights %r of %s: %s", self.name, source, error)
                if getattr(error, "expelled", False) and publisher in (None, error.peer):
                    self._fail(error)  # the publisher has declared this worker lost
                self._forget_newest_publisher()
                failed = source
            except Exception as error:  # such as no memory: those that wait get it
                if not self._has_ended():
                    self._fail_once(error)
            if self._version != progress:
                delay, trouble_since = FIRST_DELAY, None
            self._pause(delay)
            delay = min(1.5 * delay, LONGEST_DELAY)

    def _has_ended(self) -> bool:
        return self._closed or self._runtime.closing

    def _call(self, to: str, function: Callable[..., Any], *args: Any, extra: float = 0.0) -> Any:
        return self._runtime.start(
            to, function, args, timeout=self._patience + extra, internal=True
        ).wait()

    def _find_publisher(self) -> str | None:
        """Return the worker that publishes these weights; None if there is none at present.

        Raise `PeerLost` if nobody publishes them, and a worker has declared this one lost.
        """
        if self._publisher is not None:
            return self._publisher
        newest = self._newest_publisher
        if newest is not None:
            return newest[1]
        runtime = self._runtime
        names = [member.name for member in runtime.directory.members(refresh=True)]
        found: Future[str | None] = Future()
        left = len(names)
        expelled: PeerLost | None = None
        lock = threading.Lock()

        def on_reply(name: str, done: Any) -> None:
            nonlocal left, expelled
            error = done.exception()
            epoch = done.value() if error is None else None
            with lock:
                left -= 1
                is_last = not left
                if isinstance(error, PeerLost) and error.expelled:
                    expelled = error
            if epoch is not None:
                self.publisher_started(epoch, name)  # also after another one was found
                found._try_complete(name, None)
            elif is_last:
                found._try_complete(None, expelled)

        for name in names:
            future = runtime.start(
                name, service.publishes, (self.name,), timeout=self._patience, internal=True
            )
            future.add_done_callback(partial(on_reply, name))
        return found.wait()

    def _forget_newest_publisher(self) -> None:
        with self._lock:
            self._newest_publisher = None

    def _check_publisher(self) -> None:
        """Raise `OtherPublisher` if another worker publishes the same and was started later."""
        newest = self._newest_publisher
        if self._publisher is None and newest is not None and newest[0] > self._followed_epoch:
            raise OtherPublisher(newest[1], str(self._found))

    def _leave(self, successor: str | None = None) -> None:
        """Tell the publisher that this worker leaves. `successor` is the one that it follows."""
        if self._found is not None:
            arguments = (self.name, self._runtime.name, successor)
            self._runtime.start(self._found, service.leave, arguments, internal=True)

    def _join(self, publisher: str, failed: str | None) -> JoinReply:
        host = self._runtime.local_member.host if self._shared.is_possible else None
        arguments = (self.name, self._runtime.name, host, failed)
        reply: JoinReply = self._call(publisher, service.join, *arguments)
        return reply

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
        key = self._key_of(reply)
        arguments, mapped = (key, reply.epoch, self._me), ""
        while not self._has_ended():
            self._check_publisher()
            self._leases.release_ended()  # of threads that were interrupted
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
                    with self._shared.read(reply, key):  # raises if the memory cannot be mapped
                        mapped = reply.source.worker
                have = version
                self._announce(reply.epoch, version, partial(self._shared.read, reply, key))
                if self._store is not None:
                    self._registry.set_store(self.name, None)
                    self._store = None

    def _key_of(self, reply: JoinReply) -> str:
        """Return the name of the store to read: that on the GPU, if the source has one."""
        if self.uuid is not None and self._shared.device_is_possible:  # pragma: gpu
            arguments = (self.name, reply.epoch, self.uuid)
            if self._call(reply.source.worker, service.open_on_device, *arguments):
                return device_key(self.name, self.uuid)
        return self.name

    def _own_reader(self, store: VersionStore, version: int) -> Reader:
        """Return how to read a version that has arrived here, on the GPU if possible."""
        if self.uuid is not None:  # pragma: gpu
            on_device = self._registry.device_store(self.name, store.epoch, self.uuid)
            if on_device is not None:
                on_device.wait_for_version(self._me, version - 1).wait()
                return partial(read_own, on_device, self._me, self._leases)
        return partial(read_own, store, self._me, self._leases)

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
            self._check_publisher()
            self._leases.release_ended()
            limit = self._next_limit(store)
            have = None if self._needs_snapshot else store.version
            update: Update | None = self._call(
                source, service.next_update, *arguments, have, limit, self._poll, extra=self._poll
            )
            if update is not None:
                self._receive(store, source, update)
                self._needs_snapshot = False
                self._arrived(store, update.streams[-1].version)

    def _next_limit(self, store: VersionStore) -> int | None:
        """Return the version up to which this worker receives next; None: the newest."""
        return None

    def _arrived(self, store: VersionStore, version: int) -> None:
        """Let subscribers read a version that this worker has received."""
        self._announce(store.epoch, version, self._own_reader(store, version))

    def _receive(self, store: VersionStore, source: str, update: Update) -> None:
        """Build the newest version from an update, and pass its parts on as they arrive."""
        image, base = store.take_image(), store.current()
        old = image.contents if base is None else base.contents
        arriving = [store.begin(info) for info in update.streams]
        log, version = None, update.streams[-1].version
        if base is not None and all(info.base is not None for info in update.streams):
            log = store.open_log(base.version, version)
        try:
            for number, stream in enumerate(arriving):
                for part in self._fetch(store, source, update.ticket, number):
                    stream.append(part)
                    deltas.apply(part, old, image.contents, log)
                    self._count(part)
                stream.finish()
                old = image.contents
            store.complete(image, version, log)
            if log is not None:
                store.end_log(log)
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

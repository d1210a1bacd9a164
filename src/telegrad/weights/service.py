"""The calls between workers that publish, pass on and read weights.

State: `WeightsRegistry`, one per agent. `_publishers` has the publishers of this worker by name,
and `_stores` the store of each name that other workers may read; both are changed under `_lock`.
A store on a GPU or of slices has a key of its own, which begins with the name and a zero character.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad.errors import PeerLost, StaleReference, TelegradError, UsageError
from telegrad.futures import Future
from telegrad.messages.remote_functions import DeferredReply, internal
from telegrad.runtime import active_service
from telegrad.weights import device_images
from telegrad.weights.deltas import Part
from telegrad.weights.device_images import DeviceVersionStore, device_key
from telegrad.weights.layout import Layout
from telegrad.weights.topology import Source, Topology
from telegrad.weights.versions import VersionStore
from telegrad.wire.handshake import Incarnation

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime
    from telegrad.weights.boxes import Box
    from telegrad.weights.shards import ShardInfo, SliceServer

PublisherListener = Callable[[str, str], None]  # it gets the epoch and the worker
_log = logging.getLogger(__name__)


class PublishedAsShards(UsageError):
    """A subscriber has to say which parts of these weights it gets."""


class JoinReply(NamedTuple):
    """What a subscriber needs to follow a publisher."""

    epoch: str
    layout: Layout
    source: Source
    history: int
    bandwidth: float | None


class PublisherEntry(NamedTuple):
    """What the registry needs of a publisher."""

    store: VersionStore
    topology: Topology
    history: int
    device_store: DeviceVersionStore | None = None
    slices: SliceServer | None = None


class WeightsRegistry:
    """The publishers and stores of one agent."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self.runtime = runtime
        self._publishers: dict[str, PublisherEntry] = {}
        self._stores: dict[str, VersionStore] = {}
        self._refused: set[str] = set()  # keys of GPUs on which there is no memory
        # by the name of a publisher: the workers that have joined it, and the error if all of
        # these are gone because they cannot or do not follow it any more
        self._subscribers: dict[str, set[str]] = {}
        self._deserted: dict[str, TelegradError] = {}
        # by name: what is called when a worker begins to publish weights
        self._followers: dict[str, list[PublisherListener]] = {}
        self._lock = threading.Lock()
        runtime.on_loss(self._worker_lost)
        runtime.on_end(self._end)

    def __repr__(self) -> str:
        return f"<WeightsRegistry of {self.runtime.name}: {self._stores}>"

    @classmethod
    def here(cls) -> WeightsRegistry:
        """Return the registry of the agent that serves the current call."""
        return active_service(cls)

    def add_publisher(self, name: str, publisher: PublisherEntry) -> None:
        """Let subscribers join a publisher."""
        with self._lock:
            if name in self._stores:
                raise UsageError(
                    f"worker {self.runtime.name!r} already publishes or receives weights named "
                    f"{name!r}; close the other one, or pass another name"
                )
            self._publishers[name] = publisher
            self._stores[name] = publisher.store
            if publisher.device_store is not None:  # pragma: gpu
                self._stores[device_key(name, publisher.device_store.uuid)] = publisher.device_store

    def remove_publisher(self, name: str) -> None:
        """Undo `add_publisher`."""
        with self._lock:
            for key in [each for each in self._publishers if _belongs(each, name)]:
                del self._publishers[key]
            self._subscribers.pop(name, None)
            self._deserted.pop(name, None)
            stores = self._take_stores(name)
        for store in stores:
            store.close()

    def remove_unused(self, key: str) -> bool:
        """Remove a publisher that has no subscribers. Return whether it had none."""
        with self._lock:
            publisher = self._publishers.get(key)
            if publisher is not None and not publisher.topology.is_empty:
                return False
        self.remove_publisher(key)
        return True

    def publisher(self, name: str) -> PublisherEntry | None:
        """Return a publisher of this worker, if there is one of this name."""
        return self._publishers.get(name)

    def set_store(self, name: str, store: VersionStore | None) -> None:
        """Let other workers read a store; None: no longer."""
        with self._lock:
            if name in self._publishers:
                raise UsageError(f"worker {self.runtime.name!r} publishes {name!r} itself")
            old_stores = self._take_stores(name)
            if store is not None:
                self._stores[name] = store
        for old in old_stores:
            if old is not store:
                old.close()

    def store(self, name: str, epoch: str) -> VersionStore:
        """Return a store. Raise `StaleReference` if it is not here, or is of another epoch."""
        store = self._stores.get(name)
        if store is None or store.epoch != epoch:
            raise StaleReference(
                f"worker {self.runtime.name!r} does not pass on the current weights {name!r}"
            )
        return store

    def device_store(
        self, name: str, epoch: str, uuid: str
    ) -> DeviceVersionStore | None:  # pragma: gpu
        """Return the store of these weights on a GPU; None if this worker cannot have one."""
        key = device_key(name, uuid)
        with self._lock:
            publisher = self._publishers.get(name)
        source = self.store(name, epoch)
        if publisher is not None and publisher.device_store is not None:
            source = publisher.device_store
        with self._lock:
            found = self._stores.get(key)
            if isinstance(found, DeviceVersionStore) and found.epoch == epoch:
                return found
            opened = None
            if key not in self._refused:
                opened = device_images.open_mirror(source, uuid, self.runtime.config)
            if opened is not None:
                self._stores[key] = opened
        if opened is not None:
            self.runtime.threads.start(partial(self._mirror, key, source, opened))
        return opened

    def join(self, name: str, worker: str, host: str | None, failed: str | None) -> JoinReply:
        """Tell a subscriber from where it gets the weights."""
        with self._lock:
            publisher = self._publishers.get(name)
            if publisher is None:
                raise StaleReference(f"worker {self.runtime.name!r} does not publish {name!r}")
            if publisher.slices is not None and publisher.slices.info.count > 1:
                raise PublishedAsShards(
                    f"{name!r} is published as {publisher.slices.info.count} shards; pass "
                    "`weights` or `slices` to the subscriber, so that it knows which parts to get"
                )
            source = publisher.topology.join(worker, host, failed)
            published = publisher_of(name)
            self._subscribers.setdefault(published, set()).add(worker)
            self._deserted.pop(published, None)
        store = publisher.store
        return JoinReply(store.epoch, store.layout, source, publisher.history, store.bandwidth)

    def leave(self, name: str, worker: str, successor: str | None) -> None:
        """Remove a subscriber from the tree. It may follow another publisher now, `successor`."""
        with self._lock:
            publisher = self._publishers.get(name)
            if publisher is not None:
                publisher.topology.remove(worker)
                published, error = publisher_of(name), None
                if successor is not None:
                    error = UsageError(
                        f"nobody gets the weights {published!r} of this worker any more: worker "
                        f"{successor!r} publishes them, too, and was started later; close one of "
                        "the two publishers, or give it another name"
                    )
                self._remove_subscriber(published, worker, error)

    def _remove_subscriber(self, name: str, worker: str, error: TelegradError | None) -> None:
        """The lock is held. `error`: why this worker does not follow the publisher any more."""
        subscribers = self._subscribers.get(name, set())
        if worker in subscribers:
            subscribers.remove(worker)
            if not subscribers and error is not None:
                self._deserted[name] = error

    def raise_if_deserted(self, name: str) -> None:
        """Raise an error if a publisher has lost all its subscribers and they cannot come back."""
        error = self._deserted.get(name)
        if error is not None:
            raise error

    # When a worker begins to publish

    def add_follower(self, name: str, listener: PublisherListener) -> None:
        """Call `listener(epoch, worker)` when a worker begins to publish these weights."""
        with self._lock:
            self._followers.setdefault(name, []).append(listener)

    def remove_follower(self, name: str, listener: PublisherListener) -> None:
        """Undo `add_follower`. May be repeated."""
        with self._lock:
            if listener in self._followers.get(name, ()):
                self._followers[name].remove(listener)

    def announce_publisher(self, name: str) -> None:
        """Tell all workers that this one has begun to publish these weights."""
        publisher, runtime = self._publishers.get(name), self.runtime
        if publisher is not None:
            arguments = (name, publisher.store.epoch, runtime.name)
            for member in runtime.directory.members(refresh=True):
                if member.name != runtime.name:
                    runtime.start(member.name, publisher_started, arguments, internal=True)

    def publisher_started(self, name: str, epoch: str, worker: str) -> None:
        """Tell the subscribers of this worker that another worker has begun to publish."""
        with self._lock:
            followers = list(self._followers.get(name, ()))
        for follower in followers:
            follower(epoch, worker)

    def forget_if_lost(self, store: VersionStore, reader: str) -> None:
        """Remove a reader whose loss was noticed before its call was served."""
        if self.runtime.is_lost(Incarnation(reader)):
            store.reader_lost(reader)

    def _mirror(
        self, key: str, source: VersionStore, target: DeviceVersionStore
    ) -> None:  # pragma: gpu
        try:
            device_images.mirror(source, target)
        except (RuntimeError, TelegradError) as error:  # such as no memory: the host's is used
            _log.warning("weights cannot be kept on the GPU for other workers: %s", error)
            self._refused.add(key)
        finally:
            with self._lock:
                if self._stores.get(key) is target:
                    del self._stores[key]

    def _take_stores(self, name: str) -> list[VersionStore]:
        """Remove the stores of a name: also on GPUs, and of slices. The lock is held."""
        return [self._stores.pop(key) for key in list(self._stores) if _belongs(key, name)]

    def _end(self) -> None:
        with self._lock:
            stores = list(self._stores.values())
            self._stores.clear()
            self._publishers.clear()
        for store in stores:
            store.close()

    def _worker_lost(self, name: str, incarnation: Incarnation) -> None:
        error = None
        if self.runtime.failures.has_expelled(incarnation):
            error = PeerLost(
                f"nobody gets the weights of this worker any more: worker {name!r}, like the other "
                "subscribers, has declared it lost, because it was silent for too long; to go on, "
                "it must join the group again",
                peer=name,
                expelled=True,
            )
        with self._lock:
            stores = list(self._stores.values())
            for publisher in self._publishers.values():
                publisher.topology.remove(name)
            for published in self._subscribers:
                self._remove_subscriber(published, name, error)
        for store in stores:
            store.reader_lost(str(incarnation))


def _belongs(key: str, name: str) -> bool:
    return key == name or key.startswith(device_key(name, ""))


def publisher_of(key: str) -> str:
    """Return the name of the publisher that a store of slices or on a GPU belongs to."""
    return key.partition("\0")[0]


# Calls of publishers


@internal
def publisher_started(name: str, epoch: str, worker: str) -> None:
    """Tell the subscribers of this worker that another worker has begun to publish."""
    WeightsRegistry.here().publisher_started(name, epoch, worker)


# Calls of subscribers


@internal
def publishes(name: str) -> str | None:
    """Return the epoch of the publisher of this name, if this worker has it."""
    publisher = WeightsRegistry.here().publisher(name)
    return None if publisher is None else publisher.store.epoch


@internal
def join(name: str, worker: str, host: str | None, failed: str | None) -> JoinReply:
    """Tell a subscriber from where it gets the weights."""
    return WeightsRegistry.here().join(name, worker, host, failed)


@internal
def shard(name: str) -> ShardInfo | None:
    """Return which part of these weights this worker publishes; None if it publishes none."""
    publisher = WeightsRegistry.here().publisher(name)
    return None if publisher is None or publisher.slices is None else publisher.slices.info


@internal
def join_slices(
    name: str, key: str, boxes: dict[str, Box], worker: str, failed: str | None
) -> JoinReply:
    """Tell a subscriber from where it gets slices. `key` is the name of their store."""
    registry = WeightsRegistry.here()
    publisher = registry.publisher(name)
    if publisher is None or publisher.slices is None:
        raise StaleReference(f"worker {registry.runtime.name!r} does not publish {name!r}")
    publisher.slices.serve(key, boxes)
    return registry.join(key, worker, None, failed)


@internal
def leave(name: str, worker: str, successor: str | None) -> None:
    """Remove a subscriber from the tree. It may follow another publisher now, `successor`."""
    WeightsRegistry.here().leave(name, worker, successor)


@internal
def next_update(
    name: str, epoch: str, reader: str, have: int | None, limit: int | None, seconds: float
) -> Any:
    """Return an `Update` that leads to the newest version; None if there is none in `seconds`."""
    store = WeightsRegistry.here().store(name, epoch)
    return _wait(store, store.wait_for_update(reader, have, limit), reader, seconds)


@internal
def next_version(name: str, epoch: str, reader: str, have: int | None, seconds: float) -> Any:
    """Return the newest complete version; None if there is no other than `have` in `seconds`."""
    store = WeightsRegistry.here().store(name, epoch)
    return _wait(store, store.wait_for_version(reader, have), reader, seconds)


@internal
def part(name: str, epoch: str, ticket: int, stream: int, index: int) -> Any:
    """Return a part of an update, None after the last one."""
    registry = WeightsRegistry.here()
    store = registry.store(name, epoch)
    found = store.part(ticket, stream, index)
    if isinstance(found, Future) and found.done():
        found = found.wait()
    if store.bandwidth is not None:
        due = partial(store.due, ticket, stream, index)
        return DeferredReply(_paced(registry.runtime, due, found))
    return DeferredReply(found) if isinstance(found, Future) else found


@internal
def is_alive(name: str, epoch: str) -> None:
    """Return if this worker still passes on these weights."""
    WeightsRegistry.here().store(name, epoch)


@internal
def open_on_device(name: str, epoch: str, uuid: str) -> bool:  # pragma: gpu
    """Return whether workers of this host can read these weights on a GPU."""
    return WeightsRegistry.here().device_store(name, epoch, uuid) is not None


@internal
def acquire(
    name: str, epoch: str, reader: str, ticket: str, have: int | None, seconds: float
) -> Any:
    """Let a reader of this host use the newest version until it releases its ticket.

    The reply, a `SharedVersion`, waits up to `seconds` for what changed since version `have`.
    """
    registry = WeightsRegistry.here()
    store = registry.store(name, epoch)
    found = store.acquire(reader, ticket, have)
    registry.forget_if_lost(store, reader)
    if not isinstance(found, Future):
        return found
    copy_all = partial(store.without_logs, ticket, found)
    registry.runtime.clock.call_at(time.monotonic() + seconds, copy_all)
    return DeferredReply(found)


@internal
def release(name: str, epoch: str, ticket: str) -> bool:
    """End the use of a version. Return whether it was valid until now."""
    return WeightsRegistry.here().store(name, epoch).release(ticket)


def _wait(store: VersionStore, future: Future[Any], reader: str, seconds: float) -> Any:
    """Reply when there is something newer, and with None after `seconds`."""
    registry = WeightsRegistry.here()
    registry.forget_if_lost(store, reader)
    if future.done():
        return future.wait()
    expire: Callable[[], None] = lambda: store.expire(future)  # noqa: E731
    registry.runtime.clock.call_at(time.monotonic() + seconds, expire)
    return DeferredReply(future, on_abandoned=expire)


def _paced(
    runtime: AgentRuntime, due: Callable[[Part], float], found: Part | Future[Part | None] | None
) -> Future[Part | None]:
    """Return a future that completes when a part is there, and not before it is due."""
    paced: Future[Part | None] = Future()

    def send(part: Part | None) -> None:
        when = 0.0 if part is None else due(part)
        runtime.clock.call_at(when, lambda: paced.set_result(part))

    def on_done(done: Any) -> None:
        error = done.exception()
        if error is None:
            send(done.value())
        else:
            paced.set_exception(error)

    if isinstance(found, Future):
        found.add_done_callback(on_done)
    else:
        send(found)
    return paced

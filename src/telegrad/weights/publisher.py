"""`Publisher`: the trainer's side. It makes versions of the weights and serves them.

`publish` copies the weights into memory that is shared with the workers of this host, and returns.
A thread makes the copy the newest version, compares it with the one before, and makes the delta;
subscribers on other hosts get its parts as they are made. If `publish` is called again before that
thread begins, the version in between is skipped.

If the weights are on a GPU, the copy is in its memory, and workers of this host read it there. It
is copied to host memory only if there are other subscribers.

State, under `_lock`: `_pending`, the copy that is coded next, `_is_coding`, and `_error`. Only one
thread at a time codes, and only it changes the store.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from telegrad import thread_roles
from telegrad.agent import Agent, runtime_of
from telegrad.cuda import flat_memory as device_memory
from telegrad.errors import CallTimeout, TelegradError, UsageError
from telegrad.timeouts import time_limit
from telegrad.transport import flat_memory
from telegrad.weights import deltas, device_images, shards
from telegrad.weights.changes import ChangeLog
from telegrad.weights.deltas import Block
from telegrad.weights.device_images import DeviceVersionStore
from telegrad.weights.layout import Layout, Weights, tensors_of
from telegrad.weights.service import PublisherEntry, WeightsRegistry
from telegrad.weights.shards import SliceServer
from telegrad.weights.streams import Image
from telegrad.weights.topology import Topology
from telegrad.weights.versions import Advance, VersionStore, as_version, is_newer

_log = logging.getLogger(__name__)
_REPORTS = 1000  # that are kept
_READ_AHEAD = 1 << 22  # changed elements that are not coded yet


@dataclass(frozen=True)
class PublishReport:
    """What a version has in comparison with the one before it."""

    version: int
    changed: int
    """Elements that differ from the version before."""
    elements: int
    """All elements."""
    delta_bytes: int
    """Bytes that a subscriber with the version before it receives."""
    full_bytes: int
    """Bytes of the weights."""
    seconds: float
    """How long it took to make the delta, in the background."""

    @property
    def changed_share(self) -> float:
        """The share of the elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


class Publisher:
    """Publishes versions of the weights of a module or `state_dict` under a name.

    >>> from telegrad.testing import LocalCluster
    >>> from telegrad.weights import Subscriber
    >>> with LocalCluster(2) as cluster:
    ...     model, copy = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    ...     publisher = Publisher(model, name="policy", agent=cluster["w0"])
    ...     subscriber = Subscriber(name="policy", agent=cluster["w1"])
    ...     publisher.publish(1)
    ...     subscriber.pull_into(copy)
    ...     torch.equal(model.weight, copy.weight)
    1
    1
    True

    `fan_out` is the number of hosts that each host sends to. `history` is the memory for recent
    deltas in bytes; None: as much as the weights have. A subscriber that is further behind gets a
    snapshot. `bandwidth` limits the bytes per second that each worker sends to other hosts.

    If tensors are of the class `DTensor`, all workers of their mesh make a publisher with the same
    name, and each publishes its shards. They publish the same versions. `shard` is the number of
    this worker and how many there are; the default is that of `torch.distributed`.
    """

    def __init__(
        self,
        weights: Weights,
        name: str = "default",
        *,
        agent: Agent | None = None,
        fan_out: int = 2,
        history: int | None = None,
        bandwidth: float | None = None,
        shard: tuple[int, int] | None = None,
    ) -> None:
        runtime = runtime_of(agent)
        if runtime is None:
            raise UsageError("a publisher needs an agent: pass `agent`, or call `init_rpc` first")
        runtime.require_open()
        if fan_out < 1:
            raise UsageError(f"fan_out is at least 1 receiver, not {fan_out!r}")
        if history is not None and history < 0:
            raise UsageError(f"history is a number of bytes, not {history!r}")
        if bandwidth is not None and not bandwidth > 0:
            raise UsageError(f"a bandwidth is a positive number of bytes/s, not {bandwidth!r}")
        self.name = name
        self.reports: deque[PublishReport] = deque(maxlen=_REPORTS)
        self._weights = weights
        self._runtime = runtime
        tensors = tensors_of(weights)
        index, self._shards = shards.number_of(tensors, shard)
        local = shards.local_tensors(tensors)
        self._layout = Layout.of(local)
        history = self._layout.nbytes if history is None else history
        shared = flat_memory.may_share(runtime.config)
        # Subscribers of an earlier publisher of this name have versions of another epoch.
        epoch = f"{time.time_ns():x}-{secrets.token_hex(8)}"
        self._store = VersionStore(
            epoch, self._layout, shared=shared, history=history, bandwidth=bandwidth
        )
        self._device_store: DeviceVersionStore | None = None
        device = None if self._shards > 1 else device_images.device_of(local, runtime.config)
        if device is not None:  # pragma: gpu
            self._device_store = DeviceVersionStore(epoch, self._layout, device)
            self._store.on_first_reader = self._start_coding
        host = runtime.local_member.host if shared else None
        self._topology = Topology(runtime.name, host, fan_out)
        self._version: int | None = None
        self._publishing = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._pending: tuple[int, Image] | None = None
        self._is_coding = False
        self._error: Exception | None = None
        self._is_closed = False
        self._registry = runtime.service(WeightsRegistry)
        self._slices = SliceServer(
            name,
            shards.describe(tensors, epoch, index, self._shards),
            self._store,
            self._registry,
            fan_out=fan_out,
            history=history,
            on_new=self._start_coding,
        )
        entry = PublisherEntry(
            self._store, self._topology, history, self._device_store, self._slices
        )
        self._registry.add_publisher(name, entry)
        runtime.threads.start(self._announce)

    def __repr__(self) -> str:
        return f"<Publisher of {self.name!r}: version {self._version}>"

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int | None:
        """The version that was published last."""
        return self._version

    def publish(self, version: int | None = None) -> int:
        """Publish the present weights as a version, by default the next one. Return its number.

        This copies the weights; all else happens in the background. Versions must increase.
        """
        with self._publishing:
            self._runtime.require_open()
            if self._is_closed:
                raise UsageError(f"the publisher of {self.name!r} is closed; make a new one")
            if self._error is not None:
                raise self._error
            self._registry.raise_if_deserted(self.name)
            version = self._next_version(version)
            tensors = shards.local_tensors(tensors_of(self._weights))
            if Layout.of(tensors) != self._layout:
                raise UsageError(
                    "the names, shapes, dtypes or ties of the weights have changed; close this "
                    "publisher and make a new one"
                )
            if self._shards > 1:
                self._wait_until_begun()
            store = self._device_store or self._store
            image = store.take_image()
            with torch.no_grad():
                self._layout.write(tensors, image.contents)
            if image.contents.is_cuda:  # pragma: gpu
                image.written = torch.cuda.current_stream(image.contents.device).record_event()
            self._version = version
            with self._lock:
                skipped, self._pending = self._pending, (version, image)
            if skipped is not None:
                if skipped[1].written is not None:  # pragma: gpu
                    skipped[1].written.synchronize()
                store.give_back(skipped[1])
            self._start_coding()
            return version

    def _next_version(self, version: int | None) -> int:
        last = -1 if self._version is None else self._version
        if version is None:
            return last + 1
        number = as_version(version)
        if number < 0:
            raise UsageError(f"a version is not negative, as {number} is")
        if number <= last:
            raise UsageError(f"version {number} does not follow version {last}")
        return number

    def flush(self, timeout: float | None = None) -> None:
        """Wait until subscribers can get all that was published. Raise `CallTimeout` after it."""
        limit = time_limit(timeout)
        role = thread_roles.pause()
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._is_coding, limit):
                    raise CallTimeout(f"version {self._version} is not ready after {timeout} s")
            if self._error is not None:
                raise self._error
        finally:
            thread_roles.resume(role)

    def close(self) -> None:
        """Stop publishing. Subscribers keep the version that they have. May be repeated."""
        if self._is_closed:
            return  # there may be another publisher of this name
        self._is_closed = True
        self._registry.remove_publisher(self.name)

    def _announce(self) -> None:
        """Tell the other workers that this one publishes these weights."""
        try:
            self._registry.announce_publisher(self.name)
        except TelegradError as error:  # the store is gone: subscribers that search will find it
            _log.debug("the publisher of %r was not announced: %s", self.name, error)

    def _wait_until_begun(self) -> None:
        """Wait until the version before is no longer pending: no shard skips a version."""
        role = thread_roles.pause()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is None or self._error is not None)
        finally:
            thread_roles.resume(role)

    def _start_coding(self) -> None:
        with self._lock:
            must_start, self._is_coding = not self._is_coding, True
        if must_start:
            self._runtime.threads.start(self._code_pending)

    def _code_pending(self) -> None:
        while True:
            with self._changed:
                pending, self._pending = self._pending, None
                is_idle = pending is None and not self._is_behind()
                self._changed.notify_all()
                if is_idle or self._error is not None:
                    self._is_coding = False
                    return
            try:
                if self._device_store is not None:  # pragma: gpu
                    pending = self._complete_on_device(self._device_store, pending)
                if pending is not None:
                    self._code(*pending)
                self._slices.update(self._add_version)
            except Exception as error:  # such as no memory: the next `publish` raises it
                self._error = error

    def _is_behind(self) -> bool:
        return self._host_is_behind() or self._slices.is_behind()

    def _host_is_behind(self) -> bool:
        """Return whether a version is on the GPU that subscribers in host memory wait for."""
        store = self._device_store
        return (
            store is not None
            and self._store.has_readers
            and is_newer(store.version, self._store.version)
        )

    def _complete_on_device(  # pragma: gpu
        self, store: DeviceVersionStore, pending: tuple[int, Image] | None
    ) -> tuple[int, Image] | None:
        """Let workers of this host read a version on the GPU. Return its copy for the others."""
        if pending is not None:
            version, image = pending
            image.written.synchronize()
            store.complete(image, version)
        current = store.current()  # only this thread completes another one
        if current is None or not self._host_is_behind():
            return None
        copy = self._store.take_image()
        device_memory.copy(current.contents, copy.contents)
        return current.version, copy

    def _code(self, version: int, image: Image) -> None:
        """Let workers of this host read a version, and make the delta for the others."""
        started = time.perf_counter()
        elements = changed = sum(
            (section.stop - section.start) // section.width for section in self._layout.sections
        )
        nbytes = self._layout.nbytes
        if self._shards > 1:  # subscribers get slices
            self._store.complete(image, version)
            return
        delta = self._add_version(self._store, image, version)
        if delta is not None:
            changed, nbytes = delta
        seconds = time.perf_counter() - started
        report = PublishReport(version, changed, elements, nbytes, self._layout.nbytes, seconds)
        self.reports.append(report)

    def _add_version(
        self, store: VersionStore, image: Image, version: int
    ) -> tuple[int, int] | None:
        """Make an image the newest version of a store, and make its delta.

        Return the number of changed elements and the bytes; None for the first version.
        """
        advanced = store.advance(image, version)
        if advanced is None:
            return None
        changed = self._make_delta(store, advanced, image)
        return changed, advanced.stream.nbytes

    def _make_delta(self, store: VersionStore, advanced: Advance, image: Image) -> int:
        """Add the parts of a delta to its stream. Return the number of changed elements."""
        base, stream, log = advanced
        changed, failure = 0, "the publisher could not make this delta"
        try:
            blocks = deltas.compare(base.contents, image.contents, store.layout.sections)
            if log is not None:
                blocks = self._logged(store, log, blocks)
            for part in deltas.encode(blocks):
                stream.append(part)
                changed += part.changed
            failure = ""
        finally:
            stream.finish(failure)
            store.end_delta(base)
            if log is not None and not log.is_complete:
                log.give_up()
                store.end_log(log)
        return changed

    def _logged(
        self, store: VersionStore, log: ChangeLog, blocks: Iterable[Block]
    ) -> Iterator[Block]:
        """Return the blocks of a delta, and write their changes to a log.

        If no other host waits for the delta, the log is completed before blocks are coded.
        """
        left = _READ_AHEAD if self._topology.is_empty else 0
        waiting: list[Block] = []
        for block in blocks:
            log.add_block(block)
            if log.is_given_up:
                store.end_log(log)
                left = 0
            left -= block.positions.size
            waiting.append(block)
            if left < 0:
                yield from waiting
                waiting.clear()
        store.end_log(log)
        yield from waiting

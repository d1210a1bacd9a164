"""`SlicedVersions`: the newest version of the slices of one worker, from all shards.

A thread asks all workers which shards they publish. When it knows all shards, it plans which boxes
come from which of them. A `SliceReceiver` for each shard receives its boxes. They wait for
each other: the one with the newest version waits until all others have the same version, and these
receive up to this version and not beyond. Then the version is complete, and subscribers can read
it. If the shards change, for instance because trainers were restarted, there is another plan.

A version must not consist of shards of two runs of the trainers that use the same number. So before
a version with a new publisher is complete, all publishers are asked whether they are still there.

State, under `_lock`: `_plan`, `_receivers` by key, `_holds`, the newest version of each receiver,
`_complete`, the version that is read, and `_needs_plan`. What must never be true: holds of
different versions are in `_complete`, or an image in it is written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from telegrad.errors import StaleReference, TelegradError, UsageError
from telegrad.weights import service
from telegrad.weights.assembly import Complete, Hold, SlicedVersion
from telegrad.weights.held import Held
from telegrad.weights.newest import FIRST_DELAY, LONGEST_DELAY, NewestVersion
from telegrad.weights.planning import Plan, Source, Wanted, make_plan
from telegrad.weights.receiver import OtherPublisher, Receiver, ReceiverCounters
from telegrad.weights.service import JoinReply, WeightsRegistry
from telegrad.weights.shards import ShardInfo
from telegrad.weights.versions import VersionStore

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_log = logging.getLogger(__name__)


class SliceReceiver(Receiver):
    """Receives the slices from one shard, in step with the others."""

    def __init__(
        self, runtime: AgentRuntime, versions: SlicedVersions, source: Source, patience: float
    ) -> None:
        self._versions = versions
        self.source = source
        super().__init__(runtime, source.key, None, patience)

    def _find_publisher(self) -> str | None:
        return self._versions.worker_of(self)

    def _join(self, publisher: str, failed: str | None) -> JoinReply:
        arguments = (self.source.key, self.source.boxes, self._runtime.name, failed)
        try:
            reply: JoinReply = self._call(
                publisher, service.join_slices, self._versions.name, *arguments
            )
        except TelegradError:
            self._versions.request_plan()
            raise
        return reply

    def _check_publisher(self) -> None:
        worker = self._versions.worker_of(self)
        if worker not in (None, self._found):
            raise OtherPublisher(str(worker), str(self._found))

    def _next_limit(self, store: VersionStore) -> int | None:
        while not self._has_ended():
            limit = self._versions.next_limit(self, store, self._poll)
            if not isinstance(limit, _Undecided):
                return limit
            # Others are behind. If this publisher is gone, so is this version.
            self.check_publisher(store)
            self._versions.arrived(self, store)
        return None

    def check_publisher(self, store: VersionStore) -> None:
        """Raise if the publisher of these versions is gone."""
        publisher = self._versions.worker_of(self)
        if publisher is None:
            raise StaleReference("the publisher of this shard is gone")
        self._call(publisher, service.is_alive, self.name, store.epoch)

    def _arrived(self, store: VersionStore, version: int) -> None:
        self._version = version
        self._versions.arrived(self, store)


class _Undecided:
    """The next limit is not known yet."""


class SlicedVersions(NewestVersion):
    """The newest complete version of the slices `wanted` of the weights `name`."""

    uuid: str | None = None

    def __init__(
        self,
        runtime: AgentRuntime,
        name: str,
        publisher: str | None,
        patience: float,
        wanted: Wanted,
    ) -> None:
        self._me = str(runtime.local_member.incarnation)
        super().__init__(name, self._me)
        if runtime.service(WeightsRegistry).publisher(name) is not None:
            raise UsageError(f"worker {runtime.name!r} publishes {name!r} itself")
        self.wanted = wanted
        self._runtime = runtime
        self._publisher = publisher
        self._patience = patience
        self._plan: Plan | None = None
        self._receivers: dict[str, SliceReceiver] = {}
        self._holds: dict[str, Hold] = {}
        self._complete: Complete | None = None
        self._needs_plan = False
        self._completing = threading.Lock()  # versions are announced in the order of `_complete`
        self._past = ReceiverCounters()
        self._registry = runtime.service(WeightsRegistry)
        if publisher is None:
            self._registry.add_follower(name, self._publisher_started)
        runtime.threads.start(self._run)

    @property
    def counters(self) -> ReceiverCounters:
        """What was received from all shards. A version is counted once for each shard."""
        with self._lock:
            found = [self._past, *(each.counters for each in self._receivers.values())]
        return ReceiverCounters(*(sum(column) for column in zip(*found, strict=True)))

    def close(self, leave: bool) -> None:
        """End all threads, and let those that wait fail. `leave`: tell the publishers."""
        if self._end():
            self._registry.remove_follower(self.name, self._publisher_started)
            with self._lock:
                receivers = list(self._receivers.values())
            for receiver in receivers:
                receiver.close(leave)

    # The plan

    def _run(self) -> None:
        delay = FIRST_DELAY
        while not self._has_ended():
            try:
                found = make_plan(self.name, self._ask_workers(), self.wanted)
                if found is not None:
                    self._follow(found)
                    self._wait_for_request()
                    delay = FIRST_DELAY
            except UsageError as error:
                if not self._has_ended():
                    self._fail(error)
            except TelegradError as error:  # such as a store that cannot be reached now
                _log.info("the shards of the weights %r: %s", self.name, error)
            self._pause(delay)
            delay = min(1.5 * delay, LONGEST_DELAY)

    def _has_ended(self) -> bool:
        return self._closed or self._runtime.closing

    def _ask_workers(self) -> dict[str, ShardInfo]:
        """Return which shards there are, by worker."""
        names = [member.name for member in self._runtime.directory.members(refresh=True)]
        if self._publisher is not None:
            names = [self._publisher]
        asked = {
            name: self._runtime.start(
                name, service.shard, (self.name,), timeout=self._patience, internal=True
            )
            for name in names
        }
        found = {}
        for name, future in asked.items():
            try:
                info = future.wait()
            except TelegradError:  # it is lost, or leaves
                continue
            if info is not None:
                found[name] = info
        return found

    def _publisher_started(self, epoch: str, worker: str) -> None:
        """Look who publishes which shards: perhaps the trainers were started again."""
        self.request_plan()

    def request_plan(self) -> None:
        """Look again who publishes which shards."""
        with self._changed:
            self._needs_plan = True
            self._changed.notify_all()

    def _wait_for_request(self) -> None:
        with self._changed:
            while not self._needs_plan and not self._has_ended():
                self._changed.wait(LONGEST_DELAY)
            self._needs_plan = False

    def _follow(self, plan: Plan) -> None:
        with self._changed:
            if self._closed:
                return
            self._plan, self._error = plan, None
            unused = [
                self._receivers.pop(key) for key in list(self._receivers) if key not in plan.sources
            ]
            for receiver in unused:
                self._past = ReceiverCounters(
                    *(sum(pair) for pair in zip(self._past, receiver.counters, strict=True))
                )
                self._drop(receiver.name)
            for key, source in plan.sources.items():
                if key in self._receivers:
                    self._receivers[key].source = source
                else:
                    self._receivers[key] = SliceReceiver(
                        self._runtime, self, source, self._patience
                    )
            self._changed.notify_all()
        for receiver in unused:
            receiver.close(leave=True)

    def worker_of(self, receiver: SliceReceiver) -> str | None:
        """Return the worker that publishes the shard of a receiver."""
        plan = self._plan
        source = None if plan is None else plan.sources.get(receiver.name)
        return None if source is None else source.worker

    # Versions

    def next_limit(
        self, receiver: SliceReceiver, store: VersionStore, seconds: float
    ) -> int | _Undecided | None:
        """Wait until a receiver may go on. Return up to which version; None: the newest.

        After `seconds`, or if its version is to be looked at again, return `_Undecided`.
        """
        key = receiver.name
        with self._changed:
            while not self._closed:
                hold = self._holds.get(key)
                if hold is not None and hold.store is not store:  # of a publisher that is gone
                    self._drop(key)
                    continue
                newest = max((each.version for each in self._holds.values()), default=None)
                if store.version is None or (hold is not None and hold.version != newest):
                    return newest
                if hold is None:
                    return _Undecided()
                if self._complete is not None and hold in self._complete.holds:
                    return None
                if not self._changed.wait(seconds):
                    return _Undecided()
        return None

    def arrived(self, receiver: SliceReceiver, store: VersionStore) -> None:
        """Note the newest version of a receiver. If all have it, subscribers can read it."""
        with self._changed:
            if self._closed or self._receivers.get(receiver.name) is not receiver:
                return
            old = self._holds.get(receiver.name)
            if old is None or old.store is not store or old.version != store.version:
                self._drop(receiver.name)
                lease = self._leases.open(store.release)
                store.acquire(self._me, lease.ticket)
                version = store.image_of(lease.ticket).version
                self._holds[receiver.name] = Hold(receiver.source, store, version, lease)
                self._changed.notify_all()
            complete = self._find_complete()
            known = [] if self._complete is None else self._complete.epochs
        if complete is None:
            return
        if complete.epochs != known and not self._are_alive(complete):
            return
        with self._completing:
            with self._changed:
                newest = self._find_complete()
                if newest is None or newest.holds != complete.holds:
                    return
                for hold in complete.holds:
                    hold.owners += 1
                unused, self._complete = self._complete, complete
                self._release(unused)
            reader = partial(self._read_complete, complete)
            self._announce("\n".join(complete.epochs), complete.version, reader)

    def _find_complete(self) -> Complete | None:
        """Return the version that all receivers have. The lock is held."""
        plan, holds = self._plan, list(self._holds.values())
        if plan is None or self._holds.keys() != plan.sources.keys():
            return None
        if len({hold.version for hold in holds}) != 1:
            return None
        if self._complete is not None and self._complete.holds == holds:
            return None
        return Complete(plan, holds)

    def _are_alive(self, complete: Complete) -> bool:
        """Return whether all publishers are still there. Drop the versions of the others."""
        with self._lock:
            receivers = [(self._receivers.get(each.source.key), each) for each in complete.holds]
        gone = []
        for receiver, hold in receivers:
            try:
                if receiver is not None:
                    receiver.check_publisher(hold.store)
            except TelegradError:
                gone.append(hold)
        with self._changed:
            for hold in gone:
                if self._holds.get(hold.source.key) is hold:
                    self._drop(hold.source.key)
            self._changed.notify_all()
        return not gone

    def _drop(self, key: str) -> None:
        """Let the image of a hold be written again, unless it is read. The lock is held."""
        hold = self._holds.pop(key, None)
        if hold is not None:
            hold.release()

    def _release(self, complete: Complete | None) -> None:
        """Let the images of a version be written again if nobody reads it. The lock is held."""
        if complete is None or complete.is_released:
            return
        if not complete.users and complete is not self._complete:
            complete.is_released = True
            for hold in complete.holds:
                hold.release()

    @contextmanager
    def _read_complete(self, complete: Complete, held: Held | None) -> Iterator[SlicedVersion]:
        def release(ticket: str) -> None:
            with self._lock:
                complete.users.discard(ticket)
                self._release(complete)

        lease = self._leases.open(release)
        with self._lock:
            if complete.is_released:
                raise StaleReference("there is a newer version")
            complete.users.add(lease.ticket)
        yield SlicedVersion(complete, self.wanted.slices)

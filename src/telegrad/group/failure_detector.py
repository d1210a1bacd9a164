"""`FailureDetector`: find out which workers are lost, and declare them lost permanently.

A worker is lost for one of these reasons: it sent a LEAVE frame, its process has ended on this
host, it was silent for too long, or the directory says that it has left or was started again. An
incarnation that was declared lost stays lost: its connections are closed on this side too, so that
it notices and joins again.

A failed attempt to connect is no reason; see `Attempts` for when a series of them is. What needs to
know whether a worker is alive, and has no connection to it, asks for attempts (`watch`).

A worker that was declared lost is told so when it sends something again, and declares the other one
lost in turn (`expelled_by`).

State: `_lost`, `_expelled_by` and `_looked_up` (incarnations) are changed under `_lock`.
`_listeners` grows while layers above start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from telegrad.config import Config
from telegrad.errors import JoinError, StoreTampered, TelegradError, UsageError
from telegrad.group.hosts import host_id
from telegrad.group.membership import Directory, Member
from telegrad.recorder import FlightRecorder
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.executor import ThreadPool
from telegrad.wire.handshake import Incarnation

LossListener = Callable[[str, Incarnation], None]

_HAS_ENDED = "it has left or was started again"
_JOIN_AGAIN = "to go on, this worker must join the group again"
# the reason why a connection of a worker that was declared lost is refused
REFUSAL_OF_LOST = f"it has declared this worker lost; {_JOIN_AGAIN}"
_RETRY = 1.0  # seconds between two attempts to reach a worker that is watched

_log = logging.getLogger(__name__)


class Attempts:
    """A series of attempts to reach a worker: do they show that it is lost?

    On this host, the kernel knows: if no process listens at its addresses, the worker has ended.

    On another host, an address also refuses connections while a firewall or a proxy on the way is
    started again, or a router sends them elsewhere. So refusals count as silence. The worker is
    lost when its address has refused every attempt for `Config.heartbeat_timeout`, as a worker
    that was killed does. If attempts fail in another way, the network may be cut: the worker is
    lost when it could not be reached for `limit` seconds.
    """

    def __init__(self, member: Member, config: Config, limit: float) -> None:
        on_this_host = member.is_local or member.host == host_id()
        self._refusal_limit = 0.0 if on_this_host else config.heartbeat_timeout
        self._limit = limit
        self._started = time.monotonic()
        self._refused_since: float | None = None

    def __repr__(self) -> str:
        return f"<Attempts for {time.monotonic() - self._started:.1f} of {self._limit} s>"

    def failed(self, refused: bool) -> str:
        """Note that an attempt failed. Return why the worker is lost, "" if it may be alive.

        `refused`: at its addresses, no process listens, or one that is not the worker.
        """
        now = time.monotonic()
        if not refused:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        if self._refused_since is not None and now - self._refused_since >= self._refusal_limit:
            waited = f" for {self._refusal_limit:g} s" if self._refusal_limit else ""
            return f"no process listens at its address any more{waited}"
        if now - self._started >= self._limit:
            return f"it could not be reached for {self._limit:g} s"
        return ""


class MonitoredPeer(Protocol):
    """A peer that this worker is connected to, or connects to."""

    @property
    def member(self) -> Member: ...
    def mark_lost(self, reason: str, leave_reason: str = "") -> None: ...


class MonitoredPeers(Protocol):
    """The peers that this worker has called."""

    def current(self, name: str) -> MonitoredPeer | None: ...
    def connected(self, to: str) -> MonitoredPeer | None: ...
    def reach(self, to: str, timeout: float | None = None) -> MonitoredPeer: ...


class Prober(Protocol):
    """See `telegrad.client.dialer.Dialer`."""

    def probe(self, member: Member) -> bool | None: ...


class DetectorRuntime(Protocol):
    """What failure detection needs from its agent."""

    config: Config
    clock: Clock
    threads: ThreadPool
    directory: Directory
    closing: bool
    recorder: FlightRecorder

    @property
    def peers(self) -> MonitoredPeers: ...
    @property
    def dialer(self) -> Prober: ...
    def close_lost_peer(self, name: str, incarnation: Incarnation, reason: str) -> None: ...


class FailureDetector:
    """The workers that one agent has found to be lost."""

    def __init__(self, runtime: DetectorRuntime) -> None:
        self._runtime = runtime
        self._lost: set[Incarnation] = set()
        self._expelled_by: set[Incarnation] = set()  # those of them that declared this worker lost
        self._looked_up: set[Incarnation] = set()  # in the directory, at this moment
        self._listeners: list[LossListener] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<FailureDetector, {len(self._lost)} lost>"

    def add_listener(self, listener: LossListener) -> None:
        """Call `listener(name, incarnation)` when a worker is declared lost."""
        self._listeners.append(listener)

    def is_lost(self, incarnation: Incarnation) -> bool:
        """Return whether a worker was declared lost. True before the listeners are called."""
        return incarnation in self._lost

    def lost_names(self) -> list[str]:
        """Return the names of the workers that were declared lost."""
        return sorted({self._runtime.directory.known_name(each) for each in self._lost.copy()})

    def declare_lost(
        self,
        name: str,
        incarnation: Incarnation,
        leave_reason: str = "",
        reason: str = "it closed its connections",
    ) -> None:
        """Declare one incarnation of a peer lost: close its connections and call the listeners.

        `leave_reason` is the reason that the peer gave when it left.
        """
        runtime = self._runtime
        peer = runtime.peers.current(name)
        if peer is not None and peer.member.incarnation == incarnation:
            peer.mark_lost(reason, leave_reason)
            return  # `mark_lost` calls this method again
        with self._lock:
            if runtime.closing or incarnation in self._lost:
                return
            self._lost.add(incarnation)
        runtime.recorder.add_event("lost", peer=name, reason=leave_reason or reason)
        runtime.close_lost_peer(name, incarnation, reason)
        for listener in self._listeners:
            try:
                listener(name, incarnation)
            except Exception:
                _log.exception("a listener failed when worker %r was lost", name)

    def expelled_by(self, name: str, incarnation: Incarnation, reason: str) -> None:
        """Note that a peer has declared this worker lost, and declare it lost here."""
        with self._lock:
            self._expelled_by.add(incarnation)
        self.declare_lost(name, incarnation, reason=reason)

    def has_expelled(self, incarnation: Incarnation) -> bool:
        """Return whether a peer has declared this worker lost."""
        return incarnation in self._expelled_by

    def check_silent_peer(self, name: str, incarnation: Incarnation) -> None:
        """Find out whether a peer has ended that closed its last connection without a LEAVE frame.

        It may also have been interrupted while it connected. If this worker has a connection to the
        peer, its end will tell. If not, this worker connects.
        """
        peer = self._runtime.peers.connected(name)
        is_connected = peer is not None and peer.member.incarnation == incarnation
        if not self._runtime.closing and not is_connected:
            self.watch(incarnation)

    def watch(self, incarnation: Incarnation) -> None:
        """Make sure that the loss of a worker is noticed: connect to it, and retry on failure."""
        runtime = self._runtime
        attempts: Attempts | None = None

        def check() -> None:
            nonlocal attempts
            if runtime.closing or self.is_lost(incarnation):
                return
            name = runtime.directory.name_of(incarnation)
            try:
                peer = runtime.peers.reach(name, _RETRY)
            except (TelegradError, TimeoutError) as error:
                member = self._registered(name)
                if _has_ended(member, incarnation):
                    self.declare_lost(name, incarnation, reason=str(error) or _HAS_ENDED)
                    return
                assert member is not None
                attempts = attempts or Attempts(member, runtime.config, self._silence_limit(member))
                reason = attempts.failed(runtime.dialer.probe(member) is False)
                if reason:
                    self.declare_lost(name, incarnation, reason=reason)
                else:
                    runtime.clock.call_at(time.monotonic() + _RETRY, lambda: self._run_soon(check))
            else:
                if peer.member.incarnation != incarnation:
                    reason = "another worker has taken its name"
                    self.declare_lost(name, incarnation, reason=reason)

        self._run_soon(check)

    def look_up(self, member: Member) -> None:
        """Let another thread look whether the directory says that a worker has ended.

        The store may be slow, or be out of reach like the worker.
        """
        name, incarnation = member.name, member.incarnation
        with self._lock:
            if incarnation in self._looked_up:
                return
            self._looked_up.add(incarnation)

        def look() -> None:
            try:
                if _has_ended(self._registered(name), incarnation):
                    self.declare_lost(name, incarnation, reason=_HAS_ENDED)
            finally:
                with self._lock:
                    self._looked_up.discard(incarnation)

        self._run_soon(look)

    def _registered(self, name: str) -> Member | None:
        """Return the directory's present entry of a worker; None: it has none."""
        directory = self._runtime.directory
        try:
            try:
                return directory.find(name, refresh=True)
            # the store is gone or was tampered with; use what was read last
            except (JoinError, StoreTampered):
                return directory.find(name)
        except UsageError:
            return None

    def _silence_limit(self, member: Member) -> float:
        """Return for how many seconds a worker may be out of reach before it is lost."""
        config = self._runtime.config
        if member.is_local:
            return config.heartbeat_timeout
        return max(config.heartbeat_timeout, config.resume_timeout)

    def _run_soon(self, job: Callable[[], None]) -> None:
        self._runtime.threads.start_with_retry(job, self._runtime.clock)


def _has_ended(registered: Member | None, incarnation: Incarnation) -> bool:
    """Return whether a worker is not the one that is registered any more."""
    return registered is None or registered.left or registered.incarnation != incarnation


def lost_notice(reason: str) -> str:
    """Return the message to a peer that was declared lost."""
    return f"it has declared this worker lost ({reason}); {_JOIN_AGAIN}"

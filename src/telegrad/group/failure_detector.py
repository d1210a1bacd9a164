"""`FailureDetector`: find out which workers are lost, and declare them lost permanently.

A worker is lost for one of these reasons: it sent a LEAVE frame, its connections broke, it sent no
heartbeat, or it cannot be reached although a layer above needs to know whether it is alive
(`watch`). An incarnation that was declared lost stays lost: its connections are closed on this
side too, so that it notices and joins again.

State: `_lost` (incarnations) is changed under `_lock`. `_listeners` grows while layers above start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from telegrad.config import Config
from telegrad.errors import JoinError, StoreTampered, TelegradError, UsageError
from telegrad.group.membership import Directory, Member
from telegrad.recorder import FlightRecorder
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.executor import ThreadPool
from telegrad.wire.handshake import Incarnation

LossListener = Callable[[str, Incarnation], None]

# Seconds after which a worker of another host is lost if no process listens at its address.
REFUSED_TIMEOUT = 5.0
_RETRY = 1.0  # seconds between two attempts to reach a worker that is watched

_log = logging.getLogger(__name__)


class MonitoredPeer(Protocol):
    """A peer that this worker is connected to, or connects to."""

    @property
    def member(self) -> Member: ...
    def mark_lost(self, reason: str, leave_reason: str = "") -> None: ...


class MonitoredPeers(Protocol):
    """The peers that this worker has called."""

    def current(self, name: str) -> MonitoredPeer | None: ...
    def connected(self, to: str) -> MonitoredPeer | None: ...
    def reach(self, to: str) -> MonitoredPeer: ...


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
        started = time.monotonic()
        refused_since: float | None = None

        def check() -> None:
            nonlocal refused_since
            if runtime.closing or self.is_lost(incarnation):
                return
            name = runtime.directory.name_of(incarnation)
            try:
                alive: bool | None = runtime.peers.reach(name).member.incarnation == incarnation
            except TelegradError as error:
                # A failure to connect does not prove that the worker has ended. It may be stopped,
                # or out of descriptors, or its network is cut. It gets as much time as a worker
                # that sends no heartbeats.
                reason, now = str(error), time.monotonic()
                member = self._registered(name)
                if (
                    member is None
                    or member.left
                    or member.incarnation != incarnation
                    or now > started + self._silence_limit(member)
                ):
                    alive = False
                elif runtime.dialer.probe(member) is False:  # no process listens there
                    refused_since = refused_since or now
                    ended = member.is_local or now - refused_since > REFUSED_TIMEOUT
                    alive = False if ended else None
                else:
                    refused_since, alive = None, None
            else:
                reason = "another worker has taken its name"
            if alive is False:
                self.declare_lost(name, incarnation, reason=reason)
            elif alive is None:
                runtime.clock.call_at(time.monotonic() + _RETRY, lambda: self._run_soon(check))

        self._run_soon(check)

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


def lost_notice(name: str, reason: str) -> str:
    """Return the message of worker `name` to a peer that it has declared lost."""
    return (
        f"worker {name!r} has declared this worker lost ({reason}); "
        "to go on, this worker must join the group again"
    )

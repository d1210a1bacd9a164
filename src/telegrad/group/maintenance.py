"""Periodic tasks of an agent, run by its clock: heartbeats, idle connections, unused memory."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from telegrad.config import Config
from telegrad.group.endpoint import LocalEndpoint
from telegrad.group.failure_detector import lost_notice
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.executor import ThreadPool
from telegrad.transport.channel import Channel
from telegrad.wire.handshake import Incarnation

_TIDY_INTERVAL = 5.0
_CLOSE_IDLE_AFTER = 30.0
_TRIM_IDLE_AFTER = 60.0
_MISSED_HEARTBEATS = 3  # a peer with a long interval gets at least this many of its own intervals

_log = logging.getLogger(__name__)


class MaintainedPeer(Protocol):
    @property
    def heartbeat(self) -> float: ...
    @property
    def silence_limit(self) -> float: ...
    def send_heartbeat(self, interval: float, timeout: float) -> bool: ...
    def mark_lost(self, reason: str) -> None: ...
    def close_idle_connections(self, older_than: float) -> None: ...


class MaintainedConnection(Protocol):
    channel: Channel

    @property
    def peer_name(self) -> str: ...
    @property
    def incarnation(self) -> Incarnation: ...
    @property
    def heartbeat(self) -> float: ...
    @property
    def is_multiplexed(self) -> bool: ...
    def send_heartbeat(self, interval: float, timeout: float) -> bool: ...


class MaintainedListener(Protocol):
    @property
    def connections(self) -> Sequence[MaintainedConnection]: ...
    def close_peer(self, incarnation: Incarnation, reason: str) -> None: ...


class MaintainedPeers(Protocol):
    def all(self) -> Sequence[MaintainedPeer]: ...


class MaintenanceRuntime(Protocol):
    """What maintenance needs from its agent."""

    name: str
    config: Config
    clock: Clock
    threads: ThreadPool
    endpoint: LocalEndpoint

    @property
    def calls_made(self) -> int: ...
    @property
    def calls_served(self) -> int: ...
    @property
    def listener(self) -> MaintainedListener: ...
    @property
    def peers(self) -> MaintainedPeers: ...


def start(runtime: MaintenanceRuntime) -> None:
    """Put the periodic tasks of an agent on its clock."""
    trimmer = _MemoryTrimmer(runtime)
    runtime.clock.call_every(runtime.config.heartbeat_interval, lambda: send_heartbeats(runtime))
    runtime.clock.call_every(_TIDY_INTERVAL, lambda: _close_idle_connections(runtime))
    runtime.clock.call_every(_TIDY_INTERVAL, trimmer.tidy)


def send_heartbeats(runtime: MaintenanceRuntime) -> None:
    """Send a heartbeat to every peer, and declare those lost that have sent none for too long."""
    interval, timeout = runtime.config.heartbeat_interval, runtime.config.heartbeat_timeout
    for peer in runtime.peers.all():
        limit = max(timeout, _MISSED_HEARTBEATS * peer.heartbeat, peer.silence_limit)
        if not peer.send_heartbeat(interval, limit):
            mark_lost = functools.partial(peer.mark_lost, f"it was silent for {limit} s")
            runtime.threads.start_with_retry(mark_lost, runtime.clock)
    for connection in runtime.listener.connections:
        silence_limit = connection.channel.silence_limit
        limit = max(timeout, _MISSED_HEARTBEATS * connection.heartbeat, silence_limit)
        if connection.is_multiplexed and not connection.send_heartbeat(interval, limit):
            _log.warning(
                "worker %r has heard nothing from %r for %s s",
                runtime.name,
                connection.peer_name,
                limit,
            )
            notice = lost_notice(f"it was silent for {limit} s")
            runtime.listener.close_peer(connection.incarnation, notice)


def _close_idle_connections(runtime: MaintenanceRuntime) -> None:
    for peer in runtime.peers.all():
        peer.close_idle_connections(time.monotonic() - _CLOSE_IDLE_AFTER)


class _MemoryTrimmer:
    """Give unused shared memory back to the system when an agent has made no calls for a while."""

    def __init__(self, runtime: MaintenanceRuntime) -> None:
        self._runtime = runtime
        self._calls = 0
        self._idle_since = time.monotonic()

    def tidy(self) -> None:
        """Free what peers no longer use; trim the allocator if there were no calls for a minute."""
        endpoint, now = self._runtime.endpoint, time.monotonic()
        endpoint.mappings.unmap()
        endpoint.allocator.close_drained()
        calls = self._runtime.calls_made + self._runtime.calls_served
        if calls != self._calls:
            self._calls, self._idle_since = calls, now
        elif now - self._idle_since > _TRIM_IDLE_AFTER:
            endpoint.allocator.close_unused()

"""What the clock does for an agent: heartbeats, idle connections, unused memory."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from telegrad.client.peer import lost_notice

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_TIDY_EVERY = 5.0
_LANE_IDLE = 30.0
_QUIET_BEFORE_TRIM = 60.0
_MISSED_BEATS = 3  # a peer that beats slowly is given at least so many of its own intervals

_log = logging.getLogger(__name__)


def start(agent: AgentRuntime) -> None:
    """Put an agent's upkeep on its clock."""
    memory = _IdleMemoryTrimmer(agent)
    agent.clock.every(agent.config.heartbeat_interval, lambda: send_heartbeats(agent))
    agent.clock.every(_TIDY_EVERY, lambda: _close_idle_lanes(agent))
    agent.clock.every(_TIDY_EVERY, memory.tidy)


def send_heartbeats(agent: AgentRuntime) -> None:
    """Give a sign of life to every peer, and find those that have gone silent."""
    interval, patience = agent.config.heartbeat_interval, agent.config.heartbeat_timeout
    for link in agent.links():
        longest = max(patience, _MISSED_BEATS * link.heartbeat)
        if link.pipe.attached and not link.lost and not link.pipe.beat(interval, longest):
            reason = f"it was silent for {longest} s"
            agent.threads.start_when_possible(
                lambda link=link, reason=reason: link.lose(reason),  # type: ignore[misc]
                agent.clock,
            )
    for inbound in agent.listener.connections:
        longest = max(patience, _MISSED_BEATS * inbound.heartbeat)
        if inbound.is_shared and not inbound.beat(interval, longest):
            _log.warning(
                "worker %r has heard nothing from %r for %s s",
                agent.name,
                inbound.peer_name,
                longest,
            )
            words = lost_notice(agent.name, f"it was silent for {longest} s")
            agent.listener.close_peer(inbound.incarnation, words)


def _close_idle_lanes(agent: AgentRuntime) -> None:
    for link in agent.links():
        link.trim(time.monotonic() - _LANE_IDLE)


class _IdleMemoryTrimmer:
    """Gives shared memory back when the agent has been quiet for a while."""

    def __init__(self, agent: AgentRuntime) -> None:
        self._agent = agent
        self._traffic = 0
        self._quiet_since = time.monotonic()

    def tidy(self) -> None:
        agent, now = self._agent, time.monotonic()
        agent.endpoint.mappings.forget()
        agent.endpoint.allocator.tidy()
        traffic = agent.calls_made + agent.calls_served
        if traffic != self._traffic:
            self._traffic, self._quiet_since = traffic, now
        elif now - self._quiet_since > _QUIET_BEFORE_TRIM:
            agent.endpoint.allocator.trim()

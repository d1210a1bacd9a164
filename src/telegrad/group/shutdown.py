"""A graceful end: nobody leaves while a call of anybody is under way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

_POLL = (0.001, 0.05)
# seconds for a last round even if the time is up, so that those who are missing get named
_AT_LEAST = 0.1


def wait_for_group(agent: AgentRuntime, names: list[str], until: float | None) -> set[str]:
    """Everybody drains and tells how many calls it has made, until the totals no longer change. Who was missing.

    One round is not enough: a worker that has drained may be called again by one that has not, and call on.
    """
    gone: set[str] = set()
    before: dict[str, Any] | None = None
    while True:
        drain(agent, until)
        left = None if until is None else max(until - time.monotonic(), _AT_LEAST)
        outcome = agent.collectives.gather(agent.calls_made, names, left, "shutdown")
        gone |= {*outcome.lost, *outcome.late}
        if outcome.late or outcome.values == before:
            return gone
        before = outcome.values


def drain(agent: AgentRuntime, until: float | None) -> None:
    """Wait until no call of a user is under way here, in either direction."""
    pause = _POLL[0]
    while _under_way(agent) and (until is None or time.monotonic() < until):
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL[1])


def _under_way(agent: AgentRuntime) -> bool:
    inbounds = agent.listener.connections
    return any(link.under_way for link in agent.links()) or any(
        inbound.under_way for inbound in inbounds
    )

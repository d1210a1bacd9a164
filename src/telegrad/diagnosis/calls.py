"""Calls in progress: `Agent.calls`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from telegrad.client.peer import Peer
from telegrad.current import ServedCall
from telegrad.messages.remote_functions import describe
from telegrad.recorder import MadeCall
from telegrad.server.connection import ServerConnection

MADE, SERVED = "made", "served"


@dataclass(frozen=True)
class CallInProgress:
    """A call that has not ended.

    `state` of a made call: `connecting`, `sent`, or `abandoned` if its caller no longer waits. Of a
    served call: `queued` for a thread, `running`, `deferred` if a future will answer it, or
    `replying`.
    """

    direction: str
    """``made`` by this worker or ``served`` by it."""
    function: str
    peer: str
    """The other worker."""
    call_id: int
    """Unique among the calls of one worker to another."""
    state: str
    age: float
    """Seconds since it was made, or arrived."""
    deadline: float | None
    """Seconds until its caller stops waiting, negative if it has; None: no limit."""
    parent: tuple[str, int, str] | None = None
    """The served call that made this one: its caller, its id, its function."""
    internal: bool = False
    """A call of Telegrad itself."""
    request_bytes: int = 0

    def __str__(self) -> str:
        preposition = "on" if self.direction == MADE else "for"
        limit = "" if self.deadline is None else f", {self.deadline:.1f} s left"
        parent = "" if self.parent is None else f", in {self.parent[2]} for {self.parent[0]}"
        return (
            f"{self.function} {preposition} {self.peer}: {self.state} "
            f"{self.age:.1f} s{limit}{parent}"
        )


def made_calls(calls: Iterator[tuple[MadeCall, str]]) -> Iterator[CallInProgress]:
    """Describe calls that this worker has made; each comes with its state."""
    now = time.monotonic()
    for call, state in calls:
        yield CallInProgress(
            MADE,
            function_name(call),
            call.peer,
            call.call_id,
            state,
            now - call.started_at,
            None if call.timeout is None else call.started_at + call.timeout - now,
            parent_of(call),
            call.internal,
            call.request_bytes,
        )


def served_calls(connections: list[ServerConnection]) -> Iterator[CallInProgress]:
    """Describe the calls of peers that have not been answered."""
    now = time.monotonic()
    for connection in connections:
        for call, state in connection.call_states():
            deadline = call.deadline
            yield CallInProgress(
                SERVED,
                call.function,
                call.caller,
                call.call_id,
                state,
                now - call.received_at,
                None if deadline is None else deadline.at - now,
                None,
                call.internal,
                call.request_bytes,
            )


def calls_to(peers: list[Peer]) -> Iterator[tuple[MadeCall, str]]:
    """Yield the calls to peers that have not been answered, with their states."""
    for peer in peers:
        yield from peer.unanswered_calls()


def function_name(call: MadeCall) -> str:
    """Return the name of the function of a call."""
    return call.function if isinstance(call.function, str) else describe(call.function)


def parent_of(call: MadeCall) -> tuple[str, int, str] | None:
    """Return the call that made `call`: its caller, its id and its function."""
    parent = call.parent
    return (
        (parent.caller, parent.call_id, parent.function) if isinstance(parent, ServedCall) else None
    )

"""`FlightRecorder`: the last calls and events of an agent, in fixed memory.

The recorder is always on, so a call adds one object to a deque of fixed length and nothing else:

- a served call adds its `ServedCall`, which exists while the call is in progress in any case;
- a made call adds a list with the fields of `MadeCall`, which describes the call while it is in
  progress, too. A synchronous call fills in most of it after it has sent its request, while its
  callee works. Its times are read by the call itself.

Both are decoded when somebody looks (`telegrad.diagnosis`). Events are what happens less often:
connections, losses, batches, rounds of parameter servers, backward passes.

A record keeps nothing of the user alive: the function of a made call is an object only if the
agent's `FunctionTable` keeps it as well, otherwise its name.

State: two deques. `append` is atomic, and `copy` is too, so there is no lock.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad.current import CurrentCall, ServedCall

_EVENTS_PER_CALL = 4  # there is one event for at least so many calls


class MadeCall(NamedTuple):
    """A call that this worker made. `CallRecord` has the same fields in the same order."""

    call_id: int
    peer: str
    function: Callable[..., Any] | str
    started_at: float  # of `time.monotonic`, as all times here
    timeout: float | None
    ended_at: float = 0.0
    request_bytes: int = 0
    reply_bytes: int = 0
    outcome: str = ""  # "ok", "failed": the function raised, "cancelled", or the type of an error
    internal: bool = False
    parent: CurrentCall | None = None  # the call that was served on the thread that made this one


CallRecord = list[Any]
FUNCTION, ENDED_AT, REQUEST_BYTES, REPLY_BYTES, OUTCOME, PARENT = map(
    MadeCall._fields.index,
    ("function", "ended_at", "request_bytes", "reply_bytes", "outcome", "parent"),
)


class Event(NamedTuple):
    """Something other than a call that happened at `at`; `seconds` is how long it took."""

    at: float
    kind: str
    seconds: float
    fields: dict[str, Any]  # values of JSON


class FlightRecorder:
    """Keep the last `size` calls, and a quarter as many events. 0 keeps nothing."""

    def __init__(self, size: int) -> None:
        self._calls: collections.deque[CallRecord | ServedCall]
        self._calls = collections.deque(maxlen=size)
        self._events: collections.deque[Event] = collections.deque(maxlen=size // _EVENTS_PER_CALL)
        self.add_made: Callable[[CallRecord], None] = self._calls.append
        self.add_served: Callable[[ServedCall], None] = self._calls.append

    def __repr__(self) -> str:
        return f"<FlightRecorder {len(self._calls)} calls, {len(self._events)} events>"

    @property
    def is_full(self) -> bool:
        """Whether it has forgotten calls, or is about to."""
        return len(self._calls) == self._calls.maxlen

    def add_event(self, kind: str, seconds: float = 0.0, **fields: Any) -> None:
        """Record something that has just ended and took `seconds`."""
        self._events.append(Event(time.monotonic() - seconds, kind, seconds, fields))

    def calls(self) -> list[MadeCall | ServedCall]:
        """Return the calls that have ended, in the order of their ends."""
        return [MadeCall(*each) if isinstance(each, list) else each for each in self._calls.copy()]

    def events(self) -> list[Event]:
        """Return the events, oldest first."""
        return list(self._events.copy())

"""State of the current thread and process: its agent, the call that it runs, its call interceptor.

A `Deadline` is the absolute time at which a call must be over. A timeout that the user gives
becomes one where it enters Telegrad, so it covers all steps of a call. Clocks of two processes
differ, so a message carries the time that is left instead.

The runtime of an agent has no type here, because every package below the runtime may read this
module. `telegrad.runtime.active_runtime` and `telegrad.agent.current_agent` are typed.

State: `thread_state` is changed by its own thread only; `process_state.runtime` by `init_rpc` and
`shutdown`; `process_state.groups_joined` by `group.rendezvous`. A `ServedCall` is changed by the
thread that serves the call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from telegrad.futures import Future
from telegrad.timeouts import time_limit


class Deadline(NamedTuple):
    """A time of the monotonic clock of this process (`time.monotonic`)."""

    at: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline | None:
        """Return the deadline `seconds` from now; None if `seconds` is None."""
        limit = time_limit(seconds)
        return None if limit is None else cls(time.monotonic() + limit)

    def left(self) -> float:
        """Return the seconds until the deadline, negative once it has passed."""
        return self.at - time.monotonic()

    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return self.left() <= 0


class CurrentCall(Protocol):
    """What a thread runs: a `ServedCall`, or the calls of a batch."""

    @property
    def caller(self) -> str | None: ...
    @property
    def deadline(self) -> Deadline | None: ...
    @property
    def outcome(self) -> str: ...


class ServedCall:
    """A call of a peer, from its arrival until it is answered. It holds nothing of the user.

    `outcome` is "" until the call is answered. A time is 0 until the moment has come. The function
    starts at `started_at` and returns at `returned_at`; a future may answer the call later.
    """

    __slots__ = (
        "answered_at",
        "call_id",
        "caller",
        "function",
        "internal",
        "outcome",
        "received_at",
        "reply_bytes",
        "request_bytes",
        "returned_at",
        "started_at",
        "timeout_ms",
    )

    # Set by `ServerConnection._begin`: with `__init__`, each call would take 0.1 us longer.
    # `outcome` is set last, so a call that has it is complete.
    caller: str
    call_id: int
    function: str
    internal: bool
    timeout_ms: int  # 0: no limit
    request_bytes: int
    reply_bytes: int
    received_at: float
    started_at: float
    returned_at: float
    answered_at: float
    outcome: str

    def __repr__(self) -> str:
        state = self.outcome or ("running" if self.started_at else "queued")
        return f"<ServedCall {self.call_id} of {self.caller!r}: {self.function}, {state}>"

    @property
    def deadline(self) -> Deadline | None:
        """When the caller stops waiting."""
        if not self.timeout_ms:
            return None
        return Deadline(self.received_at + self.timeout_ms / 1000)


class CallInterceptor(Protocol):
    """Make the calls of a thread in place of its agent. The profiler uses this."""

    def invoke(
        self,
        agent: Any,
        to: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
    ) -> Any:
        """Do what `AgentRuntime.invoke` does."""

    def start(
        self,
        agent: Any,
        to: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
        keep: object,
    ) -> Future[Any]:
        """Do what `AgentRuntime.start` does."""


class _ProcessState:
    """The runtime of the agent that `init_rpc` made, and the number of groups that were joined."""

    runtime: Any = None
    groups_joined = 0


class _CurrentCallState(threading.local):
    """`runtime` is set in threads of an agent; `call` is the last call that was served there."""

    runtime: Any = None
    call: CurrentCall | None = None
    interceptor: CallInterceptor | None = None


thread_state = _CurrentCallState()
process_state = _ProcessState()


def find_runtime() -> Any:
    """Return the runtime of the current call, else that of the process, unless it is closing."""
    runtime = thread_state.runtime or process_state.runtime
    return None if runtime is None or runtime.closing else runtime


class WorkerLogFilter(logging.Filter):
    """Give each log record the name of its worker, as `record.worker`; "" if there is none.

    >>> handler = logging.StreamHandler()
    >>> handler.addFilter(WorkerLogFilter())
    >>> handler.setFormatter(logging.Formatter("%(worker)s: %(message)s"))
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Set `record.worker`; let every record pass."""
        runtime = thread_state.runtime or process_state.runtime
        record.worker = "" if runtime is None else runtime.name
        return True


def current_call() -> CurrentCall | None:
    """Return what this thread serves; None if it serves nothing, or the call has been answered."""
    call = thread_state.call
    return None if call is None or call.outcome else call


def current_caller() -> str | None:
    """Return the name of the worker that called the current remote function."""
    call = thread_state.call
    return None if call is None else call.caller


def current_deadline() -> Deadline | None:
    """Return the deadline of the current remote function: its caller does not wait longer."""
    call = thread_state.call
    return None if call is None else call.deadline

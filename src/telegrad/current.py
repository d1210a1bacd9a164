"""Which agent this thread works for, which call it is running, and what its own calls go through."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from telegrad.deadline import Deadline
from telegrad.futures import Future

if TYPE_CHECKING:
    from telegrad.agent import Agent
    from telegrad.client.peers import WorkerAddress


class CallInterceptor(Protocol):
    """Makes the calls of a thread instead of the agent, with the arguments of `Agent.invoke` and `Agent.start`."""

    def invoke(
        self,
        agent: Agent,
        to: WorkerAddress,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
    ) -> Any: ...

    def start(
        self,
        agent: Agent,
        to: WorkerAddress,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
        keep: object,
    ) -> Future[Any]: ...


class _ProcessState:
    """The agent of a process that has just one, as `init_rpc` makes it."""

    agent: Agent | None = None


class _ThreadState(threading.local):
    agent: Agent | None = None
    caller: str | None = None
    deadline: Deadline | None = None
    around: CallInterceptor | None = None


thread_state = _ThreadState()
process_state = _ProcessState()


def active_agent() -> Agent | None:
    """The agent that runs the current remote function, else the process's own; None if there is none in use."""
    agent = thread_state.agent or process_state.agent
    return None if agent is None or agent.closing else agent


def current_agent() -> Agent | None:
    """Inside a remote function: the agent that runs it. Elsewhere None."""
    return thread_state.agent


def current_caller() -> str | None:
    """Inside a remote function: the name of the worker that called it."""
    return thread_state.caller


def current_deadline() -> Deadline | None:
    """Inside a remote function: the moment after which its caller no longer waits."""
    return thread_state.deadline

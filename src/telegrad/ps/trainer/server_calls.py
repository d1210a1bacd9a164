"""Calls of one trainer to several servers at once, any of which may be restarted meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from telegrad.errors import CallTimeout
from telegrad.futures import Future, collect
from telegrad.ps.trainer.server_client import LOSS_ERRORS, LocalClients

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

T = TypeVar("T")

_CHECK_INTERVAL = 1.0  # seconds after which a trainer that waits checks that all servers are alive


@dataclass(frozen=True)
class ServerCall(Generic[T]):
    """A call to one of several servers that may wait for each other.

    `retry` waits for a server that is lost and repeats the call. `ensure_member` checks that a
    server that has replied still knows this trainer: the others may need that before they reply.
    """

    future: Future[T]
    retry: Callable[[Exception], Future[T]]
    ensure_member: Callable[[T], None]


def gather_replies(runtime: AgentRuntime, calls: Sequence[ServerCall[T]]) -> list[T]:
    """Return the replies to calls to several servers.

    Retry a lost server while waiting for the others. Rejoin a server that was restarted after its
    reply, too, as long as another server has not replied.
    """
    futures = [call.future for call in calls]
    if not futures:
        return []
    if wait_briefly(collect(futures), LOSS_ERRORS):
        return [future.wait() for future in futures]
    retried = [_with_retry(runtime, call) for call in calls]
    all_done = collect(retried)
    while not wait_briefly(all_done):
        runtime.service(LocalClients).rejoin_lost_servers()
        for call, successful in zip(calls, retried, strict=True):
            if successful.done():
                call.ensure_member(successful.wait().wait())
    return [successful.wait().wait() for successful in retried]


def wait_briefly(future: Future[Any], ignored: tuple[type[Exception], ...] = ()) -> bool:
    """Wait up to `_CHECK_INTERVAL`. Return False if it is not done, or failed with `ignored`."""
    try:
        future.result(_CHECK_INTERVAL)
    except CallTimeout:
        if future.done():  # the call itself has timed out
            raise
        return False
    except ignored:
        return False
    return True


def _with_retry(runtime: AgentRuntime, call: ServerCall[T]) -> Future[Future[T]]:
    """Return a future of the first future of this call, or of its retry, that has a result."""
    successful: Future[Future[T]] = Future()

    def retry(error: Exception) -> None:
        try:
            successful.set_result(call.retry(error))
        except Exception as final_error:
            successful.set_exception(final_error)

    def on_done(_: Any) -> None:
        error = call.future.exception()
        if isinstance(error, LOSS_ERRORS):
            # not on the thread of the callback, because a retry blocks
            runtime.threads.start(partial(retry, error))
        elif isinstance(error, Exception):
            successful.set_exception(error)
        else:
            successful.set_result(call.future)

    call.future.add_done_callback(on_done)
    return successful

"""`ServerClient`: a trainer's client for one server. Base class of `ShardClient` and `TableClient`.

It joins and leaves the server, and rejoins it after the server was restarted. Subclasses send
gradients and receive values.

A server that has a checkpoint may be restarted at any time. The trainer notices it in its next
step, which rejoins and sends its request again. Between steps, another thread may rejoin
(`rejoin_if_idle`): the restarted server asks for it, or another trainer of this worker that is
blocked by the restarted server.

State: `version`, the version of the server's values that this trainer holds; `_first_round`, the
round, or clock, in which the trainer started; `_busy`, whether the trainer is joining or in the
middle of a step, under `_busy_lock`. Everything else is used only by the thread that trains.
`LocalClients`, one per agent, finds the clients of this worker's trainers.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from telegrad.errors import CallTimeout, PeerLost, StaleReference
from telegrad.futures import Future
from telegrad.ps.backoff import attempts
from telegrad.ps.checkpoint_policy import Checkpoint
from telegrad.ps.trainer.trainer_registry import TrainerRegistration

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

T = TypeVar("T")

# what a call raises if the server is gone, or was restarted and has lost its shard
LOSS_ERRORS = (PeerLost, StaleReference)


class Spec(Protocol):
    """What `ServerClient` needs from `ShardSpec` and `TablesSpec`."""

    @property
    def name(self) -> str: ...
    @property
    def checkpoint(self) -> Checkpoint | None: ...


class MembershipService(Protocol):
    """The remote functions for membership, which each service module of the servers defines."""

    @property
    def announce(self) -> Callable[..., int]: ...
    @property
    def has_member(self) -> Callable[..., bool]: ...
    @property
    def leave(self) -> Callable[..., None]: ...


SpecT = TypeVar("SpecT", bound=Spec)


class ServerClient(ABC, Generic[SpecT]):
    """Client of the trainer `trainer` for `server`. `service` has the remote functions."""

    def __init__(
        self,
        runtime: AgentRuntime,
        trainer: str,
        server: str,
        spec: SpecT,
        service: MembershipService,
        registration: TrainerRegistration,
        patience: float,
    ) -> None:
        self.server = server
        self.spec = spec
        self.version = 0
        self._runtime = runtime
        self._trainer = trainer
        self._service = service
        self._registration = registration
        self._patience = patience  # seconds that a lost server may take to come back
        self._first_round = 0
        self._busy = True
        self._busy_lock = threading.Lock()

    # Joining and leaving

    def announce(self) -> int:
        """Announce the trainer. Return the first round in which the server waits for it."""
        self._runtime.service(LocalClients).clients[self._trainer, self.server] = self
        return int(
            self._runtime.invoke(self.server, self._service.announce, (self.spec, self._trainer))
        )

    @abstractmethod
    def start_join(self, first_round: int, timeout: float) -> Future[Any]:
        """Join the server. Its reply comes when the trainer may start, in `first_round`."""

    @abstractmethod
    def finish_join(self, reply: Any) -> None:
        """Take over the reply to `start_join`."""

    def leave(self) -> Future[None]:
        """Tell the server not to wait for this trainer any more."""
        self._runtime.service(LocalClients).clients.pop((self._trainer, self.server), None)
        return self._start(self._service.leave, self._trainer)

    def is_member(self) -> bool:
        """Return whether the server knows this trainer."""
        arguments = (self.spec.name, self._trainer)
        return bool(self._runtime.invoke(self.server, self._service.has_member, arguments))

    # Rejoining a server that was restarted

    @abstractmethod
    def _rejoin_between_steps(self) -> None:
        """Rejoin the server with the state after the last step."""

    def rejoin_if_idle(self) -> None:
        """Rejoin the server, except during a step: the step rejoins by itself."""
        with self._busy_lock:
            if self._busy or self.spec.checkpoint is None:
                return
            try:
                self._rejoin_between_steps()
            except (CallTimeout, *LOSS_ERRORS):
                return  # the server was restarted again

    def _ensure_member(self, rejoin: Callable[[], None]) -> None:
        """Call `rejoin` if the server has lost this trainer after it replied to the current step.

        Other servers may need the trainer there before they can reply.
        """
        try:
            if self.is_member():
                return
        except CallTimeout:
            return  # the server is alive and busy
        except LOSS_ERRORS:
            if self.spec.checkpoint is None:
                raise
        try:
            rejoin()
        except (CallTimeout, *LOSS_ERRORS):
            return  # the caller checks again until all servers have replied

    def _rejoin_and_retry(
        self, rejoin: Callable[[], None], call: Callable[[], Future[T]], error: Exception
    ) -> Future[T]:
        """Wait until a lost server is back, rejoin it, and repeat a call that failed with `error`.

        Raise `error` if the server has no checkpoint, because it cannot come back then.
        """
        if self.spec.checkpoint is None:
            raise error

        def attempt(restart_timeout: Callable[[], None]) -> Future[T]:
            rejoin()
            restart_timeout()
            return _raise_if_failed(call())

        return retry_while_lost(attempt, self._patience)

    def _start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a function of the service about this parameter server, without a time limit."""
        return self._runtime.start(self.server, function, (self.spec.name, *args), None, None)


class LocalClients:
    """The clients of all trainers of one agent, by trainer and server."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self.clients: weakref.WeakValueDictionary[tuple[str, str], ServerClient[Any]] = (
            weakref.WeakValueDictionary()
        )

    def __repr__(self) -> str:
        return f"<LocalClients {sorted(self.clients)}>"

    def rejoin_lost_servers(self) -> None:
        """Rejoin servers that were restarted between steps of other trainers of this worker.

        A trainer that waits may prevent another trainer from making its next step, in which that
        one would notice the restart.
        """
        for client in list(self.clients.values()):
            try:
                if not client.is_member():
                    client.rejoin_if_idle()
            except StaleReference:
                client.rejoin_if_idle()
            except (CallTimeout, PeerLost):
                continue  # the server is busy, or not back yet


def retry_while_lost(attempt: Callable[[Callable[[], None]], T], patience: float) -> T:
    """Return the result of `attempt`. Repeat it while the server is lost, for `patience` seconds.

    `attempt` calls its argument when it has reached the server. The time starts again then.
    """
    deadline = time.monotonic() + patience

    def restart_timeout() -> None:
        nonlocal deadline
        deadline = time.monotonic() + patience

    backoff = attempts()
    while True:
        next(backoff)
        try:
            return attempt(restart_timeout)
        except LOSS_ERRORS:
            if time.monotonic() > deadline:
                raise


def _raise_if_failed(future: Future[T]) -> Future[T]:
    """Wait for a future and return it. Raise its error if it failed."""
    error = future.exception()
    if error is not None:
        raise error
    return future

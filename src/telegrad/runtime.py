"""`AgentRuntime`: what an `Agent` owns. Connections, threads, timers and pending calls end with it.

The runtime connects the parts and is what the packages above use. Each part states what it needs of
the runtime in a protocol of its own, so no part imports this module.

State: `closing` goes from False to True once, under `_lock`. The lists of listeners grow while
layers above start. `_services` is written under `_service_lock`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from telegrad import plurals
from telegrad.client.dialer import DialedConnection, Dialer
from telegrad.client.peers import PeerTable, WorkerAddress, worker_key
from telegrad.client.requests import FunctionTable, timeout_error
from telegrad.cluster.torchrun import restarts_together
from telegrad.config import Config
from telegrad.cuda.transfers import CudaTransfers
from telegrad.current import current_call, find_runtime, thread_state
from telegrad.diagnosis.calls import CallInProgress
from telegrad.diagnosis.service import serve_observer
from telegrad.diagnosis.snapshot import Diagnosis
from telegrad.errors import JoinError, PeerLost, StaleReference, TelegradError, UsageError
from telegrad.free_threading import AtomicCounter
from telegrad.futures import CompletionListener, Future
from telegrad.group import maintenance, network_check, shutdown
from telegrad.group.collectives import BARRIER, SHUTDOWN, Collectives, group_broken
from telegrad.group.endpoint import LocalEndpoint
from telegrad.group.failure_detector import FailureDetector, LossListener, lost_notice
from telegrad.group.hosts import host_id
from telegrad.group.joins import JoinListener, JoinWatcher
from telegrad.group.main_module import main_module_identity
from telegrad.group.membership import Directory, Member, WorkerInfo, check_name
from telegrad.group.secret import group_key
from telegrad.group.signed_store import Store
from telegrad.messages.device_routes import DeviceRoute
from telegrad.messages.packing import MessageContext, SharedArguments
from telegrad.messages.remote_functions import Function, FunctionRegistry, describe
from telegrad.recorder import FlightRecorder, MadeCall
from telegrad.scalars import ScalarLog
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.event_loops import EventLoops
from telegrad.scheduling.executor import Executor, ThreadPool
from telegrad.server.connection import ServerConnection
from telegrad.server.listener import Listener
from telegrad.timeouts import time_limit
from telegrad.transport.sockets import AuthenticatedSocket
from telegrad.wire import handshake
from telegrad.wire.handshake import Incarnation

S = TypeVar("S")

DEFAULT = object()  # a timeout that was not given: the config's
_JOIN_THREADS = 2.0  # seconds to wait for threads when the agent closes
_MAX_NAMES = 8  # in a message of the log
_WAIT_FOR_OTHERS = 5.0  # seconds that the leader of a shutdown waits for the next one to close

_log = logging.getLogger(__name__)
_runtimes: set[AgentRuntime] = set()  # those that are open


class AgentRuntime:
    """The connections, threads, timers and pending calls of one `telegrad.Agent`."""

    def __init__(
        self,
        name: str,
        *,
        store: Store,
        rank: int | None = None,
        world_size: int | None = None,
        config: Config | None = None,
    ) -> None:
        check_name(name)
        if world_size is not None and (not isinstance(world_size, int) or world_size < 1):
            raise UsageError(f"the size of a group is at least 1, or None, not {world_size!r}")
        if rank is not None and not isinstance(rank, int):
            raise UsageError(f"a rank is a whole number, or None, not {rank!r}")
        if world_size is not None and (rank is None or not 0 <= rank < world_size):
            raise UsageError(
                f"a group of {world_size} needs a rank from 0 to {world_size - 1}, not {rank}"
            )
        if config is not None and not isinstance(config, Config):
            raise UsageError(f"config is a telegrad.Config, not {config!r}")
        self.name = name
        self.config = config if config is not None else Config.from_environment()
        self.timeout = self.config.timeout
        self.world_size = world_size
        self._calls_made, self._calls_served = AtomicCounter(), AtomicCounter()
        # attributes instead of methods: they are called for each call
        self.count_made_call = self._calls_made.increment
        self.count_served_call = self._calls_served.increment
        self.closing = False
        self._rank = rank
        self._store = store
        self._close_listeners: list[Callable[[], None]] = []
        self._shutdown_listeners: list[Callable[[], None]] = []
        self._end_listeners: list[Callable[[], None]] = []
        self._counters: list[Callable[[], dict[str, int]]] = []
        self._services: dict[Callable[[AgentRuntime], Any], Any] = {}
        self._service_lock = threading.RLock()  # reentrant: a service may need another
        self._lock = threading.Lock()
        self._opened = False
        self.agent: Any = None  # the `Agent` of the user
        self.forked = False  # this process is a fork of the one that opened the agent
        self.recorder = FlightRecorder(self.config.flight_recorder)
        self.scalars = ScalarLog(name, self.config.tensorboard)
        self.on_end(self.scalars.close)
        # of exceptions that served functions raise and that their callers receive
        self.failure_log_level = logging.INFO
        self.diagnosis = Diagnosis(self)
        self._reports: dict[str, Callable[[], Any]] = {}
        self._connecting: dict[object, MadeCall] = {}  # calls that wait for a first connection
        self.function_table = FunctionTable()
        self.functions = FunctionRegistry(self.config.only_registered)
        self.failures = FailureDetector(self)
        self.joins = JoinWatcher(self)
        self.cuda_transfers = CudaTransfers(self)
        self.peers = PeerTable(self)
        self.group = ""
        self.local_member: Member = Member(name, -1 if rank is None else rank, Incarnation(""), ())

    def __repr__(self) -> str:
        if not self._opened or self.closing:
            return f"<Agent {self.name!r} {'closed' if self.closing else 'not open'}>"
        return (
            f"<Agent {self.name!r} rank {self.local_member.rank}: "
            f"{plurals.count(self.calls_made, 'call')} made, "
            f"{self.calls_served} served, {self.executor!r}, {self.threads!r}, "
            f"{self.peers.all()}, {self.listener!r}, {self.collectives!r}>"
        )

    # Life cycle

    def open(self) -> None:
        """Listen and register. Others may call this worker when this returns."""
        if self._opened:
            raise UsageError(f"agent {self.name!r} was opened before; make a new one")
        self._opened = True
        if os.environ.get("TELEGRAD_FAULTS"):  # only then is the package for tests imported
            importlib.import_module("telegrad.testing.faults").install()
        try:
            self._set_up()
        except BaseException:
            self.closing = True
            if hasattr(self, "listener"):
                self._close_connections(None)
                self.event_loops.close()
                self.clock.close()
            raise
        self.listener.accept()
        self.clock.add_listener(self.executor)
        maintenance.start(self)
        self.joins.start()
        _runtimes.add(self)

    def _set_up(self) -> None:
        key = group_key(self.config.secret)
        self.threads = ThreadPool(f"telegrad-{self.name}", self._enter_thread)
        self.executor = Executor(self.threads, self.config.threads, self.config.max_threads)
        self.clock = Clock(f"telegrad-{self.name}")
        self.event_loops = EventLoops(self.threads, self.clock, self.config.event_loops)
        self.endpoint = LocalEndpoint(self, self.config, key, self.threads.start)
        self.dialer = Dialer(self, self.endpoint, self.config)
        self.listener = Listener(self, self.endpoint, self.config)
        summaries = {BARRIER: lambda _: None, SHUTDOWN: shutdown.summarize}
        self.collectives = Collectives(self, summaries)
        self.directory = Directory(
            self._store, key, self.name, self._rank, self.world_size is not None
        )
        self.group = self.directory.group
        # the introduction of this worker while it has no incarnation
        self.local_member = Member(
            self.name, -1 if self._rank is None else self._rank, Incarnation("newcomer"), ()
        )
        rank = self.directory.free_rank(self.name, self._rank, self.dialer.probe)
        self.listener.listen()
        self.local_member = self.directory.register(
            self.name,
            rank,
            self.endpoint.addresses,
            maps_devices=bool(self.config.device_maps),
            main=main_module_identity(),
            host=host_id(),
            protocol=handshake.VERSION,
            python=platform.python_version(),
            torch=str(torch.__version__),
            tls=self.endpoint.tls.describe(),
        )
        importlib.import_module("telegrad.telemetry.tools").start(self)  # a layer above

    def wait_for_members(self) -> None:
        """Wait for the other workers of a group of fixed size, and check the network."""
        until = time.monotonic() + self.config.join_timeout
        try:
            if self.world_size is None:
                network_check.check_newcomer(self, until)
            else:
                self.directory.wait_for_members(
                    self.world_size, self.config.join_timeout, self._has_ended
                )
                network_check.check_fixed_group(self, until)
        except BaseException:
            if self.world_size is None:
                with contextlib.suppress(TelegradError):
                    self.directory.leave(self.local_member)
            self.close()
            raise

    def _has_ended(self, member: Member) -> bool:
        """Return whether a worker has ended before its engine restarted all workers."""
        if member.incarnation == self.local_member.incarnation or not restarts_together():
            return False
        return self.dialer.probe(member) is False

    def shutdown(self, timeout: float | None = None) -> tuple[str, ...]:
        """Finish the calls in progress, wait until the other workers do the same, then close.

        Return the names of workers that were lost or did not report in time.
        """
        self.require_open()
        timeout = time_limit(timeout)
        listeners, self._shutdown_listeners = self._shutdown_listeners, []
        for listener in listeners:
            listener()
        missing: set[str] = set()
        is_leader = False
        until = None if timeout is None else time.monotonic() + timeout
        if self.world_size is not None:
            names = self._participants(None)
            missing = shutdown.wait_for_group(self, names, until)
            leader = next((name for name in names if name not in missing), self.name)
            is_leader = self.name == leader
        else:
            shutdown.drain(self, until)
        with contextlib.suppress(JoinError):  # the worker that hosted the store has ended
            self.directory.leave(self.local_member)
        # The others may still wait for a reply of the leader, and rank 0 may host their store.
        if is_leader:
            self.listener.wait_until_unused(_WAIT_FOR_OTHERS)
        self.close()
        if missing:
            names = sorted(missing)
            rest = f" and {len(names) - _MAX_NAMES} others" if len(names) > _MAX_NAMES else ""
            text = ", ".join(names[:_MAX_NAMES]) + rest
            _log.warning("worker %r shut down without %s", self.name, text)
        return tuple(sorted(missing))

    def close(self, reason: str = "") -> None:
        """Leave at once: pending calls fail here, and peers get the `reason`. May be repeated."""
        self._end(reason)

    def abort(self) -> None:
        """End without telling the peers, as if the process had been killed. Tests use this."""
        self._end(None)

    def _end(self, reason: str | None) -> None:
        with self._lock:
            if self.closing or not self._opened:
                return
            listeners, self._close_listeners = self._close_listeners, []
        if reason is not None:
            for listener in listeners:
                listener()
        with self._lock:
            if self.closing:
                return
            self.closing = True
        _runtimes.discard(self)
        for listener in self._end_listeners:
            listener()
        for peer in self.peers.all():
            peer.close(reason)
        self._close_connections(reason)
        self.collectives.close()
        self.executor.close()
        self.event_loops.close()
        self.clock.close()
        self.threads.close(_JOIN_THREADS)
        self.peers.clear()
        self.directory.close()
        self._store = None

    def _close_connections(self, reason: str | None) -> None:
        self.endpoint.stop_connecting()
        self.listener.close(reason)
        self.endpoint.close()

    @property
    def calls_made(self) -> int:
        """How many calls of users this worker has made."""
        return self._calls_made.value

    @property
    def calls_served(self) -> int:
        """How many calls this worker has served."""
        return self._calls_served.value

    def require_open(self) -> None:
        """Raise `UsageError` unless this agent is open in this process."""
        if self.forked:
            raise UsageError(
                f"this process was forked from the one of agent {self.name!r} and cannot use it; "
                "make calls in the process that opened the agent, or open another agent here"
            )
        if self.closing or not self._opened:
            state = "closed: make a new one" if self.closing else "not open yet: call open() first"
            raise UsageError(f"agent {self.name!r} is {state}")

    def _enter_thread(self) -> None:
        thread_state.runtime = self

    def _after_fork(self) -> None:
        """In the child of a fork: the agent belongs to the parent, so free its sockets here."""
        self.closing = self.forked = True
        self.peers.close_after_fork()
        self.listener.close_after_fork()
        self.endpoint.bulk.close_after_fork()
        self.event_loops.close_after_fork()

    # Calls

    def invoke(
        self,
        to: WorkerAddress,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """Run a function on another worker and return its result.

        `timeout` is in seconds; None: no limit.
        """
        if thread_state.interceptor is not None:
            return thread_state.interceptor.invoke(self, to, function, args, kwargs, timeout)
        if timeout is DEFAULT:
            timeout = self.timeout
        # This is `peers.connected(to)`, without the time that a call of it takes.
        try:
            peer = self.peers.by_key.get(to)  # type: ignore[arg-type]
        except TypeError:
            peer = None
        if peer is not None and peer.ready:
            return peer.call(function, tuple(args), kwargs, timeout)
        started = time.monotonic()
        until = None if timeout is None else started + timeout
        name = to.name if isinstance(to, WorkerInfo) else str(to)
        key = object()
        self._connecting[key] = MadeCall(
            0, name, describe(function), started, timeout, parent=current_call()
        )
        try:
            peer = self.peers.reach(to, timeout)
        except TimeoutError:
            raise timeout_error(name, describe(function), timeout, sent=False) from None
        finally:
            del self._connecting[key]
        return peer.call(function, tuple(args), kwargs, timeout, until)

    def start(
        self,
        to: WorkerAddress,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: Any = DEFAULT,
        internal: bool = False,
        keep: object = None,
        shared: SharedArguments | None = None,
    ) -> Future[Any]:
        """Run a function on another worker and return a future at once.

        `timeout` is in seconds; None: no limit. `shutdown` does not wait for `internal` calls.
        `keep` is kept alive until the callee has replied. `shared`: other workers are called with
        these arguments, too.
        """
        if thread_state.interceptor is not None and not internal:
            return thread_state.interceptor.start(self, to, function, args, kwargs, timeout, keep)
        future: Future[Any] = Future()
        self.send(to, function, args, kwargs, timeout, future, internal, keep, shared)
        return future

    def send(
        self,
        to: WorkerAddress,
        function: Function,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
        listener: CompletionListener,
        internal: bool = False,
        keep: object = None,
        shared: SharedArguments | None = None,
    ) -> None:
        """Do what `start` does, but complete `listener` instead of a new future."""
        if timeout is DEFAULT:
            timeout = self.timeout
        try:
            peer = self.peers.by_key.get(to)  # type: ignore[arg-type]  # see `invoke`
        except TypeError:
            peer = None
        if peer is None or not peer.ready:
            try:
                peer = self.peers.begin(to, timeout)
            except PeerLost as error:
                listener._try_complete(None, error)
                return
            except TimeoutError:
                late = timeout_error(str(worker_key(to)), describe(function), timeout, sent=False)
                listener._try_complete(None, late)
                return
        peer.multiplexed.submit(
            function, tuple(args), kwargs, timeout, internal, listener, keep, shared
        )

    def has_calls_in_progress(self) -> bool:
        """Return whether a call of a user is in progress here, made or served."""
        return any(peer.calls_in_progress for peer in self.peers.all()) or any(
            connection.calls_in_progress for connection in self.listener.connections
        )

    # The group

    def get_worker_info(self, to: WorkerAddress | None = None) -> WorkerInfo:
        """Return the worker with this name or rank; this one if none is given."""
        if to is not None and not self._opened:
            self.require_open()
        return self.local_member.info if to is None else self.directory.find(worker_key(to)).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return all workers that have not left, by rank."""
        refresh = self.world_size is None and not self.closing
        return [member.info for member in self.directory.members(refresh=refresh)]

    def member(self, to: WorkerAddress) -> Member:
        """Return the directory entry of a worker: the incarnation that a call would reach."""
        return self.peers.member(to)

    def barrier(self, names: Sequence[str] | None = None, timeout: float | None = None) -> None:
        """Wait until every worker (or every one of `names`) has called `barrier`.

        Raise `GroupBroken`, which names the missing workers, if one is lost or `timeout` passes.
        """
        self.require_open()
        timeout = time_limit(timeout)
        result = self.collectives.gather(None, self._participants(names), timeout, BARRIER)
        if result.lost or result.late:
            raise group_broken("the barrier", result, timeout)

    def all_gather(
        self, value: Any, names: Sequence[str] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Return the values of all workers by name. Raise `GroupBroken` if one is missing."""
        self.require_open()
        timeout = time_limit(timeout)
        result = self.collectives.gather(value, self._participants(names), timeout)
        if result.lost or result.late:
            raise group_broken("the gather", result, timeout)
        values: dict[str, Any] = result.values
        return values

    def _participants(self, names: Sequence[str] | None) -> list[str]:
        """Return names in the order of ranks, which decides who leads; None: all members."""
        if names is None:
            members = self.directory.members(refresh=self.world_size is None)
        elif isinstance(names, str) or not names:
            raise UsageError(f"names is a list of at least one worker, or None, not {names!r}")
        else:
            members = sorted(map(self.directory.find, set(names)), key=lambda member: member.rank)
        return [member.name for member in members]

    # Workers that join and are lost

    def on_join(self, listener: JoinListener) -> None:
        """Call `listener(name, incarnation)` when a worker joins. It must not block."""
        _check_listener(listener)
        self.joins.add_listener(listener)

    def on_loss(self, listener: LossListener) -> None:
        """Call `listener(name, incarnation)` when a worker is lost. It must not block."""
        _check_listener(listener)
        self.failures.add_listener(listener)

    def is_lost(self, incarnation: Incarnation) -> bool:
        """Return whether a worker was lost. True before the listeners of `on_loss` are called."""
        return self.failures.is_lost(incarnation)

    def watch(self, incarnation: Incarnation) -> None:
        """Make sure that the loss of a worker is noticed even if it never calls this one."""
        self.failures.watch(incarnation)

    def close_lost_peer(self, name: str, incarnation: Incarnation, reason: str) -> None:
        """Free what belongs to a lost peer, on the server's side and in collectives."""
        self.listener.close_peer(incarnation, lost_notice(reason))
        self.endpoint.forget_peer(incarnation)
        if self.directory.is_current(name, incarnation):
            self.collectives.worker_lost(name, incarnation)

    # For layers above

    def on_close(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when this agent starts to close, while it can still make calls.

        The listener is not called if the agent is aborted.
        """
        self._close_listeners.append(listener)

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when this agent ends in any way. It must wake waiting threads."""
        self._end_listeners.append(listener)

    def on_shutdown(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when `shutdown` begins, before it waits for other workers."""
        self._shutdown_listeners.append(listener)

    def service(self, make: Callable[[AgentRuntime], S]) -> S:
        """Return `make(runtime)`, made once for each runtime: the state of a layer above."""
        found: S | None = self._services.get(make)
        if found is None:
            with self._service_lock:
                found = self._services.get(make)
                if found is None:
                    found = self._services[make] = make(self)
        return found

    def statistics(self) -> dict[str, int]:
        """Return counters of calls, connections and shared memory, and those of layers above."""
        statistics = {
            "calls_made": self.calls_made,
            "calls_served": self.calls_served,
            "calls_pending": sum(len(peer.multiplexed.active_calls()) for peer in self.peers.all()),
            "shared_blocks_in_use": self.endpoint.mappings.blocks_in_use,
            **self.endpoint.bulk.counters(),
            **self.listener.counters.counts(),
        }
        for counters in self._counters:
            statistics.update(counters())
        return statistics

    def calls(self) -> list[CallInProgress]:
        """Return the calls in progress, made and served, oldest first."""
        return self.diagnosis.calls() if self._opened and not self.closing else []

    def snapshot(self) -> dict[str, Any]:
        """Return the state of this worker as values of JSON."""
        self.require_open()
        return self.diagnosis.snapshot()

    def add_report(self, name: str, report: Callable[[], Any]) -> None:
        """Add the result of `report()`, values of JSON, to snapshots under `name`."""
        self._reports[name] = report

    def reports(self) -> dict[str, Callable[[], Any]]:
        """Return what layers above have added with `add_report`."""
        return self._reports.copy()

    def connecting_calls(self) -> list[MadeCall]:
        """Return the synchronous calls that wait for the first connection to their callee."""
        return list(self._connecting.copy().values())

    def serve_observer(self, connection: AuthenticatedSocket) -> None:
        """Answer the requests of an observer until it closes its connection."""
        serve_observer(connection, self.diagnosis.answer, self.name)

    def add_statistics(self, counters: Callable[[], dict[str, int]]) -> None:
        """Add the result of `counters()` to `statistics`."""
        self._counters.append(counters)

    # For peers, connections and the listener; see their protocols

    def message_context(
        self, peer: str, incarnation: Incarnation, route: DeviceRoute
    ) -> MessageContext:
        """Return the context of messages between this agent and an incarnation of a peer."""
        return MessageContext(self, peer, incarnation, route)

    def dial(self, member: Member, purpose: str, timeout: float | None = None) -> DialedConnection:
        """Open a connection to a member; see `Dialer.dial`."""
        if self.closing:
            raise PeerLost(
                f"worker {self.name!r} has left the group and cannot call {member.name!r}",
                peer=member.name,
            )
        return self.dialer.dial(member, purpose, timeout)

    def connection_ended(self, connection: ServerConnection, error: BaseException) -> None:
        """Remove a connection that a peer had opened."""
        self.listener.connection_ended(connection, error)


def _check_listener(listener: object) -> None:
    if not callable(listener):
        raise UsageError(f"a listener must be callable, not {type(listener).__name__}")


def active_runtime() -> AgentRuntime | None:
    """Return the runtime that runs the current remote function, else that of `init_rpc`'s agent."""
    runtime: AgentRuntime | None = find_runtime()
    return runtime


def active_service(make: Callable[[AgentRuntime], S]) -> S:
    """Return a service of the runtime that runs the current remote function.

    Raise `StaleReference` if its agent is closing: the call arrived too late.
    """
    runtime = active_runtime()
    if runtime is None:
        raise StaleReference("the worker that was called is leaving the group")
    return runtime.service(make)


def open_runtimes() -> list[AgentRuntime]:
    """Return the runtimes of this process that are open."""
    return list(_runtimes)


def _close_all() -> None:
    """When the process exits, close all agents, so that their peers get the reason."""
    error = getattr(sys, "last_value", None)
    reason = "the process ended without shutdown"
    if error is not None:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        reason = text or reason
    for runtime in list(_runtimes):
        runtime.close(reason)


def _forget_all() -> None:
    for runtime in list(_runtimes):
        runtime._after_fork()
    _runtimes.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)

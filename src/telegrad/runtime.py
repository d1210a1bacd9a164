"""`AgentRuntime`: what an `Agent` owns. Connections, threads, timers and pending calls end with it.

State: `_gone` (incarnations that were lost), under `_lock`; `closing` goes from False to True once. Statistics
(`calls_made`, `calls_served`) may lose an increment, nothing more.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from telegrad.client.dialer import DialedConnection, Dialer
from telegrad.client.multiplexed import timeout_error
from telegrad.client.peer import Peer, lost_notice
from telegrad.client.peers import PeerTable, WorkerAddress, worker_key
from telegrad.config import Config
from telegrad.cuda.transfers import CudaTransfers
from telegrad.current import find_runtime, thread_state
from telegrad.errors import JoinError, PeerLost, TelegradError, UsageError
from telegrad.futures import CompletionListener, Future
from telegrad.group import maintenance, shutdown
from telegrad.group.collectives import Collectives, group_broken
from telegrad.group.endpoint import LocalEndpoint
from telegrad.group.main_module import main_module_identity
from telegrad.group.membership import Directory, Member, Store, WorkerInfo, check_name
from telegrad.group.secret import group_secret
from telegrad.messages.packing import MessageContext
from telegrad.messages.routes import DeviceRoute
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.event_loop import EventLoops
from telegrad.scheduling.threads import Executor, ThreadPool
from telegrad.server.connection import ServerConnection
from telegrad.server.functions import ServedFunction, is_trusted
from telegrad.server.listener import Listener
from telegrad.wire.function_table import MAX_FUNCTIONS, Function, FunctionTable, describe

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

DEFAULT = object()  # a timeout that was not given: the config's
_JOIN_THREADS = 2.0
_WAIT_FOR_OTHERS = 5.0
_LOOK_AGAIN = 1.0  # seconds between two attempts to reach a worker that is watched

_log = logging.getLogger(__name__)
_exposed: set[Function] = set()
_agents: weakref.WeakSet[AgentRuntime] = weakref.WeakSet()


def expose(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that workers with ``Config(only_registered=True)`` may be asked to run."""
    _exposed.add(function)
    return function


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
        if world_size is not None and (rank is None or not 0 <= rank < world_size):
            raise UsageError(
                f"a group of {world_size} needs a rank from 0 to {world_size - 1}, not {rank}"
            )
        self.name = name
        self.config = config if config is not None else Config.from_environment()
        self.timeout = self.config.timeout
        self.world_size = world_size
        self.calls_made = 0
        self.calls_served = 0
        self.closing = False
        self._rank = rank
        self._store = store
        self._targets: dict[Function, ServedFunction] = {}
        self._loss_listeners: list[Callable[[str, str], None]] = []
        self._close_listeners: list[Callable[[], None]] = []
        self._parting_listeners: list[Callable[[], None]] = []
        self._end_listeners: list[Callable[[], None]] = []
        self._figures: list[Callable[[], dict[str, int]]] = []
        self._services: dict[Callable[[AgentRuntime], Any], Any] = {}
        self._making = threading.RLock()  # a service may need another
        self._gone: set[str] = set()
        self._lock = threading.Lock()
        self._opened = False
        self.agent: Any = None  # the `Agent` that the user holds
        self.forked = False  # this process is a fork of the one that opened the agent
        self.numbers = FunctionTable()
        self.devices = CudaTransfers(self)
        self.peers = PeerTable(self)
        self.group = ""
        self.local_member = Member(name, -1 if rank is None else rank, "", ())

    def __repr__(self) -> str:
        if not self._opened or self.closing:
            return f"<Agent {self.name!r} {'closed' if self.closing else 'not open'}>"
        return (
            f"<Agent {self.name!r} rank {self.local_member.rank}: {self.calls_made} calls made, "
            f"{self.calls_served} served, "
            f"{self.executor!r}, {self.threads!r}, {self.links()}, {self.listener!r}, {self.collectives!r}>"
        )

    # Life

    def open(self) -> None:
        """Listen and register. Others may call this worker from now on; `wait_for_members` waits for them."""
        if self._opened:
            raise UsageError(f"agent {self.name!r} was opened before; make a new one")
        self._opened = True
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
        self.clock.watch(self.executor)
        maintenance.start(self)
        _agents.add(self)

    def _set_up(self) -> None:
        secret = group_secret(self.config.secret)
        self.threads = ThreadPool(f"telegrad-{self.name}", self._enter_thread)
        self.executor = Executor(self.threads, self.config.threads, self.config.max_threads)
        self.clock = Clock(f"telegrad-{self.name}")
        self.event_loops = EventLoops(self.threads, self.clock, self.config.event_loops)
        self.endpoint = LocalEndpoint(self, self.config, secret)
        self.dialer = Dialer(self, self.endpoint, self.config)
        self.listener = Listener(self, self.endpoint, self.config)
        self.collectives = Collectives(self)
        self.directory = Directory(self._store, self.world_size is not None)
        self.group = self.directory.group
        self._check_free()
        self.listener.listen()
        self.local_member = self.directory.register(
            self.name,
            self._rank,
            self.endpoint.addresses,
            bool(self.config.device_maps),
            main_module_identity(),
        )

    def wait_for_members(self) -> None:
        """Wait for the rest of a group of fixed size."""
        if self.world_size is not None:
            try:
                self.directory.meet(self.world_size, self.config.join_timeout)
            except BaseException:
                self.close()
                raise

    def shutdown(self, timeout: float | None = None) -> tuple[str, ...]:
        """Finish what is under way, wait for the others to do the same, then close.

        Returns the names of workers that died or did not come in time; it never hangs on them.
        """
        self.require_open()
        listeners, self._parting_listeners = self._parting_listeners, []
        for listener in listeners:
            listener()
        gone: set[str] = set()
        leads = False
        until = None if timeout is None else time.monotonic() + timeout
        if self.world_size is not None:
            names = self._participants(None)
            gone = shutdown.wait_for_group(self, names, until)
            leads = self.name == next((name for name in names if name not in gone), self.name)
        else:
            shutdown.drain(self, until)
        with contextlib.suppress(JoinError):  # the store went with the worker that hosted it
            self.directory.leave(self.local_member)
        # the others may still wait for its answer, and rank 0 may host the store that they use
        if leads:
            self.listener.wait_until_unused(_WAIT_FOR_OTHERS)
        self.close()
        if gone:
            _log.warning("worker %r shut down without %s", self.name, ", ".join(sorted(gone)))
        return tuple(sorted(gone))

    def close(self, last_words: str = "") -> None:
        """Leave at once: pending calls fail here, and peers are told `last_words`. Safe to call twice."""
        self._end(last_words)

    def abort(self) -> None:
        """End without a word, as if the process had been killed: for tests of what the others make of it."""
        self._end(None)

    def _end(self, last_words: str | None) -> None:
        with self._lock:
            if self.closing or not self._opened:
                return
            listeners, self._close_listeners = self._close_listeners, []
        if last_words is not None:
            for listener in listeners:
                listener()
        with self._lock:
            if self.closing:
                return
            self.closing = True
        _agents.discard(self)
        for ended in self._end_listeners:
            ended()
        for link in self.links():
            link.close(last_words)
        self._close_connections(last_words)
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

    # Calls

    def invoke(
        self,
        to: WorkerAddress,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: Any = DEFAULT,
    ) -> Any:
        """`call` with the arguments in containers and a time limit in seconds (None: no limit)."""
        if thread_state.interceptor is not None:
            return thread_state.interceptor.invoke(self, to, function, args, kwargs, timeout)
        if timeout is DEFAULT:
            timeout = self.timeout
        link = self.peers.known(to)
        if link is not None:
            return link.call(function, tuple(args), kwargs, timeout)
        until = None if timeout is None else time.monotonic() + timeout
        try:
            link = self.peers.reach(to, timeout)
        except TimeoutError:
            name = to.name if isinstance(to, WorkerInfo) else str(to)
            raise timeout_error(name, describe(function), timeout, sent=False) from None
        return link.call(function, tuple(args), kwargs, timeout, until)

    def start(
        self,
        to: WorkerAddress,
        function: Function,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: Any = DEFAULT,
        internal: bool = False,
        keep: object = None,
    ) -> Future[Any]:
        """`submit` with the arguments in containers and a time limit in seconds (None: no limit).

        `internal` calls are not waited for by `shutdown`. `keep` is kept alive until the callee has answered.
        """
        if thread_state.interceptor is not None and not internal:
            return thread_state.interceptor.start(self, to, function, args, kwargs, timeout, keep)
        future: Future[Any] = Future()
        self.send(to, function, args, kwargs, timeout, future, internal, keep)
        return future

    def send(
        self,
        to: WorkerAddress,
        function: Function,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
        outcome: CompletionListener,
        internal: bool = False,
        keep: object = None,
    ) -> None:
        """`start` for who needs no future: `outcome` is told how the call ended."""
        if timeout is DEFAULT:
            timeout = self.timeout
        link = self.peers.known(to)
        if link is None:
            try:
                link = self.peers.begin(to)
            except PeerLost as error:
                outcome._settle(None, error)
                return
        link.submit(function, tuple(args), kwargs, timeout, outcome, internal, keep)

    # The group

    def get_worker_info(self, to: WorkerAddress | None = None) -> WorkerInfo:
        """The worker with this name or rank; this one if none is named."""
        if to is not None and not self._opened:
            self.require_open()
        return self.local_member.info if to is None else self.directory.find(worker_key(to)).info

    def member(self, to: WorkerAddress) -> Member:
        """What the directory knows of a worker: the incarnation that a call would reach."""
        return self.peers.member(to)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers that have not left, by rank."""
        refresh = self.world_size is None and not self.closing
        return [member.info for member in self.directory.members(refresh=refresh)]

    def barrier(self, names: Sequence[str] | None = None, timeout: float | None = None) -> None:
        """Wait until every worker (or every one of `names`) is here. Raises `GroupBroken`, naming who was missing."""
        self.require_open()
        participants = self._participants(names)
        outcome = self.collectives.gather(None, participants, timeout, "barrier")
        if outcome.lost or outcome.late:
            raise group_broken("the barrier", outcome, timeout)

    def all_gather(
        self, value: Any, names: Sequence[str] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Everybody's value, by name. Raises `GroupBroken` if somebody is missing."""
        self.require_open()
        outcome = self.collectives.gather(value, self._participants(names), timeout)
        if outcome.lost or outcome.late:
            raise group_broken("the gather", outcome, timeout)
        return outcome.values

    def on_loss(self, listener: Callable[[str, str], None]) -> None:
        """Call `listener(name, incarnation)` when a worker is found to be gone. It must be short and not block."""
        self._loss_listeners.append(listener)

    def is_lost(self, incarnation: str) -> bool:
        """Was this worker found to be gone? True before the listeners of `on_loss` are called."""
        return incarnation in self._gone

    def watch(self, incarnation: str) -> None:
        """Make sure that the loss of a worker is noticed even if it never calls this one: connect to it."""
        until = time.monotonic() + self.config.heartbeat_timeout

        def look() -> None:
            if self.closing or self.is_lost(incarnation):
                return
            name = self.directory.name_of(incarnation)
            try:
                alive: bool | None = self.peers.reach(name).member.incarnation == incarnation
            except TelegradError as error:
                # A failure to connect is no proof of death. The worker may be stopped, or out of descriptors: it is
                # given as long as one that is silent.
                alive = None if time.monotonic() < until else False
                reason = str(error)
                if alive is None:
                    alive = self._probe(name, incarnation)
            else:
                reason = "another worker has taken its name"
            if alive is False:
                self.declare_lost(name, incarnation, reason=reason)
            elif alive is None:
                self.clock.at(time.monotonic() + _LOOK_AGAIN, lambda: self._soon(look))

        self._soon(look)

    def _probe(self, name: str, incarnation: str) -> bool | None:
        """Is this incarnation alive? None if that is not known."""
        try:
            member = self.directory.find(name, refresh=True)
        except JoinError:  # the store is gone; what it said last still helps
            member = self.directory.find(name)
        if member.left or member.incarnation != incarnation:
            return False
        alive = self.dialer.probe(member)
        return None if alive else alive  # alive, but `reach` failed: try again

    def _soon(self, job: Callable[[], None]) -> None:
        self.threads.start_when_possible(job, self.clock)

    def on_close(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when this agent starts to close, while it can still call others; not if it is aborted."""
        self._close_listeners.append(listener)

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when this agent has begun to end, in any way: nobody may wait here any longer."""
        self._end_listeners.append(listener)

    def on_shutdown(self, listener: Callable[[], None]) -> None:
        """Call `listener()` when `shutdown` begins, before it waits for anybody."""
        self._parting_listeners.append(listener)

    def service(self, make: Callable[[AgentRuntime], S]) -> S:
        """This agent's one `make(agent)`: how layers above keep what they know of an agent with it."""
        found: S | None = self._services.get(make)
        if found is None:
            with self._making:
                found = self._services.get(make)
                if found is None:
                    found = self._services[make] = make(self)
        return found

    def statistics(self) -> dict[str, int]:
        """Counters for people and monitors."""
        return {
            "calls_made": self.calls_made,
            "calls_served": self.calls_served,
            "calls_pending": sum(len(link.pipe.waited_for()) for link in self.links()),
            "shared_blocks_in_use": self.endpoint.mappings.live,
            **self.listener.counters,
            **{name: count for figures in self._figures for name, count in figures().items()},
        }

    def add_statistics(self, figures: Callable[[], dict[str, int]]) -> None:
        """Let `statistics` show what a layer above counts, too."""
        self._figures.append(figures)

    # What links, connections and serving need (see their protocols)

    def envelope(self, peer: str, incarnation: str, route: DeviceRoute) -> MessageContext:
        return MessageContext(self, peer, incarnation, route)

    def dial(self, member: Member, purpose: str, timeout: float | None = None) -> DialedConnection:
        if self.closing:
            raise PeerLost(
                f"worker {self.name!r} has left the group and cannot call {member.name!r}",
                peer=member.name,
            )
        return self.dialer.dial(member, purpose, timeout)

    def peer_lost(self, link: Peer, reason: str) -> None:
        self.declare_lost(link.member.name, link.member.incarnation, reason=reason)

    def connection_ended(self, inbound: ServerConnection, error: BaseException) -> None:
        self.listener.connection_ended(inbound, error)

    def declare_lost(
        self,
        name: str,
        incarnation: str,
        last_words: str = "",
        reason: str = "it closed its connections",
    ) -> None:
        """Give up this incarnation of a peer, for good. All connections with it end, so that it hears of that, too."""
        link = self.peers.current(name)
        if link is not None and link.member.incarnation == incarnation:
            link.lose(reason, last_words)
            return  # which comes back here
        with self._lock:
            if self.closing or incarnation in self._gone:
                return
            self._gone.add(incarnation)
        self.listener.close_peer(incarnation, lost_notice(self.name, reason))
        self.endpoint.forget_peer(incarnation)
        if self.directory.is_current(name, incarnation):
            self.collectives.lost(name)
        for listener in self._loss_listeners:
            try:
                listener(name, incarnation)
            except Exception:
                _log.exception("a listener failed when worker %r was lost", name)

    def check_silent_peer(self, name: str, incarnation: str) -> None:
        """A peer has closed its last connection to this worker without a good-bye: has its process ended?

        Not for sure: it may have been interrupted while it connected. If this worker has a link to it, the end of that
        tells; if not, one is made.
        """
        link = self.peers.known(name)
        if not self.closing and (link is None or link.member.incarnation != incarnation):
            self.watch(incarnation)

    def target(self, function: Function) -> ServedFunction:
        target = self._targets.get(function)
        if target is None:
            target = ServedFunction(function)
            if len(self._targets) < MAX_FUNCTIONS:
                target = self._targets.setdefault(function, target)
        return target

    def allowed(self, function: Function | None) -> bool:
        if not self.config.only_registered:
            return True
        try:
            return function in _exposed or is_trusted(function)
        except TypeError:  # not hashable, so nobody exposed it
            return False

    # Inside

    def _enter_thread(self) -> None:
        thread_state.runtime = self

    def _check_free(self) -> None:
        """A name is free if nobody has it, or if whoever had it no longer answers."""
        self.local_member = Member(
            self.name, -1 if self._rank is None else self._rank, "newcomer", ()
        )
        named = self.directory.occupant(self.name)
        if named is not None and self.world_size is not None and named.rank != self._rank:
            named = None  # two ranks of a fixed group with one name: `wait_for_members` tells both
        ranked = None if self._rank is None else self.directory.at_rank(self._rank)
        for occupant in (named, ranked):
            if occupant is None or occupant.left:
                continue
            if self.dialer.probe(occupant):
                raise JoinError(
                    f"a worker named {occupant.name!r} is already in the group and alive (rank {occupant.rank}); "
                    f"{self.name!r} needs a name and a rank of its own"
                )
            if self._rank is None:
                self._rank = occupant.rank  # it comes back

    def require_open(self) -> None:
        if self.forked:
            raise UsageError(
                f"this process was forked from the one of agent {self.name!r} and cannot use it; make calls in the "
                "process that opened the agent, or open another agent here"
            )
        if self.closing or not self._opened:
            raise UsageError(
                f"agent {self.name!r} is {'closed' if self.closing else 'not open yet'}"
            )

    def _participants(self, names: Sequence[str] | None) -> list[str]:
        """Names in the order of ranks, which decides who leads."""
        if names is None:
            return [
                member.name for member in self.directory.members(refresh=self.world_size is None)
            ]
        return [
            member.name
            for member in sorted(map(self.directory.find, set(names)), key=lambda m: m.rank)
        ]

    def links(self) -> list[Peer]:
        """One link per peer that this agent has called."""
        return self.peers.all()

    def _after_fork(self) -> None:
        """In the child of a fork: the agent belongs to the parent; let go of its sockets."""
        self.closing = self.forked = True
        self.peers.drop()
        self.listener.drop()
        self.event_loops.drop()


def active_runtime() -> AgentRuntime | None:
    """Return the runtime that runs the current remote function, else that of `init_rpc`'s agent."""
    runtime: AgentRuntime | None = find_runtime()
    return runtime


def _close_all() -> None:
    """At the end of the process, tell the peers why instead of just vanishing."""
    error = getattr(sys, "last_value", None)
    words = (
        ""
        if error is None
        else "".join(traceback.format_exception_only(type(error), error)).strip()
    )
    for agent in list(_agents):
        agent.close(words or "the process ended without shutdown")


def _forget_all() -> None:
    for agent in list(_agents):
        agent._after_fork()
    _agents.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)

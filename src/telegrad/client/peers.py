"""`PeerTable`: the workers that an agent calls.

It finds the worker that a name or rank means now, and the one `Peer` for it.

State: `by_key` (peers by name and by rank, connected or not) is written under `_lock`. The entry
of a lost peer is replaced on the next call.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Protocol

from telegrad import thread_roles
from telegrad.client.multiplexed import QUEUE_WAIT
from telegrad.client.peer import Peer, PeerRuntime
from telegrad.errors import JoinError, PeerLost, TelegradError, UsageError, as_exception
from telegrad.group.membership import Directory, Member, WorkerInfo
from telegrad.locks import new_lock

WorkerAddress = str | int | WorkerInfo
_log = logging.getLogger(__name__)


class PeerTableRuntime(PeerRuntime, Protocol):
    """What the table of peers needs from its agent."""

    directory: Directory
    world_size: int | None

    def require_open(self) -> None: ...


class PeerTable:
    """The workers that an agent has called."""

    def __init__(self, runtime: PeerTableRuntime) -> None:
        self._runtime = runtime
        self.by_key: dict[str | int, Peer] = {}
        self._lock = new_lock()

    def __repr__(self) -> str:
        return f"<PeerTable of {self._runtime.name!r}: {self.all()}>"

    def all(self) -> list[Peer]:
        """Return every peer once."""
        with self._lock:
            return self._unique()

    def _unique(self) -> list[Peer]:
        return list({id(peer): peer for peer in self.by_key.values()}.values())

    def connected(self, to: WorkerAddress) -> Peer | None:
        """Return the peer if it is connected and can be called at once."""
        try:
            peer = self.by_key.get(to)  # type: ignore[arg-type]  # a WorkerInfo is not found
        except TypeError:  # not hashable, so it is no worker; `begin` raises
            return None
        return peer if peer is not None and peer.ready else None

    def current(self, name: str) -> Peer | None:
        """Return the peer with this name, connected or not, unless it was lost."""
        peer = self.by_key.get(name)
        return None if peer is None or peer.lost else peer

    def reach(self, to: WorkerAddress, timeout: float | None = None) -> Peer:
        """Return a connected peer; connect first if there is none or it was lost.

        Raise `TimeoutError` after `timeout` seconds.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = None if timeout is None else until - time.monotonic()
            peer = self.begin(to, left)
            role = thread_roles.pause()
            try:
                left = None if timeout is None else until - time.monotonic()
                if not peer.connected_or_lost.wait(left):
                    raise TimeoutError
                if not peer.lost:
                    # calls that were submitted before are sent before
                    peer.multiplexed.queue_sent.wait(QUEUE_WAIT)
            finally:
                thread_roles.resume(role)
            if not peer.lost:
                return peer
            member = peer.member
            if self._runtime.directory.is_current(member.name, member.incarnation):
                raise peer.error_for()  # else it has come back

    def begin(self, to: WorkerAddress, timeout: float | None) -> Peer:
        """Return a peer at once; another thread connects to it if needed.

        Calls can be submitted at once. If the system refuses a thread, connect here, and raise
        `TimeoutError` after `timeout` seconds.
        """
        self._runtime.require_open()
        name = self._name_of(worker_key(to))
        peer = self.current(name)
        if peer is None:
            peer = self._add(self._find_member(name))
        if not peer.connect_started:
            try:
                self._runtime.threads.start(lambda: self._connect(peer))
            except RuntimeError:  # the system refuses a thread
                self._connect(peer, timeout)
        return peer

    def _add(self, member: Member) -> Peer:
        """Return a new peer, unless another thread has added it meanwhile."""
        with self._lock:
            peer = self.current(member.name)
            if peer is None:
                # `close` may have read the table before this peer was added
                self._runtime.require_open()
                peer = Peer(self._runtime, member)
                self.by_key[member.name] = self.by_key[member.rank] = peer
            return peer

    def _connect(self, peer: Peer, timeout: float | None = None) -> None:
        try:
            peer.connect(timeout)
        except TimeoutError:  # the time of this call is over, but others may wait
            runtime = self._runtime
            runtime.threads.start_with_retry(lambda: self._connect(peer), runtime.clock)
            raise
        except BaseException as error:
            if isinstance(error, PeerLost):
                # before the waiting callers are woken, because they look for it then
                self._refresh(peer.member)
            peer.fail_to_connect(as_exception(error))
            if not isinstance(error, Exception):
                raise

    def member(self, to: WorkerAddress) -> Member:
        """Return the directory entry of a worker: the incarnation that a call would reach."""
        key, directory = worker_key(to), self._runtime.directory
        peer = self.by_key.get(key)
        if peer is not None and not peer.lost:
            return peer.member
        refresh = peer is not None or self._runtime.world_size is None
        try:
            return directory.find(key, refresh=refresh)
        except JoinError:  # the store is gone; use what was read last
            return directory.find(key)

    def clear(self) -> None:
        """Forget all peers, after they were closed."""
        with self._lock:
            self.by_key.clear()

    def close_after_fork(self) -> None:
        """In the child of a fork: free this process's copies of the connections."""
        for peer in self._unique():
            peer.close_after_fork()
        self.by_key = {}

    def _refresh(self, member: Member) -> None:
        """Read the entry of a worker again that cannot be reached: it may have come back."""
        try:
            self._runtime.directory.find(member.name, refresh=True)
        except TelegradError as error:
            _log.debug("no later incarnation of %r was found: %s", member.name, error)

    def _name_of(self, key: str | int) -> str:
        """Return the name that belongs to a name or rank; in an open group, the newest."""
        if isinstance(key, str):
            return key
        return self._runtime.directory.find(key, refresh=self._runtime.world_size is None).name

    def _find_member(self, name: str) -> Member:
        """Return the member to connect to. Raise `PeerLost` if it has left or was lost."""
        lost = self.by_key.get(name)
        if lost is not None and lost.connect_failed:
            lost = None
        refresh = lost is not None or self._runtime.world_size is None
        try:
            member = self._runtime.directory.find(name, refresh=refresh)
        except JoinError:
            if lost is None:
                raise
            raise lost.error_for() from None  # the store ended with the peer
        if member.left:
            raise PeerLost(f"worker {member.name!r} has left the group", peer=member.name)
        if lost is not None and lost.member.incarnation == member.incarnation:
            raise lost.error_for()
        return member


def worker_key(to: WorkerAddress) -> str | int:
    """Return the name or rank of a worker. Raise `UsageError` if `to` is of another type."""
    if isinstance(to, WorkerInfo):
        return to.name
    if isinstance(to, str | int) and not isinstance(to, bool):
        return to
    raise UsageError(
        f"a worker is named by its name, rank or WorkerInfo, not by {type(to).__name__}"
    )

"""An agent's links: which worker a name or rank means now, and the one link to it.

State: `_by_key` (links by name and by rank, connected or not; entries of lost peers are replaced on the next call),
written under `_lock`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

from telegrad import blocking
from telegrad.client.multiplexed import PACE
from telegrad.client.peer import Peer
from telegrad.errors import JoinError, PeerLost, TelegradError, UsageError, as_exception
from telegrad.group.membership import Member, WorkerInfo

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

WorkerAddress = str | int | WorkerInfo

_log = logging.getLogger(__name__)


class PeerTable:
    """The workers that an agent has called."""

    def __init__(self, agent: AgentRuntime) -> None:
        self._agent = agent
        self._by_key: dict[str | int, Peer] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<PeerTable of {self._agent.name!r}: {self.all()}>"

    def all(self) -> list[Peer]:
        """One link per peer."""
        with self._lock:
            return list({id(link): link for link in self._by_key.values()}.values())

    def known(self, to: WorkerAddress) -> Peer | None:
        """The link to use, if there is one already and it is connected."""
        try:
            link = self._by_key.get(to)  # type: ignore[arg-type]  # a WorkerInfo is simply not found
        except TypeError:  # not hashable, so no worker; `begin` says so
            return None
        return link if link is not None and link.ready else None

    def current(self, name: str) -> Peer | None:
        """The link to a peer that was not lost, connected or not."""
        link = self._by_key.get(name)
        return None if link is None or link.lost else link

    def reach(self, to: WorkerAddress, timeout: float | None = None) -> Peer:
        """A link to a peer, new if there is none or the peer was lost, within `timeout` seconds (`TimeoutError`)."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            link = self.begin(to)
            role = blocking.pause()
            try:
                if not link.settled.wait(None if timeout is None else until - time.monotonic()):
                    raise TimeoutError
                if not link.lost:
                    link.pipe.caught_up.wait(PACE)  # what was submitted before is sent before
            finally:
                blocking.resume(role)
            if not link.lost:
                return link
            if self._agent.directory.is_current(link.member.name, link.member.incarnation):
                raise link.error_for()  # else it has come back

    def begin(self, to: WorkerAddress) -> Peer:
        """A link to a peer, which another thread connects if need be. Calls can be submitted at once."""
        agent = self._agent
        agent.require_open()
        name = self._name_of(worker_key(to))
        link = self.current(name)
        if link is None:
            link = self._add(self._find_again(name))
        if not link.has_connector:
            try:
                agent.threads.start(lambda: self._connect(link))
            except RuntimeError:  # the system refuses a thread
                self._connect(link)
        return link

    def _add(self, member: Member) -> Peer:
        """A new link, unless another thread was faster."""
        agent = self._agent
        with self._lock:
            link = self.current(member.name)
            if link is None:
                agent.require_open()  # `close` has looked at the links already, or is about to
                link = Peer(agent, member)
                self._by_key[member.name] = self._by_key[member.rank] = link
            return link

    def _connect(self, link: Peer) -> None:
        try:
            link.connect()
        except BaseException as error:
            if isinstance(error, PeerLost):
                self._look_for_newer(link.member)  # before those who wait are told
            link.abandon(as_exception(error))
            if not isinstance(error, Exception):
                raise

    def member(self, to: WorkerAddress) -> Member:
        """What is known of a worker: the incarnation that a call would reach."""
        key, directory = worker_key(to), self._agent.directory
        link = self._by_key.get(key)
        if link is not None and not link.lost:
            return link.member
        try:
            return directory.find(key, refresh=link is not None or self._agent.world_size is None)
        except JoinError:  # the store is gone; what it said last still helps
            return directory.find(key)

    def clear(self) -> None:
        """They are closed."""
        with self._lock:
            self._by_key.clear()

    def drop(self) -> None:
        """After a fork, in the child."""
        for link in {id(link): link for link in self._by_key.values()}.values():
            link.drop()
        self._by_key = {}

    def _look_for_newer(self, member: Member) -> None:
        """Let the directory know of a later incarnation of a worker that cannot be reached, if it has come back."""
        try:
            self._agent.directory.find(member.name, refresh=True)
        except TelegradError as error:
            _log.debug("no later incarnation of %r was found: %s", member.name, error)

    def _name_of(self, key: str | int) -> str:
        """The name behind a name or rank; in an open group, the newest."""
        if isinstance(key, str):
            return key
        return self._agent.directory.find(key, refresh=self._agent.world_size is None).name

    def _find_again(self, key: str) -> Member:
        """Who is to be dialled: a member that has not left and is not known to be dead."""
        known = self._by_key.get(key)
        if known is not None and known.abandoned:
            known = None
        refresh = known is not None or self._agent.world_size is None
        try:
            member = self._agent.directory.find(key, refresh=refresh)
        except JoinError:
            if known is None:
                raise
            raise known.error_for() from None  # the store died with the peer
        if member.left:
            raise PeerLost(f"worker {member.name!r} has left the group", peer=member.name)
        if known is not None and known.member.incarnation == member.incarnation:
            raise known.error_for()
        return member


def worker_key(to: WorkerAddress) -> str | int:
    if isinstance(to, WorkerInfo):
        return to.name
    if isinstance(to, str | int) and not isinstance(to, bool):
        return to
    raise UsageError(
        f"a worker is named by its name, rank or WorkerInfo, not by {type(to).__name__}"
    )

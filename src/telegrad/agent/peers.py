"""An agent's links: which worker a name or rank means now, and the one link to it.

State: `_by_key` (links by name and by rank; entries of lost peers are replaced on the next call), written under
`_lock`; `_dialing`, a lock for each name.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from telegrad.agent.links import Link
from telegrad.agent.membership import Member, WorkerInfo
from telegrad.errors import JoinError, PeerLost, TelegradError, UsageError

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent

To = str | int | WorkerInfo


class Peers:
    """The workers that an agent has called."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._by_key: dict[str | int, Link] = {}
        self._dialing: dict[str | int, threading.Lock] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Peers of {self._agent.name!r}: {self.all()}>"

    def all(self) -> list[Link]:
        """One link per peer."""
        with self._lock:
            return list({id(link): link for link in self._by_key.values()}.values())

    def known(self, to: To) -> Link | None:
        """The link to use, if there is one already."""
        try:
            link = self._by_key.get(to)  # type: ignore[arg-type]  # a WorkerInfo is simply not found
        except TypeError:  # not hashable, so no worker; `reach` says so
            return None
        return None if link is None or link.lost else link

    def reach(self, to: To, timeout: float | None = None) -> Link:
        """A link to a peer, new if there is none or the peer was lost, within `timeout` seconds (`TimeoutError`)."""
        agent = self._agent
        agent.require_open()
        name = self._name_of(key_of(to))
        until = math.inf if timeout is None else time.monotonic() + timeout
        held: list[bool] = []
        lock = self._dialing.setdefault(name, threading.Lock())  # one thread dials a peer; the others wait for its link
        try:
            held.extend(map(lock.acquire, (True,), (-1 if timeout is None else timeout,)))
            if not held[0]:
                raise TimeoutError
            known = self._by_key.get(name)
            if known is not None and not known.lost:
                return known
            member = self._find_again(name, known)
            link: Link | None = None
            try:
                link = self._link(member, until)
            except PeerLost:
                newer = self._newer_than(member)
                if newer is None:
                    raise
                link = self._link(newer, until)
            try:
                with self._lock:
                    closing = agent.closing
                    if not closing:
                        self._by_key[name] = self._by_key[member.rank] = link
            except BaseException:
                link.close(None)
                raise
            if closing:  # it was not there yet when the others were closed
                link.close(None)
                agent.require_open()
            return link
        finally:
            if held and held[0]:
                lock.release()

    def _link(self, member: Member, until: float) -> Link:
        return Link(self._agent, member, None if until == math.inf else max(until - time.monotonic(), 0.001))

    def member(self, to: To) -> Member:
        """What is known of a worker: the incarnation that a call would reach."""
        key, directory = key_of(to), self._agent.directory
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

    def _newer_than(self, member: Member) -> Member | None:
        """A later incarnation of a worker that cannot be reached, if it has come back."""
        try:
            newer = self._agent.directory.find(member.name, refresh=True)
        except TelegradError:
            return None
        return None if newer.incarnation == member.incarnation else newer

    def _name_of(self, key: str | int) -> str:
        """The name behind a name or rank; in an open group, the newest."""
        if isinstance(key, str):
            return key
        return self._agent.directory.find(key, refresh=self._agent.world_size is None).name

    def _find_again(self, key: str | int, known: Link | None) -> Member:
        """Who is to be dialled: a member that has not left and is not known to be dead."""
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


def key_of(to: To) -> str | int:
    if isinstance(to, WorkerInfo):
        return to.name
    if isinstance(to, str | int) and not isinstance(to, bool):
        return to
    raise UsageError(f"a worker is named by its name, rank or WorkerInfo, not by {type(to).__name__}")

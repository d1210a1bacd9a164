"""Which connections a loop reads, and what epoll watches of them."""

from __future__ import annotations

import collections
import logging
import os
import select
import threading

from telegrad.scheduling.loop_connection import LoopConnection
from telegrad.transport.channel import ChannelClosed

READ, WRITE = select.EPOLLIN, select.EPOLLOUT

_log = logging.getLogger(__name__)


class ConnectionPoller:
    """The connections of one event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, READ)
        self._connections: dict[int, LoopConnection] = {}
        self._members: set[LoopConnection] = set()
        self._ready: collections.deque[LoopConnection] = collections.deque()
        self._posted: collections.deque[LoopConnection | None] = collections.deque()
        self._asleep = False

    def reads(self, connection: LoopConnection) -> bool:
        """Is this connection read, so that the loop will close it?"""
        return connection in self._members

    def post(self, connection: LoopConnection | None) -> None:
        """There may be something to read."""
        self._posted.append(connection)
        if self._asleep:
            self._asleep = False
            self._rouse()

    def drop(self) -> None:
        """After a fork, in the child: the connections are the parent's."""
        self._epoll.close()
        os.close(self._wake)

    def _rouse(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _over(self) -> None:
        """Under the lock: nobody will lead any more."""
        self._epoll.close()
        os.close(self._wake)
        self._wake = -1

    def _watch(self, connection: LoopConnection, number: int, mask: int) -> None:
        """Under the lock: let epoll look for `mask`; 0: for nothing."""
        if mask == connection.mask:
            return
        if not mask:
            self._epoll.unregister(number)
            self._connections.pop(number, None)
        elif connection.mask:
            self._epoll.modify(number, mask)
        else:
            self._epoll.register(number, mask)
            self._connections[number] = connection
            connection.number = number
        connection.mask = mask

    def _set_mask(
        self, connection: LoopConnection, mask: int, only_if_watched: bool = False
    ) -> None:
        """Look for something else from now on, unless the connection has ended."""
        number = connection.channel.fileno()
        if number is None:
            return
        with self._lock:
            if connection not in self._members or (only_if_watched and not connection.mask):
                return
            try:
                self._watch(connection, number, mask)
            except (OSError, ValueError) as error:
                _log.debug("a connection ended before it could be watched: %s", error)
        if mask & READ:
            self.post(connection)

    def _await_room(self, connection: LoopConnection) -> None:
        """The peer takes no more: send the rest when it does. Who holds up or receives a connection sends it later."""
        self._set_mask(
            connection, WRITE if connection.stops_reading else READ | WRITE, only_if_watched=True
        )

    def _forget(self, connection: LoopConnection) -> None:
        """Under the lock: the connection is over."""
        self._members.discard(connection)
        if connection.mask:
            self._connections.pop(connection.number, None)
            try:
                self._epoll.unregister(connection.number)
            except (OSError, ValueError) as error:
                _log.debug("a connection was closed already: %s", error)
            connection.mask = 0

    def _poll(self, timeout: float | None) -> None:
        """Ask the system which connections can be read or written to."""
        for number, mask in self._epoll.poll(timeout):
            if number == self._wake:
                os.eventfd_read(number)
                continue
            connection = self._connections.get(number)
            if connection is None:
                continue
            if mask & WRITE:
                self._write(connection)
            if mask != WRITE:
                connection.readable = True
                self._enqueue(connection)

    def _write(self, connection: LoopConnection) -> None:
        """The peer takes something again."""
        try:
            complete = connection.channel.flush_nowait()
        except ChannelClosed:
            complete = True  # whoever reads is about to find out
        if complete and not connection.held:
            self._set_mask(connection, READ)

    def _enqueue(self, connection: LoopConnection) -> None:
        if not connection.queued and not connection.held and not connection.elsewhere:
            connection.queued = True
            self._ready.append(connection)

    def _take_posted(self) -> None:
        while self._posted:
            connection = self._posted.popleft()
            if connection is not None and connection in self._members:
                self._enqueue(connection)

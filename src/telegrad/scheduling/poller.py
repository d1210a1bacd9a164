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
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, READ)
        self._by_fd: dict[int, LoopConnection] = {}
        self._connections: set[LoopConnection] = set()
        self._ready: collections.deque[LoopConnection] = collections.deque()
        self._posted: collections.deque[LoopConnection | None] = collections.deque()
        self._asleep = False

    def reads(self, connection: LoopConnection) -> bool:
        """Is this connection read, so that the loop will close it?"""
        return connection in self._connections

    def post(self, connection: LoopConnection | None) -> None:
        """There may be something to read."""
        self._posted.append(connection)
        if self._asleep:
            self._asleep = False
            self._wake_up()

    def drop(self) -> None:
        """After a fork, in the child: the connections are the parent's."""
        self._epoll.close()
        os.close(self._wake_fd)

    def _wake_up(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _close_descriptors(self) -> None:
        """Under the lock: nobody will lead any more."""
        self._epoll.close()
        os.close(self._wake_fd)
        self._wake_fd = -1

    def _update_epoll(self, connection: LoopConnection, fd: int, events: int) -> None:
        """Under the lock: let epoll look for `events`; 0: for nothing."""
        if events == connection.watched_events:
            return
        if not events:
            self._epoll.unregister(fd)
            self._by_fd.pop(fd, None)
        elif connection.watched_events:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
            self._by_fd[fd] = connection
            connection.fd = fd
        connection.watched_events = events

    def _watch(
        self, connection: LoopConnection, events: int, only_if_watched: bool = False
    ) -> None:
        """Look for something else from now on, unless the connection has ended."""
        fd = connection.channel.fileno()
        if fd is None:
            return
        with self._lock:
            if connection not in self._connections or (
                only_if_watched and not connection.watched_events
            ):
                return
            try:
                self._update_epoll(connection, fd, events)
            except (OSError, ValueError) as error:
                _log.debug("a connection ended before it could be watched: %s", error)
        if events & READ:
            self.post(connection)

    def _watch_until_writable(self, connection: LoopConnection) -> None:
        """The peer takes no more: send the rest when it does. Who holds up or receives a connection sends it later."""
        self._watch(
            connection, WRITE if connection.stops_reading else READ | WRITE, only_if_watched=True
        )

    def _remove(self, connection: LoopConnection) -> None:
        """Under the lock: the connection is over."""
        self._connections.discard(connection)
        if connection.watched_events:
            self._by_fd.pop(connection.fd, None)
            try:
                self._epoll.unregister(connection.fd)
            except (OSError, ValueError) as error:
                _log.debug("a connection was closed already: %s", error)
            connection.watched_events = 0

    def _poll(self, timeout: float | None) -> None:
        """Ask the system which connections can be read or written to."""
        for fd, events in self._epoll.poll(timeout):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                continue
            connection = self._by_fd.get(fd)
            if connection is None:
                continue
            if events & WRITE:
                self._flush(connection)
            if events != WRITE:
                connection.readable = True
                self._enqueue(connection)

    def _flush(self, connection: LoopConnection) -> None:
        """The peer takes something again."""
        try:
            complete = connection.channel.flush_nowait()
        except ChannelClosed:
            complete = True  # whoever reads is about to find out
        if complete and not connection.hold_count:
            self._watch(connection, READ)

    def _enqueue(self, connection: LoopConnection) -> None:
        if (
            not connection.queued
            and not connection.hold_count
            and not connection.receives_large_frame
        ):
            connection.queued = True
            self._ready.append(connection)

    def _enqueue_posted(self) -> None:
        while self._posted:
            connection = self._posted.popleft()
            if connection is not None and connection in self._connections:
                self._enqueue(connection)

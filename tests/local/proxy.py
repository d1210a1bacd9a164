"""A TCP proxy: it forwards connections, resets them, and lets a test change what passes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Address = tuple[str, int]
_CHUNK = 1 << 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER


@dataclass(frozen=True)
class Chunk:
    """Bytes on their way: the connection's number, the direction, the number of the chunk there."""

    connection: int
    to_server: bool
    index: int
    data: bytes


Change = Callable[[Chunk], Iterable[bytes | None]]


def unchanged(chunk: Chunk) -> list[bytes]:
    return [chunk.data]


class Proxy:
    """Forward connections to each address in `routes` to the address that it maps to.

    `change` returns what is sent in place of a chunk; at None the connection is reset. Connections
    are numbered from 0. State: `_open` (client and server sockets, by connection) and `_ending`
    (those with one direction closed) are changed under `_lock`.
    """

    def __init__(self, routes: dict[Address, Address], change: Change = unchanged) -> None:
        self._routes = routes
        self.change = change
        self.accepted = 0
        self._listening: list[socket.socket] = []
        self._open: dict[int, tuple[socket.socket, socket.socket]] = {}
        self._ending: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.listen()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        for thread in self._threads:
            thread.join()

    def listen(self) -> None:
        """Accept connections."""
        for address, target in self._routes.items():
            listening = socket.create_server(address)
            self._listening.append(listening)
            self._start(self._accept, listening, target)

    def reset(self) -> int:
        """Reset every connection, and refuse others until `listen`. Return how many there were."""
        for listening in self._listening:
            listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
            listening.close()
        self._listening.clear()
        with self._lock:
            connections = list(self._open)
        for number in connections:
            self._reset(number)
        return len(connections)

    def inject(self, number: int, data: bytes, *, to_server: bool) -> None:
        """Send bytes of the proxy's own on a connection, if it is still open."""
        with contextlib.suppress(KeyError, OSError):
            client, server = self._open[number]
            (server if to_server else client).sendall(data)

    def connections(self) -> list[int]:
        """Return the numbers of the open connections."""
        with self._lock:
            return list(self._open)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket, target: Address) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return  # no longer listening
            try:
                server = socket.create_connection(target)
            except OSError:
                client.close()
                continue
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                number, self.accepted = self.accepted, self.accepted + 1
                self._open[number] = client, server
            if listening.fileno() < 0:  # `reset` may have run before this connection was added
                self._reset(number)
                return
            self._start(self._forward, number, client, server, True)
            self._start(self._forward, number, server, client, False)

    def _forward(
        self, number: int, source: socket.socket, target: socket.socket, to_server: bool
    ) -> None:
        index = 0
        try:
            while data := source.recv(_CHUNK):
                for part in self.change(Chunk(number, to_server, index, data)):
                    if part is None:
                        self._reset(number)
                        return
                    target.sendall(part)
                index += 1
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one side has reset the connection
            self._reset(number)
        else:
            self._half_closed(number)

    def _half_closed(self, number: int) -> None:
        """Close a connection when both of its directions have ended."""
        with self._lock:
            if number not in self._ending:
                self._ending.add(number)
                return
            socks = self._open.pop(number, ())
        for sock in socks:
            sock.close()

    def _reset(self, number: int) -> None:
        with self._lock:
            socks = self._open.pop(number, ())
        for sock in socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)  # wakes the thread that reads
            sock.close()

"""`open_within`: give up a store that does not answer. `StoreConnection`: notice that the process
that hosts a TCP store has ended, before asking it.

If the host of a `TCPStore` has ended, torch writes a page of C++ frames for each request to it. So
the connection of the store is looked at first: torch does not show its socket, so it is found among
the descriptors of this process. If it is not found, requests are made and torch writes.

State: `_descriptor`, a duplicate of the store's descriptor, closed with this object.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from telegrad.errors import JoinError

T = TypeVar("T")

_DESCRIPTORS = "/proc/self/fd"
_GRACE = 2.0  # seconds; torch notices most failures within its own timeout, and describes them


def open_within(seconds: float, connect: Callable[[], T]) -> T:
    """Return what `connect` returns: a store. Raise `TimeoutError` if that takes too long.

    The timeout of a `TCPStore` does not apply once a process has accepted the connection: if that
    process is frozen, or is no store, torch waits forever and cannot be interrupted. So a thread
    waits for torch, and is left alone if it is late.
    """
    opened: Future[T] = Future()

    def run() -> None:
        try:
            opened.set_result(connect())
        except BaseException as error:
            opened.set_exception(error)

    threading.Thread(target=run, name="telegrad-open-store", daemon=True).start()
    wait([opened], seconds + _GRACE)
    if not opened.done():
        raise TimeoutError("a process accepts connections there, but does not answer")
    return opened.result()


class StoreConnection:
    """The connection of a store; of another kind than TCP, it never ends."""

    def __init__(self, store: Any) -> None:
        self._poller = select.poll()
        self._address = ""
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if type(store).__name__ == "TCPStore":
            self._address = f"{store.host}:{store.port}"
            self._watch(int(store.port))

    def __repr__(self) -> str:
        return f"<StoreConnection to {self._address or 'no TCP store'}>"

    def require_open(self) -> None:
        """Raise `JoinError` if the process that hosts the store has ended."""
        if self._address and self._poller.poll(0):
            raise JoinError(
                f"the group's store at {self._address} has ended: the process that hosts it, "
                "usually the worker with rank 0, is gone"
            )

    def _watch(self, port: int) -> None:
        descriptor = _find_connection(port)
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)
            self._poller.register(descriptor, select.POLLRDHUP)


def _find_connection(port: int) -> int | None:
    """Return a duplicate of a descriptor that is connected to this port."""
    try:
        descriptors = [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:
        return None
    for descriptor in descriptors:
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            duplicate = os.dup(descriptor)
        except OSError:  # it was closed meanwhile
            continue
        if _peer_port(duplicate) == port:
            return duplicate
        os.close(duplicate)
    return None


def _peer_port(descriptor: int) -> int | None:
    """Return the port at the other end of a TCP connection; None if it is none."""
    sock = socket.socket(fileno=descriptor)
    try:
        address = sock.getpeername()
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        return int(address[1]) if is_tcp and sock.type == socket.SOCK_STREAM else None
    except OSError:
        return None
    finally:
        sock.detach()

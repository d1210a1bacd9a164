"""`Admission`: accept the connections of one listening socket, and bound those of strangers.

A stranger is a connection that is not authenticated yet. It waits on the thread that accepts until
it has sent something, so a silent one costs a descriptor, but no thread. Then one of a bounded
number of threads runs its handshake; the sources (addresses of hosts) take turns. So strangers of
one host cannot keep a member of another one waiting, and each transport has its own `Admission`.

By TCP, members send a token first (`wire.admission_token`), together with their request to connect.
A stranger with a token has a queue and threads that others do not use, and makes room for nobody.
So members get in, too, if strangers at their own address open connections all the time, silent
ones or such that stop within the TLS handshake.

A new connection is never refused because of others. If there are too many strangers, or too few
descriptors, the one that has been here longest makes room, first of all one of the same source. One
that has just come is not removed: it may be a member. If all have just come, nothing is accepted
for a moment, and connections wait in the backlog of the kernel.

State: `_strangers` (by socket), `_ready` (those that wait for a thread, by source) and `_threads`
(the number of threads) are changed under `_lock`; both also exist for strangers with tokens.
`_poller`, `_backlog` and `_waiting` (those that have sent nothing, by descriptor) belong to the
thread that accepts.
"""

from __future__ import annotations

import collections
import errno
import logging
import math
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from telegrad.errors import AuthenticationError
from telegrad.free_threading import CounterTable
from telegrad.scheduling.executor import ThreadPool
from telegrad.server.refusal_log import RefusalLog
from telegrad.timeouts import LONGEST_POLL
from telegrad.transport import sockets
from telegrad.wire import admission_token

MAX_STRANGERS = 512  # of one listening socket
MAX_PER_SOURCE = 256  # of one host
MAX_HANDSHAKES = 32  # threads
_MAY_STAY = 1.0  # seconds before a stranger may have to make room for others
# The same for strangers at a socket where members send a token with their first packets.
_MAY_STAY_WITHOUT_TOKEN = 0.05
_MAX_ACCEPTS = 64  # connections that are accepted before the others are looked at
_RETRY = 0.05  # seconds until what was not possible is tried again
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_log = logging.getLogger(__name__)


class AdmissionRuntime(Protocol):
    """What accepting connections needs from its agent."""

    name: str
    closing: bool
    threads: ThreadPool


class _Stranger:
    """A connection that is not authenticated yet."""

    __slots__ = ("handle", "has_token", "may_stay_until", "refused", "since", "sock", "source")

    def __init__(self, sock: socket.socket, source: str, may_stay: float) -> None:
        self.sock = sock
        # a second handle while its handshake runs, because TLS may take the socket's descriptor
        self.handle: socket.socket | None = None
        self.source = source
        self.since = time.monotonic()
        self.may_stay_until = self.since + may_stay
        self.has_token = False
        self.refused = False

    def shut(self) -> None:
        """Shut the socket down, which ends the handshake that uses it."""
        try:
            (self.handle or self.sock).shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("a connection was closed already: %s", error)


class Admission:
    """Accept the connections of one listening socket.

    `authenticate(sock)` runs a handshake. It must not raise, and it owns the socket from then on.
    If the socket is shut down meanwhile, it must end. It calls `trust` and `forget`.
    """

    def __init__(
        self,
        runtime: AdmissionRuntime,
        listening: socket.socket,
        authenticate: Callable[[socket.socket], None],
        timeout: float,
        counters: CounterTable,
        log: RefusalLog,
        is_token: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`is_token(data)` checks a token, once. None: members do not send any here."""
        self.listening = listening
        self._runtime = runtime
        self._authenticate = authenticate
        self._timeout = timeout
        self._counters = counters
        self._log = log
        self._is_token = is_token
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._waiting: dict[int, _Stranger] = {}
        self._ready: collections.OrderedDict[str, deque[_Stranger]] = collections.OrderedDict()
        self._threads = 0
        self._ready_members: deque[_Stranger] = deque()
        self._member_threads = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._is_polled = False  # then the thread that accepts closes the listening socket
        self._poller = select.poll()
        self._backlog = select.poll()  # of the listening socket alone

    def __repr__(self) -> str:
        return f"<Admission {len(self._strangers)} strangers, {self._threads} handshakes>"

    @property
    def strangers(self) -> list[socket.socket]:
        """The connections that are not authenticated yet."""
        with self._lock:
            return list(self._strangers)

    def trust(self, sock: socket.socket) -> None:
        """The peer has proven that it knows the secret: it makes room for nobody."""
        with self._lock:
            if sock in self._strangers:
                self._strangers[sock].may_stay_until = math.inf

    def forget(self, sock: socket.socket) -> None:
        """The connection is authenticated, or was closed."""
        with self._lock:
            self._strangers.pop(sock, None)

    def close(self) -> None:
        """Stop accepting, and end the handshakes."""
        self._closed.set()
        try:
            self.listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        except OSError as error:
            _log.debug("a listening socket was closed already: %s", error)
        with self._lock:
            is_polled = self._is_polled
        if not is_polled:
            self.listening.close()
        for stranger in self._snapshot():
            stranger.shut()

    # On the thread that accepts

    def run(self) -> None:
        """Accept connections until the agent closes, whatever strangers do."""
        try:
            with self._lock:
                self._is_polled = not self._closed.is_set()
            if not self._is_polled:
                return
            self.listening.setblocking(False)
            descriptor = self.listening.fileno()
            self._poller.register(descriptor, select.POLLIN)
            self._backlog.register(descriptor, select.POLLIN)
            while not self._is_closing():
                try:
                    found = {each for each, _ in self._poller.poll(self._poll_milliseconds())}
                    for each in found - {descriptor}:
                        self._add_ready(each)
                    # last, because it may close strangers, whose descriptors are then reused
                    if descriptor in found:
                        self._accept()
                    self._remove_expired()
                    self._serve_ready()
                except (OSError, RuntimeError, MemoryError) as error:
                    if not self._is_closing():
                        self._wait(error)
        except (OSError, ValueError):
            if not self._is_closing():  # else the socket was closed before it was polled
                raise
        finally:
            # Closed earlier, its number could be reused while this thread is about to poll it.
            self.listening.close()
            for stranger in self._snapshot():
                stranger.shut()
            for stranger in (*self._waiting.values(), *self._take_ready()):
                self.forget(stranger.sock)
                stranger.sock.close()

    def _is_closing(self) -> bool:
        return self._runtime.closing or self._closed.is_set()

    def _poll_milliseconds(self) -> float | None:
        """Return how long to wait for events; None: until there is one."""
        if self._ready:
            return _RETRY * 1000
        if self._ready_members:
            return _RETRY * 1000
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting.values())).since  # they are in the order of their arrival
        left = max(oldest + self._timeout - time.monotonic(), 0)
        return min(left, LONGEST_POLL) * 1000 + 1

    def _wait(self, error: BaseException) -> None:
        self._counters.increment("failed_accepts")
        self._log.warning("worker %r cannot accept a connection: %s", self._runtime.name, error)
        self._closed.wait(_RETRY)

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS):
            if not self._backlog.poll(0):
                return  # nobody has to make room for a connection that does not come
            if not self._make_room():
                self._closed.wait(_RETRY)  # in the backlog, connections wait
                return
            try:
                sock, address = self.listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if self._is_closing() or error.errno not in _SHORTAGES:
                    raise
                if not self._evict(self._candidates()):
                    self._wait(error)
                return
            try:
                self._add(sock, address)
            except BaseException:
                self.forget(sock)
                sock.close()
                raise

    def _add(self, sock: socket.socket, address: object) -> None:
        try:
            sockets.check_same_user(sock)
        except AuthenticationError as error:
            self._counters.increment("refused_authentication")
            self._log.refused(self._runtime.name, error)
            sock.close()
            return
        source = str(address[0]) if isinstance(address, tuple) else ""
        may_stay = _MAY_STAY
        if self._is_token is not None:
            may_stay = min(may_stay, _MAY_STAY_WITHOUT_TOKEN)
        stranger = _Stranger(sock, source, may_stay)
        with self._lock:
            self._strangers[sock] = stranger
        self._waiting[sock.fileno()] = stranger
        self._poller.register(sock.fileno(), select.POLLIN)
        if self._is_token is not None and self._first_bytes(sock):
            self._add_ready(sock.fileno())

    def _add_ready(self, descriptor: int) -> None:
        """A stranger has sent something, or has closed its end."""
        stranger = self._stop_waiting(descriptor)
        if self._is_token is not None and self._is_token(self._first_bytes(stranger.sock)):
            stranger.has_token = True
            stranger.may_stay_until = math.inf
        with self._lock:
            if stranger.has_token:
                self._ready_members.append(stranger)
            else:
                self._ready.setdefault(stranger.source, deque()).append(stranger)

    @staticmethod
    def _first_bytes(sock: socket.socket) -> bytes:
        """Return what a stranger has sent, up to the size of a token, without removing it."""
        try:
            return sock.recv(admission_token.SIZE, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return b""  # nothing yet, or the connection has ended

    def _stop_waiting(self, descriptor: int) -> _Stranger:
        self._poller.unregister(descriptor)
        return self._waiting.pop(descriptor)

    def _remove_expired(self) -> None:
        """Close the strangers that have sent nothing for too long."""
        limit = time.monotonic() - self._timeout
        while self._waiting:
            stranger = next(iter(self._waiting.values()))
            if stranger.since > limit:
                return
            self._refuse(stranger, "refused_silent", f"it has sent nothing for {self._timeout} s")

    # Making room

    def _make_room(self) -> bool:
        """Make room for one more stranger. Return False if all have just come."""
        if len(self._strangers) < MAX_PER_SOURCE:
            return True
        strangers = self._snapshot()
        if sum(each.has_token for each in strangers) >= MAX_STRANGERS:
            return False  # they wait for each other
        sources = Counter(each.source for each in strangers if not each.has_token)
        largest = max(sources, key=sources.__getitem__, default="")
        if sources[largest] >= (MAX_PER_SOURCE if largest else MAX_STRANGERS):
            return self._evict(self._candidates(largest), MAX_PER_SOURCE // 8)
        if sources.total() >= MAX_STRANGERS:
            return self._evict(self._candidates(), MAX_PER_SOURCE // 8)
        return True

    def _snapshot(self) -> list[_Stranger]:
        with self._lock:
            return list(self._strangers.values())

    def _candidates(self, source: str | None = None) -> list[_Stranger]:
        """Return those of a source that are not authenticated, the silent ones and oldest first."""
        found = [
            each
            for each in self._snapshot()
            if (source is None or each.source == source)
            and each.may_stay_until < math.inf
            and not each.refused
        ]
        silent = {id(each) for each in self._waiting.values()}
        return sorted(found, key=lambda each: (id(each) not in silent, each.since))

    def _evict(self, candidates: list[_Stranger], limit: int = 1) -> bool:
        """Close strangers that have been here long, the first ones. Return whether there are any.

        Finding them takes longer than closing them, so several may be closed at once.
        """
        now = time.monotonic()
        evicted = [each for each in candidates if each.may_stay_until < now][: max(limit, 1)]
        for stranger in evicted:
            self._refuse(stranger, "refused_evicted", "it had to make room for others")
        return bool(evicted)

    def _refuse(self, stranger: _Stranger, counter: str, reason: str) -> None:
        with self._lock:
            queue = self._ready.get(stranger.source)
            is_ready = queue is not None and stranger in queue
            if queue is not None and is_ready:
                queue.remove(stranger)
                if not queue:
                    del self._ready[stranger.source]
            stranger.refused = True
        descriptor = stranger.sock.fileno()
        if self._waiting.get(descriptor) is stranger:
            self._stop_waiting(descriptor)
        elif not is_ready:
            stranger.shut()  # the thread that runs its handshake closes and counts it
            return
        self._counters.increment(counter)
        self._log.refused(self._runtime.name, reason)
        self.forget(stranger.sock)
        stranger.sock.close()

    # Handshakes

    def _serve_ready(self) -> None:
        """Let threads run the handshakes. If all threads are busy, end those that take long."""
        with self._lock:
            members = min(len(self._ready_members), MAX_HANDSHAKES - self._member_threads)
            ready = [stranger for queue in self._ready.values() for stranger in queue]
            wanted = min(len(ready), MAX_HANDSHAKES - self._threads)
        for _ in range(members):
            self._start(self._run_members, "_member_threads")
        for _ in range(wanted):
            self._start(self._run_handshakes, "_threads")
        if len(ready) > wanted:
            not_running = {*map(id, ready), *map(id, self._waiting.values())}
            for stranger in self._candidates():
                if id(stranger) not in not_running:
                    self._evict([stranger])

    def _start(self, run: Callable[[], None], counter: str) -> None:
        """Run handshakes on one more thread, which `counter` counts."""
        with self._lock:
            setattr(self, counter, getattr(self, counter) + 1)
        try:
            self._runtime.threads.start(run)
        except BaseException:
            with self._lock:
                setattr(self, counter, getattr(self, counter) - 1)
            raise

    def _run_members(self) -> None:
        while True:
            with self._lock:
                if not self._ready_members:
                    self._member_threads -= 1
                    return
                stranger = self._ready_members.popleft()
            self._run_handshake(stranger)

    def _run_handshakes(self) -> None:
        while True:
            with self._lock:
                if not self._ready:
                    self._threads -= 1
                    return
                source, queue = self._ready.popitem(last=False)
                stranger = queue.popleft()
                if queue:
                    self._ready[source] = queue  # as the last: each source gets its turn
                stranger.may_stay_until = max(stranger.may_stay_until, time.monotonic() + _MAY_STAY)
            self._run_handshake(stranger)

    def _run_handshake(self, stranger: _Stranger) -> None:
        try:
            stranger.handle = stranger.sock.dup()
        except OSError as error:  # too few descriptors
            _log.debug("a connection gets no second handle: %s", error)
        try:
            self._authenticate(stranger.sock)
        finally:
            if stranger.handle is not None:
                stranger.handle.close()

    def _take_ready(self) -> list[_Stranger]:
        with self._lock:
            taken = [stranger for queue in self._ready.values() for stranger in queue]
            taken += self._ready_members
            self._ready.clear()
            self._ready_members.clear()
        return taken

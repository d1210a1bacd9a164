"""`NewestVersion`: the newest version that subscribers of a worker can read, and who waits for it.

State, under `_lock`: `_reader`, how to read the newest version, its `_version` and `_epoch`;
`_futures` of those that wait for a newer one; `_closed`; `_error`, why it cannot work as it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from telegrad import thread_roles
from telegrad.errors import CallCancelled, CallTimeout, TelegradError, UsageError
from telegrad.futures import Future
from telegrad.weights.held import Held
from telegrad.weights.leases import Leases
from telegrad.weights.reading import ReadVersion, VersionLost
from telegrad.weights.versions import is_newer

FIRST_DELAY, LONGEST_DELAY = 0.01, 0.5  # seconds between attempts

Reader = Callable[[Held | None], Any]  # returns a context manager of `ReadVersion`


def closed_error(name: str) -> UsageError:
    """Return the error for a use of a closed subscriber."""
    return UsageError(f"the subscriber of {name!r} is closed")


class NewestVersion:
    """The newest version of the weights `name` in this worker."""

    def __init__(self, name: str, worker: str) -> None:
        self.name = name
        self._leases = Leases(worker)  # of the versions that are read
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._reader: Reader | None = None
        self._version: int | None = None
        self._epoch = ""
        self._futures: list[tuple[int | None, Future[int]]] = []
        self._closed = False
        self._error: Exception | None = None

    @property
    def version(self) -> int | None:
        """The newest version that can be read."""
        return self._version

    def is_newest(self, version: int) -> bool:
        """Return whether this is the newest version, as far as this worker can know."""
        return self._version == version and self._error is None

    def newer_than(self, version: int | None) -> Future[int]:
        """Return a future for the newest version once it is newer than `version`."""
        future: Future[int] = Future()
        with self._lock:
            newest, error = self._version, self._error
            is_there = error is None and is_newer(newest, version)
            if not is_there and not self._closed and error is None:
                self._futures.append((version, future))
                return future
        if is_there and newest is not None:
            future.set_result(newest)
        else:
            future.set_exception(error or CallCancelled("the subscriber is closed"))
        return future

    @contextmanager
    def read(self, timeout: float | None, held: Held | None = None) -> Iterator[ReadVersion]:
        """Return the newest version. Wait for the first one, or for a source, up to `timeout`.

        With what tensors hold: also what changed since then, if that is known here.
        Raise `VersionLost` at the end if it must be read again.
        """
        try:
            with self._open(timeout, held) as found:
                yield found
        finally:
            self._leases.release_ended()

    @contextmanager
    def _open(self, timeout: float | None, held: Held | None) -> Iterator[ReadVersion]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            reader = self._wait_for_reader(until)
            opened = reader(held)
            try:
                found: ReadVersion = opened.__enter__()
            except TelegradError:
                if until is not None and time.monotonic() >= until:
                    raise
                # the source has just failed, and the thread is about to notice it
                self._pause(FIRST_DELAY)
                continue
            break
        try:
            yield found
        except BaseException:
            with suppress(VersionLost):
                opened.__exit__(None, None, None)
            raise
        opened.__exit__(None, None, None)

    def _wait_for_reader(self, until: float | None) -> Reader:
        role = thread_roles.pause()
        try:
            with self._changed:
                while self._reader is None and not self._closed:
                    if self._error is not None:
                        raise self._error
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        raise CallTimeout(
                            f"no version of the weights {self.name!r} has arrived in time; does a "
                            "worker of this group have a Publisher of this name?"
                        )
                    self._changed.wait(left)
                if self._closed or self._reader is None:
                    raise closed_error(self.name)
                return self._reader
        finally:
            thread_roles.resume(role)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if not self._closed:
                self._changed.wait(seconds)

    def _end(self) -> bool:
        """Let those that wait fail. Return whether this is the first call."""
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            futures, self._futures = self._futures, []
            self._reader = None
            self._changed.notify_all()
        for _, future in futures:
            if not future.done():
                future.set_exception(CallCancelled("the subscriber was closed"))
        return True

    def _fail(self, error: Exception) -> None:
        """Let those that wait fail, and others later: versions cannot be received as it is.

        An old version is no longer read either: its readers would not notice that it stays old.
        """
        with self._changed:
            self._error, self._reader = error, None
        self._fail_once(error)

    def _fail_once(self, error: Exception) -> None:
        """Let those that wait fail."""
        with self._changed:
            futures, self._futures = self._futures, []
            self._changed.notify_all()
        for _, future in futures:
            future._try_complete(None, error)

    def _announce(self, epoch: str, version: int, reader: Reader) -> None:
        """Let subscribers read a version, unless they could read a newer one before."""
        with self._changed:
            if self._closed or (epoch == self._epoch and is_newer(self._version, version)):
                return
            self._epoch, self._version, self._reader = epoch, version, reader
            self._error = None
            due = [each for wanted, each in self._futures if is_newer(version, wanted)]
            self._futures = [each for each in self._futures if not is_newer(version, each[0])]
            self._changed.notify_all()
        for future in due:
            future._try_complete(version, None)

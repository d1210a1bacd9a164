"""`Creation`: a creation by `remote`, as its creator sees it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from telegrad.errors import CallCancelled
from telegrad.futures import Future
from telegrad.refs.manager import ReferenceManager
from telegrad.refs.owned_objects import ObjectKey

_settle_lock = threading.Lock()
_log = logging.getLogger(__name__)


class Creation:
    """A creation as its creator sees it. Its future is made when somebody asks for it, which few do.

    State: `_done` and `error`, under `_settle_lock`; set once.
    """

    __slots__ = (
        "_arrivals",
        "_done",
        "_future",
        "_key",
        "_manager",
        "_on_cancel",
        "_owner",
        "_owner_name",
        "error",
    )

    def __init__(
        self, manager: ReferenceManager, owner_name: str, owner: str, key: ObjectKey
    ) -> None:
        self._manager = manager
        self._owner_name = owner_name
        self._owner = owner
        self._key = key
        self._arrivals: Sequence[Any] = ()
        self._on_cancel: Callable[[], None] | None = None
        self._future: Future[Any] | None = None
        self._done = False
        self.error: Exception | None = None

    def done(self) -> bool:
        """Has the owner answered, or is it known that it will not?"""
        return self._done

    @property
    def future(self) -> Future[Any]:
        """A future that completes when the owner has the object, or fails as its creation did."""
        new_future: Future[Any] = Future()
        with _settle_lock:
            future = self._future = self._future or new_future
        if future is new_future:
            future._on_cancel = self._on_cancel
            future.add_done_callback(self._ended)
        if self._done:
            future._settle(None, self.error)
        return future

    @property
    def _callbacks(self) -> tuple[Hashable, ...]:
        return () if self._future is None else self._future._callbacks

    def follow(self, future: Future[Any]) -> None:
        """This future says how the creation ends."""
        self._future = future
        future.add_done_callback(self._ended)

    def _ended(self, done: Any) -> None:
        self._settle(None, done._error)

    def _settle(self, value: Any, error: Exception | None) -> bool:
        """The object is there, or the creation has failed.

        If it failed before the owner made an entry (it was never sent, or its arguments could not
        be unpickled there), the owner must not wait for it. For an object that has an entry, the
        note changes nothing.
        """
        first = False
        try:
            with _settle_lock:
                if not self._done:
                    self.error, self._done, first = error, True, True
            self._manager.pending_creations.discard(self._key)
            may_come = (
                error is None or isinstance(error, CallCancelled) or getattr(error, "sent", False)
            )
            if first and not may_come:
                self._manager.void_creation(self._owner_name, self._owner, self._key, error)
        except Exception:
            _log.exception(
                "%r could not be told that an object will not be created", self._owner_name
            )
        finally:  # whatever was raised meanwhile: whoever waits must be woken
            if self._done and self._future is not None:
                self._future._settle(None, self.error)
        return first

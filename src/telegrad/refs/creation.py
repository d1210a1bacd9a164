"""`Creation`: the state of a `remote` call at the worker that made it.

`Creation` has the attributes and methods of `Future` that the connection uses to complete a call
(`_device_copies`, `_on_cancel`, `_callback_codes`, `_try_complete`), so that `remote` does not make
a future for every object.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from telegrad.errors import CallCancelled
from telegrad.futures import Future
from telegrad.refs.manager import ReferenceManager
from telegrad.refs.owned_objects import ObjectKey

_completion_lock = threading.Lock()
_log = logging.getLogger(__name__)


class Creation:
    """A `remote` call that is under way or has ended. Its future is made on demand.

    State: `_done` and `error`, under `_completion_lock`, set once.
    """

    __slots__ = (
        "_device_copies",
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
        self._device_copies: Sequence[Any] = ()
        self._on_cancel: Callable[[], None] | None = None
        self._future: Future[Any] | None = None
        self._done = False
        self.error: Exception | None = None

    def done(self) -> bool:
        """Return True if the owner has replied or the call has failed."""
        return self._done

    @property
    def future(self) -> Future[Any]:
        """Return a future that completes when the owner has the object or the creation fails."""
        new_future: Future[Any] = Future()
        with _completion_lock:
            future = self._future = self._future or new_future
        if future is new_future:
            future._on_cancel = self._on_cancel
            future.add_done_callback(self._ended)
        if self._done:
            future._try_complete(None, self.error)
        return future

    @property
    def _callback_codes(self) -> tuple[Hashable, ...]:
        return () if self._future is None else self._future._callback_codes

    def follow(self, future: Future[Any]) -> None:
        """End as `future` does."""
        self._future = future
        future.add_done_callback(self._ended)

    def _ended(self, future: Any) -> None:
        self._try_complete(None, future._error)

    def _try_complete(self, value: Any, error: Exception | None) -> bool:
        """End the creation; return False if it had ended before.

        If it failed before the owner knew the object (the call was not sent, or its arguments could
        not be unpickled), tell the owner not to wait for it. If the owner knows the object, that
        message has no effect.
        """
        first = False
        try:
            with _completion_lock:
                if not self._done:
                    self.error, self._done, first = error, True, True
            self._manager.pending_creations.discard(self._key)
            may_be_created = (
                error is None or isinstance(error, CallCancelled) or getattr(error, "sent", False)
            )
            if first and not may_be_created:
                self._manager.void_creation(self._owner_name, self._owner, self._key, error)
        except Exception:
            _log.exception(
                "could not tell worker %r that an object will not be created", self._owner_name
            )
        finally:  # wake waiting threads even if a signal handler raised
            if self._done and self._future is not None:
                self._future._try_complete(None, self.error)
        return first

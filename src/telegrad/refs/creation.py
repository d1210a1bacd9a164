"""What `remote` asks an owner to do: run a function and keep the result.

`create_call(f)` is `f` as the owner runs it for `remote`. There is one per function, so it is numbered per connection
and its cost is learned just as `f` itself would be. It is never dropped from a queue, even if its creator no longer
waits: others may hold references to what it makes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from telegrad.errors import CallCancelled, UsageError, as_exception
from telegrad.futures import Future
from telegrad.refs.counts import ObjectKey, OwnedObject
from telegrad.refs.manager import ReferenceManager, owner_manager
from telegrad.server.functions import ASYNC_MARK, DeferredReply, served_form, trusted
from telegrad.wire.function_table import MAX_FUNCTIONS, describe

_settling = threading.Lock()
_log = logging.getLogger(__name__)
_known: dict[Callable[..., Any], CreateObject] = {}
_lock = threading.Lock()


class Creation:
    """A creation as its creator sees it. Its future is made when somebody asks for it, which few do.

    State: `_done` and `error`, under `_settling`; set once.
    """

    __slots__ = (
        "_arrivals",
        "_done",
        "_future",
        "_keeper",
        "_key",
        "_name",
        "_on_cancel",
        "_owner",
        "error",
    )

    def __init__(self, keeper: ReferenceManager, name: str, owner: str, key: ObjectKey) -> None:
        self._keeper = keeper
        self._name = name
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
        made: Future[Any] = Future()
        with _settling:
            future = self._future = self._future or made
        if future is made:
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

        If it failed before the owner made an entry (it was never sent, or its arguments could not be unpickled there),
        the owner must not wait for it. For an object that has an entry, the note changes nothing.
        """
        first = False
        try:
            with _settling:
                if not self._done:
                    self.error, self._done, first = error, True, True
            self._keeper.pending.discard(self._key)
            may_come = (
                error is None or isinstance(error, CallCancelled) or getattr(error, "sent", False)
            )
            if first and not may_come:
                self._keeper.void(self._name, self._owner, self._key, error)
        except Exception:
            _log.exception("%r could not be told that an object will not be created", self._name)
        finally:  # whatever was raised meanwhile: whoever waits must be woken
            if self._done and self._future is not None:
                self._future._settle(None, self.error)
        return first


@trusted
class CreateObject:
    """Runs a function at the owner of a new object."""

    pickles_by_reference = True
    must_run = True
    # the creator knows the object already; it waits for what it does with it
    answer_may_wait = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.creates = function
        self.__qualname__ = f"remote {describe(function)}"

    def __call__(self, owner: str, key: tuple[str, int], /, *args: Any, **kwargs: Any) -> Any:
        return create(self.creates, owner, ObjectKey(*key), args, kwargs)

    def __reduce__(self) -> tuple[type[CreateObject], tuple[Callable[..., Any]]]:
        return CreateObject, (self.creates,)


def create_call(function: Callable[..., Any]) -> CreateObject:
    """The one `CreateObject` of a function that lives as long as the program; for others, a new one."""
    try:
        return _known[function]
    except (KeyError, TypeError):
        made = CreateObject(function)
    if (
        hasattr(function, "__qualname__")
        and "<" not in function.__qualname__
        and not hasattr(function, "__self__")
    ):
        with _lock:
            if len(_known) < MAX_FUNCTIONS:
                return _known.setdefault(function, made)
    return made


def create(
    function: Callable[..., Any],
    owner: str,
    key: ObjectKey,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """At the owner: run what `remote` asked for and keep the result. Its creator hears only that it is there."""
    keeper = owner_manager(owner)
    if not keeper.agent.allowed(function):
        raise UsageError(
            f"worker {keeper.agent.name!r} serves only registered functions; {describe(function)} is not one"
        )
    books = keeper.books
    entry = books.find(key) if key.creator == owner else books.create(key)
    try:
        run = served_form(function)
        value = run(*args, **kwargs)
        if type(value) is DeferredReply:
            value = value.future
        elif getattr(run, ASYNC_MARK, None) is None:
            entry.settle(value, None)
            books.settle(entry)
            return None
        return DeferredReply(_store_later(keeper, entry, value))
    except BaseException as error:
        entry.settle(None, as_exception(error))
        books.settle(entry)
        raise


def _store_later(keeper: ReferenceManager, entry: OwnedObject, value: Any) -> Future[None]:
    """Store what a future will hold; the future returned completes when it is stored."""
    if not hasattr(value, "add_done_callback"):
        raise UsageError(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but got {type(value).__name__}"
        )
    stored: Future[None] = Future()

    def store(done: Any) -> None:
        failure: Exception | None = None
        try:
            entry.settle(done.value(), None)
        except BaseException as error:
            failure = as_exception(error)
            entry.settle(None, failure)
        finally:
            stored._settle(None, failure)
            keeper.books.settle(entry)

    value.add_done_callback(store)
    return stored

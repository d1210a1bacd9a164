"""What `remote` asks an owner to do: run a function and keep the result.

`creating(f)` is `f` as the owner runs it for `remote`. There is one per function, so it is numbered per connection and
its cost is learned just as `f` itself would be. It is never dropped from a queue, even if its creator no longer waits:
others may hold references to what it makes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from telegrad.agent.targets import ASYNC_MARK, Later, as_served, trusted
from telegrad.errors import UsageError, as_exception
from telegrad.futures import Future
from telegrad.refs.keeper import Keeper, owner_keeper
from telegrad.refs.ownership import Entry, Key
from telegrad.wire.callables import LIMIT, describe

_known: dict[Callable[..., Any], Creating] = {}
_lock = threading.Lock()


@trusted
class Creating:
    """Runs a function at the owner of a new object."""

    pickles_by_reference = True
    must_run = True
    answer_may_wait = True  # the creator knows the object already; it waits for what it does with it

    def __init__(self, function: Callable[..., Any]) -> None:
        self.creates = function
        self.__qualname__ = f"remote {describe(function)}"

    def __call__(self, owner: str, key: tuple[str, int], /, *args: Any, **kwargs: Any) -> Any:
        return create(self.creates, owner, Key(*key), args, kwargs)

    def __reduce__(self) -> tuple[type[Creating], tuple[Callable[..., Any]]]:
        return Creating, (self.creates,)


def creating(function: Callable[..., Any]) -> Creating:
    """The one `Creating` of a function that lives as long as the program; for others, a new one."""
    try:
        return _known[function]
    except (KeyError, TypeError):
        made = Creating(function)
    if hasattr(function, "__qualname__") and "<" not in function.__qualname__ and not hasattr(function, "__self__"):
        with _lock:
            if len(_known) < LIMIT:
                return _known.setdefault(function, made)
    return made


def create(function: Callable[..., Any], owner: str, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """At the owner: run what `remote` asked for and keep the result. Its creator hears only that it is there."""
    keeper = owner_keeper(owner)
    if not keeper.agent.allowed(function):
        raise UsageError(
            f"worker {keeper.agent.name!r} serves only registered functions; {describe(function)} is not one"
        )
    books = keeper.books
    entry = books.find(key) if key.creator == owner else books.create(key)
    try:
        run = as_served(function)
        value = run(*args, **kwargs)
        if type(value) is Later:
            value = value.future
        elif getattr(run, ASYNC_MARK, None) is None:
            entry.settle(value, None)
            books.settle(entry)
            return None
        return Later(_store_later(keeper, entry, value))
    except BaseException as error:
        entry.settle(None, as_exception(error))
        books.settle(entry)
        raise


def _store_later(keeper: Keeper, entry: Entry, value: Any) -> Future[None]:
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

"""What users of an object ask its owner to run: create it, return it, call its methods.

`create_call(f)` is `f` as the owner runs it for `remote`. There is one per function, so it is numbered per connection
and its cost is learned just as `f` itself would be. It is never dropped from a queue, even if its creator no longer
waits: others may hold references to what it makes.

`method("act")` is what travels for a method: a callable that is numbered per connection like a function, so that its
cost is learned by name. At the owner it finds the object (waiting, without a thread, for one that is still being made)
and calls it.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from typing import Any

from telegrad.errors import UsageError, as_exception
from telegrad.futures import Future
from telegrad.refs.manager import ReferenceManager, owner_manager
from telegrad.refs.owned_objects import ObjectKey, OwnedObject
from telegrad.server.functions import ASYNC_MARK, DeferredReply, served_form, trusted
from telegrad.wire.function_table import MAX_FUNCTIONS, describe

_known: dict[Callable[..., Any], CreateObject] = {}
_lock = threading.Lock()


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
    owned = keeper.owned
    entry = owned.find(key) if key.creator == owner else owned.create(key)
    try:
        run = served_form(function)
        value = run(*args, **kwargs)
        if type(value) is DeferredReply:
            value = value.future
        elif getattr(run, ASYNC_MARK, None) is None:
            entry.settle(value, None)
            owned.settle(entry)
            return None
        return DeferredReply(_store_later(keeper, entry, value))
    except BaseException as error:
        entry.settle(None, as_exception(error))
        owned.settle(entry)
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
            keeper.owned.settle(entry)

    value.add_done_callback(store)
    return stored


@trusted
def fetch(owner: str, key: tuple[str, int]) -> Any:
    """The value of an object, as soon as there is one."""
    entry = owner_manager(owner).owned.find(ObjectKey(*key))
    return entry.value() if entry.done else DeferredReply(entry.future)


def with_object(
    owner: str, key: tuple[str, int], run: Callable[[ReferenceManager, Any], Any]
) -> Any:
    """At the owner: run something with an object. If it is still being made, later, and no thread waits for that.

    The key comes as a plain tuple: a class of its own takes a third of the time to pack and unpack a call.
    """
    keeper = owner_manager(owner)
    entry = keeper.owned.find(ObjectKey(*key))
    if entry.done:
        return run(keeper, entry.value())
    result: Future[Any] = Future()
    later = DeferredReply(result)

    def complete(done: Any) -> None:
        try:
            result._settle(done.value(), None)
        except BaseException as error:
            result._settle(None, as_exception(error))

    def run_now() -> None:
        try:
            outcome = run(keeper, entry.value())
        except BaseException as error:
            result._settle(None, as_exception(error))
            return
        if type(outcome) is DeferredReply:
            later.given_up = outcome.given_up
            outcome.future.add_done_callback(complete)
        else:
            result._settle(outcome, None)

    context = contextvars.copy_context()  # of the call: its scope, for one
    threads, clock = keeper.agent.threads, keeper.agent.clock
    entry.future.add_done_callback(
        lambda _: threads.start_when_possible(lambda: context.run(run_now), clock)
    )
    return later


@trusted
class MethodCall:
    """Calls the method of this name on an object of the worker that it runs on."""

    pickles_by_reference = True

    def __init__(self, name: str) -> None:
        self._name = name
        self.__qualname__ = f"method {name}"

    def __call__(self, owner: str, key: tuple[str, int], /, *args: Any, **kwargs: Any) -> Any:
        return with_object(
            owner, key, lambda keeper, target: self._invoke(keeper, target, args, kwargs)
        )

    def _invoke(
        self, keeper: ReferenceManager, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        function = getattr(target, self._name)
        if not keeper.agent.allowed(getattr(function, "__func__", function)):
            raise UsageError(
                f"worker {keeper.agent.name!r} serves only registered functions; {self._name} is not one"
            )
        served = served_form(function)
        outcome = served(*args, **kwargs)
        if served is not function:
            return outcome  # it says itself whether it answers later
        return (
            DeferredReply(outcome) if getattr(function, ASYNC_MARK, None) is not None else outcome
        )

    def __reduce__(self) -> tuple[Callable[[str], MethodCall], tuple[str]]:
        return method, (self._name,)


@functools.lru_cache(maxsize=4096)
def method(name: str) -> MethodCall:
    """The one `MethodCall` of this name."""
    return MethodCall(name)


@trusted
def pull(owner: str, key: tuple[str, int], count: int) -> Any:
    """At the owner: the next items, and whether they are the last."""
    return with_object(owner, key, lambda _, generator: _next_items(generator, count))


def _next_items(generator: Any, count: int) -> tuple[list[Any], bool]:
    items: list[Any] = []
    for item in generator:
        items.append(item)
        if len(items) == count:
            return items, False
    return items, True

"""What users of an object ask its owner to run: create it, return it, call its methods.

`create_call(f)` is `f` as the owner runs it for `remote`. There is one per function, so it is
numbered per connection and its cost is learned just as `f` itself would be. It is never dropped
from a queue, even if its creator no longer waits: others may hold references to what it makes.

`method("act")` is what travels for a method: a callable that is numbered per connection like a
function, so that its cost is learned by name. At the owner it finds the object (waiting, without a
thread, for one that is still being made) and calls it.
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

_create_calls: dict[Callable[..., Any], CreateObject] = {}
_create_calls_lock = threading.Lock()


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
        return _create_calls[function]
    except (KeyError, TypeError):
        new_call = CreateObject(function)
    if (
        hasattr(function, "__qualname__")
        and "<" not in function.__qualname__
        and not hasattr(function, "__self__")
    ):
        with _create_calls_lock:
            if len(_create_calls) < MAX_FUNCTIONS:
                return _create_calls.setdefault(function, new_call)
    return new_call


def create(
    function: Callable[..., Any],
    owner: str,
    key: ObjectKey,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """At the owner: run what `remote` asked for and keep the result. Its creator hears only that it is there."""
    manager = owner_manager(owner)
    if not manager.runtime.allowed(function):
        raise UsageError(
            f"worker {manager.runtime.name!r} serves only registered functions; {describe(function)} is not one"
        )
    owned = manager.owned
    owned_object = owned.find(key) if key.creator == owner else owned.create(key)
    try:
        run = served_form(function)
        value = run(*args, **kwargs)
        if type(value) is DeferredReply:
            value = value.future
        elif getattr(run, ASYNC_MARK, None) is None:
            owned_object.settle(value, None)
            owned.remove_if_unreferenced(owned_object)
            return None
        return DeferredReply(_store_when_done(manager, owned_object, value))
    except BaseException as error:
        owned_object.settle(None, as_exception(error))
        owned.remove_if_unreferenced(owned_object)
        raise


def _store_when_done(
    manager: ReferenceManager, owned_object: OwnedObject, value: Any
) -> Future[None]:
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
            owned_object.settle(done.value(), None)
        except BaseException as error:
            failure = as_exception(error)
            owned_object.settle(None, failure)
        finally:
            stored._settle(None, failure)
            manager.owned.remove_if_unreferenced(owned_object)

    value.add_done_callback(store)
    return stored


@trusted
def fetch(owner: str, key: tuple[str, int]) -> Any:
    """The value of an object, as soon as there is one."""
    owned_object = owner_manager(owner).owned.find(ObjectKey(*key))
    return owned_object.value() if owned_object.done else DeferredReply(owned_object.future)


def with_object(
    owner: str, key: tuple[str, int], run: Callable[[ReferenceManager, Any], Any]
) -> Any:
    """At the owner: run something with an object. If it is still being made, later, and no thread waits for that.

    The key comes as a plain tuple: a class of its own takes a third of the time to pack and unpack
    a call.
    """
    manager = owner_manager(owner)
    owned_object = manager.owned.find(ObjectKey(*key))
    if owned_object.done:
        return run(manager, owned_object.value())
    result: Future[Any] = Future()
    deferred = DeferredReply(result)

    def complete(done: Any) -> None:
        try:
            result._settle(done.value(), None)
        except BaseException as error:
            result._settle(None, as_exception(error))

    def run_now() -> None:
        try:
            outcome = run(manager, owned_object.value())
        except BaseException as error:
            result._settle(None, as_exception(error))
            return
        if type(outcome) is DeferredReply:
            deferred.given_up = outcome.given_up
            outcome.future.add_done_callback(complete)
        else:
            result._settle(outcome, None)

    context = contextvars.copy_context()  # of the call: its scope, for one
    threads, clock = manager.runtime.threads, manager.runtime.clock
    owned_object.future.add_done_callback(
        lambda _: threads.start_when_possible(lambda: context.run(run_now), clock)
    )
    return deferred


@trusted
class MethodCall:
    """Calls the method of this name on an object of the worker that it runs on."""

    pickles_by_reference = True

    def __init__(self, name: str) -> None:
        self._name = name
        self.__qualname__ = f"method {name}"

    def __call__(self, owner: str, key: tuple[str, int], /, *args: Any, **kwargs: Any) -> Any:
        return with_object(
            owner, key, lambda manager, target: self._invoke(manager, target, args, kwargs)
        )

    def _invoke(
        self, manager: ReferenceManager, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        function = getattr(target, self._name)
        if not manager.runtime.allowed(getattr(function, "__func__", function)):
            raise UsageError(
                f"worker {manager.runtime.name!r} serves only registered functions; {self._name} is not one"
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

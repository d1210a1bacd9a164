"""What an owner runs for the users of its objects: create, return, and call a method.

`create_call(f)` is the callable that `remote` sends instead of `f`, and `method("act")` is the one
that a proxy sends for a method. The wire layer gives each a function id per connection, and the
scheduler learns how long each takes, as for a function. Therefore there is one `CreateObject` per
function and one `MethodCall` per name.

If an object is still being created, a call that needs it is run when its value is there. No thread
waits for it.

State: `_create_calls`, under `_create_calls_lock`; it only grows, up to `MAX_FUNCTIONS`.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

from telegrad.errors import UsageError, as_exception
from telegrad.futures import Future
from telegrad.locks import new_lock
from telegrad.messages.remote_functions import (
    ASYNC_MARK,
    MAX_FUNCTIONS,
    DeferredReply,
    definer,
    describe,
    no_future_error,
    served_form,
    trusted,
    unregistered_error,
)
from telegrad.refs.manager import ReferenceManager, owner_manager
from telegrad.refs.owned_objects import ObjectKey, OwnedObject
from telegrad.wire.handshake import Incarnation

_create_calls: dict[Callable[..., Any], CreateObject] = {}
_create_calls_lock = new_lock()


@definer("function")
@trusted
class CreateObject:
    """A callable that runs a function at the owner of a new object and stores the result there."""

    pickles_by_reference = True
    hidden_arguments = 2
    # even if the creator has given up: others may have references to the object
    must_run = True
    # the creator can use the reference before the reply arrives
    answer_may_wait = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.creating_function = function
        self.__qualname__ = f"remote {describe(function)}"

    def __call__(
        self, owner: Incarnation, key: tuple[Incarnation, int], /, *args: Any, **kwargs: Any
    ) -> Any:
        return create(self.creating_function, owner, ObjectKey(*key), args, kwargs)

    def __reduce__(self) -> tuple[type[CreateObject], tuple[Callable[..., Any]]]:
        return CreateObject, (self.creating_function,)


def create_call(function: Callable[..., Any]) -> CreateObject:
    """Return the `CreateObject` of a function.

    It is kept for module-level functions and classes. Lambdas, local functions and bound methods
    get a new one, because keeping it would keep them alive.
    """
    try:
        return _create_calls[function]
    except (KeyError, TypeError):
        new_call = CreateObject(function)
    if (
        hasattr(function, "__qualname__")
        and "<" not in function.__qualname__  # "<lambda>" or "outer.<locals>.inner"
        and not hasattr(function, "__self__")
    ):
        with _create_calls_lock:
            if len(_create_calls) < MAX_FUNCTIONS:
                return _create_calls.setdefault(function, new_call)
    return new_call


def create(
    function: Callable[..., Any],
    owner: Incarnation,
    key: ObjectKey,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the function of a `remote` call and store its result. The reply has no value."""
    manager = owner_manager(owner)
    if not manager.runtime.functions.is_allowed(function):
        raise unregistered_error(manager.runtime.name, describe(function))
    owned = manager.owned
    # for an object of its own, `remote` has called `create` already
    owned_object = owned.find(key) if key.creator == owner else owned.create(key)
    try:
        run = served_form(function)
        value = run(*args, **kwargs)
        if type(value) is DeferredReply:
            value = value.future
        elif getattr(run, ASYNC_MARK, None) is None:
            owned_object.complete(value, None)
            owned.remove_if_unreferenced(owned_object)
            return None
        return DeferredReply(_store_when_done(manager, owned_object, function, value))
    except BaseException as error:
        owned_object.complete(None, as_exception(error))
        owned.remove_if_unreferenced(owned_object)
        raise


def _store_when_done(
    manager: ReferenceManager,
    owned_object: OwnedObject,
    function: Callable[..., Any],
    value: Any,
) -> Future[None]:
    """Store the value of a future when it is done. Return a future that completes after that."""
    if not hasattr(value, "add_done_callback"):
        raise no_future_error(describe(function), value)
    stored: Future[None] = Future()

    def store(done: Any) -> None:
        failure: Exception | None = None
        try:
            owned_object.complete(done.value(), None)
        except BaseException as error:
            failure = as_exception(error)
            owned_object.complete(None, failure)
        finally:
            stored._try_complete(None, failure)
            manager.owned.remove_if_unreferenced(owned_object)

    value.add_done_callback(store)
    return stored


@trusted
def fetch(owner: Incarnation, key: tuple[Incarnation, int]) -> Any:
    """Return the value of an object when it is there."""
    owned_object = owner_manager(owner).owned.find(ObjectKey(*key))
    return owned_object.value() if owned_object.done else DeferredReply(owned_object.future)


def with_object(
    owner: Incarnation, key: tuple[Incarnation, int], run: Callable[[ReferenceManager, Any], Any]
) -> Any:
    """Return `run(manager, value)` for an object of this worker.

    If the object is still being created, return a `DeferredReply` and run when it is there. The key
    arrives as a plain tuple: a class of its own would take a third of the time to pack and unpack a
    call.
    """
    manager = owner_manager(owner)
    owned_object = manager.owned.find(ObjectKey(*key))
    if owned_object.done:
        return run(manager, owned_object.value())
    result: Future[Any] = Future()
    deferred = DeferredReply(result)

    def run_now() -> None:
        try:
            outcome = run(manager, owned_object.value())
        except BaseException as error:
            result._try_complete(None, as_exception(error))
            return
        if type(outcome) is DeferredReply:
            deferred.on_abandoned = outcome.on_abandoned
            result.follow(outcome.future)
        else:
            result._try_complete(outcome, None)

    context = contextvars.copy_context()  # the call's context variables, such as its scope
    threads, clock = manager.runtime.threads, manager.runtime.clock
    owned_object.future.add_done_callback(
        lambda _: threads.start_with_retry(lambda: context.run(run_now), clock)
    )
    return deferred


@trusted
class MethodCall:
    """A callable that calls the method of this name on an object of the worker where it runs."""

    pickles_by_reference = True
    hidden_arguments = 2

    def __init__(self, name: str) -> None:
        self._name = name
        self.__qualname__ = f"method {name}"

    def __call__(
        self, owner: Incarnation, key: tuple[Incarnation, int], /, *args: Any, **kwargs: Any
    ) -> Any:
        return with_object(
            owner, key, lambda manager, target: self._invoke(manager, target, args, kwargs)
        )

    def _invoke(
        self, manager: ReferenceManager, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        function = getattr(target, self._name)
        if not manager.runtime.functions.is_allowed(getattr(function, "__func__", function)):
            raise unregistered_error(manager.runtime.name, self._name)
        served = served_form(function)
        outcome = served(*args, **kwargs)
        if served is not function:
            return outcome  # the served form returns a `DeferredReply` itself if it needs one
        is_async = getattr(function, ASYNC_MARK, None) is not None
        return DeferredReply(outcome) if is_async else outcome

    def __reduce__(self) -> tuple[Callable[[str], MethodCall], tuple[str]]:
        return method, (self._name,)


@definer("name")
@functools.lru_cache(maxsize=4096)
def method(name: str) -> MethodCall:
    """Return the `MethodCall` of this name."""
    return MethodCall(name)


@trusted
def pull(owner: Incarnation, key: tuple[Incarnation, int], count: int) -> Any:
    """Return the next items of a generator, and whether they are the last."""
    return with_object(owner, key, lambda _, generator: _next_items(generator, count))


def _next_items(generator: Any, count: int) -> tuple[list[Any], bool]:
    items: list[Any] = []
    iterator = iter(generator)
    if iterator is not generator:  # it would begin again with each call
        raise UsageError(
            "a method that is called by stream() must return a generator or another iterator, "
            f"not {type(generator).__name__}: return iter(...), or call it by rpc_sync()"
        )
    for item in iterator:
        items.append(item)
        if len(items) == count:
            return items, False
    return items, True

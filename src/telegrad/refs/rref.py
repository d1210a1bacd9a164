"""`RRef`: a reference to an object that lives on one worker, its owner, and can be used from any.

A reference belongs to the agent that holds it. It can be sent only inside calls; packing it tells
the owner which worker receives it (see `owned_objects`). When it dies, `HeldReferences` is
notified through a queue, not from inside the garbage collector.

A call that uses a reference keeps it alive until the reply arrives (`keep` of `AgentRuntime.start`;
a synchronous caller has it anyway). Therefore a temporary such as ``remote(...).rpc_async().f()``
lives while its call waits at the owner.

A proxy calls the methods of the object. A call is one round trip, whatever the type of the object:
the proxy sends the name of the method (`owner_calls.method`) and does not ask for the type first.

`Creation` is the state of a `remote` call at the worker that made it. It is a `CompletionListener`
as a `Future` is, so that `remote` does not make a future for every object.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Generator, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from torch import Tensor

from telegrad import autograd
from telegrad.agent import Agent, runtime_of
from telegrad.current import thread_state
from telegrad.errors import CallCancelled, CallTimeout, SerializationError, UsageError
from telegrad.futures import Future
from telegrad.group.membership import WorkerInfo
from telegrad.locks import new_lock
from telegrad.messages.packing import (
    MessageContext,
    before_sending,
    current_message,
    keep_until_answered,
)
from telegrad.messages.remote_functions import check_callable, checked_args, checked_kwargs, trusted
from telegrad.refs.manager import ReferenceManager
from telegrad.refs.owned_objects import ObjectKey, OwnedObject
from telegrad.refs.owner_calls import create_call, fetch, method, pull, with_object
from telegrad.runtime import DEFAULT
from telegrad.timeouts import duration, time_limit
from telegrad.wire import codec
from telegrad.wire.handshake import Incarnation

if TYPE_CHECKING:
    from telegrad.client.peers import WorkerAddress
    from telegrad.runtime import AgentRuntime


_completion_lock = new_lock()
Send = Callable[[Any, float, tuple[Any, ...], dict[str, Any]], Any]
T = TypeVar("T")
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
        self, manager: ReferenceManager, owner_name: str, owner: Incarnation, key: ObjectKey
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

    def _settle(self, value: Any, error: Exception | None) -> bool:
        """Store the outcome. Return False if there is one already."""
        with _completion_lock:
            if self._done:
                return False
            self.error, self._done = error, True
            return True

    def _announce(self) -> None:
        """End the creation.

        If it failed before the owner knew the object (the call was not sent, or its arguments could
        not be unpickled), tell the owner not to wait for it. If the owner knows the object, that
        message has no effect.
        """
        error = self.error
        try:
            self._manager.pending_creations.discard(self._key)
            may_be_created = (
                error is None or isinstance(error, CallCancelled) or getattr(error, "sent", False)
            )
            if not may_be_created:
                self._manager.void_creation(self._owner_name, self._owner, self._key, error)
        except Exception:
            _log.exception(
                "could not tell worker %r that an object will not be created", self._owner_name
            )
        finally:  # wake waiting threads even if a signal handler raised
            if self._future is not None:
                self._future._try_complete(None, error)

    def _try_complete(self, value: Any, error: Exception | None) -> bool:
        """Do both. Return False if the creation had ended before."""
        settled = True
        try:
            settled = self._settle(value, error)
        finally:  # even if a signal handler raised
            if settled and self._done:
                self._announce()
        return settled


class Proxy:
    """Base of the proxies: sends each method call to the owner."""

    def __init__(self, send: Send, timeout: float) -> None:
        self._send = send
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {getattr(self._send, '__self__', None)!r}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        send, timeout, method_call = self._send, self._timeout, method(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return send(method_call, timeout, args, kwargs)

        return call


class SyncProxy(Proxy):
    """A proxy whose methods return their results."""


class AsyncProxy(Proxy):
    """A proxy whose methods return futures."""


class RemoteProxy(Proxy):
    """A proxy whose methods return references to their results."""


class StreamProxy(Proxy):
    """A proxy whose methods are generators and return streams of their items."""

    def __init__(self, send: Send, timeout: float, chunk: int) -> None:
        if not isinstance(chunk, int) or chunk < 1:
            raise UsageError(f"the chunk of a stream must be at least 1 item, not {chunk!r}")
        super().__init__(send, timeout)
        self._chunk = chunk

    def __getattr__(self, name: str) -> Callable[..., RemoteStream]:
        create = super().__getattr__(name)

        def call(*args: Any, **kwargs: Any) -> RemoteStream:
            return RemoteStream(create(*args, **kwargs), self._timeout, self._chunk)

        return call


class RemoteStream:
    """The items of a generator on another worker.

    While one chunk is used, the next one is requested, and no more than that.
    """

    def __init__(self, generator: RRef[Any], timeout: float, chunk: int) -> None:
        self._generator = generator
        self._timeout = timeout
        self._chunk = chunk
        self._next: Future[tuple[list[Any], bool]] | None = self._pull()

    def __iter__(self) -> Iterator[Any]:
        while self._next is not None:
            items, ended = self._next.wait()
            self._next = None if ended else self._pull()
            yield from items

    async def __aiter__(self) -> AsyncIterator[Any]:
        while self._next is not None:
            items, ended = await self._next
            self._next = None if ended else self._pull()
            for item in items:
                yield item

    def _pull(self) -> Future[tuple[list[Any], bool]]:
        future: Future[tuple[list[Any], bool]] = self._generator._start(
            pull, self._timeout, (self._chunk,), {}
        )
        return future


class RRef(Generic[T]):
    """A reference to `value`, which stays on this worker.

    >>> from telegrad.testing import LocalCluster
    >>> with LocalCluster(2) as cluster:
    ...     numbers = remote("w1", list, ((1, 2),), agent=cluster["w0"])
    ...     numbers.rpc_sync().append(3)
    ...     numbers.to_here()
    [1, 2, 3]
    """

    __slots__ = ("__weakref__", "_creation", "_key", "_manager", "_owner", "_owner_info")

    def __init__(self, value: T, type_hint: Any = None, *, agent: Agent | None = None) -> None:
        runtime = runtime_of(agent)
        if runtime is None:
            raise UsageError(
                "Current RPC agent is not set! Did you initialize the RPC framework "
                "(e.g. by calling `rpc.init_rpc`)?"
            )
        manager = ReferenceManager.of(runtime)
        self._initialize(
            manager,
            runtime.local_member.info,
            runtime.local_member.incarnation,
            manager.owned.add(value),
            None,
        )

    def _initialize(
        self,
        manager: ReferenceManager,
        owner_info: WorkerInfo,
        owner: Incarnation,
        key: ObjectKey,
        creation: Creation | None,
    ) -> RRef[T]:
        self._manager = manager
        self._owner_info = owner_info
        self._owner = owner
        self._key = key
        self._creation = creation
        manager.held.watch(self, owner, key)
        return self

    def __repr__(self) -> str:
        kind = "OwnerRRef" if self.is_owner() else "UserRRef"
        state = "" if self.confirmed_by_owner() else ", not confirmed yet"
        creator, sequence_number = self._key
        return (
            f"{kind}(owner={self._owner_info.name!r}, object {sequence_number} of {creator}{state})"
        )

    def is_owner(self) -> bool:
        """Return True if the object lives on this worker."""
        return self._owner == self._manager.runtime.local_member.incarnation

    def owner(self) -> WorkerInfo:
        """Return the worker that the object lives on."""
        return self._owner_info

    def owner_name(self) -> str:
        """Return the name of the worker that the object lives on."""
        return self._owner_info.name

    def confirmed_by_owner(self) -> bool:
        """Return True if the owner has the object; False while `remote` is still creating it."""
        return self._creation is None or (self._creation.done() and self._creation.error is None)

    def local_value(self) -> T:
        """Return the object itself. Only its owner can do this."""
        if not self.is_owner():
            raise UsageError(
                f"For {self!r}, can't call localValue() on user "
                f"{self._manager.runtime.local_member.info}. Call local_value() on owner "
                f"{self._owner_info}, or to_here() for a copy"
            )
        value: T = self._owned_object().value()
        return value

    def to_here(self, timeout: float = -1.0) -> T:
        """Return a copy of the object; on its owner, the object itself.

        Raise the error of its creation. A negative `timeout` means the default, 0 no limit.
        """
        self._raise_failed_creation()
        if self.is_owner():
            seconds = duration(timeout)
            return self._owned_object().value(None if seconds <= 0 else seconds)  # type: ignore[no-any-return]
        args = (self._owner, tuple(self._key))
        value: T = self._runtime.invoke(
            self._owner_info.name, fetch, args, None, call_timeout(timeout)
        )
        return value

    def fetch_async(self, timeout: float = -1.0) -> Future[T]:
        """Return a future for `to_here`."""
        args = (self._owner, tuple(self._key))
        return self._runtime.start(
            self._owner_info.name, fetch, args, None, call_timeout(timeout), keep=self
        )

    def __await__(self) -> Generator[Any, None, T]:
        return self.fetch_async().__await__()

    def rpc_sync(self, timeout: float = -1.0) -> Any:
        """Return a proxy: `rref.rpc_sync().method(...)` returns the result of the method."""
        return SyncProxy(self._call, timeout)

    def rpc_async(self, timeout: float = -1.0) -> Any:
        """Return a proxy: `rref.rpc_async().method(...)` returns an awaitable future."""
        return AsyncProxy(self._start, timeout)

    def remote(self, timeout: float = -1.0) -> Any:
        """Return a proxy: `rref.remote().method(...)` returns a reference to the result."""
        return RemoteProxy(self._create, timeout)

    def stream(self, timeout: float = -1.0, chunk: int = 1) -> Any:
        """Return a proxy: `rref.stream().method(...)` iterates over a generator on the owner.

        Items are fetched as they are used, `chunk` at a time, with `for` or `async for`.
        """
        return StreamProxy(self._create, timeout, chunk)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass from the tensor that this refers to.

        On the owner, the context may be left out; gradients then go to `.grad` as with
        `Tensor.backward`.
        """
        if not self.is_owner() and dist_autograd_ctx_id == -1:
            raise UsageError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        if self.is_owner():
            _backward_from(self.local_value(), dist_autograd_ctx_id, retain_graph)
        else:
            self._call(_backward, -1.0, (dist_autograd_ctx_id, retain_graph), {})

    def _get_future(self) -> Future[Any]:
        """Return a future that completes when the owner has the object or its creation fails."""
        if self._creation is not None:
            return self._creation.future
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def _get_profiling_future(self) -> Future[Any]:
        """Return a future that completes when the profile of a `remote` call is complete."""
        return self._get_future()

    def _get_type(self, timeout: float = -1.0, blocking: bool = True) -> Any:
        """Return the type of the object, or a future for it if not `blocking`."""
        if blocking:
            return self._call(_rref_typeof_on_owner, timeout, (), {})
        return self._start(_rref_typeof_on_owner, timeout, (), {})

    @property
    def _runtime(self) -> AgentRuntime:
        return self._manager.runtime

    def _owned_object(self) -> OwnedObject:
        return self._manager.owned.find(self._key)

    def _raise_failed_creation(self) -> None:
        if self._creation is not None and self._creation.done():
            error = self._creation.error
            if isinstance(error, CallTimeout):
                raise CallTimeout(
                    f"RRef creation timed out: {error}", peer=error.peer, call=error.call
                ) from error
            if error is not None:
                raise error

    def _call(
        self, method: Any, timeout: float, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._raise_failed_creation()
        args = (self._owner, tuple(self._key), *args)
        return self._runtime.invoke(
            self._owner_info.name, method, args, kwargs, call_timeout(timeout)
        )

    def _start(
        self, method: Any, timeout: float, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        self._raise_failed_creation()
        args = (self._owner, tuple(self._key), *args)
        return self._runtime.start(
            self._owner_info.name, method, args, kwargs, call_timeout(timeout), keep=self
        )

    def _create(
        self, method: Any, timeout: float, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> RRef[Any]:
        self._raise_failed_creation()
        args = (self._owner, tuple(self._key), *args)
        return remote(
            self._owner_info,
            method,
            args,
            kwargs,
            call_timeout(timeout),
            agent=self._runtime.agent,
            keep=self,
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise SerializationError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC: "
            "send it as an argument or result of a call"
        )


@trusted
def _backward(owner: Incarnation, key: ObjectKey, context_id: int, retain_graph: bool) -> Any:
    """Run the backward pass of `RRef.backward` at the owner of the tensor."""
    return with_object(owner, key, lambda _, value: _backward_from(value, context_id, retain_graph))


@trusted
def _rref_typeof_on_owner(owner: Incarnation, key: ObjectKey) -> Any:
    """Return the type of an object at its owner, for `RRef._get_type`."""
    return with_object(owner, key, lambda _, value: type(value))


def _backward_from(value: Any, context_id: int, retain_graph: bool) -> None:
    if not isinstance(value, Tensor):
        raise UsageError(
            f"RRef should contain a tensor for .backward(), not {type(value).__name__}"
        )
    if context_id == -1:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        autograd.backward(context_id, [value], retain_graph)


def call_timeout(timeout: float) -> Any:
    """Translate a timeout of the torch-shaped API: negative for the default, 0 for no limit."""
    if timeout == -1.0:
        return DEFAULT
    seconds = duration(timeout)
    return DEFAULT if seconds < 0 else seconds or None


def remote(
    to: WorkerAddress,
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: Any = DEFAULT,
    *,
    agent: Agent | None = None,
    keep: object = None,
) -> RRef[T]:
    """Run `function(*args, **kwargs)` on worker `to` and leave the result there.

    Return a reference to the result at once. `keep` is kept alive until the owner has replied.
    """
    runtime = runtime_of(agent)
    if runtime is None:
        raise UsageError("RPC has not been initialized. Call telegrad.rpc.init_rpc first.")
    check_callable(function)
    args = args if type(args) is tuple else checked_args(args)
    kwargs = checked_kwargs(kwargs) if kwargs else None
    if timeout is not DEFAULT:
        timeout = time_limit(timeout, positive=True)
    manager = ReferenceManager.of(runtime)
    manager.sweep_if_many()
    member = runtime.member(to)
    owner, is_local = member.incarnation, member.incarnation == runtime.local_member.incarnation
    key = manager.owned.next_key() if is_local else manager.held.next_key(owner)
    # Make the reference before it is counted: if a signal handler raises in between, the end of the
    # reference releases what was counted.
    rref: RRef[T] = RRef.__new__(RRef)
    rref._initialize(manager, member.info, owner, key, None)
    try:
        if is_local:
            manager.owned.create(key)
        else:
            manager.held.receive(owner, key)
        manager.pending_creations.add(key)
        rref._creation = creation = Creation(manager, member.name, owner, key)
        run, args = create_call(function), (owner, tuple(key), *args)
        if thread_state.interceptor is None:
            runtime.send(member.name, run, args, kwargs, timeout, creation, keep=keep)
        else:
            creation.follow(runtime.start(member.name, run, args, kwargs, timeout, keep=keep))
    except BaseException as error:
        manager.pending_creations.discard(key)
        if isinstance(error, Exception):  # not sent; after an interrupt, it may have been sent
            if is_local:
                manager.owned.cancel(key)
            else:
                manager.held.cancel(owner, key)
        manager.void_creation(member.name, owner, key, error)
        raise
    return rref


def _reduce(rref: RRef[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Pack a reference as its owner and key, and tell the owner before the message is sent."""
    message = current_message()
    if message is None:
        rref.__reduce_ex__(5)
    if message is not None and message.runtime is not rref._manager.runtime:
        raise SerializationError(
            f"{rref!r} belongs to another agent of this process than the one that sends it"
        )
    if message is not None and message.incarnation == rref._owner and keep_until_answered(rref):
        # the caller's reference keeps the object alive until the call has ended
        return _rebuild_at_owner, tuple(rref._key)
    owner_info = rref._owner_info

    def announce(message: MessageContext) -> None:
        rref._manager.lend(owner_info.name, rref._owner, rref._key, message.incarnation)

    before_sending(rref, announce)
    return _rebuild, (owner_info.name, owner_info.id, rref._owner, *rref._key)


def _rebuild(
    name: str, rank: int, owner: Incarnation, creator: Incarnation, sequence_number: int
) -> RRef[Any]:
    """Unpack a reference."""
    message = current_message()
    if message is None:
        raise SerializationError("a reference arrived outside a call")
    manager, key = ReferenceManager.of(message.runtime), ObjectKey(creator, sequence_number)
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._initialize(manager, WorkerInfo(name, rank), owner, key, None)
    if owner == message.runtime.local_member.incarnation:
        manager.owned.receive(key)
    else:
        manager.held.receive(owner, key)
    return rref


def _rebuild_at_owner(creator: Incarnation, sequence_number: int) -> RRef[Any]:
    """Unpack an argument at the owner; the caller keeps its own reference meanwhile."""
    message = current_message()
    if message is None:
        raise SerializationError("a reference arrived outside a call")
    agent, key = message.runtime, ObjectKey(creator, sequence_number)
    manager = ReferenceManager.of(agent)
    manager.owned.add_local_reference(key)
    rref: RRef[Any] = RRef.__new__(RRef)
    return rref._initialize(
        manager, agent.local_member.info, agent.local_member.incarnation, key, None
    )


codec.register(RRef, _reduce)

"""Proxies that call the methods of an object through a reference.

A call is one round trip, whatever the type of the object: the proxy sends the name of the method
(`owner_calls.method`) and does not ask for the type first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from telegrad.errors import UsageError
from telegrad.futures import Future
from telegrad.refs.owner_calls import method, pull

if TYPE_CHECKING:
    from telegrad.refs.rref import RRef

Send = Callable[[Any, float, tuple[Any, ...], dict[str, Any]], Any]


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
        if chunk < 1:
            raise UsageError(f"the chunk of a stream must be at least 1 item, not {chunk}")
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

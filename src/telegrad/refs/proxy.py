"""Calls of an object's methods through a reference: one round trip each, whatever the object's type.

`method("act")` is what travels: a callable that is numbered per connection like a function, so that
its cost is learned by name. At the owner it finds the object (waiting, without a thread, for one
that is still being made) and calls it.
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
    """Stands for the object: what is called on it is sent to the owner."""

    def __init__(self, send: Send, timeout: float) -> None:
        self._send = send
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {getattr(self._send, '__self__', None)!r}>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        send, timeout, called = self._send, self._timeout, method(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return send(called, timeout, args, kwargs)

        return call


class SyncProxy(Proxy):
    """Methods return their results."""


class AsyncProxy(Proxy):
    """Methods return futures."""


class RemoteProxy(Proxy):
    """Methods return references to their results."""


class StreamProxy(Proxy):
    """Methods return streams of what they yield."""

    def __init__(self, send: Send, timeout: float, chunk: int) -> None:
        if chunk < 1:
            raise UsageError(f"a stream brings at least one item at a time, not {chunk}")
        super().__init__(send, timeout)
        self._chunk = chunk

    def __getattr__(self, name: str) -> Callable[..., RemoteStream]:
        create = super().__getattr__(name)

        def call(*args: Any, **kwargs: Any) -> RemoteStream:
            return RemoteStream(create(*args, **kwargs), self._timeout, self._chunk)

        return call


class RemoteStream:
    """What a generator on another worker yields. While one chunk is used, the next is under way; no more than that."""

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

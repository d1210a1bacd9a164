"""`CallScope`: state that a call runs under besides its arguments, and passes on to its own calls.

The scope of a caller travels with each of its calls as a few bytes. At the callee, a function that
a layer above registered turns them into that worker's part of the scope. The call runs under it,
and so does the code that replies later. Distributed autograd uses this: its contexts are scopes.

State: a context variable, so callbacks (`Future.then`) and coroutines keep the scope that they were
made under. `_Registry.opener` is set once, when the layer above is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from telegrad.errors import InternalError
from telegrad.messages.packing import MessageContext

_LENGTH = 2  # bytes at the end of a body: the length of the scope data before them


class CallScope(Protocol):
    """A scope on one worker."""

    def follow(self, to: MessageContext) -> bytes:
        """Return the data that a call under this scope takes along; b"" if the scope has ended."""

    def run(self, call: Callable[[], None]) -> None:
        """Run a call that came with this scope."""


ScopeOpener = Callable[[bytes, MessageContext], CallScope | None]

current_scope: ContextVar[CallScope | None] = ContextVar("telegrad scope", default=None)


class _Registry:
    opener: ScopeOpener | None = None


def register_opener(opener: ScopeOpener) -> None:
    """Let `opener(data, context)` find or make this worker's part of a scope.

    It returns None if the scope has already ended here.
    """
    _Registry.opener = staticmethod(opener)  # type: ignore[assignment]


def append_scope(body: bytes, data: bytes) -> bytes:
    """Return a body that ends with scope data. Unpickling ignores what follows the pickle."""
    return body + data + len(data).to_bytes(_LENGTH, "little")


def open_scope(body: bytes | memoryview, context: MessageContext) -> CallScope | None:
    """Return the scope that a call came with."""
    if _Registry.opener is None:
        raise InternalError("a call came with a scope, but no layer has registered an opener")
    end = len(body) - _LENGTH
    length = int.from_bytes(body[end:], "little")
    return _Registry.opener(bytes(body[end - length : end]), context)

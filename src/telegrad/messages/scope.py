"""`CallScope`: what a call runs under besides its arguments, and takes along to whatever it calls in turn.

The scope of a caller travels with each of its calls as a few bytes. At the callee a function that a layer above
registered turns them into that worker's part of the scope. The call runs under it, and so does what answers it later.
Distributed autograd uses this: its contexts are scopes.

State: a context variable, so callbacks (`Future.then`) and coroutines keep the scope that they were made under.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from telegrad.errors import InternalError
from telegrad.messages.packing import MessageContext

_LENGTH = 2  # bytes at the end of a body that say how long the scope before them is


class CallScope(Protocol):
    def follow(self, to: MessageContext) -> bytes:
        """A call under this scope is about to leave: what it takes along. Nothing, if the scope has ended."""

    def run(self, call: Callable[[], None]) -> None:
        """Run a call that came with this scope."""


ScopeOpener = Callable[[bytes, MessageContext], CallScope | None]

current_scope: ContextVar[CallScope | None] = ContextVar("telegrad scope", default=None)


class _Registry:
    opener: ScopeOpener | None = None


def register_opener(opener: ScopeOpener) -> None:
    """Let `opener(said, envelope)` find or make this worker's part of a scope; None: it has ended here already."""
    _Registry.opener = staticmethod(opener)  # type: ignore[assignment]


def append_scope(body: bytes, said: bytes) -> bytes:
    """A body that ends with what a scope says of itself. Who reads the pickle before it does not notice."""
    return body + said + len(said).to_bytes(_LENGTH, "little")


def open_scope(body: bytes | memoryview, envelope: MessageContext) -> CallScope | None:
    """The scope that a call came with."""
    if _Registry.opener is None:
        raise InternalError("a call came with a scope, but nobody here knows scopes")
    end = len(body) - _LENGTH
    length = int.from_bytes(body[end:], "little")
    return _Registry.opener(bytes(body[end - length : end]), envelope)

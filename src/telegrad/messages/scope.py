"""`Scope`: what a call runs under besides its arguments, and takes along to whatever it calls in turn.

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
from telegrad.messages.packing import Envelope

_LENGTH = 2  # bytes at the end of a body that say how long the scope before them is


class Scope(Protocol):
    def follow(self, to: Envelope) -> bytes:
        """A call under this scope is about to leave: what it takes along. Nothing, if the scope has ended."""

    def run(self, call: Callable[[], None]) -> None:
        """Run a call that came with this scope."""


Opener = Callable[[bytes, Envelope], Scope | None]

current_scope: ContextVar[Scope | None] = ContextVar("telegrad scope", default=None)


class _Registry:
    opener: Opener | None = None


def register(opener: Opener) -> None:
    """Let `opener(said, envelope)` find or make this worker's part of a scope; None: it has ended here already."""
    _Registry.opener = staticmethod(opener)  # type: ignore[assignment]


def append(body: bytes, said: bytes) -> bytes:
    """A body that ends with what a scope says of itself. Who reads the pickle before it does not notice."""
    return body + said + len(said).to_bytes(_LENGTH, "little")


def opened(body: bytes | memoryview, envelope: Envelope) -> Scope | None:
    """The scope that a call came with."""
    if _Registry.opener is None:
        raise InternalError("a call came with a scope, but nobody here knows scopes")
    end = len(body) - _LENGTH
    length = int.from_bytes(body[end:], "little")
    return _Registry.opener(bytes(body[end - length : end]), envelope)

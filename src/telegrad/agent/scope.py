"""`Scope`: what a call runs under besides its arguments, and takes along to whatever it calls in turn.

The scope of a caller travels with each of its calls as a number. At the callee a function that a layer above registered
turns the number into that worker's part of the scope, and the call runs under it, replies that come later included.
Distributed autograd is one: its contexts are scopes.

State: a context variable, so callbacks (`Future.then`) and coroutines keep the scope that they were made under.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from telegrad.agent.packing import Envelope
from telegrad.errors import InternalError

SIZE = 8  # bytes of a number on the wire


class Scope(Protocol):
    @property
    def number(self) -> int:
        """What stands for this scope on the wire; the same on every worker."""

    def follow(self, to: Envelope) -> bool:
        """A call under this scope is about to leave. False if the scope has ended and stays behind."""


Opener = Callable[[int, Envelope], Scope | None]

current_scope: ContextVar[Scope | None] = ContextVar("telegrad scope", default=None)


class _Registry:
    opener: Opener | None = None


def register(opener: Opener) -> None:
    """Let `opener(number, envelope)` find or make this worker's part of a scope; None: it has ended here already."""
    _Registry.opener = staticmethod(opener)  # type: ignore[assignment]


def to_wire(scope: Scope) -> bytes:
    return scope.number.to_bytes(SIZE, "little")


def from_wire(body: bytes | memoryview, envelope: Envelope) -> Scope | None:
    """The scope of a call whose body ends with its number."""
    if _Registry.opener is None:
        raise InternalError("a call came with a scope, but nobody here knows scopes")
    return _Registry.opener(int.from_bytes(body[-SIZE:], "little"), envelope)

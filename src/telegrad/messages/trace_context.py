"""The context of a tracer, which travels with a call as a few bytes at the end of its body.

A layer above, `telegrad.telemetry.opentelemetry`, sets the function that returns them, and reads
them at the callee. Without it, nothing is sent, and what is received is ignored.

State: `tracer.current`, set by that layer.
"""

from __future__ import annotations

from collections.abc import Callable

from telegrad.wire.frames import HAS_TRACE

_LENGTH = 2  # bytes at the end of a body: the length of the data before them


class _Tracer:
    current: Callable[[], bytes] | None = None


tracer = _Tracer()


def append_trace(body: bytes, data: bytes) -> bytes:
    """Return a body that ends with the context of a tracer."""
    return body + data + len(data).to_bytes(_LENGTH, "little")


def received(body: bytes | memoryview, flags: int) -> bytes:
    """Return the context that a call came with; b"" if there is none."""
    if not flags & HAS_TRACE or len(body) < _LENGTH:
        return b""
    end = len(body) - _LENGTH
    return bytes(body[max(end - int.from_bytes(body[end:], "little"), 0) : end])


def without(body: bytes | memoryview) -> memoryview:
    """Return a body without the context at its end."""
    end = len(body) - _LENGTH
    return memoryview(body)[: max(end - int.from_bytes(body[end:], "little"), 0)]

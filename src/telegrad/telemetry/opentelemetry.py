"""Spans of OpenTelemetry for remote calls, and its context across them.

If the program has imported `opentelemetry.trace` when an agent opens, each call is a span of kind
CLIENT at its caller and of kind SERVER at its callee, which is a child of the first. The context of
the caller, with its baggage, travels with the call, in the format of the propagator that is set
(``OTEL_PROPAGATORS``). A callee that does not use OpenTelemetry ignores it.

State: none; spans belong to their calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from opentelemetry import context, propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from telegrad.messages import trace_context
from telegrad.telemetry import instruments
from telegrad.telemetry.instruments import CallInfo, Span
from telegrad.wire.frames import Frame

__all__ = ["enable"]

_MAX_BYTES = 4096  # of a context; what is larger travels without baggage


class _CallSpan:
    """A span that is the current one until the thread goes on with something else."""

    def __init__(self, call: CallInfo, kind: SpanKind, parent: Any = None) -> None:
        tracer = trace.get_tracer("telegrad")
        self._span = tracer.start_span(
            call.function,
            context=parent,
            kind=kind,
            attributes={
                "rpc.system": "telegrad",
                "rpc.method": call.function,
                "telegrad.mode": call.mode,
                "telegrad.caller": call.caller,
                "telegrad.callee": call.callee,
            },
        )
        self._token = context.attach(trace.set_span_in_context(self._span, parent))

    def leave(self) -> None:
        context.detach(self._token)

    def end(self, outcome: str, error: BaseException | None) -> None:
        if error is not None:
            self._span.record_exception(error)
        if outcome != "ok":
            self._span.set_attribute("error.type", outcome)
            self._span.set_status(Status(StatusCode.ERROR, str(error or outcome)))
        self._span.end()


class _OpenTelemetry:
    def made(self, call: CallInfo) -> Span:
        return _CallSpan(call, SpanKind.CLIENT)

    def served(self, call: CallInfo, frame: Frame) -> Span:
        data = trace_context.received(frame.body, frame.flags)
        parent = propagate.extract(_decode(data), context.Context())
        return _CallSpan(call, SpanKind.SERVER, parent)


_instrument = _OpenTelemetry()


def enable() -> None:
    """Follow the calls of this process. It may be repeated."""
    if trace_context.tracer.current is None:
        trace_context.tracer.current = _encode
        instruments.add(_instrument)


def disable() -> None:
    """Undo `enable`."""
    if trace_context.tracer.current is not None:
        trace_context.tracer.current = None
        instruments.remove(_instrument)


def _encode() -> bytes:
    """Return the current context for a message; b"" if there is none."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    data = json.dumps(carrier).encode() if carrier else b""
    if len(data) > _MAX_BYTES:
        carrier.pop("baggage", None)
        data = json.dumps(carrier).encode()
    return data if len(data) <= _MAX_BYTES else b""


def _decode(data: bytes) -> Mapping[str, str]:
    """Return the context of a message; empty if it cannot be read."""
    try:
        carrier = json.loads(data) if data else {}
    except ValueError:
        return {}
    return carrier if isinstance(carrier, dict) else {}

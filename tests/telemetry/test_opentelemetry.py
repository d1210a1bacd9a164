"""Spans of OpenTelemetry at caller and callee, with its SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import telegrad.rpc as rpc
from telegrad import autograd, current_agent
from telegrad.errors import UsageError
from telegrad.refs import remote
from telegrad.runtime import AgentRuntime
from telegrad.server.connection import ServerConnection
from telegrad.telemetry import instruments, opentelemetry
from tests.conftest import Clusters
from tests.local.gates import until

_exporter = InMemorySpanExporter()


@pytest.fixture(params=["memory", "unix"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    monkeypatch.delenv("OTEL_SDK_DISABLED")  # the other tests have it
    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # it can be set once
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(_exporter))
        trace.set_tracer_provider(provider)
    _exporter.clear()
    yield _exporter
    opentelemetry.disable()


def spans(exporter: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    """Return the finished spans in the order of their starts; the callee may be the last to end."""
    until(lambda: len(exporter.get_finished_spans()) >= count)
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def through(to: str) -> str:
    agent = current_agent()
    assert agent is not None
    return agent.call(to, read_baggage)


_promised: list[torch.futures.Future[int]] = []


@rpc.functions.async_execution
def promised() -> Any:
    return _promised[0]


def read_baggage() -> str:
    return str(baggage.get_baggage("user"))


def fail() -> None:
    raise ValueError("no")


@rpc.functions.async_execution
def later(to: str) -> Any:
    agent = current_agent()
    assert agent is not None
    return agent.submit(to, abs, -2)


def grow(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def parents(found: list[ReadableSpan]) -> list[str | None]:
    """Return, for each span, the mode and the worker of its parent."""
    names = {span.context.span_id: _place(span) for span in found if span.context is not None}
    return [None if span.parent is None else names.get(span.parent.span_id) for span in found]


def _place(span: ReadableSpan) -> str:
    attributes = dict(span.attributes or {})
    mode = attributes.get("telegrad.mode", span.name)
    worker = attributes.get("telegrad.callee" if mode == "serve" else "telegrad.caller", "")
    return f"{mode} {worker}".strip()


def test_a_nested_call_is_one_trace(cluster: Clusters, exporter: InMemorySpanExporter) -> None:
    workers = cluster(3)
    token = context.attach(baggage.set_baggage("user", "ada"))
    try:
        with trace.get_tracer("test").start_as_current_span("program"):
            assert workers["w0"].call("w1", through, "w2") == "ada"
    finally:
        context.detach(token)
    found = spans(exporter, 5)
    assert [_place(span) for span in found] == [
        "program",
        "sync w0",
        "serve w1",
        "sync w1",
        "serve w2",
    ]
    assert parents(found) == [None, "program", "sync w0", "serve w1", "sync w1"]
    assert len({span.context.trace_id for span in found if span.context is not None}) == 1
    assert [span.kind for span in found[1:3]] == [SpanKind.CLIENT, SpanKind.SERVER]
    assert found[1].name == "through"


def test_errors_are_in_both_spans(cluster: Clusters, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="no"):
        cluster(2)["w0"].call("w1", fail)
    found = spans(exporter, 2)
    assert [span.status.status_code for span in found] == [StatusCode.ERROR] * 2
    assert [(span.attributes or {})["error.type"] for span in found] == ["ValueError"] * 2


def test_a_span_ends_when_its_future_completes(
    cluster: Clusters, exporter: InMemorySpanExporter
) -> None:
    assert cluster(3)["w0"].submit("w1", later, "w2").wait() == 2
    found = spans(exporter, 4)
    assert [_place(span) for span in found] == ["async w0", "serve w1", "async w1", "serve w2"]
    assert parents(found) == [None, "async w0", "serve w1", "async w1"]
    made, served, nested, _ = found
    assert (made.end_time or 0) >= (nested.end_time or 0)
    assert (served.end_time or 0) >= (nested.end_time or 0)


def test_a_scope_and_a_trace_travel_together(
    cluster: Clusters, exporter: InMemorySpanExporter
) -> None:
    agent = cluster(2)["w0"]
    x = torch.ones(2, requires_grad=True)
    with autograd.context(agent=agent) as context_id:
        y = agent.call("w1", grow, x)
        autograd.backward(context_id, [y.sum()])
        gradient = autograd.get_gradients(context_id)[x]
    assert torch.equal(gradient, torch.full((2,), 2.0))
    assert {"sync w0", "serve w1"} <= {_place(span) for span in spans(exporter, 2)}


def test_a_creation_is_a_span(cluster: Clusters, exporter: InMemorySpanExporter) -> None:
    agent = cluster(2)["w0"]
    assert remote("w1", abs, args=(-3,), agent=agent).to_here() == 3
    found = spans(exporter, 2)
    assert _place(found[0]) == "remote w0"
    assert found[0].name == "abs"


def test_nothing_is_replaced_without_it(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]
    methods = AgentRuntime.invoke, ServerConnection._run
    opentelemetry.disable()
    assert AgentRuntime.invoke is not methods[0]
    assert ServerConnection._run is not methods[1]
    assert agent.call("w1", read_baggage) == "None"


def test_a_callee_without_it_ignores_the_context(
    cluster: Clusters, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = cluster(2)["w0"]
    monkeypatch.setattr(ServerConnection, "_run", ServerConnection._run.__wrapped__)  # type: ignore[attr-defined]
    assert agent.call("w1", max, 1, 2) == 2
    assert [_place(span) for span in spans(exporter, 1)] == ["sync w0"]


def test_large_baggage_is_left_out(cluster: Clusters, exporter: InMemorySpanExporter) -> None:
    agent = cluster(2)["w0"]
    token = context.attach(baggage.set_baggage("user", "x" * 5000))
    try:
        assert agent.call("w1", read_baggage) == "None"
    finally:
        context.detach(token)
    assert parents(spans(exporter, 2)) == [None, "sync w0"]


def test_baggage_of_many_entries_is_left_out(
    cluster: Clusters, exporter: InMemorySpanExporter
) -> None:
    agent = cluster(2)["w0"]
    carried = context.get_current()
    for name in ("user", "tenant", "region"):
        carried = baggage.set_baggage(name, "x" * 2500, carried)
    token = context.attach(carried)
    try:
        assert agent.call("w1", read_baggage) == "None"
    finally:
        context.detach(token)
    assert parents(spans(exporter, 2)) == [None, "sync w0"]  # the rest of the context arrives


def test_a_context_that_cannot_be_read_is_ignored() -> None:
    assert opentelemetry._decode(b"{") == {}
    assert opentelemetry._decode(b"[1]") == {}


def test_calls_that_fail_end_their_spans(cluster: Clusters, exporter: InMemorySpanExporter) -> None:
    agent = cluster(2)["w0"]
    with pytest.raises(UsageError):
        agent.call(7, max, 1, 2)
    with pytest.raises(UsageError):
        agent.submit("nobody", max, 1, 2)
    with pytest.raises(ZeroDivisionError):
        agent.submit("w1", divmod, 1, 0).wait()
    found = spans(exporter, 4)
    assert [(_place(span), span.status.status_code) for span in found[:3]] == [
        ("sync w0", StatusCode.ERROR),
        ("async w0", StatusCode.ERROR),
        ("async w0", StatusCode.ERROR),
    ]
    assert "rank 7" in str(found[0].attributes)


def test_calls_that_wait_for_a_future_end_with_the_tool(
    cluster: Clusters, exporter: InMemorySpanExporter
) -> None:
    agent = cluster(2)["w0"]
    _promised.append(torch.futures.Future())
    waiting = agent.submit("w1", promised)
    until(lambda: bool(instruments._deferred))
    opentelemetry.disable()
    (served,) = [span for span in spans(exporter, 1) if _place(span).startswith("serve")]
    assert "unknown" in str(served.attributes) + str(served.status.description)
    _promised.pop().set_result(3)
    assert waiting.wait() == 3

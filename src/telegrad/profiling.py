"""Remote events in the profile of a caller: what its calls did on their callees.

While `torch.autograd.profiler_legacy.profile` is enabled in a thread, a `_ProfilerSession` makes
the calls of that thread (`current.thread_state.interceptor`). It lets the callee run each function
under a profiler with the same options. The reply carries the events of that profiler. In the
profile of the caller, a call is an event named `rpc_sync#f(w0 -> w1)`. Events of the callee have
names such as `rpc_sync#f(w0 -> w1)#remote_op: aten::add`, with `is_remote` set and the rank as
`node_id`. Calls that the callee made are shown in the same way. If no profiler is enabled, a call
reads one thread-local variable more.

The profiler of torch has no interface for events of other processes. So `enable_remote_events`
wraps two of its functions: the one that starts a profile, and the one that creates the list of
events. For the other profiler, `torch.profiler.profile`, see `telegrad.telemetry.kineto`.

Times are microseconds of the wall clock, as in torch's profiler. Times of a callee are shifted so
that the middle of its part is the middle of the call.

State: a session belongs to the thread whose profile it is. Any thread that completes a call appends
to `_events`, a deque whose operations are atomic. `_lock` guards the wrapping.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import profiler_legacy
from torch.autograd.profiler_util import FunctionEvent

from telegrad.current import thread_state
from telegrad.errors import InternalError, as_exception
from telegrad.futures import Future
from telegrad.messages.remote_functions import (
    ASYNC_MARK,
    DeferredReply,
    describe,
    no_future_error,
    trusted,
    unregistered_error,
)

if TYPE_CHECKING:
    from telegrad.client.peers import WorkerAddress
    from telegrad.runtime import AgentRuntime

__all__ = ["enable_remote_events", "profiling_key"]

_OPTIONS = ("record_shapes", "with_flops", "profile_memory", "with_stack", "with_modules")
# Attributes of a FunctionEvent that are also parameters of its constructor.
_FIELDS = (
    "id",
    "name",
    "trace_name",
    "thread",
    "node_id",
    "fwd_thread",
    "input_shapes",
    "stack",
    "scope",
    "use_device",
    "cpu_memory_usage",
    "device_memory_usage",
    "is_async",
    "sequence_nr",
    "is_legacy",
    "flops",
)
_REMOTE_OP = "#remote_op: "
_START_RECORD = "__start_profile"  # the name of the first record of a profile
_lock = threading.Lock()


class _RemoteEvent(NamedTuple):
    """An event in a reply: its times, and the fields and kernels of a FunctionEvent."""

    start: float
    end: float
    fields: dict[str, Any]
    kernels: list[tuple[str, int, float]]


class _RemoteProfile(NamedTuple):
    """The reply to a profiled call: the result of the function, and the events on the callee."""

    value: Any
    start: float
    end: float
    events: list[_RemoteEvent]


class _ProfiledCall(NamedTuple):
    """A call that has started, with its name in the profile."""

    key: str
    start: float


def enable_remote_events() -> None:
    """Show remote events in profiles of this process from now on. `init_rpc` calls this."""
    with _lock:
        if getattr(profiler_legacy._parse_legacy_records, "shows_remote_events", False):
            return
        legacy: Any = profiler_legacy
        legacy.profile.__enter__ = _with_session(legacy.profile.__enter__)
        legacy._parse_legacy_records = _with_remote_events(legacy._parse_legacy_records)


def profiling_key(mode: str, function: str, source: str, target: str) -> str:
    """Return the name of a call in a profile. `mode` is sync, async or remote."""
    return f"rpc_{mode}#{function}({source} -> {target})"


class _ProfilerSession:
    """An enabled profile of a thread, and the events of its calls."""

    def __init__(self, profile: Any) -> None:
        self.origin = 0.0  # the time when the profile started
        self.rank = -1
        self._options = {name: getattr(profile, name) for name in _OPTIONS}
        self._use_cuda = bool(profile.use_cuda)
        self._events: deque[_RemoteEvent] = deque()

    def __repr__(self) -> str:
        return f"<ProfilerSession of rank {self.rank}, {len(self._events)} events>"

    # The protocol `CallInterceptor`

    def invoke(
        self,
        agent: AgentRuntime,
        to: WorkerAddress,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
    ) -> Any:
        with self._not_intercepting():
            call = self._start_call(agent, to, function, "sync")
            arguments = self._remote_arguments(function, args, kwargs)
            try:
                remote_profile = agent.invoke(to, _run, arguments, None, timeout)
            except BaseException:
                self._add_call_event(call, _now())
                raise
        return self._finish_call(call, remote_profile)

    def start(
        self,
        agent: AgentRuntime,
        to: WorkerAddress,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
        keep: object,
    ) -> Future[Any]:
        with self._not_intercepting():
            call = self._start_call(agent, to, function, "async")
            arguments = self._remote_arguments(function, args, kwargs)
            reply = agent.start(to, _run, arguments, None, timeout, keep=keep)
        future: Future[Any] = Future()

        def cancel() -> None:
            reply.cancel()

        def on_reply(done: torch.futures.Future[_RemoteProfile]) -> None:
            try:
                future._try_complete(self._finish_call(call, done.value()), None)
            except BaseException as error:
                self._add_call_event(call, _now())
                future._try_complete(None, as_exception(error))

        future._on_cancel = cancel
        reply.add_done_callback(on_reply)
        return future

    # Events

    def take_events(self) -> list[_RemoteEvent]:
        """Remove and return the events of calls that have completed."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def remote_profile(self, value: Any, profile: Any) -> _RemoteProfile:
        """Return the reply of a callee.

        It has the events of the profile, and those of calls that completed after the profile ended.
        """
        events = [_pack(event, self.origin) for event in profile.function_events]
        return _RemoteProfile(value, self.origin, _now(), events + self.take_events())

    # Calls

    @contextmanager
    def _not_intercepting(self) -> Iterator[None]:
        """Let the agent itself make the calls in this block."""
        thread_state.interceptor = None
        try:
            yield
        finally:
            thread_state.interceptor = self

    def _remote_arguments(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> Any:
        """Return the arguments of `_run`."""
        return function, tuple(args), kwargs or {}, self._use_cuda, self._options

    def _start_call(
        self, agent: AgentRuntime, to: WorkerAddress, function: Callable[..., Any], mode: str
    ) -> _ProfiledCall:
        self.rank = agent.local_member.rank
        # The function of `refs.remote` has the user's function as an attribute.
        created = getattr(function, "creating_function", None)
        if created is not None:
            mode, function = "remote", created
        target = agent.get_worker_info(to).name
        return _ProfiledCall(profiling_key(mode, _name(function), agent.name, target), _now())

    def _add_call_event(self, call: _ProfiledCall, end: float) -> None:
        """Add the event of a call that has completed on this worker."""
        fields = {
            "id": 0,
            "name": call.key,
            "trace_name": call.key,
            "thread": threading.get_native_id(),
            "node_id": self.rank,
            "is_async": True,
            "is_legacy": True,
            "stack": [],
        }
        self._events.append(_RemoteEvent(call.start, end, fields, []))

    def _finish_call(self, call: _ProfiledCall, remote_profile: _RemoteProfile) -> Any:
        """Add the events of a call and of its callee, and return the result of the call."""
        end = _now()
        self._add_call_event(call, end)
        shift = (call.start + end - remote_profile.start - remote_profile.end) / 2
        for event in remote_profile.events:
            fields = {**event.fields, "is_remote": True}
            for name in ("name", "trace_name"):
                fields[name] = f"{call.key}{_REMOTE_OP}{fields[name]}"
            self._events.append(
                _RemoteEvent(event.start + shift, event.end + shift, fields, event.kernels)
            )
        return remote_profile.value


@trusted
def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use_cuda: bool,
    options: dict[str, bool],
) -> Any:
    """Run a function on the callee under a profiler, and reply with its events."""
    agent = thread_state.runtime
    if agent is None:
        raise InternalError("a profiled call outside an agent")
    if not agent.functions.is_allowed(function):
        raise unregistered_error(agent.name, describe(function))
    enable_remote_events()
    legacy_profile: Any = profiler_legacy.profile
    with legacy_profile(use_cuda=use_cuda and torch.cuda.is_available(), **options) as profile:
        session = thread_state.interceptor
        assert isinstance(session, _ProfilerSession)
        session.rank = agent.local_member.rank
        value = function(*args, **kwargs)
    if type(value) is DeferredReply:
        value = value.future
    elif getattr(function, ASYNC_MARK, None) is None:
        return session.remote_profile(value, profile)
    return DeferredReply(_remote_profile_later(session, profile, function, value))


# `_run` can be a call of `remote`, and other workers can have references to its object already.
_run.must_run = True  # type: ignore[attr-defined]


def _remote_profile_later(
    session: _ProfilerSession, profile: Any, function: Callable[..., Any], value: Any
) -> Future[_RemoteProfile]:
    """Return a future for the reply of a function that returned a future."""
    if not isinstance(value, torch._C.Future):
        raise no_future_error(describe(function), value)
    future: Future[_RemoteProfile] = Future()
    source: Any = value
    future.follow(source, lambda result: session.remote_profile(result, profile))
    return future


def _with_session(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `profile.__enter__` so that an enabled profile has a session."""

    @functools.wraps(enter)
    def start(profile: Any) -> Any:
        entered = enter(profile)
        if profile.enabled:
            thread_state.interceptor = _ProfilerSession(profile)
        return entered

    return start


def _with_remote_events(parse: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Wrap the function that creates the events of a profile so that it adds remote events."""

    @functools.wraps(parse)
    def merge(records: Any) -> list[Any]:
        events = parse(records)
        session, thread_state.interceptor = thread_state.interceptor, None
        if not isinstance(session, _ProfilerSession):
            return events  # the profile started before `enable_remote_events` was called
        session.origin = next(
            each.start_us() for thread in records for each in thread if each.name() == _START_RECORD
        )
        for event in events:
            event.node_id = session.rank if event.node_id == -1 else event.node_id
        events += [_unpack(event, session.origin) for event in session.take_events()]
        return sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))

    merge.shows_remote_events = True  # type: ignore[attr-defined]
    return merge


def _pack(event: Any, origin: float) -> _RemoteEvent:
    """Return a FunctionEvent, whose times start at `origin`, as an event for a reply."""
    fields = {name: getattr(event, name) for name in _FIELDS}
    kernels = [(kernel.name, kernel.device, kernel.duration) for kernel in event.kernels]
    return _RemoteEvent(
        event.time_range.start + origin, event.time_range.end + origin, fields, kernels
    )


def _unpack(event: _RemoteEvent, origin: float) -> Any:
    """Return an event of a reply as a FunctionEvent whose times start at `origin`."""
    function_event: Any = FunctionEvent(
        start_us=event.start - origin, end_us=event.end - origin, **event.fields
    )  # type: ignore[no-untyped-call]
    for kernel in event.kernels:
        function_event.append_kernel(*kernel)  # pragma: gpu
    return function_event


def _name(function: Callable[..., Any]) -> str:
    """Return the name of an operator in torch's profiler, or a description of another function."""
    name = getattr(function, "__name__", "")
    if name and getattr(torch, name, None) is function:
        return f"aten::{name}"
    return describe(function)


def _now() -> float:
    """Return the wall clock in microseconds."""
    return time.time_ns() / 1e3

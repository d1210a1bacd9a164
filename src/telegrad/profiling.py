"""What a call did on its callee, in the profile of its caller.

While `torch.autograd.profiler_legacy.profile` is on in a thread, the calls of that thread go through a
`_ProfilerSession` (`current.thread_state.interceptor`). It has the callee run each function under a profiler with the
same options; the answer brings along what that saw. In the profile, a call is an event named `rpc_sync#f(w0 -> w1)`,
and what happened on the callee follows under `rpc_sync#f(w0 -> w1)#remote_op: aten::add`, with `is_remote` set and the
rank as `node_id`. Calls that the callee made in turn are there in the same way. With no profiler on, this costs a call
one look at a thread-local.

torch's profiler has no place for events of others, so `watch` wraps two of its functions: the one that starts a profile
and the one that makes its list of events. Its other profiler, `torch.profiler.profile`, stays as it is: torch does not
show remote events there either.

State: a session belongs to the thread that its profile is on in; whoever completes a call appends to `_events`.
Clocks: all times are microseconds of the wall clock, as the profiler's. Those of a callee are moved so that its part
lies in the middle of the call.
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
from telegrad.errors import UsageError, as_exception
from telegrad.futures import Future
from telegrad.server.functions import ASYNC_MARK, DeferredReply, trusted
from telegrad.wire.function_table import describe

if TYPE_CHECKING:
    from telegrad.client.peers import WorkerAddress
    from telegrad.runtime import AgentRuntime

__all__ = ["profiling_key", "watch"]

_OPTIONS = ("record_shapes", "with_flops", "profile_memory", "with_stack", "with_modules")
_FIELDS = (  # of a FunctionEvent: attributes and parameters of the same name
    *(
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
    ),
    *("cpu_memory_usage", "device_memory_usage", "is_async", "sequence_nr", "is_legacy", "flops"),
)
_REMOTE = "#remote_op: "


class _RemoteEvent(NamedTuple):
    """An event as it travels: when it was, and the fields of a FunctionEvent."""

    start: float
    end: float
    fields: dict[str, Any]
    kernels: list[tuple[str, int, float]]


class _RemoteProfile(NamedTuple):
    """What a callee answers to a call that is profiled."""

    value: Any
    start: float
    end: float
    events: list[_RemoteEvent]


class _ProfiledCall(NamedTuple):
    key: str
    start: float


def watch() -> None:
    """From now on, profiles of this process show remote events. `init_rpc` calls this; more than once does no harm."""
    with _lock:
        if getattr(profiler_legacy._parse_legacy_records, "shows_remote_events", False):
            return
        legacy: Any = profiler_legacy
        legacy.profile.__enter__ = _starting(legacy.profile.__enter__)
        legacy._parse_legacy_records = _merging(legacy._parse_legacy_records)


def profiling_key(mode: str, function: str, source: str, target: str) -> str:
    """The name of a call in a profile; `mode` is sync, async or remote."""
    return f"rpc_{mode}#{function}({source} -> {target})"


class _ProfilerSession:
    """A profile that is on in a thread, and what its calls brought."""

    def __init__(self, profile: Any) -> None:
        self.origin = 0.0  # when the profile began
        self.rank = -1
        self._options = {name: getattr(profile, name) for name in _OPTIONS}
        self._use_cuda = bool(profile.use_cuda)
        self._events: deque[_RemoteEvent] = deque()

    def __repr__(self) -> str:
        return f"<ProfilerSession of rank {self.rank}, {len(self._events)} events>"

    # What `AgentRuntime` hands over

    def invoke(
        self,
        agent: AgentRuntime,
        to: WorkerAddress,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        timeout: Any,
    ) -> Any:
        with self._aside():
            call = self._begin(agent, to, function, "sync")
            try:
                report = agent.invoke(to, _run, self._order(function, args, kwargs), None, timeout)
            except BaseException:
                self._end(call, _now())
                raise
        return self._finish(call, report)

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
        with self._aside():
            call = self._begin(agent, to, function, "async")
            reported = agent.start(
                to, _run, self._order(function, args, kwargs), None, timeout, keep=keep
            )
        future: Future[Any] = Future()

        def cancel() -> None:
            reported.cancel()

        def arrived(done: torch.futures.Future[_RemoteProfile]) -> None:
            try:
                future._settle(self._finish(call, done.value()), None)
            except BaseException as error:
                self._end(call, _now())
                future._settle(None, as_exception(error))

        future._on_cancel = cancel
        reported.add_done_callback(arrived)
        return future

    # What profiles take

    def collect(self) -> list[_RemoteEvent]:
        """The events that have arrived since this was last asked."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def report(self, value: Any, profile: Any) -> _RemoteProfile:
        """The answer of a callee: its own events, and those of its calls that ended after the function returned."""
        own = [_pack(event, self.origin) for event in profile.function_events]
        return _RemoteProfile(value, self.origin, _now(), own + self.collect())

    # Inside

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Calls in this block are made by the agent itself."""
        thread_state.interceptor = None
        try:
            yield
        finally:
            thread_state.interceptor = self

    def _order(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> Any:
        return function, tuple(args), kwargs or {}, self._use_cuda, self._options

    def _begin(
        self, agent: AgentRuntime, to: WorkerAddress, function: Callable[..., Any], mode: str
    ) -> _ProfiledCall:
        self.rank = agent.local_member.rank
        created = getattr(function, "creates", None)
        name = _name(function) if created is None else _name(created)
        target = agent.get_worker_info(to).name
        return _ProfiledCall(
            profiling_key(mode if created is None else "remote", name, agent.name, target), _now()
        )

    def _end(self, call: _ProfiledCall, end: float) -> None:
        fields = {
            "id": 0,
            "name": call.key,
            "thread": threading.get_native_id(),
            "node_id": self.rank,
        }
        fields |= {"trace_name": call.key, "is_async": True, "is_legacy": True, "stack": []}
        self._events.append(_RemoteEvent(call.start, end, fields, []))

    def _finish(self, call: _ProfiledCall, report: _RemoteProfile) -> Any:
        end = _now()
        self._end(call, end)
        shift = (call.start + end - report.start - report.end) / 2
        for event in report.events:
            fields = {**event.fields, "is_remote": True}
            for name in ("name", "trace_name"):
                fields[name] = f"{call.key}{_REMOTE}{fields[name]}"
            self._events.append(
                _RemoteEvent(event.start + shift, event.end + shift, fields, event.kernels)
            )
        return report.value


@trusted
def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    use_cuda: bool,
    options: dict[str, bool],
) -> Any:
    """At the callee: run the function under a profiler; what that saw goes with the answer."""
    agent = thread_state.runtime
    if agent is None or not agent.allowed(function):
        where = "this worker" if agent is None else f"worker {agent.name!r}"
        raise UsageError(
            f"{where} serves only registered functions; {describe(function)} is not one"
        )
    watch()
    make: Any = profiler_legacy.profile
    with make(use_cuda=use_cuda and torch.cuda.is_available(), **options) as profile:
        session = thread_state.interceptor
        assert isinstance(session, _ProfilerSession)
        session.rank = agent.local_member.rank
        value = function(*args, **kwargs)
    if type(value) is DeferredReply:
        value = value.future
    elif getattr(function, ASYNC_MARK, None) is None:
        return session.report(value, profile)
    return DeferredReply(_report_later(session, profile, function, value))


_run.must_run = True  # type: ignore[attr-defined]  # it may be for `remote`, whose object others may refer to


def _report_later(
    session: _ProfilerSession, profile: Any, function: Callable[..., Any], value: Any
) -> Future[_RemoteProfile]:
    if not isinstance(value, torch._C.Future):
        raise UsageError(
            f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
            f"but {describe(function)} returned {type(value).__name__}"
        )
    reported: Future[_RemoteProfile] = Future()

    def arrived(done: torch.futures.Future[Any]) -> None:
        try:
            reported._settle(session.report(done.value(), profile), None)
        except BaseException as error:
            reported._settle(None, as_exception(error))

    value.add_done_callback(arrived)  # type: ignore[attr-defined]
    return reported


def _starting(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(enter)
    def start(profile: Any) -> Any:
        entered = enter(profile)
        if profile.enabled:
            thread_state.interceptor = _ProfilerSession(profile)
        return entered

    return start


def _merging(parse: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    @functools.wraps(parse)
    def merge(records: Any) -> list[Any]:
        events = parse(records)
        session, thread_state.interceptor = thread_state.interceptor, None
        if not isinstance(session, _ProfilerSession):
            return events  # the profile began before `watch`
        session.origin = next(
            each.start_us() for thread in records for each in thread if each.name() == _FIRST
        )
        for event in events:
            event.node_id = session.rank if event.node_id == -1 else event.node_id
        events += [_unpack(event, session.origin) for event in session.collect()]
        return sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))

    merge.shows_remote_events = True  # type: ignore[attr-defined]
    return merge


def _pack(event: Any, origin: float) -> _RemoteEvent:
    fields = {name: getattr(event, name) for name in _FIELDS}
    kernels = [(kernel.name, kernel.device, kernel.duration) for kernel in event.kernels]
    return _RemoteEvent(
        event.time_range.start + origin, event.time_range.end + origin, fields, kernels
    )


def _unpack(event: _RemoteEvent, origin: float) -> Any:
    made: Any = FunctionEvent(
        start_us=event.start - origin, end_us=event.end - origin, **event.fields
    )  # type: ignore[no-untyped-call]
    for kernel in event.kernels:
        made.append_kernel(*kernel)
    return made


def _name(function: Callable[..., Any]) -> str:
    """An operator as torch's profiler calls it, anything else as people do."""
    name = getattr(function, "__name__", "")
    return (
        f"aten::{name}" if name and getattr(torch, name, None) is function else describe(function)
    )


def _now() -> float:
    return time.time_ns() / 1e3


_FIRST = "__start_profile"  # the record that a profile begins with
_lock = threading.Lock()

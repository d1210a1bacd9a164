"""`Collectives`: barriers and gathers that end even if workers are lost, and name the missing ones.

Every participant reports to a leader, the first participant that is alive. The leader watches those
that have not reported; a lost worker no longer counts. When all others have reported, every
participant gets the values and the names of the lost workers. If the leader is lost, the next
participant leads and starts again; a participant that already has the result passes it on.

Each participant numbers its own gathers of a sequence (equal topic and names), from the start of
its incarnation. The numbers of two workers may differ, since one may have restarted, so the leader
never compares them with each other. A report belongs to the last gather if that gather has this
very report, or counted its sender as late; otherwise it belongs to the next gather. Only the leader
knows whether a late worker has reported since. So a worker never replaces a result that it knows by
the same one, or by an earlier one, from another worker.

State: `_gathers` (those that this agent leads, by sequence), `_results` (the last result of each
sequence) and `_started` (how many gathers of each sequence this agent has started) are changed
under `_lock`.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from telegrad.current import thread_state
from telegrad.errors import CallTimeout, GroupBroken, InternalError, PeerLost, TelegradError
from telegrad.futures import Future
from telegrad.group.membership import Directory, Member
from telegrad.messages.remote_functions import DeferredReply, internal
from telegrad.scheduling.clock import Clock
from telegrad.scheduling.executor import ThreadPool
from telegrad.wire.handshake import Incarnation

# Seconds that a participant waits longer than its leader, so that the leader names the late
# workers.
_GRACE = 5.0
_ASK_AGAIN = 1.0
# Seconds for each participant before the missing ones are asked, at most one second in all: most
# report by themselves, and the leader need not connect to them.
_ASK_AFTER = 0.001
_MAX_NAMES_TEXT = 200
_RETRY = (0.02, 1.0)  # seconds until a leader that cannot be reached is tried again
_log = logging.getLogger(__name__)


class CollectivesRuntime(Protocol):
    """What collectives need from their agent."""

    name: str
    local_member: Member
    closing: bool
    threads: ThreadPool
    clock: Clock
    directory: Directory

    def is_lost(self, incarnation: Incarnation) -> bool: ...
    def watch(self, incarnation: Incarnation) -> None: ...
    def start(
        self,
        to: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: None,
        timeout: float | None,
        internal: bool,
    ) -> Future[Any]: ...


class Report(NamedTuple):
    """Identify a participant of a gather: its name, its incarnation and its count of gathers."""

    name: str
    incarnation: Incarnation
    number: int


class GatherResult(NamedTuple):
    """The values of all participants that reported, and the names of the others."""

    values: dict[str, Any]
    lost: tuple[str, ...]
    late: tuple[str, ...]
    reports: dict[Incarnation, int] = {}  # noqa: RUF012  # the counts of those that reported
    late_incarnations: tuple[Incarnation, ...] = ()

    def answers(self, incarnation: Incarnation, number: int) -> bool:
        """Return whether this is the result of the gather that a report belongs to."""
        return self.reports.get(incarnation) == number or incarnation in self.late_incarnations


class _Gather:
    """A gather that this agent leads and that has not ended."""

    def __init__(self, expected: tuple[str, ...]) -> None:
        self.expected = expected
        self.done: Future[GatherResult] = Future()
        self.values: dict[str, Any] = {}
        self.reports: dict[str, Report] = {}
        self.lost: set[str] = set()
        self.unknown = set(expected)  # those that have neither reported nor were lost

    @property
    def missing(self) -> list[str]:
        return [
            name for name in self.expected if name not in self.reports and name not in self.lost
        ]

    @property
    def numbers(self) -> dict[Incarnation, int]:
        """The reports without names. A dict of text and numbers is packed and unpacked fast."""
        return {report.incarnation: report.number for report in self.reports.values()}

    def result(self, incarnations: dict[str, Incarnation]) -> GatherResult:
        """Return the result if the gather ends now; `incarnations` are those of all members."""
        late = tuple(self.missing)
        late_incarnations = tuple(incarnations[name] for name in late if name in incarnations)
        reports = self.numbers
        lost = tuple(sorted(self.lost))
        return GatherResult(dict(self.values), lost, late, reports, late_incarnations)


class Collectives:
    """The barriers and gathers of one agent."""

    def __init__(self, runtime: CollectivesRuntime) -> None:
        self._runtime = runtime
        self._gathers: dict[str, _Gather] = {}
        self._results: dict[str, GatherResult] = {}
        self._started: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        waiting_for = {
            sequence: gather.missing
            for sequence, gather in list(self._gathers.items())
            if not gather.done.done()
        }
        return f"<Collectives, leading {waiting_for}>"

    def waiting(self) -> list[dict[str, Any]]:
        """Return the gathers that this agent leads, and whom they wait for, as values of JSON."""
        return [
            {"operation": sequence.partition(":")[0], "missing": gather.missing}
            for sequence, gather in self._gathers.copy().items()
            if not gather.done.done()
        ]

    def gather(
        self, value: Any, names: Sequence[str], timeout: float | None, topic: str = "gather"
    ) -> GatherResult:
        """Return the value of every participant by name.

        All participants call this with the same names, in the same order, and the same topic.
        """
        names = tuple(names)
        sequence = f"{topic}:{_short_text(names)}"
        member = self._runtime.local_member
        with self._lock:
            self._started[sequence] += 1
            report = Report(self._runtime.name, member.incarnation, self._started[sequence])
        patience = None if timeout is None else timeout + _GRACE
        args = (sequence, names, report, value, timeout)
        lost: list[str] = []
        for leader in names:
            try:
                result = self._report_to(leader, args, patience)
            except CallTimeout:
                result = GatherResult({}, tuple(lost), (leader,))
            if result is None:
                lost.append(leader)
                continue
            with self._lock:
                # If this worker leads, it already knows this result and may know of late reports.
                if not self._is_known(sequence, result):
                    self._results[sequence] = result
            return result
        raise InternalError("a gather without a living participant")

    def _report_to(
        self, leader: str, args: tuple[Any, ...], timeout: float | None
    ) -> GatherResult | None:
        """Report to a leader and return the result; None if the leader is lost.

        A leader that cannot be reached may be alive: it may have too many connections at this
        moment. If this worker reported to another one, both leaders would wait for each other. So
        it tries again, until the leader is declared lost.
        """
        until = None if timeout is None else time.monotonic() + timeout
        pause = _RETRY[0]
        while True:
            left = None if until is None else max(until - time.monotonic(), _RETRY[0])
            try:
                result: GatherResult = self._start(leader, _report, args, left).wait()
                return result
            except PeerLost as error:
                if self._runtime.closing:
                    raise  # it is this worker that leaves
                if self._has_ended(leader, error):
                    return None
            if until is not None and time.monotonic() > until:
                raise CallTimeout(f"worker {leader!r} cannot be reached", peer=leader, sent=False)
            time.sleep(pause)
            pause = min(pause * 1.5, _RETRY[1])

    def _has_ended(self, name: str, error: PeerLost) -> bool:
        """Return whether a call failed because the worker is lost, not only out of reach.

        If it is out of reach, make sure that it is declared lost if it has ended.
        """
        member = self._runtime.directory.find(name)
        if error.sent or member.left or self._runtime.is_lost(member.incarnation):
            return True
        self._runtime.watch(member.incarnation)
        return False

    def close(self) -> None:
        """Fail all gathers that this agent leads, because it leaves."""
        with self._lock:
            gathers = list(self._gathers.values())
        name = self._runtime.name
        for gather in gathers:
            gather.done._try_complete(None, PeerLost(f"worker {name!r} left the group", peer=name))

    def _start(
        self, name: str, function: Any, args: tuple[Any, ...], timeout: float | None
    ) -> Future[Any]:
        return self._runtime.start(name, function, args, None, timeout, internal=True)

    # The leader's side

    def add_report(
        self,
        sequence: str,
        names: tuple[str, ...],
        report: Report,
        value: Any,
        timeout: float | None,
    ) -> Future[GatherResult]:
        """Add the report of a participant to a gather that this agent leads."""
        with self._lock:
            last = self._results.get(sequence)
            if last is not None and last.answers(report.incarnation, report.number):
                still_late = (
                    incarnation
                    for incarnation in last.late_incarnations
                    if incarnation != report.incarnation
                )
                self._results[sequence] = last._replace(late_incarnations=tuple(still_late))
                done: Future[GatherResult] = Future()
                done.set_result(last)
                return done
            gather = self._gathers.get(sequence)
            is_first = gather is None
            if gather is None:
                gather = self._gathers[sequence] = _Gather(names)
            gather.values[report.name] = value
            gather.reports[report.name] = report
            gather.unknown.discard(report.name)
            gather.lost.discard(report.name)  # it has come back
        if is_first:
            runtime = self._runtime
            runtime.threads.start_with_retry(lambda: self._watch(sequence, gather), runtime.clock)
            if timeout is not None:
                until = time.monotonic() + timeout
                runtime.clock.call_at(until, lambda: self._finish(sequence, gather))
        self._finish_if_complete(sequence, gather)
        return gather.done

    def worker_lost(self, name: str) -> None:
        """Let no gather wait for a lost worker. Do nothing if it is this agent that leaves."""
        if self._runtime.closing:
            return
        with self._lock:
            gathers = list(self._gathers.items())
        for sequence, gather in gathers:
            if name in gather.expected and name not in gather.reports:
                gather.lost.add(name)
                gather.unknown.discard(name)
                self._finish_if_complete(sequence, gather)

    def _watch(self, sequence: str, gather: _Gather) -> None:
        """Ask the missing workers for the result until the gather ends.

        This connects to each, so that its loss is noticed. One may have the result from an earlier
        leader.
        """
        asked: set[str] = set()

        def on_reply(name: str, done: Any) -> None:
            asked.discard(name)
            try:
                result = done.value()
            except PeerLost as error:
                if not self._runtime.closing and self._has_ended(name, error):
                    self.worker_lost(name)
                return
            except Exception as error:  # it is alive, and is asked again
                _log.debug("worker %r could not be asked for a gather: %s", name, error)
                return
            if result is not None:
                self._complete(sequence, gather, result)

        pause = min(_ASK_AFTER * len(gather.expected), _ASK_AGAIN)
        while not _ends_within(gather.done, pause) and not self._runtime.closing:
            pause = _ASK_AGAIN
            numbers = gather.numbers
            for name in gather.missing:
                if name in asked:
                    continue
                asked.add(name)
                args = (sequence, numbers)
                try:
                    reply = self._start(name, _result_for, args, None)
                except TelegradError:
                    self.worker_lost(name)
                else:
                    reply.add_done_callback(lambda done, name=name: on_reply(name, done))  # type: ignore[misc]

    def _finish_if_complete(self, sequence: str, gather: _Gather) -> None:
        if not gather.unknown:
            self._finish(sequence, gather)

    def _finish(self, sequence: str, gather: _Gather) -> None:
        """End a gather, on a thread of its own because callbacks of the future may block."""
        if not gather.done.done():
            self._runtime.threads.start_with_retry(
                lambda: self._complete(sequence, gather, None), self._runtime.clock
            )

    def _complete(self, sequence: str, gather: _Gather, result: GatherResult | None) -> None:
        """End a gather with a result of an earlier leader; None: with what was reported here."""
        members = self._runtime.directory.members(refresh=False)
        incarnations = {member.name: member.incarnation for member in members}
        with self._lock:
            if self._gathers.get(sequence) is not gather:
                return  # it has ended
            if result is not None and self._is_known(sequence, result):
                return  # it is the result of an earlier gather
            del self._gathers[sequence]
            result = result or gather.result(incarnations)
            self._results[sequence] = result
        gather.done._try_complete(result, None)

    # Results that are known here

    def result_for(self, sequence: str, reports: Mapping[Incarnation, int]) -> GatherResult | None:
        """Return the result of the gather, led by another worker, that these reports belong to."""
        with self._lock:
            last = self._results.get(sequence)
        if last is None or not any(last.answers(*each) for each in reports.items()):
            return None
        return last

    def _is_known(self, sequence: str, result: GatherResult) -> bool:
        """Return whether this is the last result known of a sequence, or an earlier one.

        Called under the lock.
        """
        last = self._results.get(sequence)
        if last is None:
            return False
        return any(
            number <= last.reports.get(incarnation, 0)
            for incarnation, number in result.reports.items()
        )


def _short_text(names: tuple[str, ...]) -> str:
    """Return a text that identifies these names; of many names, a digest."""
    text = ",".join(names)
    return text if len(text) <= _MAX_NAMES_TEXT else hashlib.sha256(text.encode()).hexdigest()


def group_broken(operation: str, result: GatherResult, timeout: float | None) -> GroupBroken:
    """Return the error for a gather that not all workers took part in."""
    reasons = []
    if result.lost:
        reasons.append(f"lost: {', '.join(result.lost)}")
    if result.late:
        reasons.append(f"not there within {timeout} s: {', '.join(result.late)}")
    return GroupBroken(
        f"{operation} ended without everybody; {'; '.join(reasons)}",
        missing=(*result.lost, *result.late),
    )


def _ends_within(done: Future[GatherResult], seconds: float) -> bool:
    try:
        done.exception(seconds)
    except CallTimeout:
        return False
    return True


def _local_collectives() -> Collectives:
    if thread_state.runtime is None:
        raise InternalError("a gather outside an agent")
    collectives: Collectives = thread_state.runtime.collectives
    return collectives


@internal
def _report(
    sequence: str, names: tuple[str, ...], report: Report, value: Any, timeout: float | None
) -> DeferredReply:
    done = _local_collectives().add_report(sequence, names, Report(*report), value, timeout)
    return DeferredReply(
        done
    )  # not the future itself: a caller that cancels would cancel it for all


@internal
def _result_for(sequence: str, reports: Mapping[Incarnation, int]) -> GatherResult | None:
    return _local_collectives().result_for(sequence, reports)

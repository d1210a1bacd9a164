"""`Collectives`: barriers and gathers that end even if workers are lost, and name the missing ones.

Every participant reports to a leader, the first participant that is alive. The leader watches those
that have not reported; a lost worker no longer counts. When all others have reported, every
participant gets the values and the names of the lost workers. If the leader is lost, the next
participant leads and starts again; a participant that already has the result passes it on. If an
earlier participant has come back, it leads again, and everybody reports to it: of two workers that
both lead a gather, the later one in the order of participants hands it over, whichever of them asks
the other first.

The report of a worker that is lost before the gather ends does not count. Its next incarnation may
report in its place. The gathers of a shutdown wait for that, for `Config.restart_timeout` after the
loss, so that the engine can restart the worker; others do not. If the lost incarnation is alive, it
gets the result that counts it as lost.

Each participant numbers its own gathers of a sequence (equal topic and names), from the start of
its incarnation. The numbers of two workers may differ, since one may have restarted, so the leader
never compares them with each other. A report belongs to the last gather if that gather has this
very report, or counted its sender as late or lost; otherwise to the next gather. Only the leader
knows whether a late worker has reported since. So a worker never replaces a result that it knows by
the same one, or by an earlier one, from another worker.

State: `_gathers` (those that this agent leads, by sequence), `_results` (the last result of each
sequence), `_started` (how many gathers of each sequence this agent has started) and
`_awaited_until` (by lost incarnation) are changed under `_lock`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from telegrad.config import Config
from telegrad.current import thread_state
from telegrad.errors import (
    CallTimeout,
    GroupBroken,
    InternalError,
    JoinError,
    PeerLost,
    StoreTampered,
    TelegradError,
)
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
_REPORT_AGAIN = (0.05, 1.0)  # seconds until a participant looks for another leader
BARRIER = "barrier"  # a topic
SHUTDOWN = "shutdown"  # the topic of the gathers that wait for restarts
_log = logging.getLogger(__name__)


class CallingRuntime(Protocol):
    """What a part that calls all members of the group needs from its agent."""

    config: Config
    local_member: Member
    threads: ThreadPool
    directory: Directory

    def start(
        self,
        to: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: None,
        timeout: float | None,
        internal: bool,
    ) -> Future[Any]: ...


class CollectivesRuntime(CallingRuntime, Protocol):
    """What collectives need from their agent."""

    name: str
    closing: bool
    clock: Clock

    def is_lost(self, incarnation: Incarnation) -> bool: ...
    def watch(self, incarnation: Incarnation) -> None: ...


class ParticipantReport(NamedTuple):
    """Identify a participant of a gather: its name, its incarnation and its count of gathers."""

    name: str
    incarnation: Incarnation
    number: int


class GatherResult(NamedTuple):
    """The values of all participants that reported, and the names of the others."""

    values: Any  # a dict by name, or what the leader has made of it (see `Summary`)
    lost: tuple[str, ...]
    late: tuple[str, ...]
    reports: dict[Incarnation, int] = {}  # noqa: RUF012  # the counts of those that reported
    late_incarnations: tuple[Incarnation, ...] = ()
    lost_incarnations: tuple[Incarnation, ...] = ()

    def answers(self, incarnation: Incarnation, number: int) -> bool:
        """Return whether this is the result of the gather that a report belongs to."""
        return (
            self.reports.get(incarnation) == number
            or incarnation in self.late_incarnations
            or incarnation in self.lost_incarnations
        )


# What the leader sends to all participants instead of the values, which every participant would
# have to receive and unpack.
Summary = Callable[[GatherResult], Any]


class _Gather:
    """A gather that this agent leads and that has not ended. Used under the lock of `Collectives`,
    except for `done`, `missing` and what does not change.
    """

    def __init__(self, sequence: str, expected: tuple[str, ...], directory: Directory) -> None:
        self.waits_for_restarts = sequence.startswith(f"{SHUTDOWN}:")
        self.expected = expected
        self.done: Future[GatherResult | None] = Future()  # None: another worker leads
        self.values: dict[str, Any] = {}
        self.reports: dict[str, ParticipantReport] = {}
        self.lost: dict[str, Incarnation] = {}
        self.unknown = set(expected)  # those that have neither reported nor were lost
        self._directory = directory

    @property
    def missing(self) -> list[str]:
        return [name for name in self.expected if name not in self.reports and not self._lost(name)]

    @property
    def is_complete(self) -> bool:
        """Whether nobody is missing."""
        return not self.unknown and all(map(self._lost, self.lost))

    def _lost(self, name: str) -> bool:
        """Return whether a worker is lost, and no later incarnation of it is known."""
        incarnation = self.lost.get(name)
        if not incarnation:
            return incarnation is not None
        return self._directory.is_current(name, incarnation)

    def is_led_first_by(self, name: str, other: str) -> bool:
        """Return whether `name` comes before `other` in the order of participants."""
        return self.expected.index(name) < self.expected.index(other)

    @property
    def numbers(self) -> dict[Incarnation, int]:
        """The reports without names. A dict of text and numbers is packed and unpacked fast."""
        return {report.incarnation: report.number for report in self.reports.values()}

    def result(self, incarnations: dict[str, Incarnation]) -> GatherResult:
        """Return the result if the gather ends now; `incarnations` are those of all members."""
        late = tuple(self.missing)
        late_incarnations = tuple(incarnations[name] for name in late if name in incarnations)
        lost = tuple(sorted(filter(self._lost, self.lost)))
        lost_incarnations = tuple(self.lost[name] for name in lost)
        return GatherResult(
            dict(self.values), lost, late, self.numbers, late_incarnations, lost_incarnations
        )


class Collectives:
    """The barriers and gathers of one agent."""

    def __init__(
        self, runtime: CollectivesRuntime, summaries: Mapping[str, Summary] | None = None
    ) -> None:
        self._runtime = runtime
        self._summaries = summaries or {}  # by topic
        self._gathers: dict[str, _Gather] = {}
        self._results: dict[str, GatherResult] = {}
        self._started: Counter[str] = Counter()
        self._awaited_until: dict[Incarnation, float] = {}
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
            report = ParticipantReport(
                self._runtime.name, member.incarnation, self._started[sequence]
            )
        until = None if timeout is None else time.monotonic() + timeout
        pause = _REPORT_AGAIN[0]
        while (result := self._report_to_first(sequence, names, report, value, timeout)) is None:
            time.sleep(pause)
            pause = min(2 * pause, _REPORT_AGAIN[1])
            timeout = None if until is None else max(until - time.monotonic(), _RETRY[0])
        with self._lock:
            # If this worker leads, it already knows this result and may know of late reports.
            if not self._is_known(sequence, result):
                self._results[sequence] = result
        return result

    def _report_to_first(
        self,
        sequence: str,
        names: tuple[str, ...],
        report: ParticipantReport,
        value: Any,
        timeout: float | None,
    ) -> GatherResult | None:
        """Report to the first participant that is alive. None: another worker leads now."""
        patience = None if timeout is None else timeout + _GRACE
        args = (sequence, names, report, value, timeout)
        lost: list[str] = []
        for leader in names:
            try:
                return self._report_to(leader, args, patience)
            except PeerLost:
                if self._runtime.closing:
                    raise  # it is this worker that leaves
                lost.append(leader)
            except CallTimeout:
                return GatherResult({}, tuple(lost), (leader,))
        raise InternalError("a gather without a living participant")

    def _report_to(
        self, leader: str, args: tuple[Any, ...], timeout: float | None
    ) -> GatherResult | None:
        """Report to a leader and return the result; None: another worker leads now.

        A leader that cannot be reached may be alive: it may have too many connections at this
        moment. If this worker reported to another one, both leaders would wait for each other. So
        it tries again, until the leader is declared lost. Then it raises `PeerLost`.
        """
        until = None if timeout is None else time.monotonic() + timeout
        pause = _RETRY[0]
        while True:
            left = None if until is None else max(until - time.monotonic(), _RETRY[0])
            try:
                result: GatherResult | None = self._start(leader, _report, args, left).wait()
                return result
            except PeerLost as error:
                if self._runtime.closing or self._has_ended(leader, error):
                    raise
            if until is not None and time.monotonic() > until:
                raise CallTimeout(f"worker {leader!r} cannot be reached", peer=leader, sent=False)
            time.sleep(pause)
            pause = min(pause * 1.5, _RETRY[1])

    def _has_ended(self, name: str, error: PeerLost) -> bool:
        """Return whether a call failed because the worker is lost, not only out of reach.

        If it is out of reach, make sure that it is declared lost if it has ended.
        """
        directory = self._runtime.directory
        try:
            member = directory.find(name, refresh=not error.sent)
        except (JoinError, StoreTampered):  # the store is gone; use what was read last
            member = directory.find(name)
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
        report: ParticipantReport,
        value: Any,
        timeout: float | None,
    ) -> Future[GatherResult | None]:
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
                done: Future[GatherResult | None] = Future()
                done.set_result(last)
                return done
            gather = self._gathers.get(sequence)
            is_first = gather is None
            if gather is None:
                gather = self._gathers[sequence] = _Gather(sequence, names, self._runtime.directory)
            gather.values[report.name] = value
            gather.reports[report.name] = report
            gather.unknown.discard(report.name)
            gather.lost.pop(report.name, None)  # it has come back
        if is_first:
            runtime = self._runtime
            runtime.threads.start_with_retry(lambda: self._watch(sequence, gather), runtime.clock)
            if timeout is not None:
                until = time.monotonic() + timeout
                runtime.clock.call_at(until, lambda: self._finish(sequence, gather, timed_out=True))
        self._finish_if_complete(sequence, gather)
        return gather.done

    def worker_lost(self, name: str, incarnation: Incarnation) -> None:
        """Count a worker as lost in all gathers, unless it may come back.

        Do nothing if it is this agent that leaves.
        """
        if self._runtime.closing:
            return
        now = time.monotonic()
        with self._lock:
            is_new = incarnation not in self._awaited_until
            until = now + self._runtime.config.restart_timeout
            until = self._awaited_until.setdefault(incarnation, until)
            gathers = [each for each in self._gathers.items() if name in each[1].expected]
        for sequence, gather in gathers:
            with self._lock:
                report = gather.reports.get(name)
                if report is not None and report.incarnation != incarnation:
                    continue  # that of its next incarnation
                gather.reports.pop(name, None)
                gather.values.pop(name, None)
                gather.unknown.add(name)
                if gather.waits_for_restarts and until > now:
                    continue
                gather.lost[name] = incarnation
                gather.unknown.discard(name)
            self._finish_if_complete(sequence, gather)
        if is_new and until > now:
            self._runtime.clock.call_at(until, lambda: self._give_up(name, incarnation))

    def _give_up(self, name: str, incarnation: Incarnation) -> None:
        """Count a lost worker as lost, unless it has come back in time."""
        if self._runtime.directory.is_current(name, incarnation):
            self.worker_lost(name, incarnation)

    def _watch(self, sequence: str, gather: _Gather) -> None:
        """Ask the missing workers for the result until the gather ends.

        This connects to each, so that its loss is noticed. One may have the result from an earlier
        leader.
        """
        directory = self._runtime.directory
        asked: set[str] = set()

        def on_reply(name: str, incarnation: Incarnation, done: Any) -> None:
            asked.discard(name)
            try:
                result = done.value()
            except PeerLost as error:
                if not self._runtime.closing and self._has_ended(name, error):
                    on_failure(name, incarnation)
                return
            except Exception as error:  # it is alive, and is asked again
                _log.debug("worker %r could not be asked for a gather: %s", name, error)
                return
            if result is not None:
                self._complete(sequence, gather, result)
            elif gather.is_led_first_by(name, self._runtime.name):
                self._hand_over(sequence, gather)  # it has come back, and leads again

        def on_failure(name: str, incarnation: Incarnation) -> None:
            # otherwise its next incarnation is asked
            if not incarnation or directory.is_current(name, incarnation):
                self.worker_lost(name, incarnation)

        pause = min(_ASK_AFTER * len(gather.expected), _ASK_AGAIN)
        while not _ends_within(gather.done, pause) and not self._runtime.closing:
            pause = _ASK_AGAIN
            with self._lock:
                numbers = gather.numbers
            for name in gather.missing:
                if name in asked:
                    continue
                incarnation = Incarnation("")
                try:
                    incarnation = directory.find(name).incarnation
                    args = (sequence, numbers, self._runtime.name)
                    reply = self._start(name, _result_for, args, None)
                except TelegradError:
                    on_failure(name, incarnation)
                else:
                    asked.add(name)
                    reply.add_done_callback(functools.partial(on_reply, name, incarnation))

    def _finish_if_complete(self, sequence: str, gather: _Gather) -> None:
        with self._lock:
            is_complete = gather.is_complete
        if is_complete:
            self._finish(sequence, gather)

    def _finish(self, sequence: str, gather: _Gather, *, timed_out: bool = False) -> None:
        """End a gather, on a thread of its own because callbacks of the future may block."""
        if not gather.done.done():
            self._runtime.threads.start_with_retry(
                lambda: self._complete(sequence, gather, None, timed_out=timed_out),
                self._runtime.clock,
            )

    def _complete(
        self,
        sequence: str,
        gather: _Gather,
        result: GatherResult | None,
        *,
        timed_out: bool = False,
    ) -> None:
        """End a gather with a result of an earlier leader; None: with what was reported here."""
        members = self._runtime.directory.members(refresh=False)
        incarnations = {member.name: member.incarnation for member in members}
        with self._lock:
            if self._gathers.get(sequence) is not gather:
                return  # it has ended
            if result is None and not gather.is_complete and not timed_out:
                return  # a worker was lost that had reported
            if result is not None and self._is_known(sequence, result):
                return  # it is the result of an earlier gather
            del self._gathers[sequence]
            result = result or self._summarize(sequence, gather.result(incarnations))
            self._results[sequence] = result
        gather.done._try_complete(result, None)

    def _summarize(self, sequence: str, result: GatherResult) -> GatherResult:
        summary = self._summaries.get(sequence.partition(":")[0])
        return result if summary is None else result._replace(values=summary(result))

    def _hand_over(self, sequence: str, gather: _Gather) -> None:
        """Let the participants of a gather report to another leader."""
        with self._lock:
            if self._gathers.get(sequence) is not gather:
                return  # it has ended
            del self._gathers[sequence]
        gather.done._try_complete(None, None)

    # Results that are known here

    def result_for(
        self, sequence: str, reports: Mapping[Incarnation, int], leader: str
    ) -> GatherResult | None:
        """Return the result of the gather, led by `leader`, that these reports belong to.

        If there is none and this agent leads this gather, too, only the first of both shall.
        """
        with self._lock:
            last = self._results.get(sequence)
            gather = self._gathers.get(sequence)
        if last is not None and any(last.answers(*each) for each in reports.items()):
            return last
        if gather is not None and gather.is_led_first_by(leader, self._runtime.name):
            runtime = self._runtime
            runtime.threads.start_with_retry(
                lambda: self._hand_over(sequence, gather), runtime.clock
            )
        return None

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


def _ends_within(done: Future[GatherResult | None], seconds: float) -> bool:
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
    sequence: str,
    names: tuple[str, ...],
    report: ParticipantReport,
    value: Any,
    timeout: float | None,
) -> DeferredReply:
    done = _local_collectives().add_report(
        sequence, names, ParticipantReport(*report), value, timeout
    )
    return DeferredReply(
        done
    )  # not the future itself: a caller that cancels would cancel it for all


@internal
def _result_for(
    sequence: str, reports: Mapping[Incarnation, int], leader: str
) -> GatherResult | None:
    return _local_collectives().result_for(sequence, reports, leader)

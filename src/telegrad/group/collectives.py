"""Barriers and gathers that end even when workers die, and say who was missing.

Everybody reports to a leader, the first of the participants that is alive. The leader watches those who have not come:
who is lost no longer counts. When all others are there, everybody gets the values and the names of the lost.
If the leader is lost, the next participant leads, starting afresh; one who already has the outcome passes it on.

Each participant numbers its own gathers of a sequence (the same topic and names), from the start of its life. The
numbers of two workers may differ, since one may have restarted, so the leader never compares them with each other. A
report belongs to the last gather if that already has this very report, or counted its sender as late, and to the next
one otherwise. Only the leader knows whether somebody late has come since. So nobody replaces an outcome that it knows
by the same one, or by an earlier one, from somebody else.

State: `_meetings` (gathers that this agent leads, by sequence) and `_outcomes` (the last outcome of each sequence),
under `_lock`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad.current import thread_state
from telegrad.errors import CallTimeout, GroupBroken, InternalError, PeerLost, TelegradError
from telegrad.futures import Future
from telegrad.server.functions import DeferredReply, internal

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

# seconds that a participant waits longer than its leader, so that it hears who was late
_GRACE = 5.0
_LOOK_AGAIN = 1.0
_log = logging.getLogger(__name__)


class Participation(NamedTuple):
    """Which worker came, in which of its lives, and to which of its gathers of a sequence."""

    name: str
    incarnation: str
    number: int


class GatherResult(NamedTuple):
    values: dict[str, Any]
    lost: tuple[str, ...]
    late: tuple[str, ...]
    reports: tuple[Participation, ...] = ()
    late_incarnations: tuple[str, ...] = ()

    def answers(self, report: Participation) -> bool:
        """Is this the outcome of the gather that a report belongs to?"""
        return report in self.reports or report.incarnation in self.late_incarnations


class _Gather:
    def __init__(self, expected: tuple[str, ...]) -> None:
        self.expected = expected
        self.done: Future[GatherResult] = Future()
        self.values: dict[str, Any] = {}
        self.reports: dict[str, Participation] = {}
        self.lost: set[str] = set()

    @property
    def missing(self) -> list[str]:
        return [
            name for name in self.expected if name not in self.reports and name not in self.lost
        ]

    def outcome(self, incarnations: dict[str, str]) -> GatherResult:
        late = tuple(self.missing)
        late_incarnations = tuple(incarnations[name] for name in late if name in incarnations)
        reports = tuple(self.reports.values())
        return GatherResult(
            dict(self.values), tuple(sorted(self.lost)), late, reports, late_incarnations
        )


class Collectives:
    """The barriers and gathers of one agent."""

    def __init__(self, agent: AgentRuntime) -> None:
        self._agent = agent
        self._meetings: dict[str, _Gather] = {}
        self._outcomes: dict[str, GatherResult] = {}
        self._numbers: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        waits = {
            key: meeting.missing
            for key, meeting in list(self._meetings.items())
            if not meeting.done.done()
        }
        return f"<Gathering, leading {waits}>"

    def gather(
        self, value: Any, names: Sequence[str], timeout: float | None, topic: str = "gather"
    ) -> GatherResult:
        """Everybody's value by name. All participants call it with the same names, in the same order, and topic."""
        names = tuple(names)
        sequence = f"{topic}:{','.join(names)}"
        with self._lock:
            self._numbers[sequence] += 1
            report = Participation(
                self._agent.name, self._agent.local_member.incarnation, self._numbers[sequence]
            )
        patience = None if timeout is None else timeout + _GRACE
        lost: list[str] = []
        for leader in names:
            try:
                arrival = (sequence, names, report, value, timeout)
                outcome: GatherResult = self._ask(leader, _arrive, arrival, patience).wait()
            except PeerLost:
                if self._agent.closing:
                    raise  # it is this worker that leaves
                lost.append(leader)
                continue
            except CallTimeout:
                outcome = GatherResult({}, tuple(lost), (leader,))
            with self._lock:
                if not self._knows(sequence, outcome):  # who leads knows more of it
                    self._outcomes[sequence] = outcome
            return outcome
        raise InternalError("a gather without a living participant")

    def close(self) -> None:
        """The agent leaves: nobody waits here any longer."""
        with self._lock:
            meetings = list(self._meetings.values())
        for meeting in meetings:
            meeting.done._settle(
                None, PeerLost(f"worker {self._agent.name!r} left the group", peer=self._agent.name)
            )

    def _ask(
        self, name: str, function: Any, args: tuple[Any, ...], timeout: float | None
    ) -> Future[Any]:
        return self._agent.start(name, function, args, None, timeout, internal=True)

    def arrive(
        self,
        sequence: str,
        names: tuple[str, ...],
        report: Participation,
        value: Any,
        timeout: float | None,
    ) -> Future[GatherResult]:
        """A participant reports to this agent, which leads."""
        with self._lock:
            last = self._outcomes.get(sequence)
            if last is not None and last.answers(report):
                self._outcomes[sequence] = last._replace(
                    late_incarnations=tuple(
                        each for each in last.late_incarnations if each != report.incarnation
                    )
                )
                done: Future[GatherResult] = Future()
                done.set_result(last)
                return done
            meeting = self._meetings.get(sequence)
            first = meeting is None
            if meeting is None:
                meeting = self._meetings[sequence] = _Gather(names)
            meeting.values[report.name] = value
            meeting.reports[report.name] = report
            meeting.lost.discard(report.name)  # it has come back
        if first:
            self._agent.threads.start_when_possible(
                lambda: self._watch(sequence, meeting), self._agent.clock
            )
            if timeout is not None:
                self._agent.clock.at(
                    time.monotonic() + timeout, lambda: self._finish(sequence, meeting)
                )
        self._check(sequence, meeting)
        return meeting.done

    def outcome_for(self, sequence: str, reports: Sequence[Participation]) -> GatherResult | None:
        """What this agent knows of a gather, led by another, that these reports belong to."""
        with self._lock:
            last = self._outcomes.get(sequence)
        return (
            last
            if last is not None and any(last.answers(Participation(*each)) for each in reports)
            else None
        )

    def lost(self, name: str) -> None:
        """A worker is gone: no round waits for it any longer. (When we leave, it is not the others who are gone.)"""
        if self._agent.closing:
            return
        with self._lock:
            meetings = list(self._meetings.items())
        for sequence, meeting in meetings:
            if name in meeting.expected and name not in meeting.reports:
                meeting.lost.add(name)
                self._check(sequence, meeting)

    def _watch(self, sequence: str, meeting: _Gather) -> None:
        """Look after those who are missing: connect to each, and ask if it knows the outcome from an earlier leader."""
        asked: set[str] = set()

        def heard(name: str, done: Any) -> None:
            asked.discard(name)
            try:
                outcome = done.value()
            except PeerLost:
                self.lost(name)
                return
            except Exception as error:  # it lives, and is asked again
                _log.debug("worker %r could not be asked for a gather: %s", name, error)
                return
            if outcome is not None:
                self._complete(sequence, meeting, outcome)

        while not meeting.done.done() and not self._agent.closing:
            for name in meeting.missing:
                if name in asked:
                    continue
                asked.add(name)
                try:
                    known = self._ask(
                        name, _outcome_for, (sequence, tuple(meeting.reports.values())), None
                    )
                except TelegradError:
                    self.lost(name)
                else:
                    known.add_done_callback(lambda done, name=name: heard(name, done))  # type: ignore[misc]
            try:
                meeting.done.exception(_LOOK_AGAIN)
            except CallTimeout:
                continue

    def _knows(self, sequence: str, outcome: GatherResult) -> bool:
        """Under the lock: is this the last outcome that this agent knows of a sequence, or an earlier one?"""
        last = self._outcomes.get(sequence)
        numbers = (
            {report.incarnation: report.number for report in last.reports}
            if last is not None
            else {}
        )
        return any(
            report.number <= numbers.get(report.incarnation, 0) for report in outcome.reports
        )

    def _check(self, sequence: str, meeting: _Gather) -> None:
        if not meeting.missing:
            self._finish(sequence, meeting)

    def _finish(self, sequence: str, meeting: _Gather) -> None:
        """End a gather; on a thread of its own, since whoever waits runs callbacks."""
        if not meeting.done.done():
            self._agent.threads.start_when_possible(
                lambda: self._complete(sequence, meeting, None), self._agent.clock
            )

    def _complete(self, sequence: str, meeting: _Gather, outcome: GatherResult | None) -> None:
        known = {
            member.name: member.incarnation
            for member in self._agent.directory.members(refresh=False)
        }
        with self._lock:
            if self._meetings.get(sequence) is not meeting:
                return  # it is over
            if outcome is not None and self._knows(sequence, outcome):
                return  # it is that of an earlier gather
            del self._meetings[sequence]
            outcome = outcome or meeting.outcome(known)
            self._outcomes[sequence] = outcome
        meeting.done._settle(outcome, None)


def group_broken(what: str, outcome: GatherResult, timeout: float | None) -> GroupBroken:
    """The error for a gather that did not get everybody."""
    said = []
    if outcome.lost:
        said.append(f"lost: {', '.join(outcome.lost)}")
    if outcome.late:
        said.append(f"not there within {timeout} s: {', '.join(outcome.late)}")
    return GroupBroken(
        f"{what} ended without everybody; {'; '.join(said)}", missing=(*outcome.lost, *outcome.late)
    )


def _leader() -> Collectives:
    agent: AgentRuntime | None = thread_state.runtime
    if agent is None:
        raise InternalError("a gather outside an agent")
    return agent.collectives


@internal
def _arrive(
    sequence: str, names: tuple[str, ...], report: Participation, value: Any, timeout: float | None
) -> DeferredReply:
    report = Participation(*report)
    return DeferredReply(
        _leader().arrive(sequence, names, report, value, timeout)
    )  # everybody's, so nobody may cancel it


@internal
def _outcome_for(sequence: str, reports: Sequence[Participation]) -> GatherResult | None:
    return _leader().outcome_for(sequence, reports)

"""Barriers and gathers that end even when workers die, and say who was missing.

Everybody reports to a leader, the first of the participants that is alive. The leader watches those who have not come:
who is lost no longer counts. When all others are there, everybody gets the values and the names of the lost.
If the leader is lost, the next participant leads, starting afresh with the same key; one who already has the outcome
passes it on.

State: `_meetings` (gathers that this agent leads) and `_outcomes` (the last outcome of each sequence), under `_lock`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from telegrad.agent.current import current_agent
from telegrad.agent.targets import Later, internal
from telegrad.errors import CallTimeout, GroupBroken, InternalError, PeerLost, TelegradError
from telegrad.futures import Future

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent

_GRACE = 5.0  # seconds that a participant waits longer than its leader, so that it hears who was late
_LOOK_AGAIN = 1.0


class Outcome(NamedTuple):
    values: dict[str, Any]
    lost: tuple[str, ...]
    late: tuple[str, ...]


@dataclass
class _Meeting:
    expected: tuple[str, ...]
    done: Future[Outcome] = field(default_factory=Future)
    values: dict[str, Any] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    @property
    def missing(self) -> list[str]:
        return [name for name in self.expected if name not in self.values and name not in self.lost]

    def outcome(self) -> Outcome:
        return Outcome(dict(self.values), tuple(sorted(self.lost)), tuple(self.missing))


class Gathering:
    """The barriers and gathers of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._meetings: dict[str, _Meeting] = {}
        self._outcomes: dict[str, tuple[int, Outcome]] = {}
        self._sequence: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        waits = {key: meeting.missing for key, meeting in self._meetings.items() if not meeting.done.done()}
        return f"<Gathering, leading {waits}>"

    def gather(self, value: Any, names: Sequence[str], timeout: float | None, topic: str = "gather") -> Outcome:
        """Everybody's value by name. All participants call it with the same names, in the same order, and topic."""
        names = tuple(names)
        sequence = f"{topic}:{','.join(names)}"
        with self._lock:
            self._sequence[sequence] += 1
            number = self._sequence[sequence]
        key = f"{sequence}:{number}"
        patience = None if timeout is None else timeout + _GRACE
        lost: list[str] = []
        for leader in names:
            try:
                arrival = (key, names, self._agent.name, value, timeout)
                outcome: Outcome = self._ask(leader, _arrive, arrival, patience).wait()
            except PeerLost:
                if self._agent.closing:
                    raise  # it is this worker that leaves
                lost.append(leader)
                continue
            except CallTimeout:
                outcome = Outcome({}, tuple(lost), (leader,))
            self._outcomes[sequence] = number, outcome
            return outcome
        raise InternalError("a gather without a living participant")

    def close(self) -> None:
        """The agent leaves: nobody waits here any longer."""
        with self._lock:
            meetings = list(self._meetings.values())
        for meeting in meetings:
            meeting.done._settle(None, PeerLost(f"worker {self._agent.name!r} left the group", peer=self._agent.name))

    def _ask(self, name: str, function: Any, args: tuple[Any, ...], timeout: float | None) -> Future[Any]:
        return self._agent.start(name, function, args, None, timeout, internal=True)

    def arrive(self, key: str, names: tuple[str, ...], name: str, value: Any, timeout: float | None) -> Future[Outcome]:
        """A participant reports to this agent, which leads."""
        with self._lock:
            first = key not in self._meetings
            if first:
                self._forget_finished()
                self._meetings[key] = _Meeting(names)
            meeting = self._meetings[key]
            meeting.values[name] = value
        if first:
            self._agent.threads.start(lambda: self._watch(key, meeting))
            if timeout is not None:
                self._agent.clock.at(time.monotonic() + timeout, lambda: self._settle(meeting))
        self._check(meeting)
        return meeting.done

    def outcome_of(self, key: str) -> Outcome | None:
        """What this agent knows of a gather that another one led."""
        sequence, _, number = key.rpartition(":")
        known, outcome = self._outcomes.get(sequence, (0, None))
        return outcome if known == int(number) else None

    def lost(self, name: str) -> None:
        """A worker is gone: no round waits for it any longer. (When we leave, it is not the others who are gone.)"""
        if self._agent.closing:
            return
        with self._lock:
            meetings = list(self._meetings.values())
        for meeting in meetings:
            if name in meeting.expected and name not in meeting.values:
                meeting.lost.add(name)
                self._check(meeting)

    def _watch(self, key: str, meeting: _Meeting) -> None:
        """Look after those who are missing: connect to each, and ask if it knows the outcome from an earlier leader."""
        asked: set[str] = set()

        def heard(name: str, done: Any) -> None:
            asked.discard(name)
            try:
                outcome = done.value()
            except Exception:
                self.lost(name)
                return
            if outcome is not None:
                meeting.done._settle(outcome, None)

        while not meeting.done.done() and not self._agent.closing:
            for name in meeting.missing:
                if name in asked:
                    continue
                asked.add(name)
                try:
                    known = self._ask(name, _outcome_of, (key,), None)
                except TelegradError:
                    self.lost(name)
                else:
                    known.add_done_callback(lambda done, name=name: heard(name, done))  # type: ignore[misc]
            try:
                meeting.done.exception(_LOOK_AGAIN)
            except CallTimeout:
                continue

    def _check(self, meeting: _Meeting) -> None:
        if not meeting.missing:
            self._settle(meeting)

    def _settle(self, meeting: _Meeting) -> None:
        if not meeting.done.done():
            self._agent.threads.start(lambda: _complete(meeting))

    def _forget_finished(self) -> None:
        finished = [key for key, meeting in self._meetings.items() if meeting.done.done()]
        for key in itertools.islice(finished, max(len(finished) - 8, 0)):
            del self._meetings[key]


def _complete(meeting: _Meeting) -> None:
    meeting.done._settle(meeting.outcome(), None)


def broken(what: str, outcome: Outcome, timeout: float | None) -> GroupBroken:
    """The error for a gather that did not get everybody."""
    said = []
    if outcome.lost:
        said.append(f"lost: {', '.join(outcome.lost)}")
    if outcome.late:
        said.append(f"not there within {timeout} s: {', '.join(outcome.late)}")
    return GroupBroken(f"{what} ended without everybody; {'; '.join(said)}", missing=(*outcome.lost, *outcome.late))


def _leader() -> Gathering:
    agent = current_agent()
    if agent is None:
        raise InternalError("a gather outside an agent")
    return agent.gathering


@internal
def _arrive(key: str, names: tuple[str, ...], name: str, value: Any, timeout: float | None) -> Later:
    return Later(_leader().arrive(key, names, name, value, timeout))  # everybody's, so nobody may cancel it


@internal
def _outcome_of(key: str) -> Outcome | None:
    return _leader().outcome_of(key)

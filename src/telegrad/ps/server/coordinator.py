"""Decide who trains, which reports make a step, and who is answered when. No locks, threads, tensors,
files or clock.

A coordinator is a state machine. Its owner feeds it inputs (a trainer joins, reports, leaves;
another server votes or answers; a step has been made) and carries out the decisions that each input
returns, in order. After `MakeStep` the owner calls `count_step` and `after_step` before any other
input, after `UndoStep` it calls `undone`. A decision is final: the owner carries it out even if
something beside it, such as writing a checkpoint, fails.

`RoundCoordinator` (`Sync`): round n turns version n of the parameters into version n + 1. A round
is complete when every trainer that is due has reported, or a quorum. `expected` are trainers that a
restarted server knows from its checkpoint: no round is complete before each of them has come back
or is known to be gone.

Of several servers the first leads. A follower whose round is complete sends a vote: which reports
it holds. It keeps them until it knows the decision, even if their trainers die. The leader waits
for the votes of all followers and takes the trainers that all servers have reports of.

With `exact` (every step is on disk before it is acknowledged) there is a second phase: a server
that has made the step keeps it as `made`, votes again, and answers its trainers only when the
leader knows that all servers have made it. Until then nobody has seen the new version, so it can be
undone: if a server was restarted and a trainer of the round has died, that server can never make
this round, and all others go back to the version before and make it without that trainer. Without
`confirm` a restarted server makes the round of those reports that it can still get.

Votes of one server are numbered (`sequence`); only the answer to the last one counts, so answers
may come in any order.

`ClockCoordinator` (`Async`, `Stale`): every report is a step. The clock of a trainer is the number
of its last step plus a base that it got when it joined and that is the same on all servers, so two
servers never make trainers wait in a circle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from telegrad.errors import StaleReference
from telegrad.ps.consistency import Consistency, Stale, Sync
from telegrad.ps.messages import Steps, worker_of


class StepReport(NamedTuple):
    """A step of a trainer, and the version of the parameters that it was computed with."""

    trainer: str
    step: int
    version: int
    content: Any
    future: Any
    staleness: int = 0


class RoundVote(NamedTuple):
    """What a follower tells the leader about its current round."""

    server: str  # its incarnation
    sequence: int
    number: int
    held: Steps  # the reports that it has or, if `made`, those that it has made the step of
    known: frozenset[str] = frozenset()  # trainers that it waits for or has reports of
    made: bool = False
    complete: bool = True  # if not, it only says what a restarted server has


class RoundVerdict(NamedTuple):
    """The leader's answer to a vote: "make" the step of these reports, "undo" it, or the round is "over"."""

    kind: str
    number: int
    steps: Steps


# Decisions


class MakeStep(NamedTuple):
    """Apply these reports, which may be none, then call `count_step` and `after_step`."""

    reports: list[StepReport]


class UndoStep(NamedTuple):
    """Go back to this version, then call `undone`."""

    version: int


class ReplyToReport(NamedTuple):
    """Answer a report with the current version."""

    report: StepReport
    dropped: bool = False


class FailReport(NamedTuple):
    """Fail a report."""

    future: Any
    error: Exception


class AdmitTrainer(NamedTuple):
    """Answer a trainer that joins: it may start."""

    trainer: str
    future: Any


class AskLeader(NamedTuple):
    """Send a vote to the leader, again and again until it is answered or outdated."""

    vote: RoundVote


class AnswerVote(NamedTuple):
    """Answer a follower."""

    future: Any
    verdict: RoundVerdict


Decision = MakeStep | UndoStep | ReplyToReport | FailReport | AdmitTrainer | AskLeader | AnswerVote


class _JoiningTrainer(NamedTuple):
    trainer: str
    first: int
    future: Any


class Coordinator(ABC):
    """What both kinds share: the members, the last step of each that is part of the version, and who waits to start."""

    def __init__(self, trainers: int) -> None:
        self.members: set[str] = set()
        self.applied: Steps = {}
        self.started = False
        self._trainers = trainers  # that must have come before anybody starts
        self._joined: set[str] = set()
        self._entering: list[_JoiningTrainer] = []
        self._reports: dict[str, StepReport] = {}

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of what is in memory."""

    @property
    def known(self) -> set[str]:
        """Return everybody who takes part or is waited for."""
        return set(self.members)

    @property
    def waiting(self) -> list[str]:
        """Return who has reported and is not answered."""
        return list(self._reports)

    def of(self, worker: str) -> list[str]:
        """Return the trainers of a worker, by its incarnation."""
        return [trainer for trainer in self.known if worker_of(trainer) == worker]

    def check(self, trainer: str) -> None:
        if trainer not in self.members:
            raise StaleReference("this server does not know the trainer")

    @abstractmethod
    def announce(self, trainer: str) -> int:
        """Note that a trainer is coming. Return the first round, or the clock, that it may start with."""

    @abstractmethod
    def enter(self, trainer: str, first: int, future: Any) -> list[Decision]:
        """Let a trainer take part from round, or with clock, `first`."""

    @abstractmethod
    def resume(
        self, trainer: str, first: int, acknowledged: int, version: int, applied: Steps
    ) -> list[Decision]:
        """Let a trainer take part again that this server has forgotten.

        If its version is newer than the one here, its owner has taken its values over, and `applied` says which steps
        they contain.
        """

    @abstractmethod
    def leave(self, trainer: str) -> list[Decision]:
        """Do not wait for a trainer any more."""

    @abstractmethod
    def report(self, report: StepReport) -> list[Decision]:
        """Take a report. The same step may be reported again; it counts once."""

    @abstractmethod
    def count_step(self, error: Exception | None) -> None:
        """Count the step that `MakeStep` asked for."""

    @abstractmethod
    def after_step(self, error: Exception | None = None) -> list[Decision]:
        """Go on after the step has been counted, published and saved. Its trainers are told of an error."""

    @abstractmethod
    def restore(
        self, version: int, applied: Steps, expected: Iterable[str], made: Steps | None
    ) -> None:
        """Begin with a checkpoint. Trainers that are expected are waited for; `made`: those of the last round."""

    def advance(self) -> list[Decision]:
        """Return what is to be done now."""
        return self._admit()

    def _add(self, trainer: str) -> None:
        self.members.add(trainer)
        self._joined.add(trainer)
        if len(self._joined) >= self._trainers:
            self.started = True

    def _enter(self, trainer: str, first: int, future: Any) -> list[Decision]:
        """Let a trainer wait for its start. It may come again if another server was restarted meanwhile."""
        before = [each for each in self._entering if each.trainer == trainer]
        self._entering = [each for each in self._entering if each not in before]
        self._entering.append(_JoiningTrainer(trainer, first, future))
        return [
            FailReport(each.future, StaleReference("the trainer has joined again"))
            for each in before
        ]

    def _remove(self, trainer: str) -> None:
        self.members.discard(trainer)
        self._entering = [each for each in self._entering if each.trainer != trainer]

    def _admit(self) -> list[Decision]:
        if not self.started:
            return []
        ready = [each for each in self._entering if self._may_start(each.first)]
        self._entering = [each for each in self._entering if each not in ready]
        return [AdmitTrainer(each.trainer, each.future) for each in ready]

    def _may_start(self, first: int) -> bool:
        return True

    def _merge_applied(self, applied: Steps) -> None:
        for trainer, step in applied.items():
            self.applied[trainer] = max(self.applied.get(trainer, 0), step)


class ClockCoordinator(Coordinator):
    """Every report is a step; with `Stale`, a trainer that is too far ahead of the slowest is answered later."""

    def __init__(self, consistency: Consistency, trainers: int) -> None:
        super().__init__(trainers)
        self._version = 0
        self._ahead = consistency.ahead if isinstance(consistency, Stale) else None
        self._bases: Steps = {}
        self._making: StepReport | None = None

    def __repr__(self) -> str:
        clocks = {trainer: self._clock(trainer) for trainer in self._bases}
        return f"<ClockCoordinator: {len(self.members)} trainers, version {self.version}, clocks {clocks}>"

    @property
    def version(self) -> int:
        return self._version

    def announce(self, trainer: str) -> int:
        return min(map(self._clock, self._bases), default=0)

    def enter(self, trainer: str, first: int, future: Any) -> list[Decision]:
        self._add(trainer)
        self._bases[trainer] = first
        return [*self._enter(trainer, first, future), *self.advance()]

    def resume(
        self, trainer: str, first: int, acknowledged: int, version: int, applied: Steps
    ) -> list[Decision]:
        self._add(trainer)
        self._bases[trainer] = first
        self._merge_applied({**applied, trainer: acknowledged})
        self._version = max(self._version, version)
        return self.advance()

    def leave(self, trainer: str) -> list[Decision]:
        self._remove(trainer)
        self._bases.pop(trainer, None)
        self._reports.pop(trainer, None)
        return self.advance()

    def report(self, report: StepReport) -> list[Decision]:
        self.check(report.trainer)
        # it comes again; the answer was lost
        if report.step <= self.applied.get(report.trainer, 0):
            return [ReplyToReport(report)]
        self._making = report._replace(staleness=self.version - report.version)
        return [MakeStep([report])]

    def count_step(self, error: Exception | None) -> None:
        assert self._making is not None
        if error is None:
            self._version += 1
            self.applied[self._making.trainer] = self._making.step

    def after_step(self, error: Exception | None = None) -> list[Decision]:
        report, self._making = self._making, None
        assert report is not None
        if error is not None:
            return [FailReport(report.future, error)]
        self._reports[report.trainer] = report
        return self.advance()

    def restore(
        self, version: int, applied: Steps, expected: Iterable[str], made: Steps | None
    ) -> None:
        self._version = version
        self.applied = dict(applied)

    def advance(self) -> list[Decision]:
        free = [report for report in self._reports.values() if self._may_go(report.trainer)]
        for report in free:
            del self._reports[report.trainer]
        return [*self._admit(), *map(ReplyToReport, free)]

    def _clock(self, trainer: str) -> int:
        return self._bases[trainer] + self.applied.get(trainer, 0)

    def _may_go(self, trainer: str) -> bool:
        """Return whether a trainer is not too far ahead of the slowest. One that has left may go."""
        if self._ahead is None or trainer not in self._bases or len(self._bases) == 1:
            return True
        return self._clock(trainer) - min(map(self._clock, self._bases)) < self._ahead


class RoundCoordinator(Coordinator):
    """Rounds, alone or with other servers: `followers` of this one, or a leader that it `follows`."""

    def __init__(
        self,
        consistency: Sync,
        trainers: int,
        followers: Sequence[str] = (),
        follows: bool = False,
        exact: bool = False,
        server: str = "",
    ) -> None:
        super().__init__(trainers)
        self.number = 0
        # the reports of this round, if its step is made and not confirmed
        self.made: Steps | None = None
        self.expected: set[str] = set()
        self._server = server
        self._quorum = consistency.quorum
        self._follows = follows
        self._exact = exact
        self._confirm = exact and (follows or bool(followers))
        self._first: Steps = {}  # the round in which each trainer starts to count
        self._promised = False  # this server has voted, and keeps its reports
        self._restored = False  # and has not finished a round together with the others since
        self._made_before = False  # `made` is that of the checkpoint
        self._making: Steps | None = None
        # the round that is made here is over elsewhere: it need not be confirmed
        self._at_once = False
        self._irreversible = False  # the step of this round was to be undone and could not be
        self._error: Exception | None = None
        self._sequence = 0
        self._asked: RoundVote | None = None
        self._votes: dict[str, RoundVote | None] = dict.fromkeys(followers)
        self._asks: list[tuple[str, RoundVote, Any]] = []

    def __repr__(self) -> str:
        state = "" if self.made is None else ", made and not confirmed"
        return (
            f"<RoundCoordinator: {len(self._reports)} of {self._due} have reported in round {self.number}{state}, "
            f"{len(self.expected)} expected>"
        )

    @property
    def version(self) -> int:
        return self.number + (self.made is not None)

    @property
    def known(self) -> set[str]:
        return {*self.members, *self._first, *self.expected}

    @property
    def unsure(self) -> bool:
        """Return whether this server was restarted and others may have finished a round that it does not know of."""
        return self._restored

    @property
    def _due(self) -> list[str]:
        return [trainer for trainer, first in self._first.items() if first <= self.number]

    # Trainers

    def announce(self, trainer: str) -> int:
        self._join(trainer)
        return self._first[trainer]

    def _join(self, trainer: str) -> None:
        if trainer not in self._first:
            back = trainer in self.expected
            self.expected.discard(trainer)
            begun = self.made is not None or (bool(self._reports) and not back)
            self._first[trainer] = self.number + begun

    def enter(self, trainer: str, first: int, future: Any) -> list[Decision]:
        self._add(trainer)
        self.expected.discard(trainer)
        self._first[trainer] = first
        return [*self._enter(trainer, first, future), *self.advance()]

    def resume(
        self, trainer: str, first: int, acknowledged: int, version: int, applied: Steps
    ) -> list[Decision]:
        self._add(trainer)
        self._join(trainer)
        decisions: list[Decision] = []
        # somebody was answered, so it was confirmed
        if self.made is not None and version > self.number:
            decisions += self._commit()
        if version > self.number:
            self.number = version
            self._new_round()
            if self._quorum is None:  # whoever reported in an earlier round is part of it
                applied = {**applied, **{each.trainer: each.step for each in self._earlier()}}
        self._merge_applied({**applied, trainer: max(acknowledged, applied.get(trainer, 0))})
        return [*decisions, *self._end_earlier(), *self.advance()]

    def leave(self, trainer: str) -> list[Decision]:
        self._remove(trainer)
        self._first.pop(trainer, None)
        self.expected.discard(trainer)
        if not self._promised and self.made is None:
            self._reports.pop(trainer, None)
        return self.advance()

    def report(self, report: StepReport) -> list[Decision]:
        self.check(report.trainer)
        made = self.made or {}
        counted = report.step <= self.applied.get(report.trainer, 0)
        # it comes again; the answer was lost
        if counted and made.get(report.trainer) != report.step:
            return [ReplyToReport(report)]
        if report.version < self.number:
            return [self._late(report)]
        before = self._reports.get(report.trainer)
        self._reports[report.trainer] = report
        superseded = (
            []
            if before is None
            else [FailReport(before.future, StaleReference("it was pushed again"))]
        )
        return [*superseded, *self.advance()]

    def restore(
        self, version: int, applied: Steps, expected: Iterable[str], made: Steps | None
    ) -> None:
        self.number = version
        self.applied = dict(applied)
        self._restored = True
        # the checkpoint has all that was acknowledged: nobody has to bring something first
        if self._exact:
            self._first = dict.fromkeys(expected, version)
        else:
            self.expected = set(expected)
        if self._confirm and made is not None and version > 0:
            self.number, self.made = version - 1, dict(made)
            self._made_before = True
            self._first = dict.fromkeys(expected, self.number)

    # Steps

    def advance(self) -> list[Decision]:
        admitted = self._admit()
        return [*admitted, *(self._follow() if self._follows else self._lead())]

    def _may_start(self, first: int) -> bool:
        return self.made is None and not self.expected and self.number >= first

    def _make(self, steps: Steps, at_once: bool) -> list[Decision]:
        self._making, self._at_once = dict(steps), at_once
        if self._irreversible:
            self.count_step(None)
            return self.after_step()
        return [MakeStep([self._reports[trainer] for trainer in steps])]

    def count_step(self, error: Exception | None) -> None:
        assert self._making is not None
        self.made, self._making = self._making, None
        self.applied.update(self.made)

    def after_step(self, error: Exception | None = None) -> list[Decision]:
        self._error = error
        if self._confirm and not self._at_once:
            return self.advance()
        return self._commit()

    def undone(self, applied: Steps | None) -> list[Decision]:
        """Go on after `UndoStep`. `applied` are the steps in the version before, or None if there is no way back."""
        self.made = None
        self._made_before = False
        if applied is None:
            self._irreversible = True
        else:
            self.applied = dict(applied)
        self._promised = False
        self._asked = None
        known = self.known
        self._reports = {
            trainer: each for trainer, each in self._reports.items() if trainer in known
        }
        return self.advance()

    def _commit(self) -> list[Decision]:
        assert self.made is not None
        made, self.made = self.made, None
        error, self._error = self._error, None
        self.number += 1
        # others may be ahead still
        self._restored = self._restored and (self._made_before or self._at_once)
        self._new_round()
        answers: list[Decision] = []
        for trainer, step in made.items():
            report = self._reports.get(trainer)
            if report is not None and report.step == step:
                del self._reports[trainer]
                answers.append(
                    ReplyToReport(report) if error is None else FailReport(report.future, error)
                )
        return [*answers, *self._end_earlier(), *self.advance()]

    def _new_round(self) -> None:
        self.made = None
        self._promised = self._irreversible = self._at_once = self._made_before = False
        self._asked = None

    def _earlier(self) -> list[StepReport]:
        return [report for report in self._reports.values() if report.version < self.number]

    def _end_earlier(self) -> list[Decision]:
        """Answer those who reported in rounds that are over."""
        over = self._earlier()
        for report in over:
            del self._reports[report.trainer]
        return [self._late(report) for report in over]

    def _late(self, report: StepReport) -> ReplyToReport:
        dropped = report.step > self.applied.get(report.trainer, 0)
        return ReplyToReport(report._replace(staleness=self.number - report.version), dropped)

    def _complete(self) -> Steps | None:
        """Return the reports that make up this round, or None while it is not complete.

        If there is nobody in this round and somebody in a later one, there are none, and the round is passed over.
        """
        if self.expected:
            return None
        held = {
            trainer: report.step
            for trainer, report in self._reports.items()
            if all(self._has(vote, trainer) for vote in self._votes.values())
        }
        due = self._due
        if not held:
            return {} if self._first and not due else None
        needed = len(due) if self._quorum is None else min(self._quorum, len(due))
        if self._quorum is None and not set(due).issubset(held):
            return None
        return held if len(held) >= needed else None

    def _has(self, vote: RoundVote | None, trainer: str) -> bool:
        """Return whether a follower has a report. One that is ahead has made its step."""
        if vote is None or vote.number < self.number:
            return False
        return vote.number > self.number or (vote.complete and trainer in vote.held)

    # The leader

    def hear(self, name: str, vote: RoundVote, future: Any) -> list[Decision]:
        """Take the vote of a follower."""
        before = self._votes.get(name)
        if before is not None and before.server == vote.server and before.sequence > vote.sequence:
            return [AnswerVote(future, RoundVerdict("outdated", self.number, {}))]
        self._votes[name] = vote
        self._asks.append((name, vote, future))
        return self.advance()

    def hear_of(self, name: str, server: str, number: int) -> list[Decision]:
        """Note that a follower is in this round, which matters if it has left this server behind."""
        before = self._votes.get(name)
        said_more = before is not None and before.server == server and before.number >= number
        if number <= self.number or said_more:
            return []
        self._votes[name] = RoundVote(server, 0, number, {})
        return self.advance()

    def forget(self, server: str) -> list[Decision]:
        """Note that a follower is dead, by its incarnation."""
        for name, vote in self._votes.items():
            if vote is not None and vote.server == server:
                self._votes[name] = None
        self._asks = [each for each in self._asks if each[1].server != server]
        return []

    def _lead(self) -> list[Decision]:
        decisions = self._answer_over()
        ahead = any(vote is not None and vote.number > self.number for vote in self._votes.values())
        if self.made is not None and ahead:
            return decisions + self._commit()
        made = [vote for vote in self._current_votes() if vote.made]
        if self.made is not None or (made and not ahead):
            return decisions + self._finish_made([vote.held for vote in made])
        steps = self._complete()
        if steps is None:
            return decisions
        if not steps:
            return decisions + self._pass_over()
        # A late vote of a dead follower may have replaced one of its next life, which does not have all reports.
        able = [vote for _, vote, _ in self._asks if steps.keys() <= vote.held.keys()]
        decisions += self._answer_votes("make", steps, able)
        return decisions + self._make(steps, at_once=ahead)

    def _current_votes(self) -> list[RoundVote]:
        return [
            vote for vote in self._votes.values() if vote is not None and vote.number == self.number
        ]

    def _finish_made(self, made: list[Steps]) -> list[Decision]:
        """Some servers have made the step of this round: let the others make it, or undo it if they cannot."""
        steps = self.made if self.made is not None else made[0]
        others = [vote for vote in self._current_votes() if not vote.made]
        differ = any(each != steps for each in made)
        mine = {trainer: report.step for trainer, report in self._reports.items()}
        cannot = any(_lacks(steps, vote.held, vote.known) for vote in others)
        if self.made is None:
            cannot = cannot or _lacks(steps, mine, self.known | mine.keys())
        if differ or cannot:
            return self._undo_all()
        able = [vote for vote in others if _holds(steps, vote.held)]
        decisions = self._answer_votes("make", steps, able)
        if self.made is None:
            return decisions + (self._make(steps, at_once=False) if _holds(steps, mine) else [])
        if all(
            vote is not None and vote.made and vote.number == self.number
            for vote in self._votes.values()
        ):
            return decisions + self._commit()
        return decisions

    def _undo_all(self) -> list[Decision]:
        made = [vote for vote in self._current_votes() if vote.made]
        decisions = self._answer_votes("undo", {}, made)
        for name, vote in self._votes.items():
            if vote in made:
                self._votes[name] = None
        if self.made is not None:
            return [*decisions, UndoStep(self.number)]
        return decisions

    def _pass_over(self) -> list[Decision]:
        """Go on with the next round that somebody is in, if all servers can: none has made a step of this one.

        A follower that is ahead can: this server has passed over the round before, and was restarted since.
        """
        ready = [
            vote is not None
            and (vote.number > self.number or (vote.number == self.number and vote.complete))
            for vote in self._votes.values()
        ]
        if self._confirm and not all(ready):
            return []
        self.number = min(self._first.values())
        self._new_round()
        return [*self._end_earlier(), *self.advance()]

    def _answer_votes(
        self, kind: str, steps: Steps, votes: list[RoundVote] | None = None
    ) -> list[Decision]:
        """Answer followers that wait in this round: all, or those with these votes."""
        answered = [
            ask
            for ask in self._asks
            if ask[1].number == self.number and (votes is None or ask[1] in votes)
        ]
        self._asks = [ask for ask in self._asks if ask not in answered]
        return [
            AnswerVote(future, RoundVerdict(kind, self.number, steps)) for _, _, future in answered
        ]

    def _answer_over(self) -> list[Decision]:
        over = [ask for ask in self._asks if ask[1].number < self.number]
        self._asks = [ask for ask in self._asks if ask not in over]
        return [
            AnswerVote(future, RoundVerdict("over", self.number, dict(self.applied)))
            for _, _, future in over
        ]

    # Followers

    @property
    def asking(self) -> RoundVote | None:
        """Return the vote that is not answered yet."""
        return self._asked

    def _follow(self) -> list[Decision]:
        """Vote, if there is something new to say."""
        complete: Steps | None = None
        if self.made is not None:
            held, known = self.made, frozenset[str]()
        else:
            complete = self._complete()
            if complete is None and not (self._confirm and self._restored):
                return []
            held = {trainer: report.step for trainer, report in self._reports.items()}
            known = frozenset({*self.known, *self._reports})
        made = self.made is not None
        vote = RoundVote(
            self._server,
            self._sequence,
            self.number,
            dict(held),
            known,
            made,
            made or complete is not None,
        )
        if vote == self._asked:
            return []
        self._sequence += 1
        self._promised = True
        self._asked = vote._replace(sequence=self._sequence)
        return [AskLeader(self._asked)]

    def answered(self, sequence: int, verdict: RoundVerdict) -> list[Decision]:
        """Take the leader's answer to a vote."""
        if self._asked is None or self._asked.sequence != sequence or verdict.kind == "outdated":
            return []
        if self.made is not None:
            return self._commit() if verdict.kind == "over" else [UndoStep(self.number)]
        if verdict.kind == "make":
            return self._make(verdict.steps, at_once=False)
        return self._catch_up(verdict)

    def _catch_up(self, verdict: RoundVerdict) -> list[Decision]:
        """Make the step of a round that is over elsewhere, of the reports that are still to be had."""
        steps = verdict.steps
        done = {trainer for trainer in steps if steps[trainer] > self.applied.get(trainer, 0)}
        if any(trainer in done and trainer not in self._reports for trainer in self.known):
            return []  # it will report here again, and then this server votes again
        counted = {
            trainer: report.step
            for trainer, report in self._reports.items()
            if report.step <= steps.get(trainer, 0)
        }
        if counted:
            return self._make(counted, at_once=True)
        self.number = verdict.number
        self._new_round()
        return [*self._end_earlier(), *self.advance()]


def coordinator(
    consistency: Consistency,
    trainers: int,
    followers: Sequence[str] = (),
    follows: bool = False,
    exact: bool = False,
    server: str = "",
) -> Coordinator:
    """Return the coordinator for a consistency rule."""
    if isinstance(consistency, Sync):
        return RoundCoordinator(consistency, trainers, followers, follows, exact, server)
    return ClockCoordinator(consistency, trainers)


def _holds(steps: Steps, held: Steps) -> bool:
    return all(held.get(trainer) == step for trainer, step in steps.items())


def _lacks(steps: Steps, held: Steps, known: Iterable[str]) -> bool:
    """Return whether a server misses one of these reports and no longer waits for its trainer."""
    return any(
        held.get(trainer) != step and (trainer not in known or trainer in held)
        for trainer, step in steps.items()
    )

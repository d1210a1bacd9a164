"""Rounds of `Sync`: what one server decides alone, and how the servers agree.

`RoundCoordinator` is what one server decides alone. Round n turns version n of the parameters into
version n + 1. Reports of a round are collected until the round is complete; then the servers agree
on its reports (`LeaderCoordinator`, `FollowerCoordinator`), make the step and reply.

| state of the round | `unconfirmed` | left by |
|---|---|---|
| open: reports are collected | None | the agreement of the servers: `MakeStep` |
| made: the step is in memory and on disk | its reports | confirmation (next round) or `UndoStep` |

A round is complete when no trainer is `expected` and every due trainer has reported, or a quorum of
them. A trainer is due from its first round on. `expected` are trainers that a restarted server
knows from its checkpoint and that have not returned. A round that no trainer is due in is skipped.

With one phase, `step_finished` confirms the step at once. With two phases (`exact`: every step is
on disk before it is acknowledged, and there are several servers), the step stays unconfirmed until
the leader knows that all servers have made it. Trainers get no reply before that, so nobody has
seen the new version, and it can be undone.

| report | decision |
|---|---|
| of a step that is applied and confirmed | reply: the first reply was lost |
| of a round that is over | reply; `dropped` if its gradients were not used |
| of the current round | keep it; a report that it replaces fails |

`LeaderCoordinator` runs on the first of several servers, or on the only one. The leader collects
the votes of its followers and decides for all servers. It answers the votes before it makes its own
step, so that all servers make their step at the same time.

| state of the servers in this round | decision |
|---|---|
| leader and all followers have a complete round | "make" the step of the reports that all have |
| some servers have made the step, others can | "make" the same step on the others |
| some have made it, another has lost a report of it for ever | "undo" it on all that have made it |
| all have made it (two phases) | confirm it; votes of the round are answered "over" |
| a follower is in a later round | make or confirm this round at once, without the others |
| the round has no trainer | skip it |
| a vote is for an earlier round | answer "over" |

A server has lost a report for ever if it was restarted and the trainer of the report has died. A
vote is outdated if a vote with a higher sequence number from the same incarnation has arrived.

`FollowerCoordinator` runs on every server but the first. A follower sends votes to the leader and
carries out the verdicts. It keeps the reports that a vote lists until it knows the verdict, even if
their trainers die.

| state | vote |
|---|---|
| the round is complete | the reports that this server has |
| the step of the round is made (two phases) | the reports that it was made of |
| restarted and not complete (two phases) | incomplete: the reports that it has so far |

| verdict | transition |
|---|---|
| "make" | make the step of these reports |
| "undo" | undo the step; the round is open again |
| "over", step made | confirm the step |
| "over", step not made | make the step of the reports that can still arrive, or skip the round |
| "outdated", or of an earlier vote | none |

Votes carry a sequence number. Only the verdict on the last vote counts, so verdicts may arrive in
any order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from telegrad.errors import StaleReference
from telegrad.ps.consistency import Sync
from telegrad.ps.messages import Steps
from telegrad.ps.server.coordinator import (
    AnswerVote,
    Coordinator,
    Decision,
    FailReport,
    MakeStep,
    ReplyToReport,
    RoundVerdict,
    RoundVote,
    SendVote,
    StepReport,
    UndoStep,
)


class RoundCoordinator(Coordinator):
    """Collect the reports of each round, make its step, and reply."""

    def __init__(self, consistency: Sync, trainers: int, exact: bool, two_phases: bool) -> None:
        super().__init__(trainers)
        self.round = 0
        # the reports of this round, while its step is made and not confirmed
        self.unconfirmed: Steps | None = None
        self.expected: set[str] = set()
        # the vote of a follower that has no answer yet; always None on the leader
        self.pending_vote: RoundVote | None = None
        # restored from a checkpoint, and other servers may have finished rounds after it
        self.may_be_behind = False
        self._quorum = consistency.quorum
        self._exact = exact
        self._two_phases = two_phases
        self._first_round: Steps = {}  # from which each trainer is due
        self._unconfirmed_from_checkpoint = False
        self._step_in_progress: Steps | None = None
        # the round is over on other servers, so its step here needs no confirmation
        self._confirm_at_once = False
        self._undo_failed = False  # the step of this round is still in memory
        self._step_error: Exception | None = None

    def __repr__(self) -> str:
        state = "" if self.unconfirmed is None else ", step made and not confirmed"
        return (
            f"<{type(self).__name__}: {len(self._reports)} of {self._due} have reported "
            f"in round {self.round}{state}, {len(self.expected)} expected>"
        )

    @property
    def version(self) -> int:
        return self.round + (self.unconfirmed is not None)

    @property
    def known(self) -> set[str]:
        return {*self.members, *self._first_round, *self.expected}

    @property
    def _due(self) -> list[str]:
        return [trainer for trainer, first in self._first_round.items() if first <= self.round]

    # Trainers

    def announce(self, trainer: str) -> int:
        self._choose_first_round(trainer)
        return self._first_round[trainer]

    def _choose_first_round(self, trainer: str) -> None:
        if trainer in self._first_round:
            return
        returns = trainer in self.expected
        self.expected.discard(trainer)
        # A new trainer does not delay a round that others have already reported in.
        under_way = self.unconfirmed is not None or (bool(self._reports) and not returns)
        self._first_round[trainer] = self.round + under_way

    def join(self, trainer: str, first: int, future: Any) -> list[Decision]:
        self._add_member(trainer)
        self.expected.discard(trainer)
        self._first_round[trainer] = first
        return [*self._add_joining(trainer, first, future), *self.advance()]

    def rejoin(
        self, trainer: str, first: int, acknowledged: int, version: int, applied: Steps
    ) -> list[Decision]:
        self._add_member(trainer)
        self._choose_first_round(trainer)
        decisions: list[Decision] = []
        # A trainer has seen the version, so all servers had confirmed it.
        if self.unconfirmed is not None and version > self.round:
            decisions += self._confirm()
        if version > self.round:
            self._start_round(version)
            # Without a quorum, every report of an earlier round is part of that round.
            if self._quorum is None:
                reported = {report.trainer: report.step for report in self._outdated_reports()}
                applied = {**applied, **reported}
        self._merge_applied({**applied, trainer: max(acknowledged, applied.get(trainer, 0))})
        return [*decisions, *self._reply_to_outdated_reports(), *self.advance()]

    def leave(self, trainer: str) -> list[Decision]:
        self._remove_member(trainer)
        self._first_round.pop(trainer, None)
        self.expected.discard(trainer)
        # After a vote, the leader may count on every report that the vote lists.
        if self.pending_vote is None and self.unconfirmed is None:
            self._reports.pop(trainer, None)
        return self.advance()

    def report(self, report: StepReport) -> list[Decision]:
        self.require_member(report.trainer)
        unconfirmed = self.unconfirmed or {}
        applied = report.step <= self.applied.get(report.trainer, 0)
        # The trainer repeats the step because the first reply was lost.
        if applied and unconfirmed.get(report.trainer) != report.step:
            return [ReplyToReport(report)]
        if report.version < self.round:
            return [self._late_reply(report)]
        replaced = self._reports.get(report.trainer)
        self._reports[report.trainer] = report
        if replaced is None:
            return self.advance()
        error = StaleReference("the trainer has reported this step again")
        return [FailReport(replaced.future, error), *self.advance()]

    def restore(
        self, version: int, applied: Steps, expected: Iterable[str], unconfirmed: Steps | None
    ) -> None:
        self.round = version
        self.applied = dict(applied)
        self.may_be_behind = True
        if self._exact:
            # The checkpoint has every acknowledged step, so no trainer must send values first.
            self._first_round = dict.fromkeys(expected, version)
        else:
            self.expected = set(expected)
        if self._two_phases and unconfirmed is not None and version > 0:
            self.round, self.unconfirmed = version - 1, dict(unconfirmed)
            self._unconfirmed_from_checkpoint = True
            self._first_round = dict.fromkeys(expected, self.round)

    # Steps

    def advance(self) -> list[Decision]:
        admitted = self._admit()
        return [*admitted, *self._agree()]

    @abstractmethod
    def _agree(self) -> list[Decision]:
        """Agree with the other servers on the current round, as far as possible now."""

    def _may_start(self, first: int) -> bool:
        return self.unconfirmed is None and not self.expected and self.round >= first

    def _make_step(self, steps: Steps, confirm_at_once: bool) -> list[Decision]:
        self._step_in_progress, self._confirm_at_once = dict(steps), confirm_at_once
        if self._undo_failed:
            self.step_applied(None)
            return self.step_finished()
        return [MakeStep([self._reports[trainer] for trainer in steps])]

    def step_applied(self, error: Exception | None) -> None:
        assert self._step_in_progress is not None
        self.unconfirmed, self._step_in_progress = self._step_in_progress, None
        self.applied.update(self.unconfirmed)

    def step_finished(self, error: Exception | None = None) -> list[Decision]:
        self._step_error = error
        if self._two_phases and not self._confirm_at_once:
            return self.advance()
        return self._confirm()

    def step_undone(self, applied: Steps | None) -> list[Decision]:
        """Continue after `UndoStep`.

        `applied` are the steps in the earlier version, or None if that version could not be read.
        """
        self.unconfirmed = None
        self._unconfirmed_from_checkpoint = False
        if applied is None:
            self._undo_failed = True
        else:
            self.applied = dict(applied)
        self.pending_vote = None
        # Reports of trainers that have left were kept for this step only.
        known = self.known
        for trainer in [trainer for trainer in self._reports if trainer not in known]:
            del self._reports[trainer]
        return self.advance()

    def _confirm(self) -> list[Decision]:
        """Finish the round: its step is final. Reply to its trainers and open the next round."""
        assert self.unconfirmed is not None
        steps, error = self.unconfirmed, self._step_error
        # After one of these, other servers may still be ahead.
        catching_up = self._unconfirmed_from_checkpoint or self._confirm_at_once
        self.may_be_behind = self.may_be_behind and catching_up
        self._step_error = None
        self._start_round(self.round + 1)
        replies: list[Decision] = []
        for trainer, step in steps.items():
            report = self._reports.get(trainer)
            if report is None or report.step != step:
                continue
            del self._reports[trainer]
            if error is None:
                replies.append(ReplyToReport(report))
            else:
                replies.append(FailReport(report.future, error))
        return [*replies, *self._reply_to_outdated_reports(), *self.advance()]

    def _start_round(self, number: int) -> None:
        self.round = number
        self.unconfirmed = None
        self.pending_vote = None
        self._undo_failed = False
        self._confirm_at_once = False
        self._unconfirmed_from_checkpoint = False

    def _outdated_reports(self) -> list[StepReport]:
        return [report for report in self._reports.values() if report.version < self.round]

    def _reply_to_outdated_reports(self) -> list[Decision]:
        """Reply to the reports of rounds that are over."""
        outdated = self._outdated_reports()
        for report in outdated:
            del self._reports[report.trainer]
        return [self._late_reply(report) for report in outdated]

    def _late_reply(self, report: StepReport) -> ReplyToReport:
        dropped = report.step > self.applied.get(report.trainer, 0)
        return ReplyToReport(report._replace(staleness=self.round - report.version), dropped)

    def _held_steps(self) -> Steps:
        """Return the steps that this server has reports of."""
        return {trainer: report.step for trainer, report in self._reports.items()}

    def _usable_steps(self) -> Steps:
        """Return the reported steps that this round may be made of."""
        return self._held_steps()

    def _complete_steps(self) -> Steps | None:
        """Return the steps that make up this round, or None while it is not complete.

        The result is empty if no trainer is due in this round and some trainer is in a later one.
        """
        if self.expected:
            return None
        usable = self._usable_steps()
        due = self._due
        if not usable:
            return {} if self._first_round and not due else None
        if self._quorum is None:
            return usable if usable.keys() >= set(due) else None
        return usable if len(usable) >= min(self._quorum, len(due)) else None


class _OpenVote(NamedTuple):
    """A vote that has no answer yet."""

    vote: RoundVote
    future: Any


class LeaderCoordinator(RoundCoordinator):
    """Decide each round for this server and its followers."""

    def __init__(
        self, consistency: Sync, trainers: int, exact: bool, followers: Sequence[str] = ()
    ) -> None:
        super().__init__(consistency, trainers, exact, two_phases=exact and bool(followers))
        self._votes: dict[str, RoundVote | None] = dict.fromkeys(followers)  # the last of each
        self._open_votes: list[_OpenVote] = []

    # Inputs

    def receive_vote(self, follower: str, vote: RoundVote, future: Any) -> list[Decision]:
        """Receive the vote of a follower; `future` is completed with the verdict."""
        last = self._votes.get(follower)
        if last is not None and last.server == vote.server and last.sequence > vote.sequence:
            return [AnswerVote(future, RoundVerdict("outdated", self.round, {}))]
        self._votes[follower] = vote
        self._open_votes.append(_OpenVote(vote, future))
        return self.advance()

    def receive_round(self, follower: str, server: str, number: int) -> list[Decision]:
        """Receive the number of a follower's round, which matters if it is ahead of this server."""
        last = self._votes.get(follower)
        known = last is not None and last.server == server and last.round >= number
        if number <= self.round or known:
            return []
        self._votes[follower] = RoundVote(server, 0, number, {})
        return self.advance()

    def remove_follower(self, server: str) -> None:
        """Forget the votes of a lost follower, given its incarnation."""
        for follower, vote in self._votes.items():
            if vote is not None and vote.server == server:
                self._votes[follower] = None
        self._open_votes = [each for each in self._open_votes if each.vote.server != server]

    # Decisions

    def _agree(self) -> list[Decision]:
        decisions = self._answer_votes_of_earlier_rounds()
        follower_ahead = any(
            vote is not None and vote.round > self.round for vote in self._votes.values()
        )
        if self.unconfirmed is not None and follower_ahead:
            return decisions + self._confirm()
        made = [vote for vote in self._current_votes() if vote.step_made]
        if self.unconfirmed is not None or (made and not follower_ahead):
            return decisions + self._finish_made_round([vote.reports for vote in made])
        steps = self._complete_steps()
        if steps is None:
            return decisions
        if not steps:
            return decisions + self._skip_empty_round()
        # A late vote of a lost follower may have replaced the vote of its next incarnation, which
        # does not have all reports.
        able = [each.vote for each in self._open_votes if steps.keys() <= each.vote.reports.keys()]
        decisions += self._answer_votes("make", steps, able)
        return decisions + self._make_step(steps, confirm_at_once=follower_ahead)

    def _usable_steps(self) -> Steps:
        return {
            trainer: report.step
            for trainer, report in self._reports.items()
            if all(self._has_report(vote, trainer) for vote in self._votes.values())
        }

    def _has_report(self, vote: RoundVote | None, trainer: str) -> bool:
        """Return whether a follower has a report, or has made the step of this round."""
        if vote is None or vote.round < self.round:
            return False
        return vote.round > self.round or (vote.complete and trainer in vote.reports)

    def _current_votes(self) -> list[RoundVote]:
        votes = self._votes.values()
        return [vote for vote in votes if vote is not None and vote.round == self.round]

    def _finish_made_round(self, made: list[Steps]) -> list[Decision]:
        """Some servers have made the step: let the others make it, or undo it if one cannot."""
        steps = self.unconfirmed if self.unconfirmed is not None else made[0]
        others = [vote for vote in self._current_votes() if not vote.step_made]
        held = self._held_steps()
        differ = any(each != steps for each in made)
        impossible = any(_has_lost(steps, vote.reports, vote.known) for vote in others)
        if self.unconfirmed is None:
            impossible = impossible or _has_lost(steps, held, self.known | held.keys())
        if differ or impossible:
            return self._undo_everywhere()
        able = [vote for vote in others if _has_all(steps, vote.reports)]
        decisions = self._answer_votes("make", steps, able)
        if self.unconfirmed is None:
            if _has_all(steps, held):
                decisions += self._make_step(steps, confirm_at_once=False)
        elif self._all_followers_made_step():
            decisions += self._confirm()
        return decisions

    def _all_followers_made_step(self) -> bool:
        return all(
            vote is not None and vote.step_made and vote.round == self.round
            for vote in self._votes.values()
        )

    def _undo_everywhere(self) -> list[Decision]:
        made = [vote for vote in self._current_votes() if vote.step_made]
        decisions = self._answer_votes("undo", {}, made)
        for follower, vote in self._votes.items():
            if vote in made:
                self._votes[follower] = None
        if self.unconfirmed is not None:
            decisions.append(UndoStep(self.round))
        return decisions

    def _skip_empty_round(self) -> list[Decision]:
        """Go to the next round that has a trainer, if no server can have made a step of this one.

        A follower that is ahead has not: this server skipped the round before it was restarted.
        """
        if self._two_phases and not all(map(self._allows_skip, self._votes.values())):
            return []
        self._start_round(min(self._first_round.values()))
        return [*self._reply_to_outdated_reports(), *self.advance()]

    def _allows_skip(self, vote: RoundVote | None) -> bool:
        if vote is None or vote.round < self.round:
            return False
        return vote.round > self.round or vote.complete

    def _answer_votes(self, kind: str, steps: Steps, votes: list[RoundVote]) -> list[Decision]:
        """Answer those of these votes that are open and of this round."""
        answered = [
            each
            for each in self._open_votes
            if each.vote.round == self.round and each.vote in votes
        ]
        return self._close_votes(answered, RoundVerdict(kind, self.round, steps))

    def _answer_votes_of_earlier_rounds(self) -> list[Decision]:
        over = [each for each in self._open_votes if each.vote.round < self.round]
        if not over:
            return []
        return self._close_votes(over, RoundVerdict("over", self.round, dict(self.applied)))

    def _close_votes(self, votes: list[_OpenVote], verdict: RoundVerdict) -> list[Decision]:
        self._open_votes = [each for each in self._open_votes if each not in votes]
        return [AnswerVote(each.future, verdict) for each in votes]


def _has_all(steps: Steps, reports: Steps) -> bool:
    return all(reports.get(trainer) == step for trainer, step in steps.items())


def _has_lost(steps: Steps, reports: Steps, known: Iterable[str]) -> bool:
    """Return whether a server lacks one of these reports and no longer waits for its trainer."""
    return any(
        reports.get(trainer) != step and (trainer not in known or trainer in reports)
        for trainer, step in steps.items()
    )


class FollowerCoordinator(RoundCoordinator):
    """Vote on each round and carry out the leader's verdict. `server` is this incarnation."""

    def __init__(self, consistency: Sync, trainers: int, exact: bool, server: str) -> None:
        super().__init__(consistency, trainers, exact, two_phases=exact)
        self._server = server
        self._sequence = 0

    def _agree(self) -> list[Decision]:
        """Vote, if the vote differs from the pending one."""
        if self.unconfirmed is not None:
            vote = self._vote(dict(self.unconfirmed), step_made=True)
        else:
            complete = self._complete_steps() is not None
            if not complete and not (self._two_phases and self.may_be_behind):
                return []
            known = frozenset({*self.known, *self._reports})
            vote = self._vote(self._held_steps(), known, complete=complete)
        if vote == self.pending_vote:
            return []
        self._sequence += 1
        self.pending_vote = vote._replace(sequence=self._sequence)
        return [SendVote(self.pending_vote)]

    def _vote(
        self,
        reports: dict[str, int],
        known: frozenset[str] = frozenset(),
        step_made: bool = False,
        complete: bool = True,
    ) -> RoundVote:
        return RoundVote(
            self._server, self._sequence, self.round, reports, known, step_made, complete
        )

    def receive_verdict(self, sequence: int, verdict: RoundVerdict) -> list[Decision]:
        """Receive the leader's answer to the vote with this sequence number."""
        pending = self.pending_vote
        if pending is None or pending.sequence != sequence or verdict.kind == "outdated":
            return []
        if self.unconfirmed is not None:
            return self._confirm() if verdict.kind == "over" else [UndoStep(self.round)]
        if verdict.kind == "make":
            return self._make_step(verdict.steps, confirm_at_once=False)
        return self._make_finished_round(verdict)

    def _make_finished_round(self, verdict: RoundVerdict) -> list[Decision]:
        """Make the step of a round that is over elsewhere, of the reports still available."""
        applied = verdict.steps
        missing = {
            trainer
            for trainer, step in applied.items()
            if step > self.applied.get(trainer, 0) and trainer not in self._reports
        }
        if missing & self.known:
            return []  # these trainers will report here again; then this server votes again
        steps = {
            trainer: report.step
            for trainer, report in self._reports.items()
            if report.step <= applied.get(trainer, 0)
        }
        if steps:
            return self._make_step(steps, confirm_at_once=True)
        self._start_round(verdict.round)
        return [*self._reply_to_outdated_reports(), *self.advance()]

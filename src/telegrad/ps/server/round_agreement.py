"""How several servers agree on the reports of each round of `Sync`.

`LeaderCoordinator` runs on the first of several servers. The leader collects the votes of its
followers and decides for all servers. It answers the votes before it makes its own step, so that
all servers make their step at the same time.

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

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from telegrad.ps.consistency import Sync
from telegrad.ps.messages import Steps
from telegrad.ps.server.coordinator import (
    AnswerVote,
    Decision,
    RoundVerdict,
    RoundVote,
    SendVote,
    UndoStep,
)
from telegrad.ps.server.round_coordinator import RoundCoordinator


class _OpenVote(NamedTuple):
    """A vote that has no answer yet."""

    vote: RoundVote
    future: Any


class LeaderCoordinator(RoundCoordinator):
    """Decide each round for this server and its followers."""

    def __init__(
        self, consistency: Sync, trainers: int, exact: bool, followers: Sequence[str]
    ) -> None:
        super().__init__(consistency, trainers, exact, two_phases=exact)
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
            return decisions + self._skip_round()
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

    def _skip_round(self) -> list[Decision]:
        """Skip this round if no server can have made a step of it.

        A follower that is ahead has not: this server skipped the round before it was restarted.
        """
        if self._two_phases and not all(map(self._allows_skip, self._votes.values())):
            return []
        return super()._skip_round()

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

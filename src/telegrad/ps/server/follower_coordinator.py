"""`FollowerCoordinator`: rounds on every server but the first.

A follower sends votes to the leader and carries out the verdicts. It keeps the reports that a vote
lists until it knows the verdict, even if their trainers die.

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

from telegrad.ps.consistency import Sync
from telegrad.ps.server.decisions import Decision, RoundVerdict, RoundVote, SendVote, UndoStep
from telegrad.ps.server.round_coordinator import RoundCoordinator


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

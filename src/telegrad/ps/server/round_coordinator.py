"""`RoundCoordinator`: decide for `Sync`, in rounds.

Round n turns version n of the parameters into version n + 1. Reports of a round are collected until
the round is complete. Then a single server makes the step and replies; several servers first agree
on the reports of the step (`round_agreement`).

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
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from telegrad.errors import StaleReference
from telegrad.ps.consistency import Sync
from telegrad.ps.messages import Steps
from telegrad.ps.server.coordinator import (
    UNKNOWN_TRAINER,
    Coordinator,
    Decision,
    FailReport,
    MakeStep,
    ReplyToReport,
    RoundVote,
    StepReport,
)


class RoundCoordinator(Coordinator):
    """Collect the reports of each round, make its step, and reply. For a single server."""

    def __init__(
        self, consistency: Sync, trainers: int, exact: bool, two_phases: bool = False
    ) -> None:
        super().__init__(trainers)
        self.round = 0
        # the reports of this round, while its step is made and not confirmed
        self.unconfirmed: Steps | None = None
        self.expected: set[str] = set()
        # the vote of a follower that has no answer yet; None on other servers
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
        if report.trainer not in self.members:
            raise StaleReference(UNKNOWN_TRAINER)
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
        admitted = self._admit() if self._joining else []
        return [*admitted, *self._agree()]

    def _agree(self) -> list[Decision]:
        """Make the step of the round if it is complete.

        With several servers, agree with the others on the round, as far as possible now.
        """
        steps = self._complete_steps()
        if steps is None:
            return []
        return self._make_step(steps, confirm_at_once=False) if steps else self._skip_round()

    def _skip_round(self) -> list[Decision]:
        """Go to the next round that has a trainer."""
        self._start_round(min(self._first_round.values()))
        return [*self._reply_to_outdated_reports(), *self.advance()]

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

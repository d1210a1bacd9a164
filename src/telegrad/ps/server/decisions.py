"""Messages that a coordinator receives and decisions that it returns.

All of them are immutable records without behaviour. `StepReport`, `RoundVote` and `RoundVerdict`
are inputs. A `Decision` is an output: `BaseShard` carries out each one, in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from telegrad.ps.messages import Steps


class StepReport(NamedTuple):
    """A step that a trainer reports to a server, and the call that waits for the reply."""

    trainer: str
    step: int
    version: int  # of the parameters that the gradients were computed with
    payload: Any  # the gradients and what else belongs to the step; coordinators do not read it
    future: Any
    staleness: int = 0


class RoundVote(NamedTuple):
    """A follower's state in its current round, which it sends to the leader."""

    server: str  # incarnation of the follower
    sequence: int
    round: int
    # the reports that the follower has or, if `step_made`, those that its step was made of
    reports: Steps
    known: frozenset[str] = frozenset()  # trainers that it waits for or has reports of
    step_made: bool = False
    complete: bool = True  # False: a restarted follower only lists the reports that it has


class RoundVerdict(NamedTuple):
    """The leader's answer to a vote.

    | kind | meaning | `steps` |
    |---|---|---|
    | "make" | make the step of these reports | the reports |
    | "undo" | undo the step of this round | empty |
    | "over" | the round is over; `round` is the leader's | the last applied step of each trainer |
    | "outdated" | a newer vote of this follower has arrived | empty |
    """

    kind: str
    round: int
    steps: Steps


class MakeStep(NamedTuple):
    """Apply these reports, which may be none. Then call `step_applied` and `step_finished`."""

    reports: list[StepReport]


class UndoStep(NamedTuple):
    """Go back to this version. Then call `step_undone`."""

    version: int


class ReplyToReport(NamedTuple):
    """Reply to a report with the current version. `dropped`: its gradients were not used."""

    report: StepReport
    dropped: bool = False


class FailReport(NamedTuple):
    """Complete the call of a trainer with an error."""

    future: Any
    error: Exception


class AdmitTrainer(NamedTuple):
    """Reply to a trainer that joins: it may start."""

    trainer: str
    future: Any


class SendVote(NamedTuple):
    """Send a vote to the leader. Repeat until it is answered or no longer pending."""

    vote: RoundVote


class AnswerVote(NamedTuple):
    """Answer the vote of a follower."""

    future: Any
    verdict: RoundVerdict


Decision = MakeStep | UndoStep | ReplyToReport | FailReport | AdmitTrainer | SendVote | AnswerVote

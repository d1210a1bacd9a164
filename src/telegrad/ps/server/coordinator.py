"""`Coordinator`: decide who trains, which reports make a step, and when each call is answered.

A coordinator is a state machine without locks, threads, tensors, files or clock. Its owner
(`BaseShard`) calls one method per input and carries out the decisions that the method returns, in
order. A decision is final: the owner carries it out even if something else, such as writing a
checkpoint, fails.

| input | method | decisions that may follow |
|---|---|---|
| a trainer will join | `announce` | none; it returns the first round, or the start clock |
| a trainer joins | `join` | `AdmitTrainer`, now or later |
| a trainer returns to a restarted server | `rejoin` | replies to reports of earlier rounds |
| a trainer leaves or is lost | `leave` | `MakeStep`, replies: others may have waited for it |
| a trainer reports a step | `report` | `MakeStep`, `ReplyToReport`, now or later |
| `MakeStep` was applied | `step_applied`, then `step_finished` | `ReplyToReport`, `FailReport` |

After `MakeStep`, the owner calls `step_applied` and `step_finished` before any other input. Between
the two calls it publishes and saves the new version.

Inputs and decisions are immutable records without behaviour. `StepReport`, `RoundVote` and
`RoundVerdict` are inputs. A `Decision` is an output.

`RoundCoordinator` implements `Sync`; `LeaderCoordinator` and `FollowerCoordinator` agree with other
servers besides (`round_agreement`). `ClockCoordinator` implements `Async` and `Stale`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

from telegrad.errors import StaleReference
from telegrad.ps.messages import Steps, worker_of

UNKNOWN_TRAINER = (
    "this server does not know the trainer: the server was restarted, or the worker of the trainer "
    "was lost. Close the optimizer and make a new one"
)


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


class _JoiningTrainer(NamedTuple):
    trainer: str
    first: int
    future: Any


class Coordinator(ABC):
    """State that all rules share: the members, their applied steps, and who waits to start."""

    def __init__(self, trainers: int) -> None:
        self.members: set[str] = set()
        self.applied: Steps = {}  # the last step of each trainer that is part of the version
        self.started = False
        self._required_trainers = trainers  # that must have joined before anyone starts
        self._ever_joined: set[str] = set()
        self._joining: list[_JoiningTrainer] = []
        self._reports: dict[str, StepReport] = {}  # without a reply, by trainer

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of the parameters in memory."""

    @property
    def known(self) -> set[str]:
        """Return the trainers that take part or are waited for."""
        return set(self.members)

    @property
    def waiting(self) -> list[str]:
        """Return the trainers that have reported and have no reply."""
        return list(self._reports)

    def trainers_of(self, worker: str) -> list[str]:
        """Return the known trainers of a worker, given its incarnation."""
        return [trainer for trainer in self.known if worker_of(trainer) == worker]

    def require_member(self, trainer: str) -> None:
        """Raise `StaleReference` if the trainer is not a member."""
        if trainer not in self.members:
            raise StaleReference(UNKNOWN_TRAINER)

    @abstractmethod
    def announce(self, trainer: str) -> int:
        """Record that a trainer will join. Return the first round, or clock, it may start with."""

    @abstractmethod
    def join(self, trainer: str, first: int, future: Any) -> list[Decision]:
        """Let a trainer take part from round, or with clock, `first`."""

    @abstractmethod
    def rejoin(
        self, trainer: str, first: int, acknowledged: int, version: int, applied: Steps
    ) -> list[Decision]:
        """Let a trainer take part again after this server was restarted.

        If `version` is newer than the one here, the owner has already copied the trainer's values,
        and `applied` lists the steps that they contain.
        """

    @abstractmethod
    def leave(self, trainer: str) -> list[Decision]:
        """Stop waiting for a trainer."""

    @abstractmethod
    def report(self, report: StepReport) -> list[Decision]:
        """Receive a report. A step that is reported again counts once."""

    @abstractmethod
    def step_applied(self, error: Exception | None) -> None:
        """Count the step that `MakeStep` asked for. `error`: it failed."""

    @abstractmethod
    def step_finished(self, error: Exception | None = None) -> list[Decision]:
        """Continue after the step was counted, published and saved. Trainers get the `error`."""

    @abstractmethod
    def restore(
        self, version: int, applied: Steps, expected: Iterable[str], unconfirmed: Steps | None
    ) -> None:
        """Start from a checkpoint.

        `expected` are the trainers of the checkpoint. `unconfirmed` are the reports of its last
        step if other servers may not have made that step.
        """

    def advance(self) -> list[Decision]:
        """Return the decisions that follow from the current state."""
        return self._admit()

    def starts_with(self, trainer: str) -> bool:
        """Return whether training has started, or starts when this trainer joins."""
        return self.started or len(self._ever_joined | {trainer}) >= self._required_trainers

    def _add_member(self, trainer: str) -> None:
        self.started = self.starts_with(trainer)
        self.members.add(trainer)
        self._ever_joined.add(trainer)

    def _remove_member(self, trainer: str) -> None:
        self.members.discard(trainer)
        self._joining = [each for each in self._joining if each.trainer != trainer]

    def _add_joining(self, trainer: str, first: int, future: Any) -> list[Decision]:
        """Let a trainer wait for its start.

        The trainer joins again if another server was restarted; its earlier call then fails.
        """
        earlier = [each for each in self._joining if each.trainer == trainer]
        self._joining = [each for each in self._joining if each.trainer != trainer]
        self._joining.append(_JoiningTrainer(trainer, first, future))
        error = StaleReference("the trainer has joined again")
        return [FailReport(each.future, error) for each in earlier]

    def _admit(self) -> list[Decision]:
        """Admit the joining trainers that may start now."""
        if not self.started:
            return []
        ready = [each for each in self._joining if self._may_start(each.first)]
        self._joining = [each for each in self._joining if each not in ready]
        return [AdmitTrainer(each.trainer, each.future) for each in ready]

    def _may_start(self, first: int) -> bool:
        return True

    def _merge_applied(self, applied: Steps) -> None:
        for trainer, step in applied.items():
            self.applied[trainer] = max(self.applied.get(trainer, 0), step)

"""`BaseShard`: what one server holds of something that trainers train together: who they are, rounds, and checkpoints.

A `Coordinator` decides; this carries its decisions out. Classes that derive from it know what is trained. State, all of
it under `_lock`: the coordinator, and `_saved`. Futures are completed after the lock is released.

Rule: every decision of the coordinator is carried out. What fails on the way (a step, a checkpoint, an answer) becomes
an answer to those who wait or a problem that is logged and told to the trainers; it never keeps another decision from
being carried out.
"""

from __future__ import annotations

import logging
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from telegrad.futures import Future
from telegrad.ps.consistency import Consistency
from telegrad.ps.messages import PushReply, Steps
from telegrad.ps.server.checkpoint import CheckpointArchive, ShardSnapshot
from telegrad.ps.server.coordinator import (
    AdmitTrainer,
    AnswerVote,
    AskLeader,
    Decision,
    FailReport,
    MakeStep,
    ReplyToReport,
    RoundCoordinator,
    RoundVerdict,
    RoundVote,
    StepReport,
    UndoStep,
    coordinator,
)

_log = logging.getLogger(__name__)

Action = Callable[[], None]


class ServerRole(NamedTuple):
    """What a server is among those that hold parts of the same thing."""

    server: str = ""  # its incarnation
    followers: Sequence[str] = ()  # if it is the first: the names of the others
    ask: Callable[[RoundVote], None] | None = None  # if it is another: send a vote to the first


SINGLE_SERVER = ServerRole()


class BaseShard(ABC):
    """`run` names the group of workers; a snapshot of the same run brings back the trainers that took part."""

    def __init__(
        self,
        consistency: Consistency,
        trainers: int,
        run: str,
        archive: CheckpointArchive | None,
        role: ServerRole = SINGLE_SERVER,
    ) -> None:
        self._run = run
        self._archive = archive
        self._lock = threading.Lock()
        self._ask = role.ask
        follows = role.ask is not None
        exact = archive is not None and archive.rule.exact
        self._coordinator = coordinator(
            consistency, trainers, role.followers, follows, exact, role.server
        )
        self._saved = -1  # the last version that was given to the archive

    @property
    def version(self) -> int:
        """The number of steps made."""
        return self._coordinator.version

    @property
    def waiting(self) -> list[str]:
        """Who has reported and is not answered."""
        return self._coordinator.waiting

    @property
    def members(self) -> set[str]:
        return self._coordinator.members

    @property
    def known(self) -> set[str]:
        """Everybody who takes part or is waited for."""
        with self._lock:
            return self._coordinator.known

    # What is trained, under the lock

    @abstractmethod
    def apply(self, reports: list[StepReport]) -> None:
        """Make a step of the reports of a round, which may be none, or, without rounds, of one."""

    @abstractmethod
    def _snapshot(self) -> ShardSnapshot:
        """Return copies of what is here now."""

    @abstractmethod
    def _load(self, snapshot: ShardSnapshot) -> None:
        """Take over the contents of a snapshot."""

    def answer(self, report: StepReport) -> PushReply:
        """Return the answer to a report."""
        return PushReply(self.version, report.staleness)

    def welcome(self, trainer: str) -> Any:
        """Return the answer to a trainer that joins."""
        return PushReply(self.version)

    def _publish(self) -> None:  # noqa: B027 - most have nothing to publish
        """Let trainers see the current version, or be ready for others to come or go."""

    # Trainers

    def leave(self, trainer: str) -> None:
        """Do not wait for a trainer any more. What it reported in an unfinished round is dropped."""
        with self._lock:
            was_member = trainer in self._coordinator.members
            self._forget_trainer(trainer)
            actions = self._carry_out(self._coordinator.leave(trainer))
            self._publish()
            if was_member:
                self._note_members()
        run_actions(actions)

    def _forget_trainer(self, trainer: str) -> None:  # noqa: B027 - or nothing to forget
        """Let go of what is kept for a trainer."""

    def lose(self, worker: str) -> None:
        """Forget a dead worker, by its incarnation: every trainer there, or a server that follows this one."""
        with self._lock:
            trainers = self._coordinator.of(worker)
            if isinstance(self._coordinator, RoundCoordinator):
                self._coordinator.forget(worker)
        for trainer in trainers:
            self.leave(trainer)

    def has_member(self, trainer: str) -> bool:
        with self._lock:
            return trainer in self._coordinator.members

    def _enter(self, trainer: str, first: int, future: Future[Any]) -> list[Action]:
        actions = self._carry_out(self._coordinator.enter(trainer, first, future))
        self._publish()
        self._note_members()
        return actions

    def _resume(
        self, trainer: str, first: int, acknowledged: int, version: int, applied: Steps
    ) -> list[Action]:
        actions = self._carry_out(
            self._coordinator.resume(trainer, first, acknowledged, version, applied)
        )
        self._publish()
        self._note_members()
        return actions

    # Other servers

    def start(self) -> None:
        """Begin to talk to other servers, once they can find this."""
        with self._lock:
            actions = self._carry_out(self._coordinator.advance())
        run_actions(actions)

    def hear(self, name: str, vote: RoundVote) -> Future[RoundVerdict]:
        """Take the vote of a follower; the answer comes when there is a decision."""
        future: Future[RoundVerdict] = Future()
        with self._lock:
            actions = self._carry_out(self._rounds.hear(name, vote, future))
        run_actions(actions)
        return future

    def hear_of(self, name: str, server: str, number: int) -> None:
        """Note that a follower is in this round."""
        with self._lock:
            actions = self._carry_out(self._rounds.hear_of(name, server, number))
        run_actions(actions)

    def answered(self, sequence: int, verdict: RoundVerdict) -> None:
        """Take the leader's answer to a vote."""
        with self._lock:
            actions = self._carry_out(self._rounds.answered(sequence, verdict))
        run_actions(actions)

    def is_asking(self, vote: RoundVote) -> bool:
        """Return whether this vote still waits for its answer."""
        with self._lock:
            return self._rounds.asking == vote

    @property
    def round(self) -> int:
        """The number of the round that is open here."""
        with self._lock:
            return self._rounds.number

    @property
    def unsure(self) -> bool:
        """Was this server restarted, and may others have finished a round since that it does not know of?"""
        with self._lock:
            return isinstance(self._coordinator, RoundCoordinator) and self._coordinator.unsure

    @property
    def _rounds(self) -> RoundCoordinator:
        assert isinstance(self._coordinator, RoundCoordinator)
        return self._coordinator

    # Decisions, under the lock

    def _carry_out(self, decisions: list[Decision]) -> list[Action]:
        """Carry out decisions in order, and those that follow from them. Return what is left for after the lock."""
        actions: list[Action] = []
        left = deque(decisions)
        while left:
            decision = left.popleft()
            if isinstance(decision, MakeStep):
                left.extendleft(reversed(self._make_step(decision.reports)))
            elif isinstance(decision, UndoStep):
                left.extendleft(reversed(self._undo(decision.version)))
            # now, so that all servers make their step at the same time
            elif isinstance(decision, AnswerVote):
                _complete(decision.future, decision.verdict)
            elif isinstance(decision, ReplyToReport):
                actions.append(
                    self._result(decision.report.future, partial(self._answer, decision))
                )
            elif isinstance(decision, AdmitTrainer):
                actions.append(
                    self._result(decision.future, partial(self.welcome, decision.trainer))
                )
            elif isinstance(decision, FailReport):
                actions.append(_failing(decision.future, decision.error))
            elif isinstance(decision, AskLeader):
                assert self._ask is not None
                actions.append(partial(self._ask, decision.vote))
        return actions

    def _make_step(self, reports: list[StepReport]) -> list[Decision]:
        error: Exception | None = None
        try:
            self.apply(reports)
        except Exception as problem:
            error = problem
        self._coordinator.count_step(error)
        try:
            self._publish()
            self._save_if_due()
        except Exception as problem:
            error = error or problem
        return self._coordinator.after_step(error)

    def _undo(self, version: int) -> list[Decision]:
        """Go back to a version that was saved."""
        archive = self._archive
        snapshot = None if archive is None else archive.find(version)
        if archive is None or snapshot is None:
            _log.error(
                "a step that other servers cannot make is kept, because there is no readable checkpoint of version "
                "%s; the servers may differ by the gradients of a trainer that died",
                version,
            )
            return self._rounds.undone(None)
        self._load(snapshot)
        archive.clear(after=version)
        self._saved = version
        decisions = self._rounds.undone(snapshot.applied)
        self._publish()
        return decisions

    def _answer(self, reply: ReplyToReport) -> PushReply:
        answer = self.answer(reply.report)
        problem = None if self._archive is None else self._archive.problem
        if reply.dropped or problem is not None:
            answer = answer._replace(dropped=reply.dropped, problem=problem)
        return answer

    def _result(self, future: Any, make: Callable[[], Any]) -> Action:
        """Return an action that completes a future with a value that is made now."""
        try:
            return partial(_complete, future, make())
        except Exception as error:
            return _failing(future, error)

    # Checkpoints

    def save(self) -> None:
        """Put what is here now into the archive."""
        with self._lock:
            self._save()

    def save_first(self) -> None:
        """Write the first checkpoint, without which a restarted server would have nothing; raise if it cannot be."""
        with self._lock:
            if self._archive is not None and self.version != self._saved:
                self._archive.write_now(self._snapshot())
                self._saved = self.version

    def close(self) -> None:
        """Save everything before the worker leaves, and wait until that is on disk."""
        if self._archive is not None:
            self.save()
            self._archive.finish()

    def _restore(self, snapshot: ShardSnapshot, expected: Sequence[str], started: bool) -> None:
        """Begin with the version of a snapshot. Of the same run, the trainers that took part are waited for."""
        same = snapshot.run == self._run
        made = snapshot.round if same else None
        self._coordinator.restore(
            snapshot.version, snapshot.applied if same else {}, expected if same else (), made
        )
        self._coordinator.started = same and started
        self._saved = snapshot.version

    def _save(self) -> None:
        if self._archive is not None and self.version != self._saved:
            try:
                self._archive.save(self._snapshot())
            except Exception as error:
                self._archive.fail(error)
            self._saved = self.version

    def _save_if_due(self) -> None:
        if self._archive is not None and self.version % self._archive.rule.every == 0:
            self._save()

    def _note_members(self) -> None:
        if self._archive is not None:
            self._archive.note_members(self._coordinator.known, self._coordinator.started)
            if not self._coordinator.members:
                self._save()

    @property
    def _last_round(self) -> Steps | None:
        """The reports that the last step was made of, if it can still be undone."""
        return self._coordinator.made if isinstance(self._coordinator, RoundCoordinator) else None


def run_actions(actions: list[Action]) -> None:
    """Take all actions, not under a lock."""
    for action in actions:
        try:
            action()
        except Exception:
            _log.exception("an answer of a parameter server could not be given")


def _complete(future: Any, value: Any) -> None:
    future.set_result(value)


def _failing(future: Any, error: Exception) -> Action:
    traceback.clear_frames(error.__traceback__)  # a future is no place to keep gradients alive
    return partial(future.set_exception, error)

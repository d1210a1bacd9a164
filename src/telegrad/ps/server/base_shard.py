"""`BaseShard`: the part of a model or of tables that one server holds, and how its decisions run.

A `Coordinator` decides; `BaseShard` carries the decisions out. Subclasses know what is trained. A
report takes one path, in one direction:

    service.push -> ParameterShard.push -> Coordinator.report -> [Decision, ...]
                                           BaseShard._carry_out (under the lock)
                                               MakeStep       apply, publish, save
                                               AnswerVote     complete the call of the follower
                                               ReplyToReport  build the reply
                                           run_actions (after the lock): complete the calls

When a step has been made or undone, `_carry_out` tells the coordinator, and the decisions that the
coordinator returns run next. Nothing else calls the coordinator from inside a decision.

State, all of it under `_lock`: the coordinator, `_staleness` and `_saved_version`. Calls of
trainers are completed after the lock is released.

Rule: every decision is carried out. An error on the way (in a step, a checkpoint or a reply) is
sent to the trainers that wait, or is logged and reported to the trainers as a problem. It never
prevents another decision from being carried out.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from telegrad.futures import Future
from telegrad.ps.consistency import Consistency, Sync
from telegrad.ps.messages import PushReply, Steps
from telegrad.ps.server.checkpoint import CheckpointArchive, ShardSnapshot
from telegrad.ps.server.clock_coordinator import ClockCoordinator
from telegrad.ps.server.coordinator import (
    AdmitTrainer,
    AnswerVote,
    Coordinator,
    Decision,
    FailReport,
    MakeStep,
    ReplyToReport,
    RoundVerdict,
    RoundVote,
    StepReport,
    UndoStep,
)
from telegrad.ps.server.round_agreement import FollowerCoordinator, LeaderCoordinator
from telegrad.ps.server.round_coordinator import RoundCoordinator

_log = logging.getLogger(__name__)

Action = Callable[[], None]


class ServerRole(NamedTuple):
    """The role of a server among those that hold shards of the same model or tables."""

    incarnation: str = ""
    followers: Sequence[str] = ()  # names of the other servers, if this one leads
    send_vote: Callable[[RoundVote], None] | None = None  # to the leader, if this one follows


SINGLE_SERVER = ServerRole()


def make_coordinator(
    consistency: Consistency, trainers: int, role: ServerRole, exact: bool
) -> Coordinator:
    """Return the coordinator for a consistency rule and the role of this server."""
    if not isinstance(consistency, Sync):
        return ClockCoordinator(consistency, trainers)
    if role.send_vote is not None:
        return FollowerCoordinator(consistency, trainers, exact, role.incarnation)
    if role.followers:
        return LeaderCoordinator(consistency, trainers, exact, role.followers)
    return RoundCoordinator(consistency, trainers, exact)


class BaseShard(ABC):
    """Members, rounds and checkpoints of a shard.

    `run` names the group of workers. A checkpoint of the same run restores the members, too.
    """

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
        self._send_vote = role.send_vote
        exact = archive is not None and archive.policy.exact
        self._coordinator = make_coordinator(consistency, trainers, role, exact)
        self._saved_version = -1  # the last version that was given to the archive
        self._staleness: dict[str, int] = {}  # of the last step of each trainer
        # takes seconds, `version` and `reports` of each step, once the shard is in a registry
        self.record_step: Callable[..., None] | None = None

    @property
    def version(self) -> int:
        """The number of steps made."""
        return self._coordinator.version

    @property
    def waiting(self) -> list[str]:
        """The trainers that have reported and have no reply."""
        return self._coordinator.waiting

    @property
    def members(self) -> set[str]:
        """The trainers that take part."""
        return self._coordinator.members

    def staleness(self) -> dict[str, int]:
        """Return the staleness of the last step of each trainer that takes part, without a lock."""
        members = self.members.copy()
        return {name: value for name, value in self._staleness.copy().items() if name in members}

    @property
    def known(self) -> set[str]:
        """The trainers that take part or are waited for."""
        with self._lock:
            return self._coordinator.known

    def has_member(self, trainer: str) -> bool:
        """Return whether a trainer takes part."""
        with self._lock:
            return trainer in self._coordinator.members

    # What subclasses define; all of it is called under the lock

    @abstractmethod
    def apply(self, reports: list[StepReport]) -> None:
        """Make one step of these reports: those of a round, maybe none, or a single one."""

    @abstractmethod
    def _snapshot(self) -> ShardSnapshot:
        """Return copies of the current contents."""

    @abstractmethod
    def _load(self, snapshot: ShardSnapshot) -> None:
        """Replace the contents by those of a snapshot."""

    def reply_to_report(self, report: StepReport) -> PushReply:
        """Return the reply to a report."""
        return PushReply(self.version, report.staleness)

    def reply_to_join(self, trainer: str) -> Any:
        """Return the reply to a trainer that joins."""
        return PushReply(self.version)

    def _publish(self) -> None:  # noqa: B027 - optional
        """Publish the current version. Called after every step and every change of members."""

    def _forget_trainer(self, trainer: str) -> None:  # noqa: B027 - optional
        """Release what is kept for a trainer."""

    # Inputs from trainers

    def leave(self, trainer: str) -> None:
        """Stop waiting for a trainer. Its report in an unfinished round is dropped."""
        with self._lock:
            was_member = trainer in self._coordinator.members
            self._forget_trainer(trainer)
            actions = self._carry_out(self._coordinator.leave(trainer))
            self._publish()
            if was_member:
                self._save_members()
        run_actions(actions)

    def remove_worker(self, worker: str) -> None:
        """Remove the trainers, or the follower, of a lost worker, given its incarnation."""
        with self._lock:
            trainers = self._coordinator.trainers_of(worker)
            if isinstance(self._coordinator, LeaderCoordinator):
                self._coordinator.remove_follower(worker)
        for trainer in trainers:
            self.leave(trainer)

    def _join(self, trainer: str, first: int, future: Future[Any]) -> list[Action]:
        """Let a trainer join. Raise `UsageError` if it cannot be added to the list on disk.

        A restarted server that does not find a trainer in the list makes rounds without it.
        """
        coordinator = self._coordinator
        if self._archive is not None and isinstance(coordinator, RoundCoordinator):
            members = coordinator.known | {trainer}
            self._archive.write_members_now(members, coordinator.starts_with(trainer))
        return self._change_members(self._coordinator.join(trainer, first, future))

    def _rejoin(
        self, trainer: str, first: int, acknowledged: int, version: int, applied: Steps
    ) -> list[Action]:
        return self._change_members(
            self._coordinator.rejoin(trainer, first, acknowledged, version, applied)
        )

    def _change_members(self, decisions: list[Decision]) -> list[Action]:
        actions = self._carry_out(decisions)
        self._publish()
        self._save_members()
        return actions

    # Inputs from other servers

    def start(self) -> None:
        """Start to vote. Call it when other servers can find this shard."""
        self._process(self._coordinator.advance)

    def receive_vote(self, follower: str, vote: RoundVote) -> Future[RoundVerdict]:
        """Receive the vote of a follower. The future is completed with the verdict."""
        assert isinstance(self._coordinator, LeaderCoordinator)
        future: Future[RoundVerdict] = Future()
        self._process(self._coordinator.receive_vote, follower, vote, future)
        return future

    def receive_round(self, follower: str, server: str, number: int) -> None:
        """Receive the number of the round that a follower is in."""
        assert isinstance(self._coordinator, LeaderCoordinator)
        self._process(self._coordinator.receive_round, follower, server, number)

    def receive_verdict(self, sequence: int, verdict: RoundVerdict) -> None:
        """Receive the leader's answer to a vote."""
        assert isinstance(self._coordinator, FollowerCoordinator)
        self._process(self._coordinator.receive_verdict, sequence, verdict)

    def is_vote_pending(self, vote: RoundVote) -> bool:
        """Return whether this vote still waits for its answer."""
        with self._lock:
            return self._rounds.pending_vote == vote

    @property
    def current_round(self) -> int:
        """The number of the round that is open here."""
        with self._lock:
            return self._rounds.round

    @property
    def may_be_behind(self) -> bool:
        """Whether this server was restarted and others may have finished rounds since."""
        with self._lock:
            coordinator = self._coordinator
            return isinstance(coordinator, RoundCoordinator) and coordinator.may_be_behind

    @property
    def _rounds(self) -> RoundCoordinator:
        assert isinstance(self._coordinator, RoundCoordinator)
        return self._coordinator

    def _process(self, receive: Callable[..., list[Decision]], *args: Any) -> None:
        """Pass one input to the coordinator and carry out its decisions."""
        with self._lock:
            actions = self._carry_out(receive(*args))
        run_actions(actions)

    # Decisions, under the lock

    def _carry_out(self, decisions: list[Decision]) -> list[Action]:
        """Carry out decisions in order, and those that follow from them.

        Return the actions that must run after the lock is released.
        """
        actions: list[Action] = []
        remaining = deque(decisions)
        while remaining:
            decision = remaining.popleft()
            if isinstance(decision, MakeStep):
                remaining.extendleft(reversed(self._make_step(decision.reports)))
            elif isinstance(decision, UndoStep):
                remaining.extendleft(reversed(self._undo_step(decision.version)))
            elif isinstance(decision, AnswerVote):
                # Under the lock, so that followers make their step while this server makes its own.
                _complete(decision.future, decision.verdict)
            elif isinstance(decision, ReplyToReport):
                self._staleness[decision.report.trainer] = decision.report.staleness
                make_reply = partial(self._push_reply, decision)
                actions.append(_completion(decision.report.future, make_reply))
            elif isinstance(decision, AdmitTrainer):
                make_reply = partial(self.reply_to_join, decision.trainer)
                actions.append(_completion(decision.future, make_reply))
            elif isinstance(decision, FailReport):
                actions.append(_failure(decision.future, decision.error))
            else:
                assert self._send_vote is not None
                actions.append(partial(self._send_vote, decision.vote))
        return actions

    def _make_step(self, reports: list[StepReport]) -> list[Decision]:
        error: Exception | None = None
        started = time.monotonic()
        try:
            self.apply(reports)
        except Exception as problem:
            error = problem
        self._coordinator.step_applied(error)
        try:
            self._publish()
            self._save_if_due()
        except Exception as problem:
            error = error or problem
        if self.record_step is not None:
            seconds = time.monotonic() - started
            self.record_step(seconds, version=self.version, reports=len(reports))
        return self._coordinator.step_finished(error)

    def _undo_step(self, version: int) -> list[Decision]:
        """Go back to a saved version."""
        archive = self._archive
        snapshot = None if archive is None else archive.find(version)
        if archive is None or snapshot is None:
            _log.error(
                "a step that other servers cannot make is kept, because there is no readable "
                "checkpoint of version %s; the servers may differ by the gradients of a trainer "
                "that died",
                version,
            )
            return self._rounds.step_undone(None)
        self._load(snapshot)
        archive.clear(after=version)
        self._saved_version = version
        decisions = self._rounds.step_undone(snapshot.applied)
        self._publish()
        return decisions

    def _push_reply(self, decision: ReplyToReport) -> PushReply:
        reply = self.reply_to_report(decision.report)
        problem = None if self._archive is None else self._archive.problem
        if decision.dropped or problem is not None:
            reply = reply._replace(dropped=decision.dropped, problem=problem)
        return reply

    # Checkpoints

    def save(self) -> None:
        """Save the current version."""
        with self._lock:
            self._save()

    def save_first(self) -> None:
        """Write the first checkpoint. Raise `UsageError` if that fails.

        Without it, a restarted server would have nothing to start from.
        """
        with self._lock:
            if self._archive is not None and self.version != self._saved_version:
                self._archive.write_now(self._snapshot())
                self._saved_version = self.version

    def close(self) -> None:
        """Save the current version and wait until it is on disk."""
        if self._archive is not None:
            self.save()
            self._archive.finish()

    def _restore(self, snapshot: ShardSnapshot, expected: Sequence[str], started: bool) -> None:
        """Start from a snapshot. Trainers are expected only if it is of the same run."""
        coordinator = self._coordinator
        if snapshot.run == self._run:
            coordinator.restore(snapshot.version, snapshot.applied, expected, snapshot.round)
            coordinator.started = started
        else:
            coordinator.restore(snapshot.version, {}, (), None)
            coordinator.started = False
        self._saved_version = snapshot.version

    def _save(self) -> None:
        if self._archive is not None and self.version != self._saved_version:
            try:
                self._archive.save(self._snapshot())
            except Exception as error:
                self._archive.record_problem(error)
            self._saved_version = self.version

    def _save_if_due(self) -> None:
        if self._archive is not None and self.version % self._archive.policy.every == 0:
            self._save()

    def _save_members(self) -> None:
        if self._archive is not None:
            self._archive.save_members(self._coordinator.known, self._coordinator.started)
            if not self._coordinator.members:
                self._save()

    @property
    def _unconfirmed_reports(self) -> Steps | None:
        """The reports that the last step was made of, if it can still be undone."""
        coordinator = self._coordinator
        return coordinator.unconfirmed if isinstance(coordinator, RoundCoordinator) else None


def run_actions(actions: list[Action]) -> None:
    """Run all actions. Do not hold a lock."""
    for action in actions:
        try:
            action()
        except Exception:
            _log.exception("a parameter server could not complete a call")


def _complete(future: Any, value: Any) -> None:
    future.set_result(value)


def _completion(future: Any, make: Callable[[], Any]) -> Action:
    """Return an action that completes a future with a value that is made now, under the lock."""
    try:
        return partial(_complete, future, make())
    except Exception as error:
        return _failure(future, error)


def _failure(future: Any, error: Exception) -> Action:
    # The future must not keep the frames of the error alive: they refer to gradients.
    traceback.clear_frames(error.__traceback__)
    return partial(future.set_exception, error)

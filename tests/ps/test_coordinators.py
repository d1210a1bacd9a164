"""Decisions of coordinators in states that the simulations do not reach."""

from __future__ import annotations

from typing import Any

import pytest

from telegrad import ps
from telegrad.errors import StaleReference
from telegrad.futures import Future
from telegrad.ps.server.clock_coordinator import ClockCoordinator
from telegrad.ps.server.coordinator import (
    AnswerVote,
    Decision,
    FailReport,
    MakeStep,
    ReplyToReport,
    RoundVerdict,
    RoundVote,
    StepReport,
    UndoStep,
)
from telegrad.ps.server.round_agreement import LeaderCoordinator


def report(trainer: str, step: int, version: int = 0) -> StepReport:
    return StepReport(trainer, step, version, None, Future())


def leader_of(*followers: str, trainers: int = 1) -> LeaderCoordinator:
    """Return the leader of a group with two-phase rounds, restarted in round 0."""
    leader = LeaderCoordinator(ps.Sync(), trainers, exact=True, followers=followers)
    leader.restore(0, {}, [], None)
    for number in range(trainers):
        leader.join(f"t{number}", 0, Future())
    return leader


def made_step(server: str, steps: dict[str, int], sequence: int = 1) -> RoundVote:
    return RoundVote(server, sequence, 0, steps, frozenset(steps), step_made=True)


def verdicts(decisions: list[Decision]) -> list[RoundVerdict]:
    return [each.verdict for each in decisions if isinstance(each, AnswerVote)]


def steps_made(decisions: list[Decision]) -> list[dict[str, int]]:
    return [
        {each.trainer: each.step for each in decision.reports}
        for decision in decisions
        if isinstance(decision, MakeStep)
    ]


# A leader that was restarted after a follower had made the step of the round


def test_a_leader_makes_the_step_that_a_follower_has_made() -> None:
    leader = leader_of("s1")
    vote: Future[Any] = Future()
    assert leader.receive_vote("s1", made_step("s1", {"t0": 1}), vote) == []
    decisions = leader.report(report("t0", 1))
    assert steps_made(decisions) == [{"t0": 1}]
    leader.step_applied(None)
    (reply, answer) = leader.step_finished()
    assert isinstance(reply, ReplyToReport)
    assert reply.report.trainer == "t0"
    assert isinstance(answer, AnswerVote)
    assert (answer.future, answer.verdict) == (vote, RoundVerdict("over", 1, {"t0": 1}))


def test_a_leader_that_cannot_make_the_step_has_it_undone() -> None:
    leader = leader_of("s1", trainers=2)
    decisions = leader.receive_vote("s1", made_step("s1", {"a dead trainer": 1}), Future())
    assert verdicts(decisions) == [RoundVerdict("undo", 0, {})]
    assert not any(isinstance(each, UndoStep) for each in decisions)  # it has made none itself
    # The round is made again, of what all servers have.
    steps = {"t0": 1, "t1": 1}
    again = RoundVote("s1", 2, 0, steps, frozenset(steps))
    assert leader.receive_vote("s1", again, Future()) == []
    assert leader.report(report("t0", 1)) == []
    decisions = leader.report(report("t1", 1))
    assert verdicts(decisions) == [RoundVerdict("make", 0, steps)]
    assert steps_made(decisions) == [steps]


def test_followers_that_made_different_steps_undo_them() -> None:
    leader = leader_of("s1", "s2", trainers=2)
    assert leader.receive_vote("s1", made_step("s1", {"t0": 1}), Future()) == []
    decisions = leader.receive_vote("s2", made_step("s2", {"t0": 1, "t1": 1}), Future())
    assert verdicts(decisions) == [RoundVerdict("undo", 0, {})] * 2


def test_a_step_that_cannot_be_undone_is_confirmed_when_it_is_made_again() -> None:
    leader = leader_of("s1")
    leader.receive_vote("s1", RoundVote("s1", 1, 0, {"t0": 1}, frozenset({"t0"})), Future())
    assert steps_made(leader.report(report("t0", 1))) == [{"t0": 1}]
    leader.step_applied(None)
    assert leader.step_finished() == []
    lost = RoundVote("s1 restarted", 1, 0, {}, frozenset(), complete=False)
    decisions = leader.receive_vote("s1", lost, Future())
    assert [each for each in decisions if isinstance(each, UndoStep)] == [UndoStep(0)]
    assert leader.step_undone(None) == []  # no checkpoint of that version can be read
    vote: Future[Any] = Future()
    again = RoundVote("s1 restarted", 2, 0, {"t0": 1}, frozenset({"t0"}))
    decisions = leader.receive_vote("s1", again, vote)
    assert verdicts(decisions) == [RoundVerdict("make", 0, {"t0": 1})]
    assert steps_made(decisions) == []  # it is still in memory
    assert leader.version == 1


def test_a_report_replaces_an_earlier_one_of_the_same_step() -> None:
    leader = leader_of("s1")
    first, second = report("t0", 1), report("t0", 1)
    assert leader.report(first) == []
    (failed,) = leader.report(second)
    assert isinstance(failed, FailReport)
    assert failed.future is first.future
    assert isinstance(failed.error, StaleReference)
    assert leader.waiting == ["t0"]


# Steps that fail


@pytest.mark.parametrize("rule", [ps.Async(), ps.Stale(2)], ids=str)
def test_a_step_that_fails_is_neither_counted_nor_forgotten(rule: Any) -> None:
    coordinator = ClockCoordinator(rule, 1)
    coordinator.join("t0", 0, Future())
    first = report("t0", 1)
    assert steps_made(coordinator.report(first)) == [{"t0": 1}]
    error = ValueError("a wrong shape")
    coordinator.step_applied(error)
    assert coordinator.step_finished(error) == [FailReport(first.future, error)]
    assert (coordinator.version, coordinator.applied) == (0, {})
    assert steps_made(coordinator.report(report("t0", 1))) == [{"t0": 1}]
    coordinator.step_applied(None)
    (reply,) = coordinator.step_finished()
    assert isinstance(reply, ReplyToReport)
    assert coordinator.version == 1


def test_coordinators_describe_themselves() -> None:
    leader = leader_of("s1")
    leader.report(report("t0", 1))
    assert repr(leader) == "<LeaderCoordinator: 1 of ['t0'] have reported in round 0, 0 expected>"
    clock = ClockCoordinator(ps.Async(), 1)
    clock.join("t0", 3, Future())
    assert repr(clock) == "<ClockCoordinator: 1 trainers, version 0, clocks {'t0': 3}>"

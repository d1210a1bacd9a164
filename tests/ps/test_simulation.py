"""Random simulations: no trainer waits for ever, no acknowledged step is lost or counts twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from telegrad import ps
from telegrad.futures import Future
from telegrad.ps.server.coordinator import RoundVote
from telegrad.ps.server.round_agreement import LeaderCoordinator
from tests.ps.simulated_processes import Model
from tests.ps.simulation import Simulation

RULES = [ps.Sync(), ps.Sync(quorum=1), ps.Sync(quorum=2), ps.Async(), ps.Stale(2)]
QUORUMS = RULES[1:3]
EXACT = ps.Checkpoint("nowhere", every=1, wait=True)
LOSSY = ps.Checkpoint("nowhere", every=3)


def models(
    rng: random.Random, kinds: list[str], rule: Any, checkpoint: ps.Checkpoint, trainers: int
) -> list[Model]:
    """Return models and tables, each on one to three servers."""
    names = ("s0", "s1", "s2")
    return [
        Model(
            kind,
            rule,
            names[: rng.randint(1, 3)],
            trainers,
            checkpoint,
            restorable=kind != "tables",
        )
        for kind in kinds
    ]


def run_simulation(seed: int, rule: Any, checkpoint: ps.Checkpoint, **faults: Any) -> None:
    rng = random.Random(seed)
    kinds = rng.choice(
        [["dense"], ["tables", "dense"], ["dense", "other"], ["tables", "dense", "other"]]
    )
    # with two quorums, trainers of one model may wait for trainers that wait in the other
    if rule in QUORUMS:
        kinds = [rng.choice(["dense", "tables"])]
    trainers, awaited = rng.randint(1, 3), 1
    # a trainer that joins two models while others train may be due in one and wait in the other
    if len(kinds) > 1:
        awaited = trainers
        faults["joins"] = 0
    simulation = Simulation(
        seed, models(rng, kinds, rule, checkpoint, awaited), trainers, steps=3, **faults
    )
    try:
        simulation.run()
        simulation.check()
    except BaseException as error:
        error.add_note(f"seed {seed}, {rule}, {checkpoint}, {faults}: {simulation.models}")
        raise


def run_with_kills(seed: int, rule: Any, checkpoint: ps.Checkpoint) -> None:
    run_simulation(
        seed,
        rule,
        checkpoint,
        kills=0.02,
        server_kills=seed % 5,
        trainer_kills=seed % 3,
        joins=seed % 2,
    )


def run_with_disk_errors(seed: int, rule: Any, checkpoint: ps.Checkpoint) -> None:
    faults = {"server_kills": seed % 4, "trainer_kills": seed % 3, "joins": seed % 2}
    run_simulation(seed, rule, checkpoint, kills=0.02, disk_errors=0.1, **faults)


@pytest.mark.parametrize("checkpoint", [EXACT, LOSSY], ids=["exact", "lossy"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "simulations", [100, pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_random_faults(rule: Any, checkpoint: ps.Checkpoint, simulations: int) -> None:
    """Servers are killed and restarted, trainers are killed, and trainers join."""
    for seed in range(simulations):
        run_with_kills(seed, rule, checkpoint)


def test_a_server_is_killed_when_all_trainers_with_its_values_have_left() -> None:
    """The only trainer with unsaved steps leaves, while another joins and has no values yet."""
    run_with_kills(41448, ps.Sync(), LOSSY)


@pytest.mark.parametrize("checkpoint", [EXACT, LOSSY], ids=["exact", "lossy"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "simulations", [50, pytest.param(1500, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_random_faults_and_disk_errors(
    rule: Any, checkpoint: ps.Checkpoint, simulations: int
) -> None:
    """One of ten writes fails."""
    for seed in range(simulations):
        run_with_disk_errors(seed, rule, checkpoint)


@pytest.mark.parametrize(("seed", "quorum"), [(62066, 2), (62218, 2), (62917, 1)])
def test_a_follower_restarted_with_an_unconfirmed_step_votes_again_in_the_next_round(
    seed: int, quorum: int
) -> None:
    """The leader has made the next step, too, and must undo it: some of its trainers died."""
    run_with_kills(seed, ps.Sync(quorum=quorum), EXACT)


def test_a_late_vote_of_a_dead_follower_does_not_count_for_its_next_incarnation() -> None:
    """The restarted follower does not have the report that its earlier vote listed."""
    run_with_kills(81449, ps.Sync(), EXACT)


def test_a_leader_that_is_behind_asks_its_followers_until_it_has_caught_up() -> None:
    """It is two rounds behind, and a follower dies after it has sent its round."""
    run_with_disk_errors(61331, ps.Sync(quorum=1), LOSSY)


def test_a_restarted_server_waits_for_all_trainers_if_writes_fail() -> None:
    """A server without its list of trainers made rounds of two models without one of them."""
    run_with_disk_errors(80967, ps.Sync(), LOSSY)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("victim", ["s0", "s1"])
def test_a_server_is_killed_at_every_event(rule: Any, victim: str) -> None:
    """Kill each server at each event of a short training; in some, a trainer is killed, too."""
    for moment in range(1, 120):
        simulation = Simulation(
            moment,
            [Model("dense", rule, ("s0", "s1"), 1, EXACT)],
            trainers=2,
            steps=2,
            kills=0.02,
            trainer_kills=moment % 2,
            kill_at=(moment, victim),
        )
        simulation.run()
        simulation.check()


@pytest.mark.parametrize("message", ["vote", "round"])
def test_a_restarted_leader_skips_an_empty_round_again(message: str) -> None:
    """No server made a step of that round, so only the followers know that it is over."""
    leader = LeaderCoordinator(ps.Sync(), 1, exact=True, followers=["s1"])
    leader.restore(0, {}, [], None)
    if message == "vote":
        leader.receive_vote(
            "s1", RoundVote("s1", 1, 1, {}, frozenset({"trainer"}), complete=False), Future()
        )
    else:
        leader.receive_round("s1", "s1", 1)
    future: Future[Any] = Future()
    decisions = leader.join("trainer", 1, future)
    assert leader.round == 1
    assert any(future in decision for decision in decisions if isinstance(decision, tuple))

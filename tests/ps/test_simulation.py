"""Thousands of random worlds: nobody waits for ever, nothing acknowledged is lost, and nothing counts twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from telegrad import ps
from telegrad.futures import Future
from telegrad.ps.server.decisions import RoundVote
from telegrad.ps.server.leader_coordinator import LeaderCoordinator
from tests.ps.simulation import What, World

RULES = [ps.Sync(), ps.Sync(quorum=1), ps.Sync(quorum=2), ps.Async(), ps.Stale(2)]
QUORUMS = RULES[1:3]
EXACT = ps.Checkpoint("nowhere", every=1, wait=True)
LOSSY = ps.Checkpoint("nowhere", every=3)


def whats(
    chance: random.Random, kinds: list[str], rule: Any, checkpoint: ps.Checkpoint, trainers: int
) -> list[What]:
    """Models and tables, each on one to three servers."""
    names = ("s0", "s1", "s2")
    return [
        What(
            kind,
            rule,
            names[: chance.randint(1, 3)],
            trainers,
            checkpoint,
            brings_values=kind != "tables",
        )
        for kind in kinds
    ]


def play(seed: int, rule: Any, checkpoint: ps.Checkpoint, **accidents: Any) -> None:
    chance = random.Random(seed)
    kinds = chance.choice(
        [["dense"], ["tables", "dense"], ["dense", "other"], ["tables", "dense", "other"]]
    )
    # with two of them, trainers may wait in one for those who wait in the other
    if rule in QUORUMS:
        kinds = [chance.choice(["dense", "tables"])]
    trainers, awaited = chance.randint(1, 3), 1
    # who joins two things between steps of others may be waited for in one and wait in the other
    if len(kinds) > 1:
        awaited = trainers
        accidents["joins"] = 0
    world = World(
        seed, whats(chance, kinds, rule, checkpoint, awaited), trainers, steps=3, **accidents
    )
    try:
        world.play()
        world.check()
    except BaseException as error:
        error.add_note(f"seed {seed}, {rule}, {checkpoint}, {accidents}: {world.whats}")
        raise


def play_with_kills(seed: int, rule: Any, checkpoint: ps.Checkpoint) -> None:
    play(
        seed,
        rule,
        checkpoint,
        kills=0.02,
        server_kills=seed % 5,
        trainer_kills=seed % 3,
        joins=seed % 2,
    )


def play_with_bad_disks(seed: int, rule: Any, checkpoint: ps.Checkpoint) -> None:
    accidents = {"server_kills": seed % 4, "trainer_kills": seed % 3, "joins": seed % 2}
    play(seed, rule, checkpoint, kills=0.02, disk_errors=0.1, **accidents)


@pytest.mark.parametrize("checkpoint", [EXACT, LOSSY], ids=["exact", "lossy"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "worlds", [100, pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_random_worlds(rule: Any, checkpoint: ps.Checkpoint, worlds: int) -> None:
    """Servers and trainers die and return, trainers join."""
    for seed in range(worlds):
        play_with_kills(seed, rule, checkpoint)


def test_a_server_dies_when_everybody_with_its_values_has_left() -> None:
    """The only trainer with steps that no checkpoint has leaves; another one is joining, and has no values yet."""
    play_with_kills(41448, ps.Sync(), LOSSY)


@pytest.mark.parametrize("checkpoint", [EXACT, LOSSY], ids=["exact", "lossy"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(
    "worlds", [50, pytest.param(1500, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_random_worlds_with_bad_disks(rule: Any, checkpoint: ps.Checkpoint, worlds: int) -> None:
    """One of ten writes fails."""
    for seed in range(worlds):
        play_with_bad_disks(seed, rule, checkpoint)


@pytest.mark.parametrize(("seed", "quorum"), [(62066, 2), (62218, 2), (62917, 1)])
def test_a_follower_that_is_restarted_in_a_made_round_says_what_it_lacks_in_the_next(
    seed: int, quorum: int
) -> None:
    """The leader has made the next round, too, and must undo it because trainers of that have died."""
    play_with_kills(seed, ps.Sync(quorum=quorum), EXACT)


def test_a_late_vote_of_a_dead_follower_is_not_taken_for_one_of_its_next_life() -> None:
    """The restarted follower does not have the report that its vote before promised."""
    play_with_kills(81449, ps.Sync(), EXACT)


def test_a_leader_that_is_behind_asks_its_followers_until_it_is_not() -> None:
    """It is two rounds behind, and a follower dies after it has said so."""
    play_with_bad_disks(61331, ps.Sync(quorum=1), LOSSY)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("victim", ["s0", "s1"])
def test_a_kill_at_every_message(rule: Any, victim: str) -> None:
    """Each of the servers dies at each point of a short training of two trainers, one of which may be killed, too."""
    for moment in range(1, 120):
        world = World(
            moment,
            [What("dense", rule, ("s0", "s1"), 1, EXACT)],
            trainers=2,
            steps=2,
            kills=0.02,
            trainer_kills=moment % 2,
            kill_at=(moment, victim),
        )
        world.play()
        world.check()


@pytest.mark.parametrize("said", ["asked", "looked at"])
def test_a_leader_that_is_restarted_passes_over_a_round_again(said: str) -> None:
    """Nobody made a step of that round, so no checkpoint knows that it is over, but the followers do."""
    leader = LeaderCoordinator(ps.Sync(), 1, exact=True, followers=["s1"])
    leader.restore(0, {}, [], None)
    if said == "asked":
        leader.receive_vote(
            "s1", RoundVote("s1", 1, 1, {}, frozenset({"trainer"}), complete=False), Future()
        )
    else:
        leader.receive_round("s1", "s1", 1)
    future: Future[Any] = Future()
    decisions = leader.enter("trainer", 1, future)
    assert leader.round == 1
    assert any(future in decision for decision in decisions if isinstance(decision, tuple))

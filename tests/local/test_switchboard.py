"""Lanes whose calls are answered later share a thread, and nobody notices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from telegrad import Future, batched, waiting
from telegrad.agent.agent import Agent
from telegrad.agent.reading import ReadLoop
from telegrad.agent.targets import Later
from telegrad.rpc.functions import async_execution
from telegrad.testing import LocalCluster
from telegrad.transport.channel import ChannelClosed
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, Shared, hold_at, until

ROUNDS = 4
CALLERS = ("w1", "w2", "w3")


class Rounds(Shared):
    """Answers its callers when all of them are there, and notes which threads brought them."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.threads: list[set[int]] = []
        self._parties = parties
        self._here: list[Future[int]] = []
        self._lock = threading.Lock()

    def arrive(self) -> Future[int]:
        future: Future[int] = Future()
        with self._lock:
            if not self._here:
                self.threads.append(set())
            self.threads[-1].add(threading.get_ident())
            self._here.append(future)
            full, here = len(self._here) == self._parties, self._here
            if full:
                self._here = []
        if full:
            for number, each in enumerate(here):
                each.set_result(number)
        return future


@async_execution
def meet(rounds: Rounds) -> Future[int]:
    return rounds.arrive()


@async_execution
def meet_or_hold(rounds: Rounds, gate: Gate | None) -> Future[int]:
    if gate is not None:
        gate.hold()
    return rounds.arrive()


def play(agent: Agent, rounds: Rounds, count: int = ROUNDS) -> list[int]:
    return [agent.call("w0", meet, rounds) for _ in range(count)]


def play_all(workers: LocalCluster, in_background: Any, rounds: Rounds, count: int = ROUNDS) -> list[list[int]]:
    players = [in_background(play, workers[name], rounds, count) for name in CALLERS]
    return [player.result(PATIENCE) for player in players]


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    return cluster(4)


def test_after_the_first_round_one_thread_reads_them_all(workers: LocalCluster, in_background: Any) -> None:
    rounds = Rounds(len(CALLERS))
    results = play_all(workers, in_background, rounds, 20)
    assert [sorted(each) for each in zip(*results, strict=True)] == [[0, 1, 2]] * 20
    assert repr(workers["w0"].switchboard) == "<Switchboard of 3 lanes>"
    assert len(rounds.threads[-1]) == 1


def test_another_kind_of_call_runs_elsewhere(
    workers: LocalCluster, gate: Gate, in_background: Callable[..., Any]
) -> None:
    play_all(workers, in_background, Rounds(len(CALLERS)))
    held = in_background(workers["w1"].call, "w0", hold_at, gate)
    gate.wait_for()
    pair = Rounds(2)
    others = [in_background(play, workers[name], pair) for name in ("w2", "w3")]
    results = zip(*(other.result(PATIENCE) for other in others), strict=True)
    assert [sorted(each) for each in results] == [[0, 1]] * ROUNDS
    gate.open()
    held.result(PATIENCE)
    assert [len(each) for each in play_all(workers, in_background, Rounds(len(CALLERS)))] == [ROUNDS] * 3


def test_a_call_that_blocks_does_not_hold_up_the_others(
    workers: LocalCluster, gate: Gate, in_background: Callable[..., Any]
) -> None:
    rounds = Rounds(1)
    for name in CALLERS:
        for _ in range(3):
            workers[name].call("w0", meet_or_hold, rounds, None)
    held = in_background(workers["w1"].call, "w0", meet_or_hold, rounds, gate)
    gate.wait_for()
    assert workers["w2"].call("w0", meet_or_hold, rounds, None) == 0
    assert workers["w3"].call("w0", meet_or_hold, rounds, None) == 0
    gate.open()
    assert held.result(PATIENCE) == 0


def test_a_lane_that_is_alone_has_its_own_thread(workers: LocalCluster, in_background: Any) -> None:
    board = workers["w0"].switchboard
    play(workers["w1"], Rounds(1), 40)
    assert repr(board) == "<Switchboard of 0 lanes>"
    play_all(workers, in_background, Rounds(len(CALLERS)), 20)
    for name in ("w2", "w3"):
        workers[name].close()
    until(lambda: repr(board) == "<Switchboard of 1 lanes>")
    play(workers["w1"], Rounds(1), 40)
    until(lambda: repr(board) == "<Switchboard of 0 lanes>")


def test_a_worker_that_leaves_is_not_read_any_more(workers: LocalCluster, in_background: Any) -> None:
    play_all(workers, in_background, Rounds(len(CALLERS)), 20)
    for left, name in enumerate(reversed(CALLERS)):
        workers[name].close()
        until(lambda left=left: repr(workers["w0"].switchboard) == f"<Switchboard of {2 - left} lanes>")  # type: ignore[misc]


# What a thread that reads knows


class Scripted:
    """Frames that are there at once, then the end; and the alarms that were set."""

    def __init__(self, frames: list[int]) -> None:
        self.frames = frames
        self.alarms: list[float] = []

    def recv(self) -> int:
        if not self.frames:
            raise ChannelClosed("that was all")
        return self.frames.pop(0)

    def has_frame(self) -> bool:
        return bool(self.frames)

    def flush(self) -> None:
        return

    def shut(self) -> None:
        return

    def at(self, key: Hashable, moment: float, job: Callable[[], None]) -> bool:
        self.alarms.append(moment)
        return True


def test_what_is_left_is_done_once_after_all_that_was_there(workers: LocalCluster) -> None:
    done: list[Any] = []
    over = threading.Event()

    def handle(frame: int) -> None:
        done.append(frame)
        if waiting.more():
            waiting.afterwards("key", lambda: done.append("left"))
        assert waiting.at("key", 5.0, over.set)

    source, agent = Scripted([1, 2, 3]), workers["w0"]
    ReadLoop(source, handle, lambda _: over.set(), agent.threads, agent.clock).start()
    assert over.wait(PATIENCE)
    assert done == [1, 2, 3, "left"]
    assert source.alarms == [5.0] * 3


sizes: list[int] = []


@batched(max_size=4)
def count(numbers: list[int]) -> list[int]:
    sizes.append(len(numbers))
    return numbers


def test_calls_that_arrive_together_run_together(workers: LocalCluster) -> None:
    sizes.clear()
    answers: list[int] = []
    over = threading.Event()

    def handle(number: int) -> None:
        outcome = count.batching.serve(number)  # type: ignore[attr-defined]
        if type(outcome) is Later:
            outcome.listen(lambda done: answers.append(done.value()))
        else:
            answers.append(outcome)

    agent = workers["w0"]
    ReadLoop(Scripted(list(range(7))), handle, lambda _: over.set(), agent.threads, agent.clock).start()
    assert over.wait(PATIENCE)
    assert sizes == [4, 3]
    assert sorted(answers) == list(range(7))


def test_a_thread_of_the_user_has_nothing_more_to_read() -> None:
    assert not waiting.more()
    assert not waiting.at("key", 5.0, int)

"""Several servers make every round of the same reports, whoever dies in the middle of it, and nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import ps
from telegrad.futures import Future
from telegrad.ps.attachment import Attachment
from telegrad.ps.attendance import Attendance, Report, act
from telegrad.ps.messages import Answer, Steps
from telegrad.ps.service import Shards
from telegrad.ps.shard import Shard
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE, until
from tests.ps import training
from tests.ps.training import check_same, model

Clusters = Callable[..., LocalCluster]
Event = Callable[[], None]


class Server:
    """Rounds without anything to train: who was part of which is written down."""

    def __init__(self, world: World, number: int, rule: ps.Sync, servers: int) -> None:
        self.history: dict[int, frozenset[str]] = {}
        self._world, self._number = world, number
        followers = [str(each) for each in range(1, servers)] if number == 0 else []
        self.attendance = Attendance(rule, 1, self, followers, self._ask if number else None)

    def apply(self, reports: list[Report]) -> None:
        self.history[self.attendance.version] = frozenset(report.trainer for report in reports)

    def stepped(self) -> None:
        pass

    def answer(self, report: Report) -> Answer:
        return Answer(self.attendance.version, report.staleness)

    def welcome(self, trainer: str) -> Answer:
        return Answer(self.attendance.version)

    def rounds(self) -> dict[int, frozenset[str]]:
        """Who was part of each, but for those in which there was nobody."""
        return {number: trainers for number, trainers in self.history.items() if trainers}

    def _ask(self, number: int, held: Steps) -> None:
        """The question is under way, and then the answer is."""
        future: Future[Steps] = Future()
        lead = self._world.servers[0].attendance
        name = str(self._number)
        self._world.later(lambda: act(lead.hear(name, name, number, held, future)))
        future.add_done_callback(
            lambda done: self._world.later(lambda: act(self.attendance.decide(number, done.value())))
        )


class Trainer:
    """Reports to all servers, at the same time, again and again; what it does next depends on their answers."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.step = name, 0
        self.alive, self.done = True, False
        self._world = world
        self._announced: list[int] = []
        self._answers: list[Answer] = []
        for server in world.servers:
            world.later(partial(self._announce, server))

    def _announce(self, server: Server) -> None:
        if not self.alive:
            return
        self._announced.append(server.attendance.announce(self.name))
        if len(self._announced) == len(self._world.servers):
            for each in self._world.servers:
                self._world.later(partial(self._enter, each, max(self._announced)))

    def _enter(self, server: Server, first: int) -> None:
        if self.alive:
            act(server.attendance.enter(self.name, first, self._answer()))

    def _answer(self) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.add_done_callback(lambda done: self._world.later(lambda: self._answered(done.value())))
        return future

    def _answered(self, answer: Answer) -> None:
        self._answers.append(answer)
        if len(self._answers) < len(self._world.servers) or not self.alive:
            return
        if self.step == self._world.steps:
            self.done = True
            self._leave()
            return
        version = min(each.version for each in self._answers)
        self._answers = []
        self.step += 1
        for server in self._world.servers:
            self._world.later(partial(self._push, server, self.step, version))

    def _push(self, server: Server, step: int, version: int) -> None:
        if self.alive:  # what has not left when it dies never leaves
            act(server.attendance.take(Report(self.name, step, version, None, self._answer())))

    def die(self) -> None:
        self.alive = False
        self._leave()

    def _leave(self) -> None:
        for server in self._world.servers:
            self._world.later(lambda server=server: act(server.attendance.leave(self.name)))  # type: ignore[misc]


class World:
    """Everything that is under way may happen next."""

    def __init__(self, rule: ps.Sync, servers: int, trainers: int, steps: int) -> None:
        self.steps = steps
        self.events: list[Event] = []
        self.servers: list[Server] = []
        self.servers.extend(Server(self, number, rule, servers) for number in range(servers))
        self.trainers = [Trainer(self, f"t{number}/1") for number in range(trainers)]

    def later(self, event: Event) -> None:
        self.events.append(event)

    def kill(self, chance: random.Random) -> None:
        chance.choice([trainer for trainer in self.trainers if trainer.alive]).die()

    def join(self, _: random.Random) -> None:
        self.trainers.append(Trainer(self, "new/1"))


@pytest.mark.parametrize("rule", [ps.Sync(), ps.Sync(quorum=1), ps.Sync(quorum=2)], ids=repr)
def test_every_round_is_the_same_on_all_servers(rule: ps.Sync) -> None:
    """In worlds where anything may be fast or slow, trainers die, and one joins."""
    for seed in range(1000):
        chance = random.Random(seed)
        world = World(rule, servers=chance.randint(2, 3), trainers=chance.randint(2, 4), steps=3)
        accidents = [world.kill] * (len(world.trainers) - 1) + [world.join]
        chance.shuffle(accidents)
        while world.events:
            if accidents and chance.random() < 0.04:
                accidents.pop()(chance)
            else:
                world.events.pop(chance.randrange(len(world.events)))()
        assert [trainer.name for trainer in world.trainers if trainer.alive and not trainer.done] == [], seed
        first, *others = (server.rounds() for server in world.servers)
        assert all(other == first for other in others), seed


def three(workers: LocalCluster) -> tuple[list[nn.Module], list[ps.Optimizer]]:
    """Trainers on w2, w3 and w4, with servers on w0 and w1."""
    nets: list[nn.Module] = [model() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        made = [
            pool.submit(ps.Optimizer, net, ["w0", "w1"], agent=workers[f"w{2 + number}"], trainers=3, lr=0.1)
            for number, net in enumerate(nets)
        ]
        return nets, [each.result(PATIENCE) for each in made]


def shards(workers: LocalCluster) -> list[Shard]:
    return [workers[server].service(Shards).find("default") for server in ("w0", "w1")]


@pytest.mark.parametrize("reached", [["w0"], ["w1"], ["w0", "w1"]], ids=str)
def test_who_dies_between_two_reports_counts_nowhere(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch, reached: list[str]
) -> None:
    """It has reported to some of the servers, and another trainer to the second only; then it is killed."""
    workers = cluster(5)
    nets, optimizers = three(workers)
    victim, second, third = (optimizer._trainer for optimizer in optimizers)
    reports_to = {victim: reached, second: ["w1"], third: ["w0", "w1"]}
    start = Attachment.start_push
    unsent: Future[Answer] = Future()

    def some(self: Attachment, *args: Any) -> Future[Answer]:
        return start(self, *args) if self.server in reports_to[self._me] else unsent

    monkeypatch.setattr(Attachment, "start_push", some)
    with ThreadPoolExecutor(3) as pool:
        steps = [
            pool.submit(training.train, optimizer, net, range(1), [number])
            for number, (optimizer, net) in enumerate(zip(optimizers, nets, strict=True))
        ]
        held = {
            server: {trainer for trainer, servers in reports_to.items() if server in servers} for server in ("w0", "w1")
        }
        lead, follower = shards(workers)
        until(lambda: set(lead.waiting) == held["w0"] and set(follower.waiting) == held["w1"])
        workers.kill("w2")
        assert steps[0].exception(PATIENCE) is not None
        until(lambda: victim not in lead.waiting)
        late = optimizers[1]._attachments[0]
        start(late, 1, 0, {}).add_done_callback(lambda done: unsent.set_result(done.value()))
        for step in steps[1:]:
            step.result(PATIENCE)
    expected = model()
    training.train(torch.optim.SGD(expected.parameters(), lr=0.1), expected, range(1), [1, 2])
    for net in nets[1:]:
        check_same(net, expected)

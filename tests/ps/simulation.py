"""Worlds in which trainers and servers of parameter servers talk, die and come back, in one thread and without a
clock.

Everything that is under way (a message, a write, a timer) is an event; a seeded random choice says which
happens next. What servers do is the real code: `BaseShard` with its `Coordinator`, and `founding`. What is
simulated are the network, the disk, the calls of trainers, and what is trained: a *ledger*, which says for
every step whose reports it was made of.

A killed process loses what it has in memory. Its calls fail; what it has sent may still arrive or get lost.
Disks outlive their servers; writes may fail. Timers fire when nothing else is under way, or early. A world
has hung if somebody waits although hundreds of timers have fired since the last accident.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from telegrad import ps
from telegrad.errors import JoinError, PeerLost, StaleReference, UsageError
from telegrad.futures import Future
from telegrad.ps.consistency import Consistency
from telegrad.ps.messages import PushReply, SavedVersions, worker_of
from telegrad.ps.server.base_shard import BaseShard, ServerRole, run_actions
from telegrad.ps.server.checkpoint import CheckpointArchive, ShardSnapshot
from telegrad.ps.server.decisions import RoundVote, StepReport
from telegrad.ps.server.round_coordinator import RoundCoordinator
from telegrad.ps.trainer.creation import find_or_create_shards
from telegrad.ps.trainer.joining import LOSS_ERRORS

RUN = "run"
PATIENCE = 400  # timers

Ledger = tuple[frozenset[tuple[str, int]], ...]
Event = Callable[[], None]
Task = Generator["Promise", Any, Any]


class Promise:
    """Something that a task waits for."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._listeners: list[Event] = []

    def settle(self, value: Any = None, error: BaseException | None = None) -> None:
        if not self.done:
            self.done, self.value, self.error = True, value, error
            for listener in self._listeners:
                listener()

    def then(self, listener: Event) -> None:
        if self.done:
            listener()
        else:
            self._listeners.append(listener)


def together(promises: list[Promise]) -> Promise:
    """Return a promise that is settled when all are, or one has failed."""
    result = Promise()

    def look() -> None:
        failed = [promise.error for promise in promises if promise.error is not None]
        if failed:
            result.settle(error=failed[0])
        elif all(promise.done for promise in promises):
            result.settle()

    for promise in promises:
        promise.then(look)
    return result


@dataclass
class Disk:
    """What a server has written of one thing."""

    versions: dict[int, ShardSnapshot] = field(default_factory=dict)
    members: dict[str, Any] | None = None


class MemoryArchive(CheckpointArchive):
    """The real archive, but for the disk."""

    def __init__(self, world: World, policy: ps.Checkpoint, disk: Disk) -> None:
        self.policy = policy
        self.problem = None
        self._keep = max(policy.keep, 2) if policy.exact else policy.keep
        self._world, self._disk = world, disk
        self._folder = None  # type: ignore[assignment]
        self._members, self._members_saved = None, True
        self._waiting: list[ShardSnapshot] = []
        self.dead = False

    def versions(self) -> list[int]:
        return sorted(self._disk.versions)

    def find(self, version: int) -> ShardSnapshot | None:
        return self._disk.versions.get(version)

    def readable(self) -> list[int]:
        return self.versions()

    def members(self) -> tuple[list[str], bool]:
        noted = self._disk.members
        return ([], False) if noted is None else (noted["members"], noted["started"])

    def clear(self, after: int = -1) -> None:
        for version in self.versions():
            if version > after:
                del self._disk.versions[version]

    def save(self, snapshot: ShardSnapshot) -> None:
        if self.policy.wait:
            self._attempt(self._write, snapshot)
        else:
            self._waiting = [snapshot]
            self._world.later(self._write_waiting)

    def record_problem(self, error: Exception) -> None:
        if not isinstance(error, OSError):
            raise error
        self.problem = str(error)

    def _write_waiting(self) -> None:
        if self._waiting and not self.dead:
            self._attempt(self._write, self._waiting.pop())

    def _write(self, snapshot: ShardSnapshot) -> None:
        self._world.writing()
        self._disk.versions[snapshot.version] = snapshot
        if not self._members_saved:
            self._write_members()
        for old in self.versions()[: -self._keep]:
            del self._disk.versions[old]
        self.problem = None

    def _write_members(self) -> None:
        self._world.writing()
        self._disk.members = self._members
        self._members_saved = True


class LedgerShard(BaseShard):
    """What a server holds: a ledger. Like tables, it may be unable to take over what trainers have."""

    def __init__(self, what: What, archive: CheckpointArchive | None, role: ServerRole) -> None:
        super().__init__(what.rule, what.trainers, RUN, archive, role)
        self.what = what
        self.ledger: Ledger = ()

    def apply(self, reports: list[StepReport]) -> None:
        self.ledger = (*self.ledger, frozenset((report.trainer, report.step) for report in reports))

    def _snapshot(self) -> ShardSnapshot:
        applied, made = dict(self._coordinator.applied), self._last_round
        return ShardSnapshot(self.version, RUN, {"ledger": self.ledger}, [], [], applied, made)  # type: ignore[dict-item]

    def _load(self, snapshot: ShardSnapshot) -> None:
        self.ledger = snapshot.values["ledger"]  # type: ignore[assignment]

    def reply_to_report(self, report: StepReport) -> PushReply:
        return self._current()._replace(staleness=report.staleness)

    def reply_to_join(self, trainer: str) -> PushReply:
        return self._current()

    def _current(self) -> PushReply:
        return PushReply(self.version, values=self.ledger, applied=dict(self._coordinator.applied))  # type: ignore[arg-type]

    def restore(self, snapshot: ShardSnapshot, expected: list[str], started: bool) -> None:
        self._load(snapshot)
        self._restore(snapshot, expected, started)

    def announce(self, trainer: str) -> int:
        return self._coordinator.announce(trainer)

    def enter(self, trainer: str, first: int) -> Future[PushReply]:
        future: Future[PushReply] = Future()
        run_actions(self._enter(trainer, first, future))
        return future

    def resume(self, trainer: str, first: int, acknowledged: int, held: PushReply) -> None:
        newer = held.version > self.version
        if newer and self.what.brings_values:
            self.ledger = held.values  # type: ignore[assignment]
        applied = held.applied if newer and self.what.brings_values else {}
        run_actions(self._resume(trainer, first, acknowledged, held.version, applied or {}))

    def push(self, trainer: str, step: int, version: int) -> Future[PushReply]:
        future: Future[PushReply] = Future()
        run_actions(
            self._carry_out(
                self._coordinator.report(StepReport(trainer, step, version, None, future))
            )
        )
        return future


@dataclass(frozen=True)
class What:
    """Something that is trained: a model or tables."""

    name: str
    rule: Consistency
    servers: tuple[str, ...]
    trainers: int
    checkpoint: ps.Checkpoint
    brings_values: bool = True


class Process:
    """A life of a worker."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.incarnation = f"{name}.{next(world.numbers)}"
        self.alive = True
        # that it has not answered; in order, so that a world can be repeated
        self.calls: dict[Promise, None] = {}

    def __repr__(self) -> str:
        return self.incarnation

    def die(self) -> None:
        self.alive = False
        for promise in list(self.calls):
            self.world.later(partial(promise.settle, error=PeerLost(f"{self} died")))
        self.calls.clear()


class Server(Process):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.shards: dict[str, LedgerShard] = {}

    def find(self, what: What) -> LedgerShard:
        if what.name not in self.shards:
            raise StaleReference(f"{self} holds nothing of {what.name}")
        return self.shards[what.name]

    def die(self) -> None:
        super().die()
        for shard in self.shards.values():
            shard._archive.dead = True  # type: ignore[union-attr]

    def archive(self, what: What) -> MemoryArchive:
        disk = self.world.disks.setdefault((self.name, what.name), Disk())
        return MemoryArchive(self.world, what.checkpoint, disk)

    def saved(self, what: What) -> SavedVersions:
        shard = self.shards.get(what.name)
        versions = self.archive(what).versions()
        pristine = shard is not None and shard.version == 0 and not shard.known
        return SavedVersions(shard is not None, pristine, bool(versions), versions)

    def create(self, what: What, version: int | None) -> None:
        shard = self.shards.get(what.name)
        if shard is not None and (shard.known or shard.version > 0):
            return
        archive = self.archive(what)
        snapshot = None if version is None else archive.find(version)
        archive.clear(after=-1 if version is None else version)
        self._make(what, archive, snapshot)

    def recreate(self, what: What) -> None:
        if what.name not in self.shards:
            archive = self.archive(what)
            snapshot = archive.newest()
            if snapshot is None:
                raise JoinError(f"{self} has come back without its part of {what.name}")
            self._make(what, archive, snapshot)

    def _make(self, what: What, archive: MemoryArchive, snapshot: ShardSnapshot | None) -> None:
        leads = self.name == what.servers[0]
        ask = None if leads else partial(self._ask, what)
        shard = LedgerShard(
            what, archive, ServerRole(self.incarnation, what.servers[1:] if leads else (), ask)
        )
        expected: list[str] = []
        if snapshot is not None:
            expected, started = archive.members()
            shard.restore(snapshot, expected, started)
        shard.save_first()
        self.shards[what.name] = shard
        for trainer in expected:
            self.world.later(partial(self._look_for, shard, trainer))
        shard.start()
        if leads and isinstance(what.rule, ps.Sync):
            for follower in what.servers[1:]:
                self._look_at(what, follower)

    def _look_for(self, shard: LedgerShard, trainer: str) -> None:
        if not self.alive:
            return
        membership = self.world.find_trainer(trainer)
        if membership is None:
            shard.leave(trainer)
        else:
            membership.come_back_if_idle(self.name)

    def _ask(self, what: What, vote: RoundVote) -> None:
        if not self.alive or not self.find(what).is_vote_pending(vote):
            return
        verdict = self.world.call(
            self,
            what.servers[0],
            lambda lead: lead.find(what).receive_vote(self.name, vote),
            vote.server,
        )

        def answered() -> None:
            if not self.alive:
                return
            if verdict.error is None:
                self.find(what).receive_verdict(vote.sequence, verdict.value)
            else:
                self.world.timer(partial(self._ask, what, vote))

        verdict.then(answered)

    def _look_at(self, what: What, follower: str) -> None:
        if not self.alive or not self.find(what).may_be_behind:
            return
        standing = self.world.call(
            self, follower, lambda other: (other.incarnation, other.find(what).current_round)
        )

        def answered() -> None:
            if self.alive:
                if standing.error is None:
                    self.find(what).receive_round(follower, *standing.value)
                self.world.timer(partial(self._look_at, what, follower))

        standing.then(answered)


class ServerSide:
    """A trainer's side of one server. What `founding` calls is answered at once."""

    def __init__(self, trainer: Membership, server: str) -> None:
        self.trainer, self.server, self.plan = trainer, server, trainer.what
        self.held = PushReply(0, values=(), applied={})  # type: ignore[arg-type]

    def _now(self) -> Server:
        self.trainer.process.world.maybe_accident()
        process = self.trainer.process.world.servers[self.server]
        if not process.alive:
            raise PeerLost(f"{process} is dead")
        return process

    def may_found(self) -> bool | None:
        return None if self.plan.name in self._now().shards else True

    def saved(self) -> SavedVersions:
        return self._now().saved(self.plan)

    def create(self, version: int | None) -> None:
        self._now().create(self.plan, version)

    def recreate(self) -> None:
        self._now().recreate(self.plan)


class Membership:
    """A trainer of one thing."""

    def __init__(self, process: Trainer, what: What, number: int) -> None:
        self.process, self.what = process, what
        self.name = f"{process.incarnation}/{number}"
        self.sides = [ServerSide(self, server) for server in what.servers]
        self.first = 0
        self.step = 0
        self.acknowledged: dict[int, bool] = {}  # steps; were they dropped?
        self.trains = False
        self.busy = True

    def _call(self, side: ServerSide, function: Callable[[LedgerShard], Any]) -> Promise:
        world = self.process.world
        return world.call(
            self.process, side.server, lambda server: function(server.find(self.what)), self.name
        )

    def join(self) -> Task:
        while True:
            try:
                self.trains = True
                find_or_create_shards(self.sides, self.what.rule)  # type: ignore[arg-type]
                firsts = []
                for side in self.sides:
                    firsts.append((yield self._call(side, lambda shard: shard.announce(self.name))))
                self.first = max(firsts)
                entered = [
                    self._call(
                        side, partial(LedgerShard.enter, trainer=self.name, first=self.first)
                    )
                    for side in self.sides
                ]
                yield from self._wait_for_start(entered)
                for side, reply in zip(self.sides, entered, strict=True):
                    side.held = reply.value
            # UsageError: the first checkpoint could not be written
            except (UsageError, *LOSS_ERRORS):
                yield self.process.world.pause()
            else:
                self.busy = False
                return

    def watch(self, side: ServerSide) -> Task:
        try:
            known = yield self._call(side, lambda shard: shard.has_member(self.name))
        except StaleReference:
            known = False
        except PeerLost:
            known = True
        if not known:
            self.come_back_if_idle(side.server)

    def _wait_for_start(self, entered: list[Promise]) -> Task:
        """Wait for all answers; servers that have answered are watched meanwhile."""
        all_entered = together(entered)
        while not all_entered.done:
            yield from self.process.watch_idle()
            for side, each in zip(self.sides, entered, strict=True):
                if each.done and not (
                    yield self._call(side, lambda shard: shard.has_member(self.name))
                ):
                    raise StaleReference("a server was restarted")
        yield all_entered

    def come_back_if_idle(self, server: str) -> None:
        if not self.busy:
            (side,) = (side for side in self.sides if side.server == server)
            self._resume(side, self.step, side.held)

    def leave(self) -> Task:
        self.trains = False
        self.process.world.note_losses(self.what, self.forgotten_by())
        for promise in [
            self._call(side, lambda shard: shard.leave(self.name)) for side in self.sides
        ]:
            try:
                yield promise
            except LOSS_ERRORS:
                continue

    def forgotten_by(self) -> list[str]:
        """Return the servers that were restarted and to which this trainer has not come back."""
        servers = self.process.world.servers
        shards = {name: servers[name].shards.get(self.what.name) for name in self.what.servers}
        return [
            name
            for name, shard in shards.items()
            if shard is None or self.name not in shard.members
        ]

    def begin_step(self) -> list[Promise]:
        self.step += 1
        self.busy = True
        rounds = isinstance(self.what.rule, ps.Sync)
        oldest = min(side.held.version for side in self.sides)
        world = self.process.world
        return [
            world.run(self.process, self._push(side, oldest if rounds else side.held.version))
            for side in self.sides
        ]

    def _push(self, side: ServerSide, version: int) -> Task:
        step, back = self.step, False
        while True:
            try:
                if back:
                    yield self._resume(side, step - 1, side.held)
                return (yield self._call(side, lambda shard: shard.push(self.name, step, version)))
            except LOSS_ERRORS:
                back = True
                yield self.process.world.pause()

    def _resume(self, side: ServerSide, acknowledged: int, held: PushReply) -> Promise:
        def resume(server: Server) -> None:
            server.recreate(self.what)
            server.find(self.what).resume(self.name, self.first, acknowledged, held)

        return self.process.world.call(self.process, side.server, resume, self.name)

    def finish_step(self, pushes: list[Promise]) -> Task:
        """Wait for all answers; servers that have answered are watched meanwhile."""
        while not all(push.done for push in pushes):
            yield from self.process.watch_idle()
            for side, push in zip(self.sides, pushes, strict=True):
                if push.done:
                    yield from self._stay(side, push.value)
        for side, push in zip(self.sides, pushes, strict=True):
            if push.error is not None:
                raise push.error
            side.held = push.value
        self.busy = False
        self.acknowledged[self.step] = any(push.value.dropped for push in pushes)

    def _stay(self, side: ServerSide, reply: PushReply) -> Task:
        try:
            if (yield self._call(side, lambda shard: shard.has_member(self.name))):
                return
        except LOSS_ERRORS:
            yield self.process.world.pause()
        try:
            yield self._resume(side, self.step, reply)
        except LOSS_ERRORS:
            return


class Trainer(Process):
    """Joins everything, makes steps, and leaves."""

    def __init__(self, world: World, name: str, steps: int) -> None:
        super().__init__(world, name)
        self.started = False
        self.members = [Membership(self, what, number) for number, what in enumerate(world.whats)]
        self.finished = world.run(self, self._train(steps))

    def watch_idle(self) -> Task:
        """Wait a moment, and come back to servers that were restarted between steps of another membership."""
        yield self.world.pause()
        for each in self.members:
            for side in each.sides:
                if not each.busy and each.trains:
                    yield from each.watch(side)

    def _train(self, steps: int) -> Task:
        for each in self.members:
            yield from each.join()
        self.started = True
        for _ in range(steps):
            tables = [each for each in self.members if not each.what.brings_values]
            begun = [(each, each.begin_step()) for each in tables]
            for each in self.members:
                if each not in tables:
                    yield from each.finish_step(each.begin_step())
            for each, pushes in begun:
                yield from each.finish_step(pushes)
        for each in self.members:
            yield from each.leave()


class World:
    def __init__(
        self,
        seed: int,
        whats: list[What],
        trainers: int,
        steps: int,
        kills: float = 0.0,
        server_kills: int = 0,
        trainer_kills: int = 0,
        joins: int = 0,
        disk_errors: float = 0.0,
        kill_at: tuple[int, str] | None = None,
    ) -> None:
        self.chance = random.Random(seed)
        self.whats, self.steps = whats, steps
        self.numbers = iter(range(10**6))
        self.disks: dict[tuple[str, str], Disk] = {}
        self.events: list[Event] = []
        self.timers: list[Event] = []
        self.fired = self.happened = 0
        self.writes_failed = self.servers_killed = 0
        # what, server, trainer, step: see `note_losses`
        self.lost: set[tuple[str, str, str, int]] = set()
        self._kills, self._disk_errors, self._kill_at = kills, disk_errors, kill_at
        self._accidents = ["server"] * server_kills + ["trainer"] * trainer_kills + ["join"] * joins
        self.chance.shuffle(self._accidents)
        names = {server for what in whats for server in what.servers}
        self.servers = {name: Server(self, name) for name in sorted(names)}
        self.trainers: list[Trainer] = []
        for number in range(trainers):
            self.trainers.append(Trainer(self, f"t{number}", steps))

    # What is under way

    def later(self, event: Event) -> None:
        self.events.append(event)

    def timer(self, event: Event) -> None:
        self.timers.append(event)

    def pause(self) -> Promise:
        promise = Promise()
        self.timer(promise.settle)
        return promise

    def writing(self) -> None:
        if self.chance.random() < self._disk_errors:
            self.writes_failed += 1
            raise OSError("no space left on device")

    def run(self, process: Process, task: Task) -> Promise:
        """Run a task as long as its process lives."""
        finished = Promise()

        def go_on(promise: Promise | None) -> None:
            if not process.alive:
                return
            try:
                if promise is not None and promise.error is not None:
                    following = task.throw(promise.error)
                else:
                    following = task.send(None if promise is None else promise.value)
            except StopIteration as end:
                finished.settle(end.value)
            except Exception as error:
                finished.settle(error=error)
            else:
                following.then(partial(self.later, partial(go_on, following)))

        self.later(partial(go_on, None))
        return finished

    def call(
        self,
        caller: Process,
        server: str,
        function: Callable[[Server], Any],
        sender: str | None = None,
    ) -> Promise:
        """Call a function on a server; the request and the reply take their time."""
        promise = Promise()

        def arrive() -> None:
            callee = self.servers[server]
            if not caller.alive and self.chance.random() < 0.5:
                return
            if not callee.alive:
                promise.settle(error=PeerLost(f"{callee} is dead"))
                return
            callee.calls[promise] = None
            try:
                result = function(callee)
            except Exception as error:
                reply(callee, error=error)
                return
            finally:
                if sender is not None and not caller.alive:
                    for shard in callee.shards.values():
                        shard.remove_worker(worker_of(sender))
            if isinstance(result, Future):
                result.add_done_callback(
                    lambda done: (
                        reply(callee, error=done.exception())
                        if done.exception()
                        else reply(callee, done.value())
                    )
                )
            else:
                reply(callee, result)

        def reply(callee: Process, value: Any = None, error: BaseException | None = None) -> None:
            def deliver() -> None:
                if callee.alive or self.chance.random() < 0.5:
                    callee.calls.pop(promise, None)
                    promise.settle(value, error)

            if callee.alive:
                self.later(deliver)

        def reply_later(callee: Process, done: Future[Any]) -> None:
            error = done.exception()
            reply(callee, None if error is not None else done.value(), error)

        self.later(arrive)
        return promise

    def find_trainer(self, trainer: str) -> Membership | None:
        """Return a trainer if it is alive and has not left."""
        for process in self.trainers:
            for each in process.members:
                if each.name == trainer and each.trains and process.alive:
                    return each
        return None

    # Accidents

    def maybe_accident(self) -> None:
        if self._accidents and self.chance.random() < self._kills:
            self._happen(self._accidents.pop())

    def _happen(self, accident: str) -> None:
        self.fired = 0
        if accident == "server":
            self.kill_server(self.chance.choice(list(self.servers)))
        elif accident == "join":
            self.trainers.append(Trainer(self, f"n{len(self.trainers)}", self.steps))
        else:
            alive = [
                trainer for trainer in self.trainers if trainer.alive and not trainer.finished.done
            ]
            awaited = max(what.trainers for what in self.whats)
            if awaited > 1 and not all(trainer.started for trainer in self.trainers):
                self._accidents.insert(0, accident)  # the others would wait for another one to come
            elif len(alive) > 1:
                self.kill_trainer(self.chance.choice(alive))

    def kill_server(self, name: str) -> None:
        server = self.servers[name]
        if not server.alive:
            return
        self.servers_killed += 1
        server.die()
        for what in self.whats:
            self.note_losses(
                what, [each for each in what.servers if what.name not in self._running(each)]
            )
        self._lost(server)
        self.later(partial(self._restart, name))

    def kill_trainer(self, trainer: Trainer) -> None:
        trainer.die()
        for each in trainer.members:
            self.note_losses(each.what, each.forgotten_by())
        self._lost(trainer)

    def _lost(self, process: Process) -> None:
        for server in self.servers.values():
            self.later(partial(self._notice, server, process.incarnation))

    def _notice(self, server: Server, incarnation: str) -> None:
        if server.alive:
            for shard in list(server.shards.values()):
                shard.remove_worker(incarnation)

    def _restart(self, name: str) -> None:
        self.servers[name] = Server(self, name)

    def _running(self, server: str) -> dict[str, LedgerShard]:
        process = self.servers[server]
        return process.shards if process.alive else {}

    def note_losses(self, what: What, servers: list[str]) -> None:
        """Note which steps servers that were killed cannot get back.

        These are in no checkpoint that they may begin with, and no trainer that takes part has their values: those who
        had them have left or died.
        """
        archives = {name: self.servers[name].archive(what) for name in what.servers}
        versions = {name: set(archive.versions()) for name, archive in archives.items()}
        # all may begin with the same version
        if not any(what.name in self._running(name) for name in what.servers):
            versions = dict.fromkeys(versions, set.intersection(*versions.values()))
        members = [
            each for trainer in self.trainers for each in trainer.members if each.what is what
        ]
        for name in servers:
            snapshot = archives[name].find(max(versions[name], default=-1))
            kept = set() if snapshot is None else _entries(snapshot.values["ledger"])  # type: ignore[arg-type]
            for each in members:
                if each.trains and each.process.alive:
                    (held,) = (side.held.values for side in each.sides if side.server == name)
                    kept |= _entries(held)  # type: ignore[arg-type]
            acknowledged = {(each.name, step) for each in members for step in each.acknowledged}
            self.lost |= {(what.name, name, *entry) for entry in acknowledged - kept}

    # What must be true

    def play(self) -> None:
        """Let everything happen, until all trainers are done."""
        while not all(trainer.finished.done or not trainer.alive for trainer in self.trainers):
            self.happened += 1
            if self._kill_at is not None and self.happened == self._kill_at[0]:
                self.kill_server(self._kill_at[1])
            self.maybe_accident()
            early = self.timers and self.chance.random() < 0.02
            if self.events and not early:
                self.events.pop(self.chance.randrange(len(self.events)))()
            elif self.timers:
                self.fired += 1
                assert self.fired < PATIENCE, f"somebody waits for ever: {self.stuck()}"
                self.timers.pop(self.chance.randrange(len(self.timers)))()
            else:
                raise AssertionError(f"nothing is under way, and somebody waits: {self.stuck()}")
        for trainer in self.trainers:
            assert not trainer.alive or trainer.finished.error is None, trainer.finished.error

    def stuck(self) -> dict[str, Any]:
        return {
            "trainers": {
                process.incarnation: {each.what.name: each.step for each in process.members}
                for process in self.trainers
                if process.alive and not process.finished.done
            },
            "servers": {
                name: [shard._coordinator for shard in server.shards.values()]
                for name, server in self.servers.items()
            },
        }

    def ledgers(self, what: What) -> dict[str, Ledger]:
        """What each server has, in memory or, if nobody has needed it since it was restarted, on disk."""
        found: dict[str, Ledger] = {}
        for name in what.servers:
            server = self.servers[name]
            if what.name in server.shards:
                found[name] = server.shards[what.name].ledger
            elif (snapshot := server.archive(what).newest()) is not None:
                found[name] = snapshot.values["ledger"]  # type: ignore[assignment]
        return found

    def check(self) -> None:
        """Nothing counts twice; what was acknowledged counts on all servers; they have made the same rounds."""
        for what in self.whats:
            exact = what.checkpoint.exact and not self.writes_failed
            safe = exact or not self.servers_killed
            ledgers = self.ledgers(what)
            for server, ledger in ledgers.items():
                counted = [entry for made in ledger for entry in made]
                assert len(counted) == len(set(counted)), (
                    f"{what.name} on {server} counts twice: {ledger}"
                )
                in_memory = what.name in self.servers[server].shards
                if safe or (
                    what.rule == ps.Sync()
                    and what.brings_values
                    and in_memory
                    and not self.writes_failed
                ):
                    self._check_acknowledged(what, server, set(counted), dead_too=safe)
            if safe and isinstance(what.rule, ps.Sync):
                rounds = [self._confirmed(what, name, ledger) for name, ledger in ledgers.items()]
                longest = max(rounds, key=len, default=())
                assert all(each == longest[: len(each)] for each in rounds), (
                    f"servers differ in {what.name}: {ledgers}"
                )

    def _confirmed(self, what: What, server: str, ledger: Ledger) -> Ledger:
        """Return the rounds that have trainers and cannot be undone."""
        shard = self.servers[server].shards.get(what.name)
        if shard is None or (
            isinstance(shard._coordinator, RoundCoordinator)
            and shard._coordinator.unconfirmed is not None
        ):
            ledger = ledger[:-1]
        return tuple(made for made in ledger if made)

    def _check_acknowledged(
        self, what: What, server: str, counted: set[tuple[str, int]], dead_too: bool
    ) -> None:
        for trainer in self.trainers:
            for each in trainer.members:
                if each.what is what and (trainer.alive or dead_too):
                    for step, dropped in each.acknowledged.items():
                        claim = f"{what.name} on {server}: step {step} of {each.name}, dropped {dropped}"
                        lost = not dead_too and (what.name, server, each.name, step) in self.lost
                        assert dropped or lost or (each.name, step) in counted, claim
                        assert not (dropped and dead_too) or (each.name, step) not in counted, claim


def _entries(ledger: Ledger) -> set[tuple[str, int]]:
    return {entry for made in ledger for entry in made}

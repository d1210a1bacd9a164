"""`Simulation`: parameter servers and trainers that fail and restart, in one thread, without clock.

Everything that is under way (a message, a write, a timer) is an event. A seeded random generator
chooses which event happens next, so a seed repeats a simulation.

Real code: `BaseShard` with its coordinators, and `find_or_create_shards`. Simulated: the network,
the disk, the calls of trainers, and the parameters. Instead of parameters, a shard has a history:
for each version, the reports that its step was made of.

A killed process loses its memory. Its calls fail; messages that it has sent may arrive or be lost.
A disk survives its server; writes may fail. Timers fire when nothing else is under way, or early. A
simulation hangs if a trainer still waits when `MAX_TIMERS` timers have fired since the last fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from telegrad import ps
from telegrad.errors import PeerLost
from telegrad.futures import Future
from telegrad.ps.messages import worker_of
from telegrad.ps.server.round_coordinator import RoundCoordinator
from tests.ps.simulated_processes import Event, History, Model, Process, Promise, Task
from tests.ps.simulated_servers import Disk, HistoryShard, Server
from tests.ps.simulated_trainers import ModelTrainer, TrainerProcess

MAX_TIMERS = 400


class Simulation:
    """Servers, trainers, and all events that are under way.

    `kills` is the probability of a fault at each event; `server_kills`, `trainer_kills` and `joins`
    are the numbers of faults of each kind. `kill_at` kills a server at the event with this number.
    """

    def __init__(
        self,
        seed: int,
        models: list[Model],
        trainers: int,
        steps: int,
        kills: float = 0.0,
        server_kills: int = 0,
        trainer_kills: int = 0,
        joins: int = 0,
        disk_errors: float = 0.0,
        kill_at: tuple[int, str] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.models, self.steps = models, steps
        self.incarnation_numbers = iter(range(10**6))
        self.disks: dict[tuple[str, str], Disk] = {}
        self.events: list[Event] = []
        self.timers: list[Event] = []
        self.timers_fired = self.event_count = 0
        self.writes_failed = self.servers_killed = 0
        # (model, server, trainer, step): see `record_lost_steps`
        self.lost: set[tuple[str, str, str, int]] = set()
        self._fault_rate, self._disk_errors, self._kill_at = kills, disk_errors, kill_at
        self._faults = ["server"] * server_kills + ["trainer"] * trainer_kills + ["join"] * joins
        self.rng.shuffle(self._faults)
        names = {server for model in models for server in model.servers}
        self.servers = {name: Server(self, name) for name in sorted(names)}
        self.trainers: list[TrainerProcess] = []
        for number in range(trainers):
            self.trainers.append(TrainerProcess(self, f"t{number}", steps))

    # Events

    def schedule(self, event: Event) -> None:
        self.events.append(event)

    def add_timer(self, event: Event) -> None:
        self.timers.append(event)

    def pause(self) -> Promise:
        promise = Promise()
        self.add_timer(promise.complete)
        return promise

    def maybe_fail_write(self) -> None:
        if self.rng.random() < self._disk_errors:
            self.writes_failed += 1
            raise OSError("no space left on device")

    def start_task(self, process: Process, task: Task) -> Promise:
        """Run a task while its process is alive."""
        finished = Promise()

        def resume(promise: Promise | None) -> None:
            if not process.alive:
                return
            try:
                if promise is not None and promise.error is not None:
                    awaited = task.throw(promise.error)
                else:
                    awaited = task.send(None if promise is None else promise.value)
            except StopIteration as end:
                finished.complete(end.value)
            except Exception as error:
                finished.complete(error=error)
            else:
                awaited.then(partial(self.schedule, partial(resume, awaited)))

        self.schedule(partial(resume, None))
        return finished

    def call(
        self,
        caller: Process,
        server: str,
        function: Callable[[Server], Any],
        sender: str | None = None,
    ) -> Promise:
        """Call a function on a server. The request and the reply are events."""
        promise = Promise()

        def arrive() -> None:
            callee = self.servers[server]
            if not caller.alive and self.rng.random() < 0.5:
                return
            if not callee.alive:
                promise.complete(error=PeerLost(f"{callee} is dead"))
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
                result.add_done_callback(partial(reply_with_result, callee))
            else:
                reply(callee, result)

        def reply(callee: Process, value: Any = None, error: BaseException | None = None) -> None:
            def deliver() -> None:
                if callee.alive or self.rng.random() < 0.5:
                    callee.calls.pop(promise, None)
                    promise.complete(value, error)

            if callee.alive:
                self.schedule(deliver)

        def reply_with_result(callee: Process, done: Any) -> None:
            error = done.exception()
            reply(callee, None if error is not None else done.value(), error)

        self.schedule(arrive)
        return promise

    def find_trainer(self, trainer: str) -> ModelTrainer | None:
        """Return a trainer if it is alive and has not left."""
        for process in self.trainers:
            for each in process.model_trainers:
                if each.name == trainer and each.takes_part and process.alive:
                    return each
        return None

    # Faults

    def maybe_inject_fault(self) -> None:
        if self._faults and self.rng.random() < self._fault_rate:
            self._inject_fault(self._faults.pop())

    def _inject_fault(self, fault: str) -> None:
        self.timers_fired = 0
        if fault == "server":
            self.kill_server(self.rng.choice(list(self.servers)))
        elif fault == "join":
            self.trainers.append(TrainerProcess(self, f"n{len(self.trainers)}", self.steps))
        else:
            alive = [
                trainer for trainer in self.trainers if trainer.alive and not trainer.finished.done
            ]
            awaited = max(model.trainers for model in self.models)
            if awaited > 1 and not all(trainer.started for trainer in self.trainers):
                self._faults.insert(0, fault)  # too early: the others would wait for a replacement
            elif len(alive) > 1:
                self.kill_trainer(self.rng.choice(alive))

    def kill_server(self, name: str) -> None:
        server = self.servers[name]
        if not server.alive:
            return
        self.servers_killed += 1
        server.kill()
        for model in self.models:
            self.record_lost_steps(
                model, [each for each in model.servers if model.name not in self._running(each)]
            )
        self._announce_loss(server)
        self.schedule(partial(self._restart, name))

    def kill_trainer(self, trainer: TrainerProcess) -> None:
        trainer.kill()
        for each in trainer.model_trainers:
            self.record_lost_steps(each.model, each.forgotten_by())
        self._announce_loss(trainer)

    def _announce_loss(self, process: Process) -> None:
        for server in self.servers.values():
            self.schedule(partial(self._remove_lost, server, process.incarnation))

    def _remove_lost(self, server: Server, incarnation: str) -> None:
        if server.alive:
            for shard in list(server.shards.values()):
                shard.remove_worker(incarnation)

    def _restart(self, name: str) -> None:
        self.servers[name] = Server(self, name)

    def _running(self, server: str) -> dict[str, HistoryShard]:
        process = self.servers[server]
        return process.shards if process.alive else {}

    def record_lost_steps(self, model: Model, servers: list[str]) -> None:
        """Record the acknowledged steps that restarted servers cannot restore.

        These steps are in no checkpoint that a server may start from, and all trainers that had
        their values have left or died.
        """
        archives = {name: self.servers[name].archive(model) for name in model.servers}
        versions = {name: set(archive.versions()) for name, archive in archives.items()}
        # If all servers were restarted, they start from a version that all have.
        if not any(model.name in self._running(name) for name in model.servers):
            versions = dict.fromkeys(versions, set.intersection(*versions.values()))
        members = [
            each
            for trainer in self.trainers
            for each in trainer.model_trainers
            if each.model is model
        ]
        for name in servers:
            snapshot = archives[name].find(max(versions[name], default=-1))
            kept = set() if snapshot is None else _counted_steps(snapshot.values["history"])  # type: ignore[arg-type]
            for each in members:
                if each.takes_part and each.process.alive:
                    (last_reply,) = (
                        client.last_reply.values for client in each.clients if client.server == name
                    )
                    kept |= _counted_steps(last_reply)  # type: ignore[arg-type]
            acknowledged = {(each.name, step) for each in members for step in each.acknowledged}
            self.lost |= {(model.name, name, *entry) for entry in acknowledged - kept}

    # Run and check

    def run(self) -> None:
        """Process events until all trainers have finished."""
        while not all(trainer.finished.done or not trainer.alive for trainer in self.trainers):
            self.event_count += 1
            if self._kill_at is not None and self.event_count == self._kill_at[0]:
                self.kill_server(self._kill_at[1])
            self.maybe_inject_fault()
            early = self.timers and self.rng.random() < 0.02
            if self.events and not early:
                self.events.pop(self.rng.randrange(len(self.events)))()
            elif self.timers:
                self.timers_fired += 1
                assert self.timers_fired < MAX_TIMERS, (
                    f"a trainer waits for ever: {self.describe_waiting()}"
                )
                self.timers.pop(self.rng.randrange(len(self.timers)))()
            else:
                raise AssertionError(
                    f"no event is left, and a trainer waits: {self.describe_waiting()}"
                )
        for trainer in self.trainers:
            assert not trainer.alive or trainer.finished.error is None, trainer.finished.error

    def describe_waiting(self) -> dict[str, Any]:
        return {
            "trainers": {
                process.incarnation: {each.model.name: each.step for each in process.model_trainers}
                for process in self.trainers
                if process.alive and not process.finished.done
            },
            "servers": {
                name: [shard._coordinator for shard in server.shards.values()]
                for name, server in self.servers.items()
            },
        }

    def histories(self, model: Model) -> dict[str, History]:
        """Return the history on each server: in memory or, if it has no shard yet, on disk."""
        found: dict[str, History] = {}
        for name in model.servers:
            server = self.servers[name]
            if model.name in server.shards:
                found[name] = server.shards[model.name].history
            elif (snapshot := server.archive(model).newest()) is not None:
                found[name] = snapshot.values["history"]  # type: ignore[assignment]
        return found

    def check(self) -> None:
        """Check that steps count once, acknowledged ones count, and servers agree on rounds."""
        for model in self.models:
            exact = model.checkpoint.exact and not self.writes_failed
            safe = exact or not self.servers_killed
            histories = self.histories(model)
            for server, history in histories.items():
                counted = [entry for step in history for entry in step]
                assert len(counted) == len(set(counted)), (
                    f"{model.name} on {server} counts twice: {history}"
                )
                in_memory = model.name in self.servers[server].shards
                if safe or (
                    model.rule == ps.Sync()
                    and model.restorable
                    and in_memory
                    and not self.writes_failed
                ):
                    self._check_acknowledged(model, server, set(counted), include_dead=safe)
            # A follower that lost its reports may finish a round without some of them.
            keeps_reports = model.checkpoint.exact or len(model.servers) == 1
            if model.rule == ps.Sync() and keeps_reports:
                self._check_not_dropped(model)
            if safe and isinstance(model.rule, ps.Sync):
                rounds = [
                    self._confirmed(model, name, history) for name, history in histories.items()
                ]
                longest = max(rounds, key=len, default=())
                assert all(each == longest[: len(each)] for each in rounds), (
                    f"servers differ in {model.name}: {histories}"
                )

    def _check_not_dropped(self, model: Model) -> None:
        """Check that no round was made without a live trainer."""
        for trainer in self.trainers:
            for each in trainer.model_trainers:
                dropped = [step for step, was_dropped in each.acknowledged.items() if was_dropped]
                assert each.model is not model or not dropped, (
                    f"{model.name}: steps {dropped} of {each.name} were dropped"
                )

    def _confirmed(self, model: Model, server: str, history: History) -> History:
        """Return the rounds that have reports and cannot be undone."""
        shard = self.servers[server].shards.get(model.name)
        if shard is None or (
            isinstance(shard._coordinator, RoundCoordinator)
            and shard._coordinator.unconfirmed is not None
        ):
            history = history[:-1]
        return tuple(step for step in history if step)

    def _check_acknowledged(
        self, model: Model, server: str, counted: set[tuple[str, int]], include_dead: bool
    ) -> None:
        for trainer in self.trainers:
            for each in trainer.model_trainers:
                if each.model is model and (trainer.alive or include_dead):
                    for step, dropped in each.acknowledged.items():
                        step_name = f"step {step} of {each.name}, dropped {dropped}"
                        claim = f"{model.name} on {server}: {step_name}"
                        lost = (
                            not include_dead and (model.name, server, each.name, step) in self.lost
                        )
                        assert dropped or lost or (each.name, step) in counted, claim
                        assert not (dropped and include_dead) or (each.name, step) not in counted, (
                            claim
                        )


def _counted_steps(history: History) -> set[tuple[str, int]]:
    return {entry for step in history for entry in step}

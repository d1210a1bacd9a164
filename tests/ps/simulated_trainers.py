"""Simulated trainers: processes that join models, report steps, and return to restarted servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad import ps
from telegrad.errors import PeerLost, StaleReference, UsageError
from telegrad.ps.messages import PushReply, SavedVersions
from telegrad.ps.trainer.creation import find_or_create_shards
from telegrad.ps.trainer.server_client import LOSS_ERRORS
from tests.ps.simulated_processes import Model, Process, Promise, Task, together
from tests.ps.simulated_servers import HistoryShard, Server

if TYPE_CHECKING:
    from tests.ps.simulation import Simulation


class ServerClient:
    """A client of one server. `find_or_create_shards` calls it; these calls are not events."""

    def __init__(self, trainer: ModelTrainer, server: str) -> None:
        self.trainer, self.server, self.spec = trainer, server, trainer.model
        self.last_reply = PushReply(0, values=(), applied={})  # type: ignore[arg-type]

    def _find_server(self) -> Server:
        self.trainer.process.simulation.maybe_inject_fault()
        process = self.trainer.process.simulation.servers[self.server]
        if not process.alive:
            raise PeerLost(f"{process} is dead")
        return process

    def claim_creation(self) -> bool | None:
        return None if self.spec.name in self._find_server().shards else True

    def saved_versions(self) -> SavedVersions:
        return self._find_server().saved_versions(self.spec)

    def create(self, version: int | None) -> None:
        self._find_server().create(self.spec, version)

    def recreate(self) -> None:
        self._find_server().recreate(self.spec)


class ModelTrainer:
    """A trainer of one model."""

    def __init__(self, process: TrainerProcess, model: Model, number: int) -> None:
        self.process, self.model = process, model
        self.name = f"{process.incarnation}/{number}"
        self.clients = [ServerClient(self, server) for server in model.servers]
        self.first = 0
        self.step = 0
        self.acknowledged: dict[int, bool] = {}  # by step: whether it was dropped
        self.takes_part = False
        self.busy = True

    def _call(self, client: ServerClient, function: Callable[[HistoryShard], Any]) -> Promise:
        simulation = self.process.simulation
        return simulation.call(
            self.process, client.server, lambda server: function(server.find(self.model)), self.name
        )

    def join(self) -> Task:
        while True:
            try:
                self.takes_part = True
                find_or_create_shards(self.clients, self.model.rule)  # type: ignore[arg-type]
                self.first = 0
                for client in self.clients:
                    first = yield self._call(client, lambda shard: shard.announce(self.name))
                    self.first = max(self.first, first)
                joined = [
                    self._call(
                        client, partial(HistoryShard.join, trainer=self.name, first=self.first)
                    )
                    for client in self.clients
                ]
                yield from self._wait_for_start(joined)
                for client, reply in zip(self.clients, joined, strict=True):
                    client.last_reply = reply.value
            # UsageError: the first checkpoint could not be written
            except (UsageError, *LOSS_ERRORS):
                yield self.process.simulation.pause()
            else:
                self.busy = False
                return

    def check_member(self, client: ServerClient) -> Task:
        """Return to a server if it was restarted."""
        try:
            known = yield self._call(client, lambda shard: shard.has_member(self.name))
        except StaleReference:
            known = False
        except PeerLost:
            known = True
        if not known:
            self.rejoin_if_idle(client.server)

    def _wait_for_start(self, joined: list[Promise]) -> Task:
        """Wait for all replies. Raise `StaleReference` if a server is restarted after its reply."""
        all_joined = together(joined)
        while not all_joined.done:
            yield from self.process.check_idle_models()
            for client, each in zip(self.clients, joined, strict=True):
                if each.done and not (
                    yield self._call(client, lambda shard: shard.has_member(self.name))
                ):
                    raise StaleReference("a server was restarted")
        yield all_joined

    def rejoin_if_idle(self, server: str) -> None:
        if not self.busy:
            (client,) = (client for client in self.clients if client.server == server)
            self._rejoin(client, self.step, client.last_reply)

    def leave(self) -> Task:
        self.takes_part = False
        self.process.simulation.record_lost_steps(self.model, self.forgotten_by())
        for promise in [
            self._call(client, lambda shard: shard.leave(self.name)) for client in self.clients
        ]:
            try:
                yield promise
            except LOSS_ERRORS:
                continue

    def forgotten_by(self) -> list[str]:
        """Return the restarted servers that this trainer has not returned to."""
        servers = self.process.simulation.servers
        shards = {name: servers[name].shards.get(self.model.name) for name in self.model.servers}
        return [
            name
            for name, shard in shards.items()
            if shard is None or self.name not in shard.members
        ]

    def begin_step(self) -> list[Promise]:
        self.step += 1
        self.busy = True
        rounds = isinstance(self.model.rule, ps.Sync)
        oldest = min(client.last_reply.version for client in self.clients)
        simulation = self.process.simulation
        return [
            simulation.start_task(
                self.process, self._push(client, oldest if rounds else client.last_reply.version)
            )
            for client in self.clients
        ]

    def _push(self, client: ServerClient, version: int) -> Task:
        step, lost = self.step, False
        while True:
            try:
                if lost:
                    yield self._rejoin(client, step - 1, client.last_reply)
                return (
                    yield self._call(client, lambda shard: shard.push(self.name, step, version))
                )
            except LOSS_ERRORS:
                lost = True
                yield self.process.simulation.pause()

    def _rejoin(self, client: ServerClient, acknowledged: int, last_reply: PushReply) -> Promise:
        def rejoin(server: Server) -> None:
            server.recreate(self.model)
            server.find(self.model).rejoin(self.name, self.first, acknowledged, last_reply)

        return self.process.simulation.call(self.process, client.server, rejoin, self.name)

    def finish_step(self, pushes: list[Promise]) -> Task:
        """Wait for all replies. Return to servers that are restarted after their reply."""
        while not all(push.done for push in pushes):
            yield from self.process.check_idle_models()
            for client, push in zip(self.clients, pushes, strict=True):
                if push.done:
                    yield from self._ensure_member(client, push.value)
        for client, push in zip(self.clients, pushes, strict=True):
            if push.error is not None:
                raise push.error
            client.last_reply = push.value
        self.busy = False
        self.acknowledged[self.step] = any(push.value.dropped for push in pushes)

    def _ensure_member(self, client: ServerClient, reply: PushReply) -> Task:
        try:
            if (yield self._call(client, lambda shard: shard.has_member(self.name))):
                return
        except LOSS_ERRORS:
            yield self.process.simulation.pause()
        try:
            yield self._rejoin(client, self.step, reply)
        except LOSS_ERRORS:
            return


class TrainerProcess(Process):
    """A worker that joins all models, makes steps, and leaves."""

    def __init__(self, simulation: Simulation, name: str, steps: int) -> None:
        super().__init__(simulation, name)
        self.started = False
        self.model_trainers = [
            ModelTrainer(self, model, number) for number, model in enumerate(simulation.models)
        ]
        self.finished = simulation.start_task(self, self._train(steps))

    def check_idle_models(self) -> Task:
        """Wait for a timer. Return to restarted servers of models that are between two steps."""
        yield self.simulation.pause()
        for each in self.model_trainers:
            for client in each.clients:
                if not each.busy and each.takes_part:
                    yield from each.check_member(client)

    def _train(self, steps: int) -> Task:
        for each in self.model_trainers:
            yield from each.join()
        self.started = True
        for _ in range(steps):
            tables = [each for each in self.model_trainers if not each.model.restorable]
            begun = [(each, each.begin_step()) for each in tables]
            for each in self.model_trainers:
                if each not in tables:
                    yield from each.finish_step(each.begin_step())
            for each, pushes in begun:
                yield from each.finish_step(pushes)
        for each in self.model_trainers:
            yield from each.leave()

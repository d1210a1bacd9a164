"""Simulated servers: the real `BaseShard` and coordinators, with a simulated disk and network."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad import ps
from telegrad.errors import JoinError, StaleReference
from telegrad.futures import Future
from telegrad.ps.messages import PushReply, SavedVersions, Steps
from telegrad.ps.server.base_shard import BaseShard, ServerRole, run_actions
from telegrad.ps.server.checkpoint import CheckpointArchive, ShardSnapshot
from telegrad.ps.server.coordinator import RoundVote, StepReport
from tests.ps.simulated_processes import History, Model, Process

if TYPE_CHECKING:
    from tests.ps.simulation import Simulation

RUN = "run"


@dataclass
class Disk:
    """The files of one shard."""

    versions: dict[int, ShardSnapshot] = field(default_factory=dict)
    members: dict[str, Any] | None = None


class MemoryArchive(CheckpointArchive):
    """A `CheckpointArchive` that writes to a simulated disk."""

    def __init__(self, simulation: Simulation, policy: ps.Checkpoint, disk: Disk) -> None:
        self.policy = policy
        self.problem = None
        self._keep = max(policy.keep, 2) if policy.exact else policy.keep
        self._simulation, self._disk = simulation, disk
        self._folder = None  # type: ignore[assignment]
        self._members, self._members_saved = None, True
        self._queued_snapshots: list[ShardSnapshot] = []
        self.dead = False

    def versions(self) -> list[int]:
        return sorted(self._disk.versions)

    def find(self, version: int) -> ShardSnapshot | None:
        return self._disk.versions.get(version)

    def readable(self) -> list[int]:
        return self.versions()

    def members(self) -> tuple[list[str], bool]:
        saved = self._disk.members
        return ([], False) if saved is None else (saved["members"], saved["started"])

    def clear(self, after: int = -1) -> None:
        for version in self.versions():
            if version > after:
                del self._disk.versions[version]

    def save(self, snapshot: ShardSnapshot) -> None:
        if self.policy.wait:
            self._attempt(self._write, snapshot)
        else:
            self._queued_snapshots = [snapshot]
            self._simulation.schedule(self._write_queued)

    def record_problem(self, error: Exception) -> None:
        if not isinstance(error, OSError):
            raise error
        self.problem = str(error)

    def _write_queued(self) -> None:
        if self._queued_snapshots and not self.dead:
            self._attempt(self._write, self._queued_snapshots.pop())

    def _write(self, snapshot: ShardSnapshot) -> None:
        self._simulation.maybe_fail_write()
        self._disk.versions[snapshot.version] = snapshot
        if not self._members_saved:
            self._write_members()
        for old in self.versions()[: -self._keep]:
            del self._disk.versions[old]
        self.problem = None

    def _write_members(self) -> None:
        self._simulation.maybe_fail_write()
        self._disk.members = self._members
        self._members_saved = True


class HistoryShard(BaseShard):
    """A shard whose contents are the history of its steps."""

    def __init__(self, model: Model, archive: CheckpointArchive | None, role: ServerRole) -> None:
        super().__init__(model.rule, model.trainers, RUN, archive, role)
        self.model = model
        self.history: History = ()

    def apply(self, reports: list[StepReport]) -> None:
        self.history = (
            *self.history,
            frozenset((report.trainer, report.step) for report in reports),
        )

    def _snapshot(self) -> ShardSnapshot:
        values: Any = {"history": self.history}
        applied = dict(self._coordinator.applied)
        return ShardSnapshot(self.version, RUN, values, [], [], applied, self._unconfirmed_reports)

    def _load(self, snapshot: ShardSnapshot) -> None:
        self.history = snapshot.values["history"]  # type: ignore[assignment]

    def reply_to_report(self, report: StepReport) -> PushReply:
        return self._current()._replace(staleness=report.staleness)

    def reply_to_join(self, trainer: str) -> PushReply:
        return self._current()

    def _current(self) -> PushReply:
        values: Any = self.history
        return PushReply(self.version, values=values, applied=dict(self._coordinator.applied))

    def restore(self, snapshot: ShardSnapshot, expected: list[str], started: bool) -> None:
        self._load(snapshot)
        self._restore(snapshot, expected, started)

    def announce(self, trainer: str) -> int:
        return self._coordinator.announce(trainer)

    def join(self, trainer: str, first: int) -> Future[PushReply]:
        future: Future[PushReply] = Future()
        run_actions(self._join(trainer, first, future))
        return future

    def rejoin(self, trainer: str, first: int, acknowledged: int, last_reply: PushReply) -> None:
        applied: Steps = {}
        if last_reply.version > self.version and self.model.restorable:
            self.history = last_reply.values  # type: ignore[assignment]
            applied = last_reply.applied or {}
        run_actions(self._rejoin(trainer, first, acknowledged, last_reply.version, applied))

    def push(self, trainer: str, step: int, version: int) -> Future[PushReply]:
        future: Future[PushReply] = Future()
        report = StepReport(trainer, step, version, None, future)
        run_actions(self._carry_out(self._coordinator.report(report)))
        return future


class Server(Process):
    """A worker that holds shards. It does what `ParameterShards` and `LeaderProtocol` do."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(simulation, name)
        self.shards: dict[str, HistoryShard] = {}

    def find(self, model: Model) -> HistoryShard:
        if model.name not in self.shards:
            raise StaleReference(f"{self} holds no shard of {model.name}")
        return self.shards[model.name]

    def kill(self) -> None:
        super().kill()
        for shard in self.shards.values():
            shard._archive.dead = True  # type: ignore[union-attr]

    def archive(self, model: Model) -> MemoryArchive:
        disk = self.simulation.disks.setdefault((self.name, model.name), Disk())
        return MemoryArchive(self.simulation, model.checkpoint, disk)

    def saved_versions(self, model: Model) -> SavedVersions:
        shard = self.shards.get(model.name)
        versions = self.archive(model).versions()
        unused = shard is not None and shard.version == 0 and not shard.known
        return SavedVersions(shard is not None, unused, bool(versions), versions)

    def create(self, model: Model, version: int | None) -> None:
        shard = self.shards.get(model.name)
        if shard is not None and (shard.known or shard.version > 0):
            return
        archive = self.archive(model)
        snapshot = None if version is None else archive.find(version)
        archive.clear(after=-1 if version is None else version)
        self._add_shard(model, archive, snapshot)

    def recreate(self, model: Model) -> None:
        if model.name not in self.shards:
            archive = self.archive(model)
            snapshot = archive.newest()
            if snapshot is None:
                raise JoinError(f"{self} was restarted without its part of {model.name}")
            self._add_shard(model, archive, snapshot)

    def _add_shard(
        self, model: Model, archive: MemoryArchive, snapshot: ShardSnapshot | None
    ) -> None:
        leads = self.name == model.servers[0]
        if leads:
            role = ServerRole(self.incarnation, followers=model.servers[1:])
        else:
            role = ServerRole(self.incarnation, send_vote=partial(self._send_vote, model))
        shard = HistoryShard(model, archive, role)
        expected: list[str] = []
        if snapshot is not None:
            expected, started = archive.members()
            shard.restore(snapshot, expected, started)
        shard.save_first()
        self.shards[model.name] = shard
        for trainer in expected:
            self.simulation.schedule(partial(self._ask_trainer, shard, trainer))
        shard.start()
        if leads and isinstance(model.rule, ps.Sync):
            for follower in model.servers[1:]:
                self._ask_for_round(model, follower)

    def _ask_trainer(self, shard: HistoryShard, trainer: str) -> None:
        if not self.alive:
            return
        found = self.simulation.find_trainer(trainer)
        if found is None:
            shard.leave(trainer)
        else:
            found.rejoin_if_idle(self.name)

    def _send_vote(self, model: Model, vote: RoundVote) -> None:
        if not self.alive or not self.find(model).is_vote_pending(vote):
            return
        verdict = self.simulation.call(
            self,
            model.servers[0],
            lambda leader: leader.find(model).receive_vote(self.name, vote),
            vote.server,
        )

        def handle_reply() -> None:
            if not self.alive:
                return
            if verdict.error is None:
                self.find(model).receive_verdict(vote.sequence, verdict.value)
            else:
                self.simulation.add_timer(partial(self._send_vote, model, vote))

        verdict.then(handle_reply)

    def _ask_for_round(self, model: Model, follower: str) -> None:
        if not self.alive or not self.find(model).may_be_behind:
            return
        reply = self.simulation.call(
            self, follower, lambda other: (other.incarnation, other.find(model).current_round)
        )

        def handle_reply() -> None:
            if self.alive:
                if reply.error is None:
                    self.find(model).receive_round(follower, *reply.value)
                self.simulation.add_timer(partial(self._ask_for_round, model, follower))

        reply.then(handle_reply)

"""What trainers call on a server. A worker needs no code of its own to be one: the first trainer that comes makes it.

Which trainer that is, whose parameters everybody starts from, is decided by the first of the servers; it makes the
shards of all others before that one's. So whoever finds a shard on the first server finds one on all.

State: `ParameterShards`, one per agent: who is making shards, under the lock of the `ShardRegistry` that they are added
to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from telegrad.errors import JoinError, UsageError
from telegrad.messages.routes import allow_any_device
from telegrad.ps import flat_memory
from telegrad.ps.flat_memory import SegmentHandle
from telegrad.ps.messages import (
    Gradients,
    JoinReply,
    PushReply,
    SavedVersions,
    ShardSpec,
    Steps,
    worker_of,
)
from telegrad.ps.server.checkpoint import CheckpointArchive, ShardSnapshot
from telegrad.ps.server.leader import LeaderProtocol
from telegrad.ps.server.registry import ShardRegistry, value_or_deferred
from telegrad.ps.server.shard import ParameterShard
from telegrad.ps.server.shard_optimizer import Options, State
from telegrad.server.functions import trusted

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class ParameterShards:
    """The shards that live on one worker."""

    def __init__(self, agent: AgentRuntime) -> None:
        self.agent = agent
        self._registry = agent.service(ShardRegistry)
        self._founders: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<ParameterShards of {self.agent.name}, made by {self._founders}>"

    @classmethod
    def here(cls) -> ParameterShards:
        return ShardRegistry.here().agent.service(cls)

    def find(self, name: str) -> ParameterShard:
        return self._registry.find(_what(name), ParameterShard)

    def has(self, name: str) -> bool:
        return self._registry.has(_what(name))

    def found(self, name: str, trainer: str) -> bool:
        with self._registry.lock:
            founder = self._founders.get(name)
            if not self.has(name) and (founder is None or self.agent.is_lost(worker_of(founder))):
                founder = self._founders[name] = trainer
            return not self.has(name) and founder == trainer

    def leave(self, name: str, trainer: str) -> None:
        with self._registry.lock:
            if self._founders.get(name) == trainer:
                del self._founders[name]  # if it could not make the shards, the next may try
        if self.has(name):
            self.find(name).leave(trainer)

    def saved(self, plan: ShardSpec) -> SavedVersions:
        """Say what a shard could begin with."""
        here = self.has(plan.name)
        pristine = here and self.find(plan.name).version == 0 and not self.find(plan.name).known
        archive = self._archive(plan)
        newest = None if archive is None else archive.newest()
        if archive is None or newest is None:
            return SavedVersions(here, pristine, ours=False, versions=[])
        ours = newest.run == self.agent.group
        return SavedVersions(
            here, pristine, ours, archive.readable() if ours or archive.policy.resume else []
        )

    def create(self, plan: ShardSpec, values: Tensor, version: int | None) -> None:
        """Make a shard with a version that was saved or, if that is None, with these values.

        One that is here and that nobody has used is replaced: whoever made it died before it had made all.
        """
        with self._registry.lock:
            if self.has(plan.name) and (
                self.find(plan.name).known or self.find(plan.name).version > 0
            ):
                return
            archive = self._archive(plan)
            snapshot = None if archive is None or version is None else archive.find(version)
            if archive is not None:
                if version is not None and snapshot is None:
                    raise UsageError(
                        f"worker {self.agent.name!r} cannot read its checkpoint of version {version}"
                    )
                archive.clear(after=-1 if version is None else version)
            self._make(plan, values, archive, snapshot)

    def recreate(self, plan: ShardSpec) -> None:
        """Make a shard that was here before this worker was restarted, from its newest checkpoint."""
        with self._registry.lock:
            if self.has(plan.name):
                return
            archive = self._archive(plan)
            snapshot = None if archive is None else archive.newest()
            if (
                archive is None
                or snapshot is None
                or not (archive.policy.resume or snapshot.run == self.agent.group)
            ):
                where = "it saves none"
                if archive is not None and plan.checkpoint is not None:
                    where = f"there is none of this run in {plan.checkpoint.folder}"
                raise JoinError(
                    f"worker {self.agent.name!r} has come back without its part of parameter server {plan.name!r}: it "
                    f"needs a checkpoint that can be read, and {where}. Start the training anew"
                )
            values = flat_memory.allocate_private(plan.share.nbytes, _usable(plan.device))
            self._make(plan, values, archive, snapshot).look_around()

    def check(self, shard: ParameterShard, trainer: str) -> None:
        """A call of a trainer may be served after its loss was noticed: it must not stay."""
        self._registry.check(shard, trainer)

    def _archive(self, plan: ShardSpec) -> CheckpointArchive | None:
        agent, rule = self.agent, plan.checkpoint
        return (
            None
            if rule is None
            else CheckpointArchive(rule, plan.name, agent.name, agent.threads.start)
        )

    def _make(
        self,
        plan: ShardSpec,
        values: Tensor,
        archive: CheckpointArchive | None,
        snapshot: ShardSnapshot | None,
    ) -> LeaderProtocol:
        agent, what = self.agent, _what(plan.name)
        protocol = LeaderProtocol(agent, what, plan.servers, patient=archive is not None)
        shard = ParameterShard(
            plan, values, shares_memory(agent), agent.group, archive, protocol.role
        )
        expected: list[str] = []
        if archive is not None and snapshot is not None:
            members, started = archive.members()
            expected = members if snapshot.run == agent.group else []
            shard.restore(snapshot, expected, started)
        shard.save_first()
        self._registry.add(what, shard)
        self._registry.expect(shard, expected)
        shard.start()
        return protocol


def _what(name: str) -> str:
    return f"parameter server {name!r}"


def _usable(device: str) -> str:
    """The device of the trainers if this worker has it, too."""
    wanted = torch.device(device)
    return (
        device
        if wanted.type == "cuda" and (wanted.index or 0) < torch.cuda.device_count()
        else "cpu"
    )


def shares_memory(agent: AgentRuntime) -> bool:
    """Who has been told to use TCP only is treated as if it were on another host."""
    return any(transport != "tcp" for transport in agent.config.transports)


@trusted
def find_shard(name: str, trainer: str) -> bool | None:
    """May this trainer make the shards? None: they are there already."""
    shards = ParameterShards.here()
    if shards.has(name):
        return None
    return shards.found(name, trainer)


@trusted
def saved(plan: ShardSpec) -> SavedVersions:
    """Say what of a parameter server is here, in memory or in checkpoints."""
    return ParameterShards.here().saved(plan)


@trusted
@allow_any_device
def create(plan: ShardSpec, values: Tensor, version: int | None) -> None:
    """Make a shard, unless there is one."""
    ParameterShards.here().create(plan, values, version)


@trusted
def recreate(plan: ShardSpec) -> None:
    """Make a shard again that was here before this worker was restarted."""
    ParameterShards.here().recreate(plan)


@trusted
def has_member(name: str, trainer: str) -> bool:
    """Return whether a trainer takes part here."""
    return ParameterShards.here().find(name).has_member(trainer)


@trusted
def announce(plan: ShardSpec, trainer: str) -> int:
    shards = ParameterShards.here()
    shard = shards.find(plan.name)
    first = shard.announce(trainer, plan)
    shards.check(shard, trainer)
    return first


@trusted
@allow_any_device
def enter(name: str, trainer: str, first: int, gradients: SegmentHandle | None) -> Any:
    shards = ParameterShards.here()
    shard = shards.find(name)
    entered = shard.enter(trainer, first, gradients)
    shards.check(shard, trainer)
    return value_or_deferred(entered)


@trusted
@allow_any_device
def resume(
    plan: ShardSpec,
    trainer: str,
    first: int,
    acknowledged: int,
    version: int,
    values: Tensor,
    gradients: SegmentHandle | None,
    applied: Steps,
) -> JoinReply:
    """Let a trainer come back to a server that has lost it, most likely because it was restarted."""
    shards = ParameterShards.here()
    ShardRegistry.here().refuse_lost(trainer)
    shards.recreate(plan)
    shard = shards.find(plan.name)
    welcome = shard.resume(trainer, first, acknowledged, version, values, gradients, applied)
    shards.check(shard, trainer)
    return welcome


@trusted
@allow_any_device
def bring(name: str, trainer: str, step: int, pieces: dict[int, Tensor]) -> None:
    """Buckets of gradients that are ready before the step that they are for."""
    ParameterShards.here().find(name).bring(trainer, step, pieces)


@trusted
@allow_any_device
def push(
    name: str,
    trainer: str,
    step: int,
    version: int,
    changes: dict[int, Options],
    gradients: Gradients | None,
    by_value: bool,
    missing: frozenset[int] = frozenset(),
    skip: bool = False,
    written: dict[int, Tensor] | None = None,
) -> Any:
    shard = ParameterShards.here().find(name)
    arguments = (changes, gradients, by_value, missing, skip, written)
    return value_or_deferred(shard.push(trainer, step, version, *arguments))


@trusted
def leave(name: str, trainer: str) -> None:
    ParameterShards.here().leave(name, trainer)


@trusted
@allow_any_device
def pull(name: str) -> PushReply:
    return ParameterShards.here().find(name).pull()


@trusted
@allow_any_device
def state(name: str) -> list[State]:
    return ParameterShards.here().find(name).state()


@trusted
@allow_any_device
def load(name: str, states: dict[int, State], changes: dict[int, Options]) -> None:
    ParameterShards.here().find(name).load(states, changes)

"""The calls that trainers make to a parameter server, and the shards that serve them.

A worker needs no code of its own to be a server: the first trainer creates its shard. The first
server decides which trainer that is, and whose parameters training starts from. That trainer
creates the shards of all other servers before the shard of the first server. So if the first server
has a shard, all servers have one.

State: `ParameterShards`, one per agent. It records which trainer creates each parameter server,
under the lock of the `ShardRegistry`, which holds the shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from telegrad.errors import JoinError, UsageError
from telegrad.messages.device_routes import allow_any_device
from telegrad.messages.remote_functions import trusted
from telegrad.param_groups import Options
from telegrad.ps.messages import (
    Gradients,
    JoinReply,
    PushReply,
    SavedVersions,
    ShardSpec,
    Steps,
    worker_of,
)
from telegrad.ps.optimizer_types import State
from telegrad.ps.server.checkpoint import CheckpointArchive, ShardSnapshot
from telegrad.ps.server.leader_protocol import LeaderProtocol
from telegrad.ps.server.registry import ShardRegistry, value_or_deferred
from telegrad.ps.server.shard import ParameterShard
from telegrad.transport import flat_memory
from telegrad.transport.flat_memory import SegmentHandle

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class ParameterShards:
    """The parameter shards of one worker: create, find and restore them."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self.runtime = runtime
        self._registry = runtime.service(ShardRegistry)
        self._creators: dict[str, str] = {}  # trainers, by the name of the parameter server

    def __repr__(self) -> str:
        return f"<ParameterShards of {self.runtime.name}, created by {self._creators}>"

    @classmethod
    def here(cls) -> ParameterShards:
        """Return the shards of the agent that serves the current call."""
        return ShardRegistry.here().runtime.service(cls)

    def find(self, name: str) -> ParameterShard:
        """Return a shard. Raise `StaleReference` if there is none."""
        return self._registry.find(_key(name), ParameterShard)

    def has(self, name: str) -> bool:
        """Return whether there is a shard of this parameter server."""
        return self._registry.has(_key(name))

    def claim_creation(self, name: str, trainer: str) -> bool:
        """Return whether this trainer is the one that creates the parameter server."""
        with self._registry.lock:
            if self.has(name):
                return False
            creator = self._creators.get(name)
            if creator is None or self.runtime.is_lost(worker_of(creator)):
                creator = self._creators[name] = trainer
            return creator == trainer

    def leave(self, name: str, trainer: str) -> None:
        """Remove a trainer."""
        with self._registry.lock:
            # If it could not create the shards, another trainer may try.
            if self._creators.get(name) == trainer:
                del self._creators[name]
        if self.has(name):
            self.find(name).leave(trainer)

    def saved_versions(self, spec: ShardSpec) -> SavedVersions:
        """Return what this server has of a parameter server, in memory and on disk."""
        has_shard = self.has(spec.name)
        unused = has_shard and not self._is_used(spec.name)
        archive = self._open_archive(spec)
        newest = None if archive is None else archive.newest()
        if archive is None or newest is None:
            return SavedVersions(has_shard, unused, of_this_run=False, versions=[])
        of_this_run = newest.run == self.runtime.group
        versions = archive.readable() if of_this_run or archive.policy.resume else []
        return SavedVersions(has_shard, unused, of_this_run, versions)

    def create(self, spec: ShardSpec, values: Tensor, version: int | None) -> None:
        """Create a shard from a saved version or, if that is None, from these values.

        An unused shard is replaced: its creator died before it had created the shards of all
        servers.
        """
        with self._registry.lock:
            if self.has(spec.name) and self._is_used(spec.name):
                return
            archive = self._open_archive(spec)
            snapshot = None if archive is None or version is None else archive.find(version)
            if archive is not None:
                if version is not None and snapshot is None:
                    raise UsageError(
                        f"worker {self.runtime.name!r} cannot read its checkpoint of version "
                        f"{version} any more; start again, which uses another version"
                    )
                archive.clear(after=-1 if version is None else version)
            self._add_shard(spec, values, archive, snapshot)

    def recreate(self, spec: ShardSpec) -> None:
        """Create a shard from its newest checkpoint if this worker was restarted."""
        with self._registry.lock:
            if self.has(spec.name):
                return
            archive = self._open_archive(spec)
            snapshot = None if archive is None else archive.newest()
            if archive is not None and snapshot is not None:
                usable = archive.policy.resume or snapshot.run == self.runtime.group
            else:
                usable = False
            if not usable:
                reason = "it saves none"
                if spec.checkpoint is not None:
                    reason = f"there is none of this run in {spec.checkpoint.folder}"
                raise JoinError(
                    f"worker {self.runtime.name!r} was restarted without its part of parameter "
                    f"server {spec.name!r}: it needs a checkpoint that can be read, and {reason}. "
                    "Start the training anew"
                )
            values = flat_memory.allocate_private(spec.server_range.nbytes, _available(spec.device))
            self._add_shard(spec, values, archive, snapshot).ask_followers_for_round()

    def remove_if_lost(self, shard: ParameterShard, trainer: str) -> None:
        """Remove the trainer that made the current call if it is lost."""
        self._registry.remove_if_lost(shard, trainer)

    def _is_used(self, name: str) -> bool:
        shard = self.find(name)
        return bool(shard.version > 0 or shard.known)

    def _open_archive(self, spec: ShardSpec) -> CheckpointArchive | None:
        if spec.checkpoint is None:
            return None
        runtime = self.runtime
        return CheckpointArchive(spec.checkpoint, spec.name, runtime.name, runtime.threads.start)

    def _add_shard(
        self,
        spec: ShardSpec,
        values: Tensor,
        archive: CheckpointArchive | None,
        snapshot: ShardSnapshot | None,
    ) -> LeaderProtocol:
        """Create a shard, restore it from a snapshot, and start it."""
        runtime, key = self.runtime, _key(spec.name)
        protocol = LeaderProtocol(runtime, key, spec.servers, retry=archive is not None)
        shard = ParameterShard(
            spec,
            values,
            flat_memory.may_share(runtime.config),
            runtime.group,
            archive,
            protocol.role,
        )
        expected: list[str] = []
        if archive is not None and snapshot is not None:
            members, started = archive.members()
            expected = members if snapshot.run == runtime.group else []
            shard.restore(snapshot, expected, started)
        shard.save_first()
        self._registry.add(key, shard)
        self._registry.ask_trainers(shard, expected)
        shard.start()
        return protocol


def _key(name: str) -> str:
    """Return the key of a parameter server in the `ShardRegistry`."""
    return f"parameter server {name!r}"


def _find(name: str) -> ParameterShard:
    """Return the shard of a parameter server here. Raise `StaleReference` if there is none."""
    return ShardRegistry.here().find(_key(name), ParameterShard)


def _available(device: str) -> str:
    """Return the device of the trainers if this worker has it, or else "cpu"."""
    wanted = torch.device(device)
    has_device = wanted.type == "cuda" and (wanted.index or 0) < torch.cuda.device_count()
    return device if has_device else "cpu"


# Calls of trainers


@trusted
def claim_creation(name: str, trainer: str) -> bool | None:
    """Return None if there is a shard, or else whether this trainer creates the shards."""
    shards = ParameterShards.here()
    if shards.has(name):
        return None
    return shards.claim_creation(name, trainer)


@trusted
def saved_versions(spec: ShardSpec) -> SavedVersions:
    """Return what this server has of a parameter server, in memory and on disk."""
    return ParameterShards.here().saved_versions(spec)


@trusted
@allow_any_device
def create(spec: ShardSpec, values: Tensor, version: int | None) -> None:
    """Create a shard, unless there is one in use."""
    ParameterShards.here().create(spec, values, version)


@trusted
def recreate(spec: ShardSpec) -> None:
    """Create a shard from its newest checkpoint, unless there is one."""
    ParameterShards.here().recreate(spec)


@trusted
def has_member(name: str, trainer: str) -> bool:
    """Return whether a trainer takes part here."""
    return _find(name).has_member(trainer)


@trusted
def announce(spec: ShardSpec, trainer: str) -> int:
    """Record that a trainer will join. Return the first round, or clock, it may start with."""
    shards = ParameterShards.here()
    shard = shards.find(spec.name)
    first = shard.announce(trainer, spec)
    shards.remove_if_lost(shard, trainer)
    return first


@trusted
@allow_any_device
def join(name: str, trainer: str, first: int, gradients: SegmentHandle | None) -> Any:
    """Let a trainer join. Reply when it may start."""
    shards = ParameterShards.here()
    shard = shards.find(name)
    joined = shard.join(trainer, first, gradients)
    shards.remove_if_lost(shard, trainer)
    return value_or_deferred(joined)


@trusted
@allow_any_device
def rejoin(
    spec: ShardSpec,
    trainer: str,
    first: int,
    acknowledged: int,
    version: int,
    values: Tensor,
    gradients: SegmentHandle | None,
    applied: Steps,
) -> JoinReply:
    """Let a trainer return to a server that does not know it, because the server was restarted."""
    shards = ParameterShards.here()
    ShardRegistry.here().reject_if_lost(trainer)
    shards.recreate(spec)
    shard = shards.find(spec.name)
    reply = shard.rejoin(trainer, first, acknowledged, version, values, gradients, applied)
    shards.remove_if_lost(shard, trainer)
    return reply


@trusted
@allow_any_device
def stage_gradients(name: str, trainer: str, step: int, pieces: dict[int, Tensor]) -> None:
    """Receive buckets of gradients before the trainer reports the step that they belong to."""
    _find(name).stage_gradients(trainer, step, pieces)


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
    """Receive the report of a step. Reply when the trainer may continue."""
    shard = _find(name)
    arguments = (changes, gradients, by_value, missing, skip, written)
    return value_or_deferred(shard.push(trainer, step, version, *arguments))


@trusted
def leave(name: str, trainer: str) -> None:
    """Remove a trainer."""
    ParameterShards.here().leave(name, trainer)


@trusted
@allow_any_device
def pull(name: str) -> PushReply:
    """Return the current values."""
    return _find(name).pull()


@trusted
@allow_any_device
def state(name: str) -> list[State]:
    """Return the optimizer state of each part of this server's range."""
    return _find(name).state()


@trusted
@allow_any_device
def load(name: str, states: dict[int, State], changes: dict[int, Options]) -> None:
    """Set the optimizer state of whole parameters, by index."""
    _find(name).load(states, changes)

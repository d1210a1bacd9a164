"""The remote functions of servers that hold tables. The first trainer that joins creates the shard.

They have no state of their own: shards are in the `ShardRegistry` of the agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from telegrad.errors import JoinError
from telegrad.messages.remote_functions import trusted
from telegrad.ps.embeddings.messages import RowRequest, RowUpdate, TableDefinition, TablesSpec
from telegrad.ps.embeddings.shard import TableShard
from telegrad.ps.messages import PushReply
from telegrad.ps.server.checkpoint import CheckpointArchive
from telegrad.ps.server.leader_protocol import LeaderProtocol
from telegrad.ps.server.registry import ShardRegistry, value_or_deferred


def find(name: str) -> TableShard:
    """Return the shard of the tables `name` on this worker."""
    return ShardRegistry.here().find(_key(name), TableShard)


def _key(name: str) -> str:
    """Return the key in the registry, which also names the tables in errors."""
    return f"tables {name!r}"


def _find_or_create(registry: ShardRegistry, spec: TablesSpec, rejoining: bool) -> TableShard:
    """Return the shard. Create it if there is none, for `rejoining` trainers from a checkpoint."""
    key = _key(spec.name)
    with registry.lock:
        if not registry.has(key):
            protocol = LeaderProtocol(
                registry.runtime, key, spec.servers, retry=spec.checkpoint is not None
            )
            shard, expected = _create(registry, spec, protocol, rejoining)
            registry.add(key, shard)
            registry.ask_trainers(shard, expected)
            shard.start()
            protocol.ask_followers_for_round()
        return registry.find(key, TableShard)


def _create(
    registry: ShardRegistry, spec: TablesSpec, protocol: LeaderProtocol, rejoining: bool
) -> tuple[TableShard, list[str]]:
    """Return a new shard, and the trainers that it has to wait for."""
    runtime, rule = registry.runtime, spec.checkpoint
    archive = None
    if rule is not None:
        archive = CheckpointArchive(
            rule, f"{spec.name}.tables", runtime.name, runtime.threads.start
        )
    shard = TableShard(spec, runtime.group, archive, protocol.role)
    snapshot = None if archive is None else archive.newest()
    is_same_run = snapshot is not None and snapshot.run == runtime.group
    if rejoining and not is_same_run:
        raise JoinError(
            f"worker {runtime.name!r} was restarted without its part of tables {spec.name!r}: it "
            "has no readable checkpoint of this run. Start the training again"
        )
    if archive is None or rule is None:
        return shard, []
    expected: list[str] = []
    if snapshot is not None and (is_same_run or rule.resume):
        members, started = archive.members()
        expected = members if is_same_run else []
        shard.restore(snapshot, expected, started)
    else:
        archive.clear()
    shard.save_first()
    return shard, expected


@trusted
def announce(spec: TablesSpec, trainer: str) -> int:
    """Announce a trainer. Return the round from which on this server waits for it."""
    registry = ShardRegistry.here()
    shard = _find_or_create(registry, spec, rejoining=False)
    first_round = shard.announce(trainer, spec)
    registry.remove_if_lost(shard, trainer)
    return first_round


@trusted
def join(name: str, trainer: str, first_round: int) -> Any:
    """Let a trainer join. Reply when it may start, in `first_round`."""
    registry = ShardRegistry.here()
    shard = registry.find(_key(name), TableShard)
    joined = shard.join(trainer, first_round)
    registry.remove_if_lost(shard, trainer)
    return value_or_deferred(joined)


@trusted
def rejoin(
    spec: TablesSpec,
    tables: list[TableDefinition],
    trainer: str,
    first_round: int,
    acknowledged: int,
    version: int,
) -> PushReply:
    """Let a trainer rejoin a server that was restarted."""
    registry = ShardRegistry.here()
    registry.reject_if_lost(trainer)
    shard = _find_or_create(registry, spec, rejoining=True)
    shard.define(tables)
    reply = shard.rejoin(trainer, first_round, acknowledged, version)
    registry.remove_if_lost(shard, trainer)
    return reply


@trusted
def has_member(name: str, trainer: str) -> bool:
    """Return whether a trainer is a member here."""
    return find(name).has_member(trainer)


@trusted
def define(name: str, tables: list[TableDefinition]) -> None:
    """Create tables that do not exist yet."""
    find(name).define(tables)


@trusted
def pull(name: str, requests: Sequence[RowRequest], store_new: bool) -> tuple[int, list[Tensor]]:
    """Return the version and the requested rows. `store_new` stores rows that are new."""
    return find(name).pull(requests, store_new)


@trusted
def push(name: str, trainer: str, step: int, version: int, updates: list[RowUpdate] | None) -> Any:
    """Report the gradients of a step. Reply when the trainer may continue."""
    return value_or_deferred(find(name).push(trainer, step, version, updates))


@trusted
def write_rows(name: str, table: str, ids: Tensor, values: Tensor) -> None:
    """Replace the values of rows."""
    find(name).write_rows(table, ids, values)


@trusted
def stored_rows(name: str, table: str, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the ids and values of `count` stored rows from position `start` on."""
    return find(name).stored_rows(table, start, count)


@trusted
def leave(name: str, trainer: str) -> None:
    """Do not wait for a trainer any more."""
    if ShardRegistry.here().has(_key(name)):
        find(name).leave(trainer)

"""What trainers call on a server that holds tables. The first that comes makes the shard there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from telegrad.errors import JoinError
from telegrad.ps.embeddings.messages import RowRequest, RowUpdate, TableDefinition, TablesSpec
from telegrad.ps.embeddings.shard import TableShard
from telegrad.ps.messages import PushReply
from telegrad.ps.server.checkpoint import CheckpointArchive
from telegrad.ps.server.leader import LeaderProtocol
from telegrad.ps.server.registry import ShardRegistry, value_or_deferred
from telegrad.server.functions import trusted


def find(name: str) -> TableShard:
    """What is here of these tables."""
    return ShardRegistry.here().find(_what(name), TableShard)


def _what(name: str) -> str:
    return f"tables {name!r}"


def _have(holdings: ShardRegistry, plan: TablesSpec, back: bool) -> TableShard:
    """Return the shard, made if need be. One that trainers come `back` to must have a checkpoint."""
    what = _what(plan.name)
    with holdings.lock:
        if not holdings.has(what):
            protocol = LeaderProtocol(
                holdings.agent, what, plan.servers, patient=plan.checkpoint is not None
            )
            shard, expected = _made(holdings, plan, protocol, back)
            holdings.add(what, shard)
            holdings.expect(shard, expected)
            shard.start()
            protocol.look_around()
        return holdings.find(what, TableShard)


def _made(
    holdings: ShardRegistry, plan: TablesSpec, protocol: LeaderProtocol, back: bool
) -> tuple[TableShard, list[str]]:
    """Return a new shard, and the trainers that it has to wait for."""
    agent, rule = holdings.agent, plan.checkpoint
    archive = (
        None
        if rule is None
        else CheckpointArchive(rule, f"{plan.name}.tables", agent.name, agent.threads.start)
    )
    shard = TableShard(plan, agent.group, archive, protocol.role)
    snapshot = None if archive is None else archive.newest()
    ours = snapshot is not None and snapshot.run == agent.group
    if back and not ours:
        raise JoinError(
            f"worker {agent.name!r} has come back without its part of tables {plan.name!r}: there is no checkpoint of "
            "this run that can be read. Start the training anew"
        )
    if archive is None or rule is None:
        return shard, []
    expected: list[str] = []
    if snapshot is not None and (ours or rule.resume):
        members, started = archive.members()
        expected = members if ours else []
        shard.restore(snapshot, expected, started)
    else:
        archive.clear()
    shard.save_first()
    return shard, expected


@trusted
def announce(plan: TablesSpec, trainer: str) -> int:
    holdings = ShardRegistry.here()
    shard = _have(holdings, plan, back=False)
    first = shard.announce(trainer, plan)
    holdings.check(shard, trainer)
    return first


@trusted
def enter(name: str, trainer: str, first: int) -> Any:
    holdings = ShardRegistry.here()
    shard = holdings.find(_what(name), TableShard)
    entered = shard.enter(trainer, first)
    holdings.check(shard, trainer)
    return value_or_deferred(entered)


@trusted
def resume(
    plan: TablesSpec,
    tables: list[TableDefinition],
    trainer: str,
    first: int,
    acknowledged: int,
    version: int,
) -> PushReply:
    """Let a trainer come back to a server that has lost it, most likely because it was restarted."""
    holdings = ShardRegistry.here()
    holdings.refuse_lost(trainer)
    shard = _have(holdings, plan, back=True)
    shard.define(tables)
    answer = shard.resume(trainer, first, acknowledged, version)
    holdings.check(shard, trainer)
    return answer


@trusted
def has_member(name: str, trainer: str) -> bool:
    """Return whether a trainer takes part here."""
    return find(name).has_member(trainer)


@trusted
def define(name: str, tables: list[TableDefinition]) -> None:
    find(name).define(tables)


@trusted
def pull(name: str, wanted: Sequence[RowRequest], keep: bool) -> tuple[int, list[Tensor]]:
    return find(name).pull(wanted, keep)


@trusted
def push(name: str, trainer: str, step: int, version: int, updates: list[RowUpdate] | None) -> Any:
    return value_or_deferred(find(name).push(trainer, step, version, updates))


@trusted
def put(name: str, table: str, ids: Tensor, values: Tensor) -> None:
    find(name).put(table, ids, values)


@trusted
def part(name: str, table: str, start: int, count: int) -> tuple[Tensor, Tensor]:
    return find(name).part(table, start, count)


@trusted
def leave(name: str, trainer: str) -> None:
    if ShardRegistry.here().has(_what(name)):
        find(name).leave(trainer)

"""What trainers call on a server that holds tables. The first that comes makes the shard there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from telegrad.agent.targets import trusted
from telegrad.errors import StaleReference
from telegrad.ps.checkpoint import Archive
from telegrad.ps.council import Council
from telegrad.ps.holdings import Holdings, now_or_later
from telegrad.ps.messages import Answer, worker_of
from telegrad.ps.tables.messages import Definition, Plan, Update, Wanted
from telegrad.ps.tables.shard import Shard


def find(name: str) -> Shard:
    """What is here of these tables."""
    return Holdings.here().find(_what(name), Shard)


def _what(name: str) -> str:
    return f"tables {name!r}"


def _have(holdings: Holdings, plan: Plan, back: bool) -> Shard:
    """The shard, made if need be. One that trainers come `back` to must have a checkpoint."""
    what = _what(plan.name)
    with holdings.lock:
        if not holdings.has(what):
            council = Council(holdings.agent, what, plan.servers, patient=plan.checkpoint is not None)
            holdings.add(what, _made(holdings, plan, council, back))
            if back:
                council.look_around()
        return holdings.find(what, Shard)


def _made(holdings: Holdings, plan: Plan, council: Council, back: bool) -> Shard:
    agent, rule = holdings.agent, plan.checkpoint
    if rule is None:
        if back:
            raise StaleReference(f"worker {agent.name!r} has come back without its part of tables {plan.name!r}")
        return Shard(plan, agent.group, None, council.followers, council.ask)
    archive = Archive(rule, f"{plan.name}.tables", agent.name, agent.threads.start)
    snapshot = archive.newest()
    known = archive.members()
    ours = snapshot is not None and snapshot.run == agent.group
    shard = Shard(plan, agent.group, archive, council.followers, council.ask)
    if snapshot is not None and (ours or rule.resume):
        shard.restore(snapshot, known)
    elif not back:
        archive.clear()
    if ours:
        for worker in set(map(worker_of, known)):
            agent.watch(worker)
    shard.save()
    return shard


@trusted
def announce(plan: Plan, trainer: str) -> int:
    holdings = Holdings.here()
    shard = _have(holdings, plan, back=False)
    first = shard.announce(trainer, plan)
    holdings.check(shard, trainer)
    return first


@trusted
def enter(name: str, trainer: str, first: int) -> Any:
    holdings = Holdings.here()
    shard = holdings.find(_what(name), Shard)
    entered = shard.enter(trainer, first)
    holdings.check(shard, trainer)
    return now_or_later(entered)


@trusted
def resume(plan: Plan, tables: list[Definition], trainer: str, acknowledged: int, version: int) -> Answer:
    """A trainer comes back to a server that has lost it, most likely because it was restarted."""
    holdings = Holdings.here()
    shard = _have(holdings, plan, back=True)
    shard.define(tables)
    answer = shard.resume(trainer, acknowledged, version)
    holdings.check(shard, trainer)
    return answer


@trusted
def define(name: str, tables: list[Definition]) -> None:
    find(name).define(tables)


@trusted
def pull(name: str, wanted: Sequence[Wanted], keep: bool) -> tuple[int, list[Tensor]]:
    return find(name).pull(wanted, keep)


@trusted
def push(name: str, trainer: str, step: int, version: int, updates: list[Update]) -> Any:
    return now_or_later(find(name).push(trainer, step, version, updates))


@trusted
def put(name: str, table: str, ids: Tensor, values: Tensor) -> None:
    find(name).put(table, ids, values)


@trusted
def part(name: str, table: str, start: int, count: int) -> tuple[Tensor, Tensor]:
    return find(name).part(table, start, count)


@trusted
def leave(name: str, trainer: str) -> None:
    if Holdings.here().has(_what(name)):
        find(name).leave(trainer)

"""What trainers call on a server that holds tables. The first that comes makes the shard there.

State: `Shards`, one per agent: the shards by name, under `_lock`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from telegrad.agent.current import active_agent
from telegrad.agent.serving import Later, trusted
from telegrad.errors import StaleReference
from telegrad.ps.checkpoint import Archive
from telegrad.ps.messages import Answer, worker_of
from telegrad.ps.tables.messages import Definition, Plan, Update, Wanted
from telegrad.ps.tables.shard import Shard

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent


class Shards:
    """The shards of tables that live on one worker."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._shards: dict[str, Shard] = {}
        self._lock = threading.Lock()
        agent.on_loss(self._lost)
        agent.on_close(self._close)

    def __repr__(self) -> str:
        return f"<Shards of tables on {self.agent.name}: {list(self._shards.values())}>"

    @classmethod
    def here(cls) -> Shards:
        agent = active_agent()
        if agent is None:  # it was called in the moment in which it closes
            raise StaleReference("a worker that holds tables is leaving")
        return agent.service(cls)

    def find(self, name: str) -> Shard:
        shard = self._shards.get(name)
        if shard is None:
            raise StaleReference(f"worker {self.agent.name!r} holds no tables {name!r}")
        return shard

    def has(self, name: str) -> bool:
        return name in self._shards

    def have(self, plan: Plan, back: bool) -> Shard:
        """The shard, made if need be. One that trainers come `back` to must have a checkpoint."""
        with self._lock:
            if plan.name not in self._shards:
                self._shards[plan.name] = self._made(plan, back)
            return self._shards[plan.name]

    def _made(self, plan: Plan, back: bool) -> Shard:
        agent, rule = self.agent, plan.checkpoint
        if rule is None:
            if back:
                raise StaleReference(f"worker {agent.name!r} has come back without its part of tables {plan.name!r}")
            return Shard(plan, agent.group, None)
        archive = Archive(rule, f"{plan.name}.tables", agent.name, agent.threads.start)
        snapshot = archive.newest()
        known = archive.members()
        ours = snapshot is not None and snapshot.run == agent.group
        shard = Shard(plan, agent.group, archive)
        if snapshot is not None and (ours or rule.resume):
            shard.restore(snapshot, known)
        elif not back:
            archive.clear()
        if ours:
            for worker in set(map(worker_of, known)):
                agent.watch(worker)
        shard.save()
        return shard

    def check(self, shard: Shard, trainer: str) -> None:
        """A call of a trainer may be served after its loss was noticed: it must not stay."""
        if self.agent.is_lost(worker_of(trainer)):
            shard.leave(trainer)

    def _close(self) -> None:
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()

    def _lost(self, name: str, incarnation: str) -> None:
        for shard in list(self._shards.values()):
            self.agent.threads.start(lambda shard=shard: shard.lose(incarnation))  # type: ignore[misc]


@trusted
def announce(plan: Plan, trainer: str) -> int:
    shards = Shards.here()
    shard = shards.have(plan, back=False)
    first = shard.announce(trainer, plan)
    shards.check(shard, trainer)
    return first


@trusted
def enter(name: str, trainer: str, first: int) -> Any:
    shards = Shards.here()
    shard = shards.find(name)
    entered = shard.enter(trainer, first)
    shards.check(shard, trainer)
    return _now_or_later(entered)


@trusted
def resume(plan: Plan, tables: list[Definition], trainer: str, acknowledged: int, version: int) -> Answer:
    """A trainer comes back to a server that has lost it, most likely because it was restarted."""
    shards = Shards.here()
    shard = shards.have(plan, back=True)
    shard.define(tables)
    answer = shard.resume(trainer, acknowledged, version)
    shards.check(shard, trainer)
    return answer


@trusted
def define(name: str, tables: list[Definition]) -> None:
    Shards.here().find(name).define(tables)


@trusted
def pull(name: str, wanted: Sequence[Wanted], keep: bool) -> tuple[int, list[Tensor]]:
    return Shards.here().find(name).pull(wanted, keep)


@trusted
def push(name: str, trainer: str, step: int, version: int, updates: list[Update]) -> Any:
    return _now_or_later(Shards.here().find(name).push(trainer, step, version, updates))


@trusted
def put(name: str, table: str, ids: Tensor, values: Tensor) -> None:
    Shards.here().find(name).put(table, ids, values)


@trusted
def part(name: str, table: str, start: int, count: int) -> tuple[Tensor, Tensor]:
    return Shards.here().find(name).part(table, start, count)


@trusted
def leave(name: str, trainer: str) -> None:
    shards = Shards.here()
    if shards.has(name):
        shards.find(name).leave(trainer)


def _now_or_later(future: Any) -> Any:
    return future.wait() if future.done() else Later(future)

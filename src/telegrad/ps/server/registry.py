"""`ShardRegistry`: all shards that one worker holds, of parameter servers and of tables.

State: `_shards`, by key. A key is also how error messages name the shard's owner: "parameter server
'default'". Shards are added under `lock`, and looked up without it.

The registry tells its shards which workers are lost, and asks the trainers of a restored shard
whether they still take part.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from telegrad.errors import CallTimeout, JoinError, StaleReference, TelegradError
from telegrad.futures import Future
from telegrad.messages.remote_functions import DeferredReply
from telegrad.ps.backoff import attempts
from telegrad.ps.messages import worker_of
from telegrad.ps.server.base_shard import BaseShard
from telegrad.ps.trainer.service import still_trains
from telegrad.runtime import active_service
from telegrad.wire.handshake import Incarnation

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

ShardT = TypeVar("ShardT", bound=BaseShard)


class ShardRegistry:
    """The shards of one agent."""

    def __init__(self, runtime: AgentRuntime) -> None:
        self.runtime = runtime
        self.lock = threading.Lock()
        self._shards: dict[str, BaseShard] = {}
        runtime.on_loss(self._remove_lost_worker)
        runtime.on_close(self._close)
        runtime.add_report("parameter_servers", self.report)

    def __repr__(self) -> str:
        return f"<ShardRegistry of {self.runtime.name}: {list(self._shards.values())}>"

    @classmethod
    def here(cls) -> ShardRegistry:
        """Return the registry of the agent that serves the current call."""
        return active_service(cls)

    def has(self, key: str) -> bool:
        """Return whether there is a shard with this key."""
        return key in self._shards

    def get(self, key: str) -> BaseShard:
        """Return a shard. Raise `StaleReference` if there is none."""
        shard = self._shards.get(key)
        if shard is None:
            raise StaleReference(f"worker {self.runtime.name!r} holds no shard of {key}")
        return shard

    def find(self, key: str, kind: type[ShardT]) -> ShardT:
        """Return a shard of this class. Raise `StaleReference` if there is none."""
        shard = self.get(key)
        assert isinstance(shard, kind)
        return shard

    def add(self, key: str, shard: BaseShard) -> None:
        """Add a shard. The caller holds `lock`."""
        shard.record_step = partial(self.runtime.recorder.add_event, "round", shard=key)
        self._shards[key] = shard

    def report(self) -> list[dict[str, Any]]:
        """Return the shards as values of JSON, without their locks: a step may hold them long."""

        def name(trainer: str) -> str:
            return self.runtime.directory.known_name(worker_of(trainer))

        return [
            {
                "shard": key,
                "version": shard.version,
                "trainers": sorted(map(name, shard.members.copy())),
                "waiting": sorted(map(name, shard.waiting)),
                "staleness": {name(each): value for each, value in shard.staleness().items()},
            }
            for key, shard in self._shards.copy().items()
        ]

    def remove_if_lost(self, shard: BaseShard, *senders: str) -> None:
        """Remove the senders of a call (workers or trainers) from a shard if they are lost.

        A call may be served after the loss of its sender was noticed, and must not add it again.
        """
        for worker in map(worker_of, senders):
            if self.runtime.is_lost(worker):
                shard.remove_worker(worker)

    def reject_if_lost(self, trainer: str) -> None:
        """Raise `JoinError` if the worker of a trainer is lost: it would be removed at once."""
        if self.runtime.is_lost(worker_of(trainer)):
            raise JoinError(
                f"worker {self.runtime.name!r} has given up the worker of this trainer, which was "
                "silent for too long or has closed its connections; close the optimizer and make "
                "a new one"
            )

    def ask_trainers(self, shard: BaseShard, trainers: Iterable[str]) -> None:
        """Find out which trainers of a restored shard still take part.

        Call it after the shard was added. A loss that was noticed earlier is not reported again.
        """
        for worker in set(map(worker_of, trainers)):
            self.runtime.watch(worker)
        self.remove_if_lost(shard, *trainers)
        for trainer in trainers:
            self.runtime.threads.start(partial(self._ask_trainer, shard, trainer))

    def _ask_trainer(self, shard: BaseShard, trainer: str) -> None:
        """Remove a trainer from a shard if it left while this server was down."""
        worker = self.runtime.directory.name_of(worker_of(trainer))
        for _ in attempts():
            if self.runtime.closing or trainer not in shard.known:
                return
            try:
                takes_part = self.runtime.invoke(worker, still_trains, (trainer, self.runtime.name))
            except CallTimeout:
                continue
            except TelegradError:
                takes_part = False
            if not takes_part:
                shard.leave(trainer)
            return

    def _close(self) -> None:
        with self.lock:
            shards = list(self._shards.values())
            self._shards.clear()
        for shard in shards:
            shard.close()

    def _remove_lost_worker(self, name: str, incarnation: Incarnation) -> None:
        for shard in list(self._shards.values()):
            self.runtime.threads.start(partial(shard.remove_worker, incarnation))


def value_or_deferred(future: Future[Any]) -> Any:
    """Return the value of a completed future, or else a reply that is sent when it completes."""
    return future.wait() if future.done() else DeferredReply(future)

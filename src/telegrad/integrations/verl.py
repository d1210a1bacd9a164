"""verl: a backend ``telegrad`` of its checkpoint-engine registry.

Written for the interface of verl 0.9 (`verl.checkpoint_engine`). The tests use the real base class
and registry, on a machine without a GPU; a training with verl was not run.

verl imports this module if it is the ``custom_backend_module`` of the checkpoint engine. The first
actor publishes a version in each step, and every rollout worker yields its tensors from memory that
all workers of its host share. The group and the connections stay from step to step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from torch import Tensor

try:
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
except ImportError as error:
    raise ImportError(
        f"telegrad.integrations.verl needs verl ({error}): pip install 'telegrad[verl]'"
    ) from error

from telegrad.errors import CallTimeout, UsageError
from telegrad.integrations.membership import Membership
from telegrad.integrations.stream_publisher import StreamPublisher
from telegrad.timeouts import duration
from telegrad.weights import Subscriber

__all__ = ["TelegradCheckpointEngine"]


@CheckpointEngineRegistry.register("telegrad")
class TelegradCheckpointEngine(CheckpointEngine):
    """One worker's part in the transfer. verl makes it and calls its methods.

    Its options are in ``checkpoint_engine.engine_kwargs.telegrad``: `name` is that of the weights,
    `host` is the address of the first actor's host, and `timeout` is for one step, in seconds. The
    first actor makes a group, unless there is one at `store`.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        name: str = "policy",
        store: str | None = None,
        host: str = "127.0.0.1",
        timeout: float = 600.0,
    ) -> None:
        self.bucket_size = bucket_size  # versions are not divided into buckets
        self.is_master = is_master
        self.version: int | None = None
        """The version that this worker has sent or received last."""
        self._name = name
        self._host = host
        self._timeout = duration(timeout, positive=True)
        self._membership = Membership(store=store)
        self._publisher: StreamPublisher | None = None
        self._subscriber: Subscriber | None = None
        self._expected = 0

    def prepare(self) -> dict[str, Any]:
        """Return where the group is and which version follows, on the first actor."""
        if not self.is_master:
            return {}
        if self._publisher is None:
            agent = self._membership.agent_of_host(f"{self._name}-actor0", self._host)
            if self._membership.store is None:
                raise UsageError("pass `store`, so that the rollout workers can join this group")
            self._publisher = StreamPublisher(self._name, agent)
        version = self._publisher.version + 1
        return {"store": self._membership.store, "name": self._publisher.name, "version": version}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell all workers what the first actor has returned from `prepare`."""
        first = metadata[0]
        if not first:
            raise UsageError("the first actor must be the master of the checkpoint engine")

        def arguments(count: int, is_rollout: bool) -> dict[str, list[Any]]:
            values = {**first, "is_rollout": is_rollout}
            return {key: [value] * count for key, value in values.items()}

        return arguments(actor_wg_world_size, False), arguments(rollout_world_size, True)

    def init_process_group(self, *, store: str, name: str, version: int, is_rollout: bool) -> None:
        """Join the group of the first actor, unless this worker is in it."""
        self._expected = version
        if not is_rollout or (self._subscriber is not None and self._subscriber.name == name):
            return
        self.close()  # the first step, or the actor was restarted
        self._membership = Membership(store=store)
        agent = self._membership.agent(prefix=f"{self._name}-rollout")
        self._subscriber = Subscriber(name, agent=agent)

    async def send_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the weights as the next version. Other actors only help to gather them."""
        if self._publisher is None:
            for _ in weights:
                pass
            return {}
        self.version = self._publisher.publish(weights)
        return {"telegrad/version": float(self.version)}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """Wait for the version of this step, and yield its tensors, valid until the next one."""
        if self._subscriber is None:
            raise UsageError("only rollout workers receive weights, after init_process_group")
        try:
            await asyncio.wait_for(self._newer(self._expected - 1), self._timeout)
        except TimeoutError as error:
            message = f"version {self._expected} has not arrived within {self._timeout} s"
            raise CallTimeout(message) from error
        with self._subscriber.view(timeout=self._timeout) as (version, tensors):
            for pair in tensors.items():
                yield pair
        self.version = version

    async def _newer(self, version: int) -> int:
        assert self._subscriber is not None
        return await self._subscriber.newer_than(version)

    def finalize(self) -> None:
        """Do nothing: the next step uses the same connections."""

    def close(self) -> None:
        """Leave the group. May be repeated."""
        if self._subscriber is not None:
            self._subscriber.close()
        if self._publisher is not None:
            self._publisher.close()
        self._subscriber = self._publisher = None
        self._membership.close()

"""Servers that die at planned points of tests, and the snapshot of a shard."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import current_agent
from telegrad.agent import Agent
from telegrad.futures import Future
from telegrad.ps.server.checkpoint import CheckpointArchive, ShardSnapshot
from telegrad.ps.server.registry import ShardRegistry
from telegrad.testing import LocalCluster
from tests.local.gates import PATIENCE

_SILENT = {
    "receive_vote",
    "receive_verdict",
}  # nobody waits for these, or for ever; what they raise is logged, with all that they know


def when_cut_off(victim: Agent, action: Callable[[], None]) -> None:
    """Run `action` when the victim is killed: its connections are closed, its threads not ended."""
    end_threads = victim._runtime.threads.close

    def close(timeout: float) -> None:
        action()
        end_threads(timeout)

    victim._runtime.threads.close = close  # type: ignore[method-assign]


def accident_points(shard: type, before_steps: dict[str, Any]) -> pytest.MarkDecorator:
    """Let a test run with one and two servers that die at each point, in steps counted there."""
    points = before_steps | {
        "before a step": (shard, "apply", [6, 11]),
        "before it is saved": (CheckpointArchive, "_write", [7, 12]),
        "after a step": (shard, "_save_if_due", [8]),
    }
    between_servers = {
        "asked by another": (shard, "receive_vote", [4, 7]),
        "told by another": (shard, "receive_verdict", [4, 7]),
    }
    return pytest.mark.parametrize(
        ("where", "method", "plan", "servers"),
        [
            *(pytest.param(*point, ["w0"], id=name) for name, point in points.items()),
            *(
                pytest.param(*point, ["w0", "w1"], id=f"{name}-2")
                for name, point in (points | between_servers).items()
            ),
        ],
    )


class Accidents:
    """Stops servers at planned points so that the test can kill them there.

    What they did not do is never done.
    """

    def __init__(
        self, where: Any, method: str, plan: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._reached = threading.Semaphore(0)
        self._dead = threading.Semaphore(0)
        self._victim: Agent | None = None
        real, count = getattr(where, method), itertools.count(1)

        def counted(*args: Any) -> Any:
            if next(count) in plan:
                self._victim = current_agent()
                self._reached.release()
                assert self._dead.acquire(timeout=PATIENCE)
                if method in _SILENT:
                    return Future()
                raise RuntimeError("this worker is dead")
            return real(*args)

        monkeypatch.setattr(where, method, counted)

    def happen(self, cluster: LocalCluster) -> None:
        """Wait for the next accident, kill that server and start it again."""
        assert self._reached.acquire(timeout=PATIENCE)
        victim = self._victim
        assert victim is not None

        def cut_off() -> None:
            for shard in victim._runtime.service(ShardRegistry)._shards.values():
                shard._archive = None  # a process that is killed writes nothing any more
            self._dead.release()

        when_cut_off(victim, cut_off)
        cluster.kill(victim.name)
        victim._runtime.service(
            ShardRegistry
        )._shards.clear()  # a process that is killed leaves nothing behind
        cluster.join(victim.name, victim._runtime.local_member.rank)


def snapshot(version: int) -> ShardSnapshot:
    """Return the snapshot of a shard with one parameter."""
    return ShardSnapshot(
        version,
        "run",
        {"weight": torch.full((3,), float(version))},
        [],
        [{"lr": 0.1}],
        {"a": version},
    )

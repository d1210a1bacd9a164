"""Many workers in one process, for tests: fast, deterministic, with real transports between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from telegrad.agent import Agent
from telegrad.config import Config

__all__ = ["LocalCluster"]

_SECRET = "only for tests in this process"


class LocalCluster:
    """`size` agents named w0, w1, ... that are one group.

    Settings are fields of `Config`; `fixed_size=False` makes a group that workers may join and leave.

    >>> with LocalCluster(2, transports=("unix",)) as cluster:
    ...     cluster["w0"].call("w1", abs, -3)
    3
    """

    def __init__(
        self, size: int, *, fixed_size: bool = True, store: Any = None, **settings: Any
    ) -> None:
        self.store = dist.HashStore() if store is None else store
        self.config = replace(Config(secret=_SECRET), **settings)
        self._fixed = size if fixed_size else None
        self.agents = [self.agent(f"w{rank}", rank) for rank in range(size)]

    def __repr__(self) -> str:
        return "\n".join(repr(agent) for agent in self.agents)

    def agent(self, name: str, rank: int | None = None) -> Agent:
        """One more agent for this group, not yet open."""
        return Agent(name, store=self.store, rank=rank, world_size=self._fixed, config=self.config)

    def join(self, name: str, rank: int | None = None) -> Agent:
        """One more agent, or one that comes back: opened, and closed with the cluster."""
        agent = self.agent(name, rank)
        self.agents.append(agent)
        agent.open()
        return agent

    def __enter__(self) -> LocalCluster:
        try:
            for agent in self.agents:
                agent.open(wait=False)
            for agent in self.agents:
                agent._runtime.wait_for_members()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for agent in self.agents:
            agent.close()

    def __getitem__(self, name: str) -> Agent:
        """The newest agent with this name."""
        return next(agent for agent in reversed(self.agents) if agent.name == name)

    def __iter__(self) -> Iterator[Agent]:
        return iter(self.agents)

    def kill(self, name: str) -> None:
        """End a worker the way a killed process ends: its connections break, and it says nothing."""
        self[name]._runtime.abort()

"""`LocalCluster`: several workers in one process, for tests. They use the real transports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from telegrad.agent import Agent
from telegrad.config import Config

__all__ = ["LocalCluster"]

_SECRET = "7e57" * 16  # a key of 64 hexadecimal digits, which is not stretched


class LocalCluster:
    """A group of `size` agents named w0, w1, ...

    Settings are fields of `Config`. With `fixed_size=False`, workers may join and leave the group.

    >>> with LocalCluster(2, transports=("unix",)) as cluster:
    ...     cluster["w0"].call("w1", abs, -3)
    3
    """

    def __init__(
        self, size: int, *, fixed_size: bool = True, store: Any = None, **settings: Any
    ) -> None:
        self.store: Any = dist.HashStore() if store is None else store
        self.config: Config = replace(Config(secret=_SECRET), **settings)
        self._world_size = size if fixed_size else None
        self.agents: list[Agent] = [self.agent(f"w{rank}", rank) for rank in range(size)]

    def __repr__(self) -> str:
        return "\n".join(repr(agent) for agent in self.agents)

    def agent(self, name: str, rank: int | None = None) -> Agent:
        """Return a further agent of this group that is not open."""
        return Agent(
            name, store=self.store, rank=rank, world_size=self._world_size, config=self.config
        )

    def join(self, name: str, rank: int | None = None) -> Agent:
        """Open a further agent, or one that rejoins. The cluster closes it."""
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
        """Close all agents."""
        for agent in self.agents:
            agent.close()

    def __getitem__(self, name: str) -> Agent:
        """Return the newest agent with this name."""
        return next(agent for agent in reversed(self.agents) if agent.name == name)

    def __iter__(self) -> Iterator[Agent]:
        return iter(self.agents)

    def kill(self, name: str) -> None:
        """End a worker like a killed process: its connections break without a message."""
        self[name]._runtime.abort()

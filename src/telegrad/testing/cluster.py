"""`LocalCluster`: several workers in one process, for tests. They use the real transports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from telegrad.agent import Agent
from telegrad.config import Config
from telegrad.errors import UsageError

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
        self._ranks = {f"w{rank}": rank for rank in range(size)}
        self.agents: list[Agent] = [self.agent(name, rank) for name, rank in self._ranks.items()]

    def __repr__(self) -> str:
        return "\n".join(repr(agent) for agent in self.agents)

    def agent(self, name: str, rank: int | None = None) -> Agent:
        """Return a further agent of this group that is not open."""
        return Agent(
            name, store=self.store, rank=rank, world_size=self._world_size, config=self.config
        )

    def join(self, name: str, rank: int | None = None) -> Agent:
        """Open a further agent, or one that rejoins. The cluster closes it."""
        if rank is None and self._world_size is not None:
            if name not in self._ranks:
                raise UsageError(
                    f"this cluster has {self._world_size} workers, of which none is {name!r}: let "
                    "further ones join with LocalCluster(size, fixed_size=False)"
                )
            rank = self._ranks[name]
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
        for agent in reversed(self.agents):
            if agent.name == name:
                return agent
        names = ", ".join(dict.fromkeys(agent.name for agent in self.agents))
        raise KeyError(f"no worker {name!r}; this cluster has {names}")

    def __iter__(self) -> Iterator[Agent]:
        return iter(self.agents)

    def kill(self, name: str) -> None:
        """End a worker like a killed process: its connections break without a message."""
        self[name]._runtime.abort()

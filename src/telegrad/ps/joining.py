"""How trainers find their servers, and leave them when their agent ends."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from telegrad.agent.current import active_agent
from telegrad.errors import UsageError

if TYPE_CHECKING:
    from telegrad.agent.agent import Agent


class Closable(Protocol):
    def close(self) -> None: ...


def agent_of(agent: Agent | None) -> Agent:
    """This agent, or the one in use here."""
    agent = agent or active_agent()
    if agent is None:
        raise UsageError("a trainer needs an agent: pass agent=, or call telegrad.rpc.init_rpc first")
    return agent


def matching(agent: Agent, servers: str | Sequence[str]) -> list[str]:
    """The names of workers that a pattern stands for, or these names."""
    if not isinstance(servers, str):
        names = list(servers)
    else:
        names = sorted(fnmatch.filter([info.name for info in agent.get_worker_infos()], servers))
    if not names:
        raise UsageError(f"no worker of the group is named {servers!r}")
    return names


def closing(trainer: Closable) -> Callable[[], None]:
    """What closes a trainer if there still is one."""
    reference = weakref.ref(trainer)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    return close

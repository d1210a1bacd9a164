"""`Membership`: how a process that another package has started gets an agent.

Such a process has no place to make one: a worker of a collector, of an inference engine, of a
checkpoint engine. It uses the agent that it is given, else the current one, else it joins the group
whose store it is told of, else it hosts a store and a group of its own.

State: `_agent`, and what belongs to this process alone: `_own`, the agent that it made, and
`_hosted`, the store. A copy in another process has only the address of the store.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch.distributed as dist

from telegrad.agent import Agent, current_agent
from telegrad.config import Config
from telegrad.errors import UsageError
from telegrad.group.rendezvous import connect_store


class Membership:
    """The agent of this process. `store` is the address (``host:port``) of the group's store."""

    def __init__(self, agent: Agent | None = None, store: str | None = None) -> None:
        if store is not None:
            _parse(store)
        self.store = store
        self._agent = agent
        self._own: Agent | None = None
        self._hosted: dist.TCPStore | None = None

    def __repr__(self) -> str:
        return f"<Membership of {self._agent}, store {self.store}>"

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "_agent": None, "_own": None, "_hosted": None}

    def agent(self, name: str | None = None, *, prefix: str = "worker") -> Agent:
        """Return the agent of this process. One that joins is called `name`, or is unique."""
        if self._agent is None:
            self._agent = current_agent() or self._join(name or unique_name(prefix))
        return self._agent

    def agent_of_host(self, name: str, host: str = "127.0.0.1") -> Agent:
        """Like `agent`, but make a group and host its store if none is known."""
        if self._agent is None and self.store is None and current_agent() is None:
            self._hosted = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self.store = f"{host}:{self._hosted.port}"
        return self.agent(name)

    def close(self) -> None:
        """Leave the group, unless the agent belongs to someone else. May be repeated."""
        own, self._own = self._own, None
        if own is not None:
            self._agent = None
            own.close()
        self._hosted = None

    def _join(self, name: str) -> Agent:
        if self.store is None:
            raise UsageError(
                "this process has no agent and knows of no group: pass `agent`, or the address of "
                "the group's store as `store`, or call `init_rpc` first"
            )
        config = Config.from_environment()
        host, port = _parse(self.store)
        store = self._hosted or connect_store(host, port, config.join_timeout)
        agent = Agent(name, store=dist.PrefixStore("telegrad", store), config=config)
        agent.open()
        self._own = agent
        return agent


def unique_name(prefix: str) -> str:
    """Return a name that no other worker has."""
    return f"{prefix}-{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(2)}"


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"the address of a store is HOST:PORT, not {address!r}")
    return host.strip("[]"), int(port)

"""A scene for tests of attacks: a victim, whose port is behind a proxy, and those who join later.

The proxy is where an attacker on the network sits: the victim advertises its address.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from telegrad import Agent, Config
from telegrad.errors import TelegradError
from tests.local.gates import Log
from tests.local.proxy import Proxy, unchanged

SECRET = "that the attacker does not know"
HERE = "127.0.0.1"
# No test connects from this address: its ports are free, whatever port the victim was given.
PROXIED = "127.0.9.1"
MODES: dict[str, dict[str, Any]] = {"tls": {}, "plain": {"tls": "off"}}


def settings(mode: str, **changes: Any) -> Config:
    values = {"secret": SECRET, "transports": ("tcp",), "heartbeat_interval": 0.2, "timeout": 15.0}
    return Config(**{**values, **MODES[mode], **changes})


def port_of(agent: Agent) -> int:
    return int(agent._runtime.local_member.addresses[0].rpartition(":")[2])


@dataclass
class Scene:
    """A victim, whose port is behind a proxy, and those who join later."""

    mode: str
    stack: ExitStack
    store: Any = field(default_factory=dist.HashStore)

    def __post_init__(self) -> None:
        self.victim = self.join("victim", advertise=PROXIED)
        port = port_of(self.victim)
        self.proxy = self.stack.enter_context(Proxy({(PROXIED, port): (HERE, port)}))

    def join(self, name: str, **changes: Any) -> Agent:
        config = settings(self.mode, **changes)
        return self.stack.enter_context(Agent(name, store=self.store, config=config))

    def members_work(self) -> None:
        """A new member can call the victim."""
        self.proxy.change = unchanged
        newcomer = self.join("newcomer")
        assert newcomer.call("victim", abs, -1) == 1
        assert newcomer.submit("victim", abs, -1).wait() == 1


def note_and_return(log: Log, entry: Any, result: Any = None) -> Any:
    log.note(entry)
    return entry if result is None else result


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call, or "refused" for an error of this package."""
    try:
        return call(*args)
    except TelegradError:
        return "refused"

"""The interface of the adapters, as used in a process of a peer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

CALLEE = "callee"


@dataclass(frozen=True)
class Place:
    """The position of a process in its group: rank 0 is the callee, the others call it."""

    rank: int
    world_size: int
    port: int  # free on the loopback interface when the group started
    folder: str  # belongs to the group; empty when the group started
    address: str = "127.0.0.1"  # of this process
    callee_address: str = "127.0.0.1"
    interface: str = "lo"  # that has the address

    @property
    def name(self) -> str:
        return f"caller{self.rank}" if self.rank else CALLEE

    def publish(self, address: str) -> None:
        """Send the address of the callee to the callers, for peers without a rendezvous."""
        draft = Path(self.folder, "address.draft")
        draft.write_text(address)
        draft.rename(Path(self.folder, "address"))

    def find(self, seconds: float = 60.0) -> str:
        """Return the address that the callee published."""
        path = Path(self.folder, "address")
        end = time.monotonic() + seconds
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"the callee published no address within {seconds} s")
            time.sleep(0.02)
        return path.read_text()


class Peer(Protocol):
    """A library for remote calls, in one process of its group."""

    def start(self, place: Place) -> None:
        """Join the group. The callee serves `remote.FUNCTIONS` from then on."""
        ...

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs `fn` on the callee and waits for the result."""
        ...

    def submit(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that starts `fn` on the callee and returns a handle for `result`."""
        ...

    def result(self, pending: Any) -> Any:
        """Wait for a submitted call and return its result."""
        ...

    def stop(self) -> None:
        """Leave the group. All processes of the group get this command at the same time."""
        ...

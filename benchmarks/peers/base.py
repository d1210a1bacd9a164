"""What every peer's adapter offers, seen from inside one of its processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

CALLEE = "callee"


@dataclass(frozen=True)
class Place:
    """Where a process stands in its peer's group: rank 0 is the callee, the others call it."""

    rank: int
    world_size: int
    port: int  # free on the loopback interface when the group started
    folder: str  # the group's own, empty when the group started

    @property
    def name(self) -> str:
        return f"caller{self.rank}" if self.rank else CALLEE

    def publish(self, address: str) -> None:
        """Tells the callers where the callee listens, for peers that have no rendezvous of their own."""
        draft = Path(self.folder, "address.draft")
        draft.write_text(address)
        draft.rename(Path(self.folder, "address"))

    def find(self, seconds: float = 60.0) -> str:
        """The address that the callee published."""
        path = Path(self.folder, "address")
        end = time.monotonic() + seconds
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"the callee published no address within {seconds} s")
            time.sleep(0.02)
        return path.read_text()


class Peer(Protocol):
    """One library for remote calls, in one process of its group."""

    def start(self, place: Place) -> None:
        """Joins the group; the callee serves `remote.FUNCTIONS` from here on."""
        ...

    def call(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What a caller uses instead of `fn` to run it on the callee and wait."""
        ...

    def submit(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The same without waiting: the call returns something for `result`."""
        ...

    def result(self, pending: Any) -> Any:
        """Waits for a submitted call."""
        ...

    def stop(self) -> None:
        """Leaves the group; every process of the group is told at the same time."""
        ...

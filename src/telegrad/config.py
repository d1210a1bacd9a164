"""The settings of an agent: one frozen, validated value."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from telegrad.errors import UsageError

TRANSPORTS = ("memory", "unix", "tcp")


@dataclass(frozen=True)
class Config:
    """How an agent behaves. Every field has a default that is safe and fits one machine.

    Environment variables named ``TELEGRAD_<FIELD>`` (such as ``TELEGRAD_SECRET``, ``TELEGRAD_LISTEN``) fill fields
    that the program leaves alone; see `Config.from_environment`.
    """

    timeout: float | None = 60.0
    """Seconds a call may take unless it says otherwise; None for no limit."""
    join_timeout: float = 300.0
    """Seconds to wait for the other workers of a group at start."""
    connect_timeout: float = 10.0
    """Seconds for opening one connection, its handshake included."""
    heartbeat_interval: float = 5.0
    """Seconds between two signs of life to each connected peer."""
    heartbeat_timeout: float = 30.0
    """A peer that is silent for so many seconds is lost."""
    secret: str | None = field(default=None, repr=False)
    """Shared by all workers of a group. None: a key file that only this user can read."""
    listen: str = "127.0.0.1"
    """Address for TCP. Loopback unless you say otherwise, such as ``0.0.0.0``."""
    advertise: str | None = None
    """Address that others use to reach this worker by TCP; None: what `listen` says, or this host's name."""
    transports: tuple[str, ...] = TRANSPORTS
    """Ways to connect, best first; the first that works with a peer is used."""
    threads: int = 16
    """Calls that run at once on threads of the pool before it waits to see whether they are blocked."""
    max_threads: int = 2048
    """The pool never grows beyond this; further calls wait and their callers feel back-pressure."""
    event_loops: int | None = None
    """Threads that read connections at the same time. None: one, or half as many as there are cores, up to four,
    where Python has no interpreter lock (free-threaded builds)."""
    max_frame: int = 1 << 40
    """Largest message in bytes that is accepted from a peer."""
    shared_memory_floor: int = 256 * 1024
    """Buffers of at least so many bytes go through shared memory on one host."""
    shared_memory_limit: int = 8 << 30
    """Bytes of shared memory an agent may hold; beyond that, buffers go through the socket."""
    idle_lanes: int = 16
    """Connections to one peer that are kept open between calls."""
    only_registered: bool = False
    """Serve only functions that were marked with `telegrad.expose`."""
    device_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By worker: where tensors on a device of this worker arrive there, as in ``{"ps": {"cuda:0": "cpu"}}``.
    Results come back the same way."""
    unmapped_devices: str = "same"
    """Where CUDA tensors arrive that no map mentions: ``same`` (the same index), ``cpu`` (the same, or the CPU if the
    worker has no such device) or ``refuse`` (torch's rule: an error)."""
    cuda_ipc: bool = True
    """Send CUDA tensors between processes of one host from device to device; False: through host memory."""

    def __post_init__(self) -> None:
        def require(good: bool, message: str) -> None:
            if not good:
                raise UsageError(f"Config: {message}")

        require(
            self.timeout is None or 0 < self.timeout < math.inf,
            f"timeout must be positive or None, not {self.timeout!r}",
        )
        for name in ("join_timeout", "connect_timeout", "heartbeat_interval", "heartbeat_timeout"):
            require(
                0 < getattr(self, name) < math.inf,
                f"{name} must be positive, not {getattr(self, name)!r}",
            )
        require(self.max_frame > 0, f"max_frame must be positive, not {self.max_frame}")
        for name in ("shared_memory_floor", "shared_memory_limit", "idle_lanes"):
            require(
                getattr(self, name) >= 0,
                f"{name} must not be negative, not {getattr(self, name)!r}",
            )
        require(
            self.heartbeat_timeout > self.heartbeat_interval,
            f"heartbeat_timeout ({self.heartbeat_timeout}) must exceed heartbeat_interval ({self.heartbeat_interval})",
        )
        unknown = set(self.transports) - set(TRANSPORTS)
        require(not unknown, f"unknown transports {sorted(unknown)}; choose from {TRANSPORTS}")
        require(bool(self.transports), "transports must not be empty")
        require(
            1 <= self.threads <= self.max_threads,
            f"need 1 <= threads <= max_threads, not {self.threads}",
        )
        require(
            self.event_loops is None or self.event_loops >= 1,
            f"event_loops must be at least 1, or None, not {self.event_loops!r}",
        )
        require(
            self.unmapped_devices in ("same", "cpu", "refuse"),
            f"unmapped_devices must be 'same', 'cpu' or 'refuse', not {self.unmapped_devices!r}",
        )
        require(
            self.secret is None or len(self.secret) >= 16, "secret must have at least 16 characters"
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """The defaults, overridden by ``TELEGRAD_*`` variables."""
        env = os.environ if environment is None else environment
        given: dict[str, object] = {}
        for entry in fields(cls):
            text = env.get("TELEGRAD_" + entry.name.upper())
            if text:
                given[entry.name] = _parse(entry.name, str(entry.type), text)
        return replace(cls(), **given)  # type: ignore[arg-type]


def _parse(name: str, kind: str, text: str) -> object:
    try:
        if name == "transports":
            return tuple(part.strip() for part in text.split(","))
        if name == "device_maps":
            maps: dict[str, dict[str, str]] = json.loads(text)
            return {worker: dict(devices) for worker, devices in maps.items()}
        if kind.startswith(("float", "int")):
            if text.lower() == "none" and kind.endswith("None"):
                return None
            return float(text) if kind.startswith("float") else int(text)
        if kind == "bool":
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return text
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"TELEGRAD_{name.upper()}={text!r} is not a valid {kind}") from None

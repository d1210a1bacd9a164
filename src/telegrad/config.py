"""`Config`: the settings of an agent, as a frozen dataclass that is validated when it is made."""

from __future__ import annotations

import difflib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from telegrad.cluster.placement import VARIABLES
from telegrad.errors import UsageError
from telegrad.timeouts import duration

TRANSPORTS = ("memory", "unix", "tcp")

_PREFIX = "TELEGRAD_"
_NOT_SETTINGS = ("BENCH_", "TEST_")  # of the benchmarks and tests


@dataclass(frozen=True)
class Config:
    """The settings of an agent. Every field has a default that is safe and fits one machine.

    `Config.from_environment` reads fields from environment variables named ``TELEGRAD_<FIELD>``,
    such as ``TELEGRAD_SECRET`` and ``TELEGRAD_LISTEN``, and warns of names that it does not know.
    """

    timeout: float | None = 60.0
    """Seconds that a call may take if it has no timeout of its own; None for no limit."""
    join_timeout: float = 300.0
    """Seconds to wait for the other workers of a group when an agent starts."""
    connect_timeout: float = 10.0
    """Seconds to open one connection, including its handshake."""
    heartbeat_interval: float = 5.0
    """Seconds between two heartbeats to each connected peer."""
    heartbeat_timeout: float = 30.0
    """Seconds without a message after which a peer is considered lost. A worker of another host may
    be out of reach for `resume_timeout`; if its address refuses connections, for this time."""
    secret: str | None = field(default=None, repr=False)
    """The secret of the group, the same for all its workers. None: a key in a file that only this
    user can read."""
    listen: str = "127.0.0.1"
    """Address to listen on for TCP. The default is loopback; ``0.0.0.0`` is all interfaces."""
    advertise: str | None = None
    """Address that peers use to connect to this worker by TCP, with a port (``host:port``) if it is
    not the worker's own. None: the address in `listen`, or the name of this host."""
    tls: str = "on"
    """Encryption of TCP connections: ``on``, or ``off`` for trusted networks. With ``off``,
    messages are not encrypted but still authenticated. It is the same for all workers."""
    tls_ca: str | None = None
    """File with the certificates of the authorities that sign the workers' certificates. None: no
    certificates are needed, the secret is enough."""
    tls_cert: str | None = None
    """File with this worker's certificate, the first of it, and the intermediate ones."""
    tls_key: str | None = None
    """File with the private key of this worker's certificate."""
    resume_timeout: float = 180.0
    """Seconds for which the connection to another host may be interrupted. After them, a worker of
    which nothing was heard is considered lost."""
    restart_timeout: float = 0.0
    """Seconds for which `shutdown` waits for a lost worker of a group of fixed size to come back.
    `telegrad launch` sets it if it restarts workers."""
    transports: tuple[str, ...] = TRANSPORTS
    """Transports in order of preference. The first that works with a peer is used."""
    threads: int = 16
    """Threads of the executor. It adds threads beyond this number only if calls are blocked."""
    max_threads: int = 2048
    """Largest number of threads of the executor. Further calls wait, and back-pressure applies to
    their callers."""
    event_loops: int | None = None
    """Threads that read connections at the same time. None: one, or in a free-threaded Python half
    the number of cores, up to four."""
    max_frame: int = 1 << 40
    """Largest message in bytes that is accepted from a peer."""
    shared_memory_min_bytes: int = 256 * 1024
    """Smallest buffer in bytes that is sent through shared memory on one host."""
    shared_memory_limit: int = 8 << 30
    """Bytes of shared memory that an agent may use. Further buffers are sent through the socket."""
    bulk_streams: int = 4
    """Largest number of TCP connections to one peer that carry large buffers at the same time. 0:
    large buffers are sent in the connection of their call."""
    bulk_min_bytes: int = 512 << 10
    """Bytes in large buffers (256 KB) from which on a message sends them over these connections."""
    bulk_engine: str = "auto"
    """How large buffers travel between hosts: "tcp", "nixl" (RDMA; `pip install telegrad[nixl]`),
    or "auto": NIXL if it is installed, this host has an RDMA device, and TLS is off."""
    max_idle_connections: int = 16
    """Largest number of idle connections to one peer that are kept open for further calls."""
    only_registered: bool = False
    """Serve only functions that are registered with `telegrad.expose`. Calls of others are refused
    before anything of them is unpickled. This is no protection from workers that know the secret:
    the arguments of a call are pickles, and those can run any code."""
    device_maps: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """For each worker, the device there for tensors on a device here, as in
    ``{"ps": {"cuda:0": "cpu"}}``. For results, the map is reversed."""
    unmapped_devices: str = "same"
    """The target of CUDA tensors whose device is in no map: ``same`` (the device with the same
    index), ``cpu`` (the same, or the CPU if the worker has no such device) or ``refuse`` (an error,
    as in torch)."""
    cuda_ipc: bool = True
    """Send CUDA tensors between processes of one host directly (CUDA IPC). False: send them through
    host memory."""

    flight_recorder: int = 4096
    """Number of calls that a worker remembers for `telegrad status` and `telegrad trace`, with a
    quarter as many other events. 0: none."""
    tensorboard: str | None = None
    """Directory for TensorBoard: the values of `telegrad.report` and `ps.Optimizer` are written
    into it, a folder for each worker. None: they are not written."""

    metrics_port: int | None = None
    """Port at which the worker with rank 0 serves metrics for Prometheus; others add their rank.
    0: a free one, which the log names. None: there are none. It needs ``telegrad[prometheus]``."""
    metrics_listen: str = "127.0.0.1"
    """Address to listen on for metrics. Who can connect to it can read them without the secret."""

    def __post_init__(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise UsageError(f"Config: {message}")

        self._check_types()
        require(
            self.timeout is None or self.timeout > 0,
            f"timeout must be positive or None, not {self.timeout!r}",
        )
        for name in (
            "join_timeout",
            "connect_timeout",
            "heartbeat_interval",
            "heartbeat_timeout",
            "resume_timeout",
        ):
            require(
                getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)!r}"
            )
        require(self.max_frame > 0, f"max_frame must be positive, not {self.max_frame}")
        require(
            self.bulk_min_bytes > 0, f"bulk_min_bytes must be positive, not {self.bulk_min_bytes}"
        )
        for name in (
            "shared_memory_min_bytes",
            "shared_memory_limit",
            "bulk_streams",
            "max_idle_connections",
            "flight_recorder",
            "restart_timeout",
        ):
            require(
                getattr(self, name) >= 0,
                f"{name} must not be negative, not {getattr(self, name)!r}",
            )
        require(
            self.heartbeat_timeout > self.heartbeat_interval,
            f"heartbeat_timeout ({self.heartbeat_timeout:g}) must exceed heartbeat_interval "
            f"({self.heartbeat_interval:g})",
        )
        require(
            self.metrics_port is None or 0 <= self.metrics_port < 1 << 16,
            f"metrics_port must be a port, or None, not {self.metrics_port!r}",
        )
        require(self.tls in ("on", "off"), f"tls must be 'on' or 'off', not {self.tls!r}")
        require(
            self.bulk_engine in ("auto", "tcp", "nixl"),
            f"bulk_engine must be 'auto', 'tcp' or 'nixl', not {self.bulk_engine!r}",
        )
        certificates = (self.tls_ca, self.tls_cert, self.tls_key)
        require(
            all(certificates) or not any(certificates),
            "tls_ca, tls_cert and tls_key belong together: give all three, or none",
        )
        require(
            self.tls == "on" or not any(certificates),
            "tls_ca, tls_cert and tls_key have no effect with tls='off'",
        )
        unknown = set(self.transports) - set(TRANSPORTS)
        require(not unknown, f"unknown transports {sorted(unknown)}; choose from {TRANSPORTS}")
        require(bool(self.transports), "transports must not be empty")
        require(
            1 <= self.threads <= self.max_threads,
            f"threads must be from 1 to max_threads ({self.max_threads}), not {self.threads}",
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

    def _check_types(self) -> None:
        """Check that numbers are numbers, and make durations such that clocks can use them."""
        for setting in fields(self):
            value, kind = getattr(self, setting.name), str(setting.type)
            if value is None and kind.endswith("None"):
                continue
            if kind.startswith("float"):
                value = duration(value, f"Config: {setting.name}")
            elif kind.startswith("int"):
                value = _whole_number(setting.name, value)
            object.__setattr__(self, setting.name, value)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Return the defaults, overridden by ``TELEGRAD_*`` variables of the environment."""
        if environment is None:
            environment = os.environ
        values: dict[str, object] = {}
        variables = {_PREFIX + setting.name.upper(): setting for setting in fields(cls)}
        _warn_of_unknown(environment, [*variables, *VARIABLES])
        for variable, setting in variables.items():
            text = environment.get(variable)
            if text:
                values[setting.name] = _parse(setting.name, str(setting.type), text)
        return replace(cls(), **values)  # type: ignore[arg-type]


def _whole_number(name: str, value: object) -> int:
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise UsageError(f"Config: {name} is a whole number, not {value!r}")


def _warn_of_unknown(environment: Mapping[str, str], known: Sequence[str]) -> None:
    """Warn of variables that look like settings but are none.

    It is no error, because others may make such names: Kubernetes does for each service.
    """
    names = [name.removeprefix(_PREFIX) for name in known]
    for variable in sorted(environment):
        name = variable.removeprefix(_PREFIX)
        if name in (variable, *names) or name.startswith(_NOT_SETTINGS):
            continue
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {_PREFIX}{nearest[0]}?" if nearest else ""
        warnings.warn(f"{variable} is not a setting of Telegrad{hint}", stacklevel=3)


def _parse(name: str, type_name: str, text: str) -> object:
    """Return the value of a field from the text of its environment variable."""
    try:
        if name == "transports":
            return tuple(part.strip() for part in text.split(","))
        if name == "device_maps":
            maps: dict[str, dict[str, str]] = json.loads(text)
            return {worker: dict(devices) for worker, devices in maps.items()}
        if type_name.startswith(("float", "int")):
            if text.lower() == "none" and type_name.endswith("None"):
                return None
            return float(text) if type_name.startswith("float") else int(text)
        if type_name == "bool":
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        return text
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"TELEGRAD_{name.upper()}={text!r} is not a valid {type_name}") from None

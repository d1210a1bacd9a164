"""The cases: one `Case` for each row of the table. Loops of new kinds are added to `measure`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

KB, MB = 1024, 1_000_000
FLOAT_BYTES = 4
MACHINE = "machine"  # the pseudo-peer that measures the limits of the machine


@dataclass(frozen=True)
class Case:
    """One measurement: a loop of `measure` with parameters, run in `callers` processes at once."""

    name: str
    title: str
    unit: str
    loop: str
    params: Mapping[str, Any] = field(default_factory=dict)
    higher_is_better: bool = False
    callers: int = 1
    helpers: int = 0  # further workers that are called
    # needs a torch operator or an RRef: only peers that have them take part
    builtin: bool = False
    machine: bool = False  # a limit of the machine, measured without a peer
    quick: bool = True  # also in the quick mode
    axis: str = ""  # the amount that differs between the cases of a curve
    at: float | None = None  # its value in this case

    @property
    def processes(self) -> int:
        """The number of processes of a peer, including the callee."""
        return 1 + self.callers + self.helpers

    @property
    def group(self) -> str:
        return self.name.partition("/")[0]


def latency(name: str, title: str, builtin: bool = False, **params: Any) -> Case:
    return Case(f"latency/{name}", f"sync call, {title}", "us", "latency", params, builtin=builtin)


def rate(in_flight: int, quick: bool = True) -> Case:
    title, params = f"async, {in_flight} in flight", {"window": in_flight}
    case = Case(f"rate/{in_flight}-in-flight", title, "calls/s", "rate", params, True, quick=quick)
    return replace(case, axis="in flight", at=in_flight)


def callers(number: int) -> Case:
    title, params = f"{number} callers, 64 in flight each", {"window": 64}
    case = Case(
        f"rate/{number}-callers",
        title,
        "calls/s",
        "rate",
        params,
        True,
        callers=number,
        quick=False,
    )
    return replace(case, axis="callers", at=number)


def bandwidth(way: str, megabytes: int, title: str, quick: bool = True) -> Case:
    params = {"way": way, "elements": megabytes * MB // FLOAT_BYTES}
    case = Case(
        f"bandwidth/{way}-{megabytes}MB", title, "GB/s", "bandwidth", params, True, quick=quick
    )
    return replace(case, axis="MB" if way == "echo" else "", at=megabytes)


def containers(kind: str, title: str, way: str, quick: bool = False) -> Case:
    params = {"kind": kind, "count": 1000, "way": way}
    name, title = f"containers/{kind}-{way}", f"1000 {title} as {way}"
    return Case(name, title, "us", "containers", params, quick=quick)


def reference(name: str, title: str, use: str) -> Case:
    return Case(f"reference/{name}", title, "us", "reference", {"use": use}, builtin=True)


def backward(workers: int, quick: bool = True) -> Case:
    title, params = f"backward pass over {workers} workers, minus a local one", {"workers": workers}
    case = Case(
        f"backward/{workers}-workers",
        title,
        "us",
        "backward",
        params,
        helpers=workers - 2,
        quick=quick,
    )
    return replace(case, builtin=True)


def limit(name: str, title: str, unit: str, loop: str, **params: Any) -> Case:
    return Case(
        f"limit/{name}", title, unit, loop, params, higher_is_better=unit != "us", machine=True
    )


CASES = (
    latency("no-tensor", "no tensor, Python function", function="add", elements=0),
    latency("1-element", "1 element, Python function", function="add", elements=1),
    latency(
        "1-element-builtin", "1 element, torch.add", builtin=True, function="torch.add", elements=1
    ),
    latency("1KB", "1 KB echoed", function="echo", elements=KB // FLOAT_BYTES),
    latency("1MB", "1 MB echoed", function="echo", elements=MB // FLOAT_BYTES),
    rate(1),
    rate(64),
    rate(1000, quick=False),
    callers(2),
    callers(4),
    callers(8),
    bandwidth("echo", 1, "1 MB there and back, each way", quick=False),
    bandwidth("echo", 16, "16 MB there and back, each way"),
    bandwidth("echo", 100, "100 MB there and back, each way", quick=False),
    bandwidth("echo", 1000, "1000 MB there and back, each way", quick=False),
    bandwidth("push", 100, "100 MB to the callee", quick=False),
    bandwidth("pull", 100, "100 MB from the callee", quick=False),
    containers("tensors", "1-element tensors in a list", "argument", quick=True),
    containers("tensors", "1-element tensors in a list", "result"),
    containers("scalars", "0-dimensional tensors in a list", "argument"),
    containers("matrices", "4x4 tensors in a list", "argument"),
    containers("dict-of-tensors", "1-element tensors in a dict", "argument"),
    containers("arrays", "1-element numpy arrays in a list", "argument", quick=True),
    containers("arrays", "1-element numpy arrays in a list", "result"),
    containers("dict-of-arrays", "1-element numpy arrays in a dict", "argument"),
    reference("remote-to-here", "remote() + to_here()", "remote"),
    reference("proxied", "proxied call, rref.rpc_sync().add(1)", "proxied"),
    Case(
        "churn/objects",
        "remote objects made and deleted",
        "objects/s",
        "churn",
        {},
        True,
        builtin=True,
    ),
    backward(2),
    backward(4, quick=False),
    Case(
        "backward/digits",
        "backward pass of the network on the callee, minus a local one",
        "us",
        "digits_backward",
        builtin=True,
        quick=False,
    ),
    Case(
        "training/digits",
        "training, network on the callee",
        "iterations/s",
        "digits",
        {},
        True,
        builtin=True,
    ),
    Case("idle/cpu", "CPU of one idle caller and callee", "cores", "idle", quick=False),
    limit("digits", "training of the same network in one process", "iterations/s", "digits"),
    limit("memcpy-warm", "memcpy 100 MB, warm, 1 thread", "GB/s", "memcpy_warm", size=100 * MB),
    limit(
        "memcpy-warm-threads",
        "memcpy 100 MB, warm, all cores",
        "GB/s",
        "memcpy_threads",
        size=100 * MB,
    ),
    limit("memcpy-fresh", "memcpy 100 MB, fresh memory", "GB/s", "memcpy_fresh", size=100 * MB),
    limit("unix-ping-pong", "unix socket ping-pong, Python", "us", "ping_pong"),
    limit("unix-ping-pong-c", "unix socket ping-pong, C", "us", "ping_pong_c"),
)

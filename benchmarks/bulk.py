"""Bandwidth of large request tensors over TCP, beside raw sockets and the cipher of OpenSSL.

    python -m benchmarks.bulk                    between two processes over loopback
    python -m benchmarks.bulk --netns            between two network namespaces (needs root)
    python -m benchmarks.bulk --sizes 1 100 --streams 0 4 --min-bytes 262144 --tls off
    python -m benchmarks.bulk --devices cpu cuda --streams 4     also CUDA tensors, to a CUDA device

Each measurement is the median of several calls whose argument is one tensor; the reply is empty.
`--streams 0` sends tensors in the control stream. The cases take turns, `--rounds` times. The
number in parentheses is the processor time of both processes, in seconds for one GB.

Both ends encrypt on the same cores. So the last lines show the bandwidth that the cipher permits:
half of what all cores encrypt, and what that leaves if the sockets need the same cores, too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import telegrad
from benchmarks import limits
from telegrad.config import Config

_MB = 1_000_000
_SECRET = "only for this benchmark of bulk transfers"
_NAMES = ("bulkA", "bulkB")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_SECONDS = 0.6  # of calls for each measurement
_CIPHER = "aes-256-gcm"
_RAW = (1, 4, 8)  # streams
_TICKS = os.sysconf("SC_CLK_TCK")


class _Case(NamedTuple):
    """One of the settings of Telegrad that are measured."""

    tls: str
    streams: int
    device: str

    @property
    def title(self) -> str:
        device = "" if self.device == "cpu" else f" {self.device}"
        return f"tls {self.tls}, {self.streams}{device}"


class _Figure(NamedTuple):
    """One measurement."""

    bandwidth: float  # GB/s
    cpu: float  # seconds of both processes for one GB


def consume(tensor: torch.Tensor) -> None:
    """Wait until the tensor has arrived on its device."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def _agent(name: str, rank: int, address: str, store: Any, settings: dict[str, Any]) -> Any:
    known = {key: value for key, value in settings.items() if key in Config.__dataclass_fields__}
    config = Config(secret=_SECRET, transports=("tcp",), listen=address, timeout=60.0, **known)
    return telegrad.Agent(name, store=store, rank=rank, world_size=2, config=config)


def _cases(args: argparse.Namespace) -> list[_Case]:
    return [_Case(*case) for case in itertools.product(args.tls, args.streams, args.devices)]


def _settings(args: argparse.Namespace, case: _Case) -> dict[str, Any]:
    settings: dict[str, Any] = {"bulk_streams": case.streams, "tls": case.tls, "cuda_ipc": False}
    if args.min_bytes is not None:
        settings["bulk_min_bytes"] = args.min_bytes
    return settings


# The process that receives


def serve(args: argparse.Namespace) -> None:
    """Receive: raw bytes on one port, and calls for each case."""
    listener = socket.create_server((args.listen, args.port), backlog=64)
    print("ready", os.getpid(), flush=True)
    threading.Thread(target=_serve_raw, args=(listener,), daemon=True).start()
    agents = []
    for index, case in enumerate(_cases(args)):
        store = dist.TCPStore(args.peer, args.port + 1 + index, 2, False)
        agent = _agent("server", 1, args.listen, store, _settings(args, case))
        agent.open()
        agents.append(agent)
    sys.stdin.read()
    os._exit(0)


def _serve_raw(listener: socket.socket) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_receive_raw, args=(sock,), daemon=True).start()


def _receive_raw(sock: socket.socket) -> None:
    memory = memoryview(np.empty(0, np.uint8))
    while header := sock.recv(8, socket.MSG_WAITALL):
        size = int.from_bytes(header, "little")
        if memory.nbytes != size:
            memory = memoryview(np.empty(size, np.uint8))
        left = memory
        while left.nbytes:
            left = left[sock.recv_into(left, 0, socket.MSG_WAITALL) :]
        sock.sendall(b"\1")


# The process that sends


class _RawStreams:
    """Send bytes over several sockets, one thread for each."""

    def __init__(self, address: str, port: int, count: int) -> None:
        self._socks = [socket.create_connection((address, port)) for _ in range(count)]
        for sock in self._socks:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start = threading.Barrier(count)
        self._end = threading.Barrier(count)
        self._parts: list[memoryview] = []
        for index in range(1, count):
            threading.Thread(target=self._run, args=(index,), daemon=True).start()

    def _run(self, index: int) -> None:
        while True:
            self._start.wait()
            self._exchange(index)
            self._end.wait()

    def _exchange(self, index: int) -> None:
        part = self._parts[index]
        self._socks[index].sendall(part.nbytes.to_bytes(8, "little"))
        self._socks[index].sendall(part)
        self._socks[index].recv(1)

    def send(self, data: memoryview) -> None:
        count = len(self._socks)
        step = -(-data.nbytes // count)
        self._parts = [data[start : start + step] for start in range(0, data.nbytes, step)]
        self._start.wait()
        self._exchange(0)
        self._end.wait()


def measure(args: argparse.Namespace) -> None:
    """Send, and print the bandwidth of each case in GB/s."""
    cases: dict[str, Callable[[int], Callable[[], Any]]] = {}
    for count in _RAW:
        raw = _RawStreams(args.peer, args.port, count)
        cases[f"sockets, {count}"] = lambda size, raw=raw: _raw_call(raw, size)  # type: ignore[misc]
    for index, case in enumerate(_cases(args)):
        store = dist.TCPStore(args.listen, args.port + 1 + index, 2, True, wait_for_workers=False)
        agent = _agent("client", 0, args.listen, store, _settings(args, case))
        agent.open()
        cases[case.title] = lambda size, agent=agent, device=case.device: (  # type: ignore[misc]
            _agent_call(agent, size, device)
        )
    print(f"{'MB':>6} " + "".join(f"{name:>16}" for name in cases), flush=True)
    medians: dict[str, float] = {}
    for size in args.sizes:
        figures: dict[str, list[_Figure]] = {name: [] for name in cases}
        for _ in range(args.rounds):
            for name, prepare in cases.items():
                call = prepare(int(size * _MB))
                figures[name].append(_bandwidth(call, int(size * _MB), args.server))
        print(f"{size:>6g} " + "".join(f"{_show(each):>16}" for each in figures.values()))
        medians = {
            name: statistics.median(each.bandwidth for each in figures[name]) for name in cases
        }
    _show_limits(max(medians[f"sockets, {count}"] for count in _RAW))
    os._exit(0)


def _show(figures: list[_Figure]) -> str:
    bandwidth = statistics.median(figure.bandwidth for figure in figures)
    return f"{bandwidth:.2f} ({statistics.median(figure.cpu for figure in figures):.2f})"


def _show_limits(raw: float) -> None:
    """Print what the cipher permits, for the largest size."""
    cores = len(os.sched_getaffinity(0))
    one, every = (limits.cipher(2, _CIPHER, count)["value"] for count in (1, cores))
    print(f"{_CIPHER} of openssl speed: {one:.2f} GB/s on one core, {every:.2f} on {cores} cores")
    print(f"both ends on these cores: {every / 2:.2f} GB/s for the cipher alone,")
    both = 1 / (1 / raw + 2 / every)
    print(f"{min(raw, both):.2f} if it shares the cores with sockets that are always busy")
    sys.stdout.flush()


def _raw_call(raw: _RawStreams, size: int) -> Callable[[], Any]:
    data = memoryview(np.ones(size, np.uint8))
    return lambda: raw.send(data)


def _agent_call(agent: Any, size: int, device: str) -> Callable[[], Any]:
    tensor = torch.ones(size, dtype=torch.uint8, device=device)
    return lambda: agent.call("server", consume, tensor)


def _bandwidth(call: Callable[[], Any], nbytes: int, server: int) -> _Figure:
    call()
    times: list[float] = []
    until = time.perf_counter() + _SECONDS
    cpu = -_cpu_seconds(os.getpid()) - _cpu_seconds(server)
    while len(times) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    cpu += _cpu_seconds(os.getpid()) + _cpu_seconds(server)
    return _Figure(nbytes / statistics.median(times) / 1e9, cpu * 1e9 / nbytes / len(times))


def _cpu_seconds(process: int) -> float:
    """Return the processor time that a process has used."""
    with open(f"/proc/{process}/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


# Both


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True)


@contextlib.contextmanager
def _namespaces() -> Iterator[None]:
    """Make two network namespaces with a cable between them."""
    near, far = _NAMES
    try:
        for name in _NAMES:
            _ip("netns", "add", name)
        pair = ("type", "veth", "peer", "name", "cable1", "netns", far)
        _ip("link", "add", "cable0", "netns", near, *pair)
        for index, (name, address) in enumerate(zip(_NAMES, _ADDRESSES, strict=True)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"cable{index}")
            _ip("-n", name, "link", "set", f"cable{index}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in _NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _run_both(args: argparse.Namespace) -> None:
    addresses = _ADDRESSES if args.netns else ("127.0.0.1", "127.0.0.1")
    prefixes = [["ip", "netns", "exec", name] if args.netns else [] for name in _NAMES]
    common = [
        *("--sizes", *map(str, args.sizes), "--streams", *map(str, args.streams)),
        *("--rounds", str(args.rounds), "--port", str(args.port)),
        *("--tls", *args.tls, "--devices", *args.devices),
        *(() if args.min_bytes is None else ("--min-bytes", str(args.min_bytes))),
    ]

    def command(role: str, own: int) -> list[str]:
        python = [sys.executable, "-m", "benchmarks.bulk", "--role", role]
        where = ["--listen", addresses[own], "--peer", addresses[1 - own]]
        return [*prefixes[own], *python, *where, *common]

    quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    server = subprocess.Popen(
        command("serve", 1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet
    )
    try:
        assert server.stdout is not None
        process = server.stdout.readline().split()[1]
        measuring = [*command("measure", 0), "--server", process]
        subprocess.run(measuring, check=True, env=quiet)
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--netns", action="store_true")
    parser.add_argument("--sizes", nargs="+", type=float, default=[1, 100, 1000])
    parser.add_argument("--streams", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--min-bytes", type=int, help="Config.bulk_min_bytes")
    parser.add_argument("--tls", nargs="+", choices=["on", "off"], default=["on", "off"])
    parser.add_argument("--devices", nargs="+", choices=["cpu", "cuda"], default=["cpu"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=29650)
    parser.add_argument("--server", type=int, help="the process that receives")
    parser.add_argument("--role", choices=["serve", "measure"])
    parser.add_argument("--listen", default="")
    parser.add_argument("--peer", default="")
    args = parser.parse_args()
    if args.role == "serve":
        serve(args)
    elif args.role == "measure":
        measure(args)
    else:
        with _namespaces() if args.netns else contextlib.nullcontext():
            _run_both(args)


if __name__ == "__main__":
    main()

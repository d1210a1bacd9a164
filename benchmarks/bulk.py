"""Bandwidth of large request tensors over TCP, beside raw sockets with one and four streams.

    python -m benchmarks.bulk                    between two processes over loopback
    python -m benchmarks.bulk --netns            between two network namespaces (needs root)
    python -m benchmarks.bulk --sizes 1 100 --streams 0 4 --min-bytes 262144 --tls off

Each measurement is the median of several calls whose argument is one tensor; the reply is empty.
`--streams 0` sends tensors in the control stream. The cases take turns, `--rounds` times.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import telegrad
from telegrad.config import Config

_MB = 1_000_000
_SECRET = "only for this benchmark of bulk transfers"
_NAMES = ("bulkA", "bulkB")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_SECONDS = 0.6  # of calls for each measurement


def consume(tensor: torch.Tensor) -> None:
    """Do nothing with the tensor that has arrived."""


def _agent(name: str, rank: int, address: str, store: Any, settings: dict[str, Any]) -> Any:
    known = {key: value for key, value in settings.items() if key in Config.__dataclass_fields__}
    config = Config(secret=_SECRET, transports=("tcp",), listen=address, timeout=60.0, **known)
    return telegrad.Agent(name, store=store, rank=rank, world_size=2, config=config)


def _settings(args: argparse.Namespace, streams: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"bulk_streams": streams, "tls": args.tls}
    if args.min_bytes is not None:
        settings["bulk_min_bytes"] = args.min_bytes
    return settings


# The process that receives


def serve(args: argparse.Namespace) -> None:
    """Receive: raw bytes on one port, and calls for each number of streams."""
    listener = socket.create_server((args.listen, args.port), backlog=64)
    print("ready", flush=True)
    threading.Thread(target=_serve_raw, args=(listener,), daemon=True).start()
    agents = []
    for index, streams in enumerate(args.streams):
        store = dist.TCPStore(args.peer, args.port + 1 + index, 2, False)
        agent = _agent("server", 1, args.listen, store, _settings(args, streams))
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
    for count in (1, 4):
        raw = _RawStreams(args.peer, args.port, count)
        cases[f"raw sockets, {count}"] = lambda size, raw=raw: _raw_call(raw, size)  # type: ignore[misc]
    for index, streams in enumerate(args.streams):
        store = dist.TCPStore(args.listen, args.port + 1 + index, 2, True, wait_for_workers=False)
        agent = _agent("client", 0, args.listen, store, _settings(args, streams))
        agent.open()
        cases[f"telegrad, {streams}"] = lambda size, agent=agent: _agent_call(agent, size)  # type: ignore[misc]
    print(f"{'MB':>8}  " + "  ".join(f"{name:>16}" for name in cases), flush=True)
    for size in args.sizes:
        results: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(args.rounds):
            for name, prepare in cases.items():
                results[name].append(_bandwidth(prepare(int(size * _MB)), int(size * _MB)))
        medians = [statistics.median(values) for values in results.values()]
        print(f"{size:>8}  " + "  ".join(f"{value:>16.2f}" for value in medians), flush=True)
    os._exit(0)


def _raw_call(raw: _RawStreams, size: int) -> Callable[[], Any]:
    data = memoryview(np.ones(size, np.uint8))
    return lambda: raw.send(data)


def _agent_call(agent: Any, size: int) -> Callable[[], Any]:
    tensor = torch.ones(size, dtype=torch.uint8)
    return lambda: agent.call("server", consume, tensor)


def _bandwidth(call: Callable[[], Any], nbytes: int) -> float:
    call()
    times: list[float] = []
    until = time.perf_counter() + _SECONDS
    while len(times) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return nbytes / statistics.median(times) / 1e9


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
        *("--tls", args.tls),
        *(() if args.min_bytes is None else ("--min-bytes", str(args.min_bytes))),
    ]

    def command(role: str, own: int) -> list[str]:
        python = [sys.executable, "-m", "benchmarks.bulk", "--role", role]
        where = ["--listen", addresses[own], "--peer", addresses[1 - own]]
        return [*prefixes[own], *python, *where, *common]

    server = subprocess.Popen(
        command("serve", 1), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        subprocess.run(command("measure", 0), check=True)
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--netns", action="store_true")
    parser.add_argument("--sizes", nargs="+", type=float, default=[1, 100, 1000])
    parser.add_argument("--streams", nargs="+", type=int, default=[0, 4])
    parser.add_argument("--min-bytes", type=int, help="Config.bulk_min_bytes")
    parser.add_argument("--tls", choices=["on", "off"], default="on")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=29650)
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

"""Measure calls per second and latency of one callee with many callers.

    python -m benchmarks.callers
    python -m benchmarks.callers --callers 1,8,14 --entries telegrad,epoll --rounds 5
    python -m benchmarks.callers --callers 1,4 --busy 3       on a host with other work

Each caller is a process. It calls a function of a one-element tensor synchronously, or keeps
several calls in flight. All entries run in turn in every round. `epoll` is the limit of plain
Python: one thread reads all connections and runs each call directly, without deadlines, references,
failure handling or functions by name. With more callers than `--processes`, one process has several
agents. Only Telegrad supports that.

The table shows calls per second, as the median over the rounds. The printed lines also show the
99th percentile of the time of a synchronous call divided by the mean, and the number of calls of
the slowest caller divided by the average.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import select
import socket
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import Tensor

from benchmarks import machine, results
from benchmarks.group import free_port
from benchmarks.processes import die_with_parent, import_path
from benchmarks.worlds import busy_processes, forkserver, resume, running, stop
from telegrad import Agent

ENTRIES = ("epoll", "telegrad", "torch")
_HEAD = struct.Struct("<I")
_AHEAD = 0.05  # seconds between the command to start and the start


def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


# Plain Python


def pack_tensor(tensor: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return _tensor, (pickle.PickleBuffer(tensor.numpy()),)


def _tensor(data: Any) -> Tensor:
    return torch.frombuffer(data, dtype=torch.float32)


class _Pickler(pickle.Pickler):
    dispatch_table = {Tensor: pack_tensor}  # noqa: RUF012


def dump(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    body = file.getvalue()
    return _HEAD.pack(len(body)) + body


def frames(sock: socket.socket, kept: bytearray) -> list[bytes]:
    data = sock.recv(1 << 16)
    if not data:
        raise EOFError
    kept += data
    found, at = [], 0
    while len(kept) - at >= _HEAD.size:
        (size,) = _HEAD.unpack_from(kept, at)
        if len(kept) - at - _HEAD.size < size:
            break
        found.append(bytes(kept[at + _HEAD.size : at + _HEAD.size + size]))
        at += _HEAD.size + size
    del kept[:at]
    return found


def serve_bare(path: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1024)
    poll = select.epoll()
    poll.register(listener.fileno(), select.EPOLLIN)
    clients: dict[int, tuple[socket.socket, bytearray]] = {}
    while True:
        for number, _ in poll.poll():
            if number == listener.fileno():
                sock, _ = listener.accept()
                clients[sock.fileno()] = sock, bytearray()
                poll.register(sock.fileno(), select.EPOLLIN)
                continue
            sock, kept = clients[number]
            try:
                sock.sendall(
                    b"".join([dump(add(*pickle.loads(frame))) for frame in frames(sock, kept)])
                )
            except (EOFError, OSError):
                poll.unregister(number)
                clients.pop(number)


class Bare:
    """A caller of the plain Python server."""

    def __init__(self, path: str) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(path)
        self._kept = bytearray()

    def run(self, until: float, in_flight: int) -> tuple[int, list[float]]:
        one, open_calls, count, times = torch.ones(1), 0, 0, []
        while True:
            begin = time.monotonic()
            if begin >= until:
                break
            while open_calls < in_flight:
                self._sock.sendall(dump((one, one)))
                open_calls += 1
            answers = [pickle.loads(frame) for frame in frames(self._sock, self._kept)]
            open_calls -= len(answers)
            count += len(answers)
            if in_flight == 1:
                times.append(time.monotonic() - begin)
        while open_calls:
            open_calls -= len(frames(self._sock, self._kept))
        return count, times


# Telegrad and torch


def drive(
    call: Callable[[Tensor], Any], start: Callable[[Tensor], Any], until: float, in_flight: int
) -> tuple[int, list[float]]:
    """Call until `until`. Return the number of calls and the times of synchronous calls."""
    one, count, times = torch.ones(1), 0, []
    if in_flight == 1:
        begin = time.monotonic()
        while begin < until:
            call(one)
            end = time.monotonic()
            times.append(end - begin)
            begin = end
        return len(times), times
    window = threading.Semaphore(in_flight)
    while time.monotonic() < until:
        window.acquire()
        start(one).add_done_callback(lambda _: window.release())
        count += 1
    for _ in range(in_flight):
        window.acquire()
    return count, times


def work(
    entry: str, rank: int, size: int, agents: int, folder: str, port: int, pipe: Connection
) -> None:
    """Run a process: the callee if `rank` is 0, else callers that follow the parent's commands."""
    die_with_parent()
    torch.set_num_threads(1)
    drives: list[Callable[[float, int], tuple[int, list[float]]]] = []
    with contextlib.ExitStack() as stack:
        if entry == "epoll":
            if rank == 0:
                threading.Thread(target=serve_bare, args=(f"{folder}/bare",), daemon=True).start()
            else:
                drives.append(Bare(f"{folder}/bare").run)
        elif entry == "torch":
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
            drives.append(
                lambda until, n: drive(
                    lambda x: rpc.rpc_sync("w0", add, (x, x)),
                    lambda x: rpc.rpc_async("w0", add, (x, x)),
                    until,
                    n,
                )
            )
        else:
            store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
            for number in range(agents if rank else 1):
                agent = stack.enter_context(
                    Agent(f"w{rank}" if not rank else f"w{rank}.{number}", store=store)
                )
                drives.append(
                    lambda until, n, agent=agent: drive(  # type: ignore[misc]
                        lambda x: agent.call("w0", add, x, x),
                        lambda x: agent.submit("w0", add, x, x),
                        until,
                        n,
                    )
                )
        pipe.send("here")
        while (command := pipe.recv()) is not None:
            begin, seconds, in_flight, count = command
            pipe.send(run_all(drives[:count], begin, seconds, in_flight))
        pipe.send("left")
        pipe.recv()
        # the measurement is complete; a graceful shutdown of a hundred workers would take long
        os._exit(0)


def run_all(
    drives: list[Any], begin: float, seconds: float, in_flight: int
) -> list[tuple[int, list[float]]]:
    """Run all callers of this process at the same time."""
    found: list[tuple[int, list[float]]] = [(0, [])] * len(drives)

    def one(index: int) -> None:
        time.sleep(max(begin - time.monotonic(), 0))
        found[index] = drives[index](begin + seconds, in_flight)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(1, len(drives))]
    for thread in threads:
        thread.start()
    one(0)
    for thread in threads:
        thread.join()
    return found


class World:
    """The processes of one entry."""

    def __init__(self, entry: str, callers: int, processes: int, folder: str) -> None:
        context = forkserver("telegrad", "telegrad.rpc", "benchmarks.results")
        self.agents = -(-callers // processes)
        size = 1 + min(callers, processes)
        port = free_port()
        self.pipes: list[Any] = []
        self._processes = []
        self.callers = callers
        for rank in range(size):
            near, far = context.Pipe()
            process = context.Process(
                target=work, args=(entry, rank, size, self.agents, folder, port, far)
            )
            process.start()
            self._processes.append(process)
            self.pipes.append(near)
            if rank == 0 and entry != "torch":
                near.recv()
        for pipe in self.pipes if entry == "torch" else self.pipes[1:]:
            pipe.recv()
        stop(self._processes)

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Let the processes run only inside a block."""
        return running(self._processes)

    def measure(self, seconds: float, in_flight: int) -> dict[str, Any]:
        begin = time.monotonic() + _AHEAD
        share = [
            len(range(rank, self.callers, len(self.pipes) - 1))
            for rank in range(len(self.pipes) - 1)
        ]
        for pipe, count in zip(self.pipes[1:], share, strict=True):
            pipe.send((begin, seconds, in_flight, count))
        found = [each for pipe in self.pipes[1:] for each in pipe.recv()]
        counts = [count for count, _ in found]
        times = sorted(each for _, part in found for each in part)
        line: dict[str, Any] = {
            "rounds": sum(counts) / seconds,
            "slowest": min(counts) / statistics.mean(counts),
        }
        if times:
            line["p99"] = times[int(len(times) * 0.99)] / statistics.mean(times)
            line["mean"] = statistics.mean(times)
        return line

    def close(self) -> None:
        resume(self._processes)
        for pipe in self.pipes:
            pipe.send(None)
        for pipe in self.pipes:
            pipe.recv()
            pipe.send(None)
        for process in self._processes:
            process.join()


def measure(options: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """Add a result for each entry, number of callers and number of calls in flight."""
    for callers in options.callers:
        entries = [
            entry
            for entry in options.entries
            if entry == "telegrad" or callers <= options.processes
        ]
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            worlds = {entry: World(entry, callers, options.processes, folder) for entry in entries}
            for in_flight in options.in_flight:
                for world in worlds.values():
                    with world.running():
                        world.measure(0.2, in_flight)
                found: dict[str, list[dict[str, Any]]] = {entry: [] for entry in entries}
                for _ in range(options.rounds):
                    for entry, world in worlds.items():
                        with world.running():
                            found[entry].append(world.measure(options.seconds, in_flight))
                for entry, rounds in found.items():
                    line = {name: [each[name] for each in rounds] for name in rounds[0]}
                    lines.append(
                        {
                            "kind": "result",
                            "callers": callers,
                            "in flight": in_flight,
                            "entry": entry,
                            **line,
                        }
                    )
                    print(describe(lines[-1]), flush=True)
            for world in worlds.values():
                world.close()


def describe(line: dict[str, Any]) -> str:
    calls = statistics.median(line["rounds"])
    slowest = f"slowest {statistics.median(line['slowest']):.2f}"
    if "p99" in line:
        mean = statistics.median(line["mean"]) * 1e6
        slowest += f", p99 {statistics.median(line['p99']):.1f}x of {mean:.0f} us"
    what = f"{line['callers']:4} callers, {line['in flight']:3} in flight, {line['entry']:9}"
    return f"{what} {calls:9,.0f}/s ({slowest})"


def table(lines: list[dict[str, Any]], entries: list[str]) -> str:
    rows = [["callers", "in flight", *entries, "to torch", "to epoll"]]
    for callers, in_flight in dict.fromkeys((line["callers"], line["in flight"]) for line in lines):
        here = {
            line["entry"]: statistics.median(line["rounds"])
            for line in lines
            if (line["callers"], line["in flight"]) == (callers, in_flight)
        }
        figures = [f"{here[entry]:,.0f}/s" if entry in here else "" for entry in entries]
        ratios = [
            f"{here['telegrad'] / here[other]:.2f}x" if other in here and "telegrad" in here else ""
            for other in ("torch", "epoll")
        ]
        rows.append([str(callers), str(in_flight), *figures, *ratios])
    return results.aligned(rows)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.callers", description=summary)
    parser.add_argument("--callers", type=numbers, default=[1, 2, 4, 8, 14, 32, 64])
    parser.add_argument("--in-flight", type=numbers, default=[1, 64])
    parser.add_argument("--entries", type=lambda text: text.split(","), default=list(ENTRIES))
    parser.add_argument(
        "--processes", type=int, default=16, help="maximum number of processes of callers"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each measurement")
    parser.add_argument(
        "--busy", type=int, default=0, help="processes that compute meanwhile: a loaded host"
    )
    parser.add_argument(
        "--out",
        type=results.out_file,
        default=Path("build/bench/callers.jsonl"),
        help="default %(default)s",
    )
    options = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = import_path()
    run = machine.heading(
        "callers", rounds=options.rounds, seconds=options.seconds, busy=options.busy
    )
    lines: list[dict[str, Any]] = []
    with results.kept(options.out, run, lambda: lines), busy_processes(options.busy):
        measure(options, lines)
    print(f"\n{table(lines, options.entries)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Limits of the machine: memory copies, sockets, and the cipher of TLS."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks import training
from benchmarks.measure import MIN_COPIES, Measured, percentiles, timed

PING_BYTES = 64
ECHO = f"""
import socket, sys
s = socket.socket(fileno=int(sys.argv[1]))
while data := s.recv({PING_BYTES}):
    s.sendall(data)
"""


def memcpy_warm(seconds: float, size: int) -> Measured:
    """Copy into memory that was written before, with one thread."""
    a, b = filled(size), filled(size)
    return per_second(lambda: ctypes.memmove(b.data_ptr(), a.data_ptr(), size), seconds, size)


def memcpy_threads(seconds: float, size: int) -> Measured:
    """Copy into memory that was written before, with as many threads as torch uses."""
    a, b = filled(size), filled(size)
    return per_second(lambda: b.copy_(a), seconds, size)


def memcpy_fresh(seconds: float, size: int) -> Measured:
    """Copy into memory newly allocated from the system: every page faults."""
    a = filled(size)

    def once() -> None:
        with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
            view = ctypes.c_char.from_buffer(fresh)
            ctypes.memmove(ctypes.addressof(view), a.data_ptr(), size)
            del view  # a map with an exported buffer cannot be closed

    return per_second(once, seconds, size)


def ping_pong(seconds: float) -> Measured:
    """Send a few bytes to another process and back over a unix socket, both in Python."""
    ours, theirs = socket.socketpair()
    echo = subprocess.Popen(
        [sys.executable, "-c", ECHO, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    payload = b"." * PING_BYTES

    def once() -> None:
        ours.sendall(payload)
        ours.recv(PING_BYTES)

    try:
        ours.settimeout(10)
        once()
        ours.settimeout(None)
        return percentiles(once, seconds)
    finally:
        ours.close()
        echo.kill()
        echo.wait()


def ping_pong_c(seconds: float) -> Measured:
    """Run the same round trip with both sides in C."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError("this machine has no C compiler")
    source = Path(__file__).with_name("ping_pong.c")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        program = f"{folder}/ping_pong"
        subprocess.run([compiler, "-O2", "-o", program, str(source)], check=True)
        done = subprocess.run([program, str(seconds)], capture_output=True, text=True, check=True)
    median, p99, n = map(float, done.stdout.split())
    return {"value": median, "p99": p99, "n": n}


# Between hosts

SINK = """
import socket, sys, threading
listening = socket.create_server((sys.argv[1], 0))
print(listening.getsockname()[1], flush=True)
share = int(sys.argv[2])
def serve(sock):
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    memory = memoryview(bytearray(share))
    while True:
        left = share
        while left:
            received = sock.recv_into(memory[share - left:])
            if not received:
                return
            left -= received
        sock.sendall(b".")
while True:
    threading.Thread(target=serve, args=(listening.accept()[0],)).start()
"""


def sockets(seconds: float, size: int, streams: int, address: str, prefix: list[str]) -> Measured:
    """Send bytes to another host over TCP, and wait until it has received them.

    The streams share the bytes. `prefix` starts a program on that host.
    """
    share = size // streams
    command = [*prefix, sys.executable, "-c", SINK, address, str(share)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as sink:
        assert sink.stdout is not None
        port = int(sink.stdout.readline())
        payload = bytes(share)
        with ThreadPoolExecutor(streams) as pool, ExitStack() as stack:
            socks = [
                stack.enter_context(socket.create_connection((address, port)))
                for _ in range(streams)
            ]
            for sock in socks:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def send(sock: socket.socket) -> None:
                sock.sendall(payload)
                sock.recv(1)

            def once() -> None:
                if streams == 1:
                    send(socks[0])
                else:
                    list(pool.map(send, socks))

            try:
                if size == PING_BYTES:
                    return percentiles(once, seconds)
                return per_second(once, seconds, share * streams)
            finally:
                sink.kill()


def cipher(seconds: float, algorithm: str, processes: int) -> Measured:
    """Encrypt records of 16 KB with OpenSSL, and return the sum of all processes."""
    command = f"openssl speed -mr -evp {algorithm} -bytes 16384 -seconds {max(1, round(seconds))}"
    if processes > 1:
        command += f" -multi {processes}"
    done = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("+F:"))
    return {"value": float(line.rpartition(":")[2]) / 1e9, "n": 1}


def filled(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8)


def per_second(once: Callable[[], object], seconds: float, size: int) -> Measured:
    times = timed(once, seconds, MIN_COPIES)
    return {"value": size / statistics.median(times) / 1e9, "n": len(times)}


LOOPS: dict[str, Callable[..., Measured]] = {
    "memcpy_warm": memcpy_warm,
    "memcpy_threads": memcpy_threads,
    "memcpy_fresh": memcpy_fresh,
    "ping_pong": ping_pong,
    "ping_pong_c": ping_pong_c,
    "sockets": sockets,
    "cipher": cipher,
    "digits": training.digits_here,
}

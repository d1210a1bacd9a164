"""Run CartPole on moolib: one thread reads a queue with dynamic batching, as in its documentation.

    python -m benchmarks.moolib_queue 8 1000 gymnasium cpu 29500

This runs 8 observers, which connect to port 29500, and prints their steps per second. It runs in
the interpreter that has moolib; `benchmarks.cartpole` starts it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
from typing import Any

import torch

from benchmarks.pole import Policy, observe

SERVER, FUNCTION = "server", "act"
TIMEOUT_S = 120.0
MAX_SIZE = 64


def serve(address: str, device: str, ready: Any, stop: Any) -> None:
    import moolib  # noqa: PLC0415  # only installed for the processes of this peer

    torch.set_num_threads(1)
    rpc, policy = moolib.Rpc(), Policy(device)
    rpc.set_name(SERVER)
    queue = rpc.define_queue(FUNCTION, batch_size=MAX_SIZE, dynamic_batching=True)

    async def answer() -> None:
        while True:
            reply, args, _ = await queue
            reply(policy.decide(*args))

    threading.Thread(
        target=lambda: asyncio.new_event_loop().run_until_complete(answer()), daemon=True
    ).start()
    rpc.listen(address)
    ready.release()
    stop.wait()


def play(address: str, number: int, steps: int, environment: str, rates: Any) -> None:
    import moolib  # noqa: PLC0415  # only installed for the processes of this peer

    torch.set_num_threads(1)
    rpc = moolib.Rpc()
    rpc.set_name(f"observer{number}")
    rpc.set_timeout(TIMEOUT_S)
    rpc.connect(address)
    rates.put(observe(lambda state: rpc.sync(SERVER, FUNCTION, state), environment, number, steps))


def main(argv: list[str]) -> int:
    observers, steps, environment, device, port = (
        int(argv[0]),
        int(argv[1]),
        argv[2],
        argv[3],
        int(argv[4]),
    )
    context, address = multiprocessing.get_context("forkserver"), f"127.0.0.1:{port}"
    context.set_forkserver_preload(["torch", "benchmarks.pole"])
    ready, stop, rates = context.Semaphore(0), context.Event(), context.Queue()
    server = context.Process(target=serve, args=(address, device, ready, stop), daemon=True)
    server.start()
    if not ready.acquire(timeout=TIMEOUT_S):
        raise TimeoutError("the server did not start")
    players = [
        context.Process(target=play, args=(address, number, steps, environment, rates), daemon=True)
        for number in range(observers)
    ]
    for player in players:
        player.start()
    print(sum(rates.get(timeout=TIMEOUT_S) for _ in players))
    for player in players:
        player.join(TIMEOUT_S)
    stop.set()
    server.join(TIMEOUT_S)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Steps per second of many observers of CartPole that ask one policy what to do.

    python -m benchmarks.cartpole                              1, 4 and 10 observers
    python -m benchmarks.cartpole --observers 1,2,3,4,5,6,7,8,9,10 --rounds 5
    python -m benchmarks.cartpole --entries telegrad.batched,torch --device cuda

The entries:

    telegrad.batched     `@telegrad.batched` on the policy's method
    telegrad one by one  a call and a forward pass for each step
    telegrad by hand     batched with locks and futures, as PyTorch's tutorial on batch RPC processing does it
    torch by hand        the same code on torch.distributed.rpc
    torch one by one     the second on torch.distributed.rpc

Every measurement has processes of its own; entries take turns, and the table shows the median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import torch
import torch.distributed.rpc as torch_rpc
import torch.multiprocessing as mp
from torch import Tensor, nn

import telegrad
import telegrad.rpc as telegrad_rpc
from benchmarks import machine, results
from benchmarks.group import free_port
from benchmarks.processes import import_path

SERVER = "server"
LIMIT_S = 300.0
WARM = 50
PACKAGES: dict[str, Any] = {"torch": torch_rpc, "telegrad": telegrad_rpc}
FUTURES: dict[str, Any] = {"torch": torch.futures.Future, "telegrad": telegrad.Future}
ENTRIES = ("telegrad.batched", "telegrad one by one", "telegrad by hand", "torch by hand", "torch one by one")
BASELINE = "torch by hand"


class Server:
    """The policy, and what the tutorial keeps to batch by hand."""

    def __init__(self, observers: int, package: str, device: str) -> None:
        self.policy = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2), nn.Softmax(1))
        self.policy.to(device)
        self.device = device
        self.lock = threading.Lock()
        self.new_future = FUTURES[package]
        self.future = self.new_future()
        self.states = torch.zeros(observers, 4)
        self.waiting = self.observers = observers

    @torch.no_grad()
    def decide(self, states: Tensor) -> Tensor:
        """An action for each state, drawn from the policy."""
        return torch.multinomial(self.policy(states.to(self.device)), 1).squeeze(1).cpu()

    @telegrad.batched(max_wait=0.001)
    def act(self, states: Tensor) -> list[int]:
        return self.decide(states).tolist()

    def act_alone(self, state: Tensor) -> int:
        return int(self.decide(state.unsqueeze(0)))

    def act_by_hand(self, number: int, state: Tensor) -> Any:
        with self.lock:
            self.states[number].copy_(state)
            self.waiting -= 1
            future = self.future
            if self.waiting == 0:
                self.waiting = self.observers
                self.future = self.new_future()
                future.set_result(self.decide(self.states))
        return future.then(lambda done: int(done.wait()[number]))


def alone(server: Any, number: int, state: Tensor) -> int:
    return server.local_value().act_alone(state)  # type: ignore[no-any-return]


@torch_rpc.functions.async_execution
def by_hand_on_torch(server: Any, number: int, state: Tensor) -> Any:
    return server.local_value().act_by_hand(number, state)


@telegrad_rpc.functions.async_execution
def by_hand_on_telegrad(server: Any, number: int, state: Tensor) -> Any:
    return server.local_value().act_by_hand(number, state)


def deciding(entry: str, server: Any, number: int) -> Callable[[Tensor], int]:
    """How an observer of this entry asks for an action."""
    if entry == "telegrad.batched":
        return server.rpc_sync().act  # type: ignore[no-any-return]
    package, _, way = entry.partition(" ")
    rpc = PACKAGES[package]
    function: Any = alone
    if way == "by hand":
        function = by_hand_on_torch if package == "torch" else by_hand_on_telegrad
    return lambda state: rpc.rpc_sync(SERVER, function, args=(server, number, state))  # type: ignore[no-any-return]


def observe(entry: str, server: Any, number: int, steps: int) -> float:
    """Plays so many steps; steps per second, after some that do not count."""
    env = gymnasium.make("CartPole-v1")
    state, _ = env.reset(seed=number)
    act = deciding(entry, server, number)
    for step in range(WARM + steps):
        if step == WARM:
            begin = time.perf_counter()
        state, _, terminated, truncated, _ = env.step(int(act(torch.from_numpy(state))))
        if terminated or truncated:
            state, _ = env.reset()
    return steps / (time.perf_counter() - begin)


def work(rank: int, entry: str, port: int, observers: int, options: argparse.Namespace, rates: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    package = entry.partition(" ")[0].partition(".")[0]
    rpc = PACKAGES[package]
    rpc.init_rpc(f"observer{rank}" if rank else SERVER, rank=rank, world_size=1 + observers)
    if rank == 0:
        server = rpc.RRef(Server(observers, package, options.device))
        started = [
            rpc.rpc_async(
                f"observer{number + 1}", observe, args=(entry, server, number, options.steps), timeout=LIMIT_S
            )
            for number in range(observers)
        ]
        rates.put(sum(each.wait() for each in started))
    rpc.shutdown()


def measure(entry: str, observers: int, options: argparse.Namespace) -> float:
    rates = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, args=(entry, free_port(), observers, options, rates), nprocs=1 + observers)
    rate: float = rates.get()
    return rate


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cartpole", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--observers", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4, 10])
    parser.add_argument("--entries", type=lambda text: text.split(","), default=list(ENTRIES))
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each entry")
    parser.add_argument("--steps", type=int, default=1000, help="of each observer")
    parser.add_argument("--device", default="cpu", help="where the policy is")
    parser.add_argument("--out", type=Path, default=Path("build/bench/cartpole.jsonl"), help="default %(default)s")
    options = parser.parse_args(argv)
    os.environ["PYTHONPATH"] = import_path()
    run = machine.heading("cartpole", **{key: value for key, value in vars(options).items() if key != "out"})
    measured: dict[tuple[int, str], list[float]] = {}
    for number in range(options.rounds):
        for observers in options.observers:
            for entry in options.entries:
                rate = measure(entry, observers, options)
                measured.setdefault((observers, entry), []).append(rate)
                print(f"round {number + 1}: {observers} observers, {entry}: {rate:,.0f} steps/s", flush=True)
    middle = {key: statistics.median(rates) for key, rates in measured.items()}
    rows = [["observers", *options.entries]]
    for observers in options.observers:
        base = middle.get((observers, BASELINE), float("nan"))
        cells = [middle[observers, entry] for entry in options.entries]
        rows.append([str(observers), *(f"{cell:,.0f} {cell / base:.2f}x" for cell in cells)])
    print(f"\nsteps/s, and against {BASELINE}\n{results.aligned(rows)}")
    lines = [
        {"kind": "result", "observers": observers, "entry": entry, "rounds": rates}
        for (observers, entry), rates in measured.items()
    ]
    results.write(options.out, run, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

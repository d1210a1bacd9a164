"""Measure how fast a new version of weights on a GPU reaches processes on the same GPU.

    python -m benchmarks.gpu_weights                     14 GB of bf16 weights, 4 subscribers
    python -m benchmarks.gpu_weights --gigabytes 2 --subscribers 8

Each subscriber copies every version into a model of its own on the GPU. The time is that from the call
of the trainer until the last subscriber has the version in its model; the throughput is the bytes that
all subscribers have got in this time. Each version has other random bits, and each subscriber checks
every bit. `pull_ms` is the slowest copy, `publish_ms` how long the trainer's call takes. `copy_gb_s` is
what one process reaches that copies memory of the GPU, for comparison: it counts the bytes once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import telegrad
from telegrad.weights import Publisher, Subscriber

TENSORS = 200
LIMIT_S = 120.0
SECRET = "for the benchmark of weights on a GPU"


@dataclass(frozen=True)
class World:
    """What all processes know."""

    subscribers: int
    nbytes: int
    rounds: int
    store: str
    barrier: Any
    queue: Any


def tensors(world: World) -> dict[str, Tensor]:
    count = world.nbytes // 2 // TENSORS
    return {
        f"t{index}": torch.zeros(count, dtype=torch.bfloat16, device="cuda")
        for index in range(TENSORS)
    }


def bits(number: int, index: int, count: int) -> Tensor:
    """Return the bits of a tensor of a version. All processes get the same."""
    generator = torch.Generator("cuda").manual_seed(1000 * number + index)
    return torch.randint(
        -(1 << 15), 1 << 15, (count,), dtype=torch.int16, device="cuda", generator=generator
    )


def work(rank: int, world: World) -> None:
    """Run one process. Rank 0 is the trainer."""
    size = world.subscribers + 1
    store = dist.FileStore(world.store, size)
    model = tensors(world)
    config = telegrad.Config(secret=SECRET)
    with telegrad.Agent(
        f"w{rank}", rank=rank, world_size=size, store=store, config=config
    ) as agent:
        if rank == 0:
            publish(world, agent, model)
        else:
            subscribe(world, agent, model)
        world.barrier.wait(LIMIT_S)


def publish(world: World, agent: telegrad.Agent, model: dict[str, Tensor]) -> None:
    with Publisher(model, "policy", agent=agent) as publisher:
        for number in range(world.rounds + 1):
            for index, tensor in enumerate(model.values()):
                tensor.view(torch.int16).copy_(bits(number, index, tensor.numel()))
            torch.cuda.synchronize()
            world.barrier.wait(LIMIT_S)
            started = time.monotonic()
            publisher.publish(number)
            called = time.monotonic()
            world.barrier.wait(LIMIT_S)  # all have it
            world.queue.put((number, 0, started, started, called, True))
            world.barrier.wait(LIMIT_S)  # all have checked it
    world.queue.put(copy_speed(next(iter(model.values())), world.nbytes))


def subscribe(world: World, agent: telegrad.Agent, model: dict[str, Tensor]) -> None:
    with Subscriber("policy", agent=agent, publisher="w0", device="cuda") as subscriber:
        for number in range(world.rounds + 1):
            world.barrier.wait(LIMIT_S)
            assert subscriber.newer_than(number - 1).wait() == number
            told = time.monotonic()
            assert subscriber.pull_into(model) == number
            ended = time.monotonic()
            world.barrier.wait(LIMIT_S)
            is_equal = all(
                torch.equal(tensor.view(torch.int16), bits(number, index, tensor.numel()))
                for index, tensor in enumerate(model.values())
            )
            torch.cuda.synchronize()
            world.queue.put((number, 1, told, told, ended, is_equal))
            world.barrier.wait(LIMIT_S)
        assert subscriber.received.nbytes == 0, "the weights were sent over a connection"


def copy_speed(like: Tensor, nbytes: int) -> float:
    """Return the bytes per second of one process that copies on the GPU."""
    source = torch.empty(min(nbytes, 4 << 30), dtype=torch.uint8, device=like.device)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    started = time.monotonic()
    for _ in range(5):
        target.copy_(source)
    torch.cuda.synchronize()
    return 5 * source.numel() / (time.monotonic() - started)


def measure(options: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        world = World(
            options.subscribers,
            int(options.gigabytes * 1e9),
            options.rounds,
            f"{folder}/store",
            context.Barrier(options.subscribers + 1),
            context.Queue(),
        )
        size = options.subscribers + 1
        processes = [context.Process(target=work, args=(rank, world)) for rank in range(size)]
        for process in processes:
            process.start()
        try:
            count = size * (options.rounds + 1) + 1
            found = [world.queue.get(timeout=2 * LIMIT_S) for _ in range(count)]
            for process in processes:
                process.join(LIMIT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
    (speed,) = (each for each in found if isinstance(each, float))
    rows = [each for each in found if not isinstance(each, float)]
    seconds, calls, pulls = [], [], []
    for number in range(1, options.rounds + 1):  # without the first one, which maps the memory
        of_round = [row for row in rows if row[0] == number]
        started, called = next((row[2], row[4]) for row in of_round if row[1] == 0)
        seconds.append(max(row[4] for row in of_round) - started)
        calls.append(called - started)
        pulls.append(max(row[4] - row[3] for row in of_round if row[1] == 1))
    nbytes = options.subscribers * (world.nbytes // 2 // TENSORS) * TENSORS * 2
    return {
        "gpu": torch.cuda.get_device_name(),
        "gigabytes": options.gigabytes,
        "subscribers": options.subscribers,
        "gb_s_in_all": round(nbytes / statistics.median(seconds) / 1e9),
        "ms": round(1000 * statistics.median(seconds), 2),
        "slowest_ms": round(1000 * max(seconds), 2),
        "publish_ms": round(1000 * statistics.median(calls), 2),
        "pull_ms": round(1000 * statistics.median(pulls), 2),
        "copy_gb_s": round(speed / 1e9),
        "equal_to_the_bit": all(row[5] for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=14.0)
    parser.add_argument("--subscribers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    print(json.dumps(measure(parser.parse_args())), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

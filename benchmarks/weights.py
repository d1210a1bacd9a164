"""Measure how fast a new version of weights reaches N workers, and what that costs the trainer.

    python -m benchmarks.weights                        one host, 1, 4 and 16 subscribers
    python -m benchmarks.weights --hosts 3 --gbit 1     three network namespaces with limited links
    python -m benchmarks.weights --gpt                  a small GPT: share of changed weights, slow-down

Each round changes 1 % of bf16 weights by one unit in the last place. The time is that from the call of
the trainer until the last subscriber has the version in its model. With several hosts, the trainer is
on the first one and the subscribers are on the others. The entries:

    telegrad.weights   `Publisher` and `Subscriber`
    telegrad           the trainer sends all weights to each subscriber by a call
    torch              the same with torch.distributed.rpc (only on one host: in several namespaces
                       of one machine it uses shared memory)
    gloo               torch.distributed.broadcast of one flat tensor
    torch.save         a file in a folder that all processes see (memory; only on one host)
    memcpy             the limit on one host: each subscriber copies the weights from shared memory

`--gpt` trains on the sources of Python's standard library: master weights in float32, and a copy in
bf16 that is published after every step. Steps with and without publishing alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as torch_rpc
from torch import Tensor, nn

import telegrad
from benchmarks.group import free_port
from benchmarks.namespaces import INTERFACE, Host, Network, enter, hindrance
from benchmarks.worlds import forkserver
from telegrad.weights import Publisher, Subscriber

ENTRIES = ("telegrad.weights", "telegrad", "torch", "gloo", "torch.save", "memcpy")
TENSORS = 20
LIMIT_S = 60.0
SECRET = "for the benchmark of weights"


@dataclass(frozen=True)
class World:
    """What all processes of one measurement know."""

    entry: str
    size: int  # with the trainer
    megabytes: int
    rounds: int
    folder: str
    address: str
    port: int
    hosts: tuple[Host, ...]
    barrier: Any
    queue: Any

    def host_of(self, rank: int) -> Host | None:
        """Return the host of a process: the first for the trainer, the others in turn."""
        if not self.hosts:
            return None
        return self.hosts[0 if rank == 0 else 1 + (rank - 1) % (len(self.hosts) - 1)]


Deliver = Callable[[int], object]


def work(rank: int, world: World) -> None:
    """Run one process. Rank 0 is the trainer."""
    host = world.host_of(rank)
    if host is not None:
        enter(host)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        os.environ["TP_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    count = world.megabytes * (1 << 20) // 2 // TENSORS
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(TENSORS * count, generator=generator).bfloat16()
    if rank:
        flat.zero_()
    model = {f"t{index}": flat[index * count :][:count] for index in range(TENSORS)}
    with entry_of(rank, world, model, flat) as deliver:
        deliver(0)
        for number in range(1, world.rounds + 1):
            if rank == 0:
                change(flat, generator)
            world.barrier.wait(LIMIT_S)
            sent = sent_bytes() if host is not None else 0
            started = time.monotonic()
            deliver(number)
            ended = time.monotonic()
            world.barrier.wait(LIMIT_S)
            sent = sent_bytes() - sent if host is not None else 0
            checksum = int(flat.view(torch.int16).sum())
            world.queue.put((number, rank, started, ended, sent, checksum))
            world.barrier.wait(LIMIT_S)


def change(flat: Tensor, generator: torch.Generator) -> None:
    """Change one value in a hundred by one unit in the last place."""
    places = torch.randint(flat.numel(), (flat.numel() // 100,), generator=generator)
    flat.view(torch.int16)[places] += 1


def sent_bytes() -> int:
    """Return the bytes that the host of this thread has sent."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"there is no interface {INTERFACE}")


# Entries


@contextmanager
def entry_of(rank: int, world: World, model: dict[str, Tensor], flat: Tensor) -> Iterator[Deliver]:
    entries: dict[str, Callable[..., Any]] = {
        "telegrad.weights": with_weights,
        "telegrad": with_calls,
        "torch": with_torch_rpc,
        "gloo": with_gloo,
        "torch.save": with_files,
        "memcpy": with_memcpy,
    }
    with entries[world.entry](rank, world, model, flat) as deliver:
        yield deliver


@contextmanager
def agent_of(rank: int, world: World) -> Iterator[telegrad.Agent]:
    host = world.host_of(rank)
    listen = "127.0.0.1" if host is None else host.address
    config = telegrad.Config(secret=SECRET, listen=listen)
    store = dist.FileStore(f"{world.folder}/store", world.size)
    with telegrad.Agent(
        f"w{rank}", store=store, rank=rank, world_size=world.size, config=config
    ) as agent:
        yield agent
        agent.shutdown(LIMIT_S)


@contextmanager
def with_weights(
    rank: int, world: World, model: dict[str, Tensor], flat: Tensor
) -> Iterator[Deliver]:
    with agent_of(rank, world) as agent:
        if rank == 0:
            publisher = Publisher(model, "policy", agent=agent, fan_out=1)
            yield publisher.publish
            publisher.flush(LIMIT_S)
            return

        subscriber = Subscriber("policy", agent=agent, publisher="w0")

        def pull(number: int) -> None:
            subscriber.newer_than(number - 1).result(LIMIT_S)
            assert subscriber.pull_into(model) == number

        yield pull
        subscriber.close()


_here: dict[str, Any] = {}


def receive(weights: dict[str, Tensor]) -> None:
    """Copy weights that the trainer has sent into the model of this worker."""
    for name, tensor in weights.items():
        _here["model"][name].copy_(tensor)


@contextmanager
def with_calls(
    rank: int, world: World, model: dict[str, Tensor], flat: Tensor
) -> Iterator[Deliver]:
    _here["model"] = model

    def send(number: int) -> None:
        futures = [agent.submit(f"w{other}", receive, model) for other in range(1, world.size)]
        for future in futures:
            future.result(LIMIT_S)

    with agent_of(rank, world) as agent:
        yield send if rank == 0 else lambda number: None


@contextmanager
def with_torch_rpc(
    rank: int, world: World, model: dict[str, Tensor], flat: Tensor
) -> Iterator[Deliver]:
    _here["model"] = model
    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{world.folder}/store", rpc_timeout=LIMIT_S
    )
    torch_rpc.init_rpc(f"w{rank}", rank=rank, world_size=world.size, rpc_backend_options=options)

    def send(number: int) -> None:
        futures = [
            torch_rpc.rpc_async(f"w{other}", receive, (model,)) for other in range(1, world.size)
        ]
        torch.futures.wait_all(futures)

    yield send if rank == 0 else lambda number: None
    torch_rpc.shutdown()


@contextmanager
def with_gloo(rank: int, world: World, model: dict[str, Tensor], flat: Tensor) -> Iterator[Deliver]:
    store = dist.FileStore(f"{world.folder}/store", world.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.size)
    yield lambda number: dist.broadcast(flat, 0)
    dist.destroy_process_group()


@contextmanager
def with_files(
    rank: int, world: World, model: dict[str, Tensor], flat: Tensor
) -> Iterator[Deliver]:
    path = f"{world.folder}/weights"

    def save(number: int) -> None:
        torch.save({name: tensor.clone() for name, tensor in model.items()}, path + ".new")
        os.replace(path + ".new", path)
        world.barrier.wait(LIMIT_S)

    def load(number: int) -> None:
        world.barrier.wait(LIMIT_S)
        for name, tensor in torch.load(path).items():
            model[name].copy_(tensor)

    yield save if rank == 0 else load


@contextmanager
def with_memcpy(
    rank: int, world: World, model: dict[str, Tensor], flat: Tensor
) -> Iterator[Deliver]:
    path = f"{world.folder}/memory"
    if rank == 0:
        Path(path).write_bytes(b"")
        os.truncate(path, flat.numel() * 2)
    world.barrier.wait(LIMIT_S)
    shared = torch.from_file(path, shared=True, size=flat.numel(), dtype=torch.bfloat16)

    def write(number: int) -> None:
        shared.copy_(flat)
        world.barrier.wait(LIMIT_S)

    def read(number: int) -> None:
        world.barrier.wait(LIMIT_S)
        flat.copy_(shared)

    yield write if rank == 0 else read


# Measurements


def measure(entry: str, subscribers: int, options: Any, hosts: tuple[Host, ...]) -> dict[str, Any]:
    """Return the median time of a round, and the bytes that the first host has sent in it."""
    context = forkserver("torch._dynamo", "telegrad", "telegrad.weights")
    size = subscribers + 1
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        world = World(
            entry,
            size,
            options.megabytes,
            options.rounds,
            folder,
            hosts[0].address if hosts else "127.0.0.1",
            free_port(),
            hosts,
            context.Barrier(size),
            context.Queue(),
        )
        processes = [context.Process(target=work, args=(rank, world)) for rank in range(size)]
        for process in processes:
            process.start()
        try:
            found = [world.queue.get(timeout=2 * LIMIT_S) for _ in range(size * options.rounds)]
            for process in processes:
                process.join(LIMIT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
    times, sent = [], []
    for number in range(1, options.rounds + 1):
        rows = [row for row in found if row[0] == number]
        assert len({row[5] for row in rows}) == 1, "a subscriber has other weights"
        started = next(row[2] for row in rows if row[1] == 0)
        times.append(max(row[3] for row in rows) - started)
        sent.append(next(row[4] for row in rows if row[1] == 0))
    return {
        "entry": entry,
        "subscribers": subscribers,
        "hosts": len(hosts) or 1,
        "ms": round(statistics.median(times) * 1000, 1),
        "sent_mb": round(statistics.median(sent) / 1e6, 2) if hosts else None,
    }


def limit_links(network: Network, gbit: float) -> None:
    for host in network.hosts:
        command = f"tc qdisc add dev {INTERFACE} root tbf rate {gbit}gbit burst 256kb latency 50ms"
        subprocess.run([*host.prefix, *command.split()], check=True)


# A small GPT


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


class GPT(nn.Module):
    def __init__(self, width: int = 256, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.tokens(x) + self.positions))
        return logits


def train_gpt(rank: int, world: World) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT()
    copy = {name: each.detach().bfloat16() for name, each in model.state_dict().items()}
    with agent_of(rank, world) as agent:
        if rank:
            with Subscriber("policy", agent=agent, publisher="w0") as subscriber:
                for version in subscriber:
                    subscriber.pull_into(copy)
                    if version >= world.rounds:
                        return
        else:
            world.queue.put(_train(model, copy, agent, world.rounds))


def _train(model: GPT, copy: dict[str, Tensor], agent: Any, steps: int) -> dict[str, Any]:
    folder = Path(os.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    publisher = Publisher(copy, "policy", agent=agent)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    shares: dict[float, list[float]] = {}
    factors: dict[float, list[float]] = {}
    weights = model.state_dict()
    rates = (1e-3, 1e-4, 1e-5, 1e-6)
    for step in range(steps):
        rate = rates[step * len(rates) // steps]
        optimizer.param_groups[0]["lr"] = rate
        is_published = step // 2 % 2 == 0
        starts = torch.randint(len(data) - 65, (8,)).tolist()
        batch = torch.stack([data[start : start + 65] for start in starts])
        started = time.perf_counter()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, tensor in weights.items():  # also without publishing: inference needs it
            copy[name].copy_(tensor)
        if is_published:
            publisher.publish(step)
        seconds[is_published].append(time.perf_counter() - started)
        if is_published and step % 2 == 1:  # the step before was published, too
            publisher.flush(LIMIT_S)
            report = publisher.reports[-1]
            shares.setdefault(rate, []).append(report.changed_share)
            factors.setdefault(rate, []).append(report.full_bytes / report.delta_bytes)
    publisher.publish(steps)
    publisher.flush(LIMIT_S)
    with_it, without = (statistics.median(seconds[each]) for each in (True, False))
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "loss": round(float(loss), 2),
        "step_ms": round(without * 1000, 1),
        "slow_down_percent": round((with_it / without - 1) * 100, 1),
        "changed_percent": {
            rate: round(100 * statistics.median(each), 2) for rate, each in shares.items()
        },
        "times_fewer_bytes": {
            rate: round(statistics.median(each), 1) for rate, each in factors.items()
        },
    }


def measure_gpt(options: Any) -> dict[str, Any]:
    """Train, publish and return the shares and the slow-down."""
    context = forkserver("torch._dynamo", "telegrad", "telegrad.weights")
    with tempfile.TemporaryDirectory() as folder:
        world = World(
            "telegrad.weights",
            2,
            0,
            options.steps,
            folder,
            "127.0.0.1",
            0,
            (),
            context.Barrier(2),
            context.Queue(),
        )
        processes = [context.Process(target=train_gpt, args=(rank, world)) for rank in range(2)]
        for process in processes:
            process.start()
        try:
            found: dict[str, Any] = world.queue.get(timeout=20 * LIMIT_S)
            for process in processes:
                process.join(LIMIT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--entries", default=",".join(ENTRIES))
    parser.add_argument("--subscribers", default="1,4,16")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--gbit", type=float, help="limit of the link of each host")
    parser.add_argument("--gpt", action="store_true")
    parser.add_argument("--steps", type=int, default=160, help="of the GPT")
    options = parser.parse_args()
    if options.gpt:
        print(json.dumps(measure_gpt(options)))
        return 0
    with ExitStack() as stack:
        hosts: tuple[Host, ...] = ()
        if options.hosts > 1:
            if reason := hindrance():
                print(reason, file=sys.stderr)
                return 1
            network = stack.enter_context(Network(options.hosts))
            if options.gbit:
                limit_links(network, options.gbit)
            hosts = tuple(network.hosts)
        for subscribers in map(int, options.subscribers.split(",")):
            for entry in options.entries.split(","):
                if hosts and entry in ("torch", "torch.save", "memcpy"):
                    continue  # they use the memory of this machine
                print(json.dumps(measure(entry, subscribers, options, hosts)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

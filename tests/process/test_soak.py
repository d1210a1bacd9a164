"""Live workers under a load of ten times the cores are never given up, and nothing is left when it
ends.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import Agent, Config, autograd
from telegrad.current import process_state
from telegrad.refs import remote
from tests.process.fleet import Fleet
from tests.refs.objects import Thing, until

pytestmark = pytest.mark.process

COUNTERS = (
    "calls_pending",
    "owned_objects",
    "references_of_others",
    "objects_not_created",
    "held_objects",
    "unconfirmed_creations",
    "unacknowledged_reference_messages",
    "autograd_contexts",
    "shared_blocks_in_use",
)
THREADS = 2  # that make calls, in each worker


def join(rank: int, size: int, path: str) -> None:
    """A heartbeat limit that is short for a machine under such a load: silence must be told from
    slowness.
    """
    config = Config(
        secret="for the soak of workers",
        heartbeat_interval=0.5,
        heartbeat_timeout=4.0,
        timeout=50.0,
    )
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(path, size)
    agent = Agent(f"w{rank}", store=store, rank=rank, world_size=size, config=config)
    agent.open()
    agent._runtime.wait_for_members()
    process_state.runtime = agent._runtime


def this_agent() -> Agent:
    assert process_state.runtime is not None
    return process_state.runtime.agent


def echo(value: Any) -> Any:
    return value


def double(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return value * factor


def relay(names: list[str], depth: int) -> int:
    return 1 if depth == 0 else 1 + this_agent().call(random.choice(names), relay, names, depth - 1)


def use(reference: Any) -> Any:
    return reference.to_here()


def one_of_each(agent: Agent, names: list[str], choose: random.Random) -> None:
    """One call of a kind that is chosen at random, to a worker that is chosen at random; checks its
    result.
    """
    to, third, number = choose.choice(names), choose.choice(names), choose.randrange(1000)
    kind = choose.randrange(8)
    if kind == 0:
        assert agent.call(to, echo, number) == number
    elif kind == 1:
        assert float(agent.call(to, echo, torch.ones(1 << 18)).sum()) == 1 << 18
    elif kind == 2:
        assert [
            future.wait() for future in [agent.submit(to, echo, each) for each in range(20)]
        ] == list(range(20))
    elif kind == 3:
        futures = [agent.submit(to, echo, torch.ones(1 << 18)) for _ in range(4)]
        assert all(float(future.wait().sum()) == 1 << 18 for future in futures)
    elif kind == 4:
        thing = remote(to, Thing, (number,), agent=agent)
        assert thing.rpc_sync().add(2) == number + 2
        assert remote(to, Thing, (number,), agent=agent).rpc_async().get().wait() == number
        assert agent.call(third, use, remote(to, echo, (number,), agent=agent)) == number
    elif kind == 5:
        leaf = torch.ones(8, requires_grad=True)
        with autograd.context(agent=agent) as context:
            there = agent.call(to, double, leaf, torch.full((8,), 2.0))
            back = agent.call(third, double, there, torch.full((8,), 3.0))
            autograd.backward(context, [back.sum()])
            assert torch.equal(autograd.get_gradients(context)[leaf], torch.full((8,), 6.0))
    elif kind == 6:
        assert agent.call(to, relay, names, 4) == 5
    else:
        assert list(remote(to, Thing, (0,), agent=agent).stream().count_to(5)) == [0, 1, 2, 3, 4]


def load(names: list[str], seconds: float, seed: int) -> int:
    """Make calls of all kinds from several threads; how many."""
    agent, until_then = this_agent(), time.monotonic() + seconds
    counts = [0] * THREADS
    errors: list[BaseException] = []

    def work(index: int) -> None:
        choose = random.Random(seed * 100 + index)
        try:
            while time.monotonic() < until_then and not errors:
                one_of_each(agent, names, choose)
                counts[index] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts)


def settle() -> dict[str, int]:
    """Wait until nothing is under way; what is left."""

    def settled() -> bool:
        gc.collect()
        figures = this_agent().statistics()
        return not any(figures.get(name, 0) for name in COUNTERS)

    until(settled, lambda: str(this_agent().statistics()))
    return {
        name: count
        for name, count in this_agent().statistics().items()
        if "lost" in name or "closed" in name
    }


def memory_in_use() -> tuple[int, int]:
    """Kilobytes of private memory, and the number of blocks that Python has allocated.

    The C allocator keeps freed memory, so the first grows for some minutes. The second does not.
    """
    gc.collect()
    with open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    return resident, sys.getallocatedblocks()


@pytest.mark.parametrize(
    ("workers", "rounds"),
    [
        (4, 1),
        pytest.param(10, 20, marks=pytest.mark.soak),
        pytest.param(20, 20, marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(1800)
def test_live_workers_are_never_given_up(tmp_path: Path, workers: int, rounds: int) -> None:
    names = [f"w{rank}" for rank in range(workers)]
    seconds = 5.0 if rounds == 1 else 30.0
    memory = []
    with Fleet(workers, join, str(tmp_path / "store")) as fleet:
        for number in range(rounds):
            for rank, worker in enumerate(fleet.workers):
                worker.begin(load, names, seconds, number * workers + rank)
            assert all(worker.result() > 0 for worker in fleet.workers)
            in_use = [worker.do(memory_in_use) for worker in fleet.workers]
            memory.append(tuple(map(max, zip(*in_use, strict=True))))
        assert [worker.do(settle) for worker in fleet.workers] == [{}] * workers
    if rounds > 10:  # flat: the second half does not grow by more than noise
        (resident, blocks), (later_resident, later_blocks) = memory[len(memory) // 2], memory[-1]
        assert later_resident < 1.1 * resident, memory
        assert later_blocks < 1.01 * blocks, memory

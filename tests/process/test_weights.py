"""Workers that publish, pass on and read weights are really killed and frozen."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from telegrad import Agent, Config
from telegrad.errors import TelegradError
from telegrad.weights import Publisher, Subscriber
from tests.process.fleet import Fleet

pytestmark = pytest.mark.process

SIZE = 200_000
TRIES = 40.0  # seconds
_here: dict[str, Any] = {}


def weights() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(SIZE), "b": torch.zeros(SIZE, dtype=torch.bfloat16)}


def join(rank: int, size: int, path: str, transport: str) -> None:
    torch.set_num_threads(1)
    config = Config(
        secret="for the tests of weights",
        transports=(transport,),
        heartbeat_interval=1.0,
        heartbeat_timeout=60.0,
        resume_timeout=60.0,
    )
    agent = Agent(f"w{rank}", store=dist.FileStore(path, -1), config=config)
    agent.open()
    _here["agent"] = agent
    if rank == 0:
        _here["weights"] = weights()
        _here["publisher"] = Publisher(_here["weights"], "policy", agent=agent, fan_out=1)
        return
    _here["subscriber"] = Subscriber("policy", agent=agent, patience=1.0)
    _here["mixed"] = []
    _here["thread"] = threading.Thread(target=pull_all_the_time, daemon=True)
    _here["thread"].start()


def pull_all_the_time() -> None:
    """Record every pull that is a mix of versions."""
    copy = weights()
    while True:
        try:
            _here["subscriber"].newer_than(_here.get("pulled")).wait()
            version = _here["subscriber"].pull_into(copy, timeout=TRIES)
        except TelegradError:
            return  # the publisher was gone for too long, or this worker ends
        values = {value for tensor in copy.values() for value in tensor.float().unique().tolist()}
        if values != {float(version % 200)}:
            _here["mixed"].append((version, values))
        _here["pulled"] = version


def publish(version: int) -> None:
    for tensor in _here["weights"].values():
        tensor.fill_(version % 200)
    _here["publisher"].publish(version)


def reached(version: int) -> tuple[bool, list[Any]]:
    """Wait for a version. Return whether it can be pulled, and the pulls that were mixed."""
    _here["subscriber"].newer_than(version - 1).result(TRIES)
    pulled = _here["subscriber"].pull_into(weights(), timeout=TRIES)
    return pulled >= version, _here["mixed"]


def end() -> None:
    _here["agent"].close()


def accidents(path: Path, transport: str, seed: int, events: int, size: int = 4) -> None:
    rng = random.Random(seed)
    with Fleet(size, join, str(path / "store"), transport) as fleet:
        version = 0
        for _ in range(events):
            for _ in range(rng.randrange(1, 4)):
                version += 1
                fleet[0].do(publish, version)
            victim = rng.randrange(size)
            if victim and rng.random() < 0.5:
                fleet[victim].signal(signal.SIGSTOP)
                version += 1
                fleet[0].do(publish, version)
                for rank in range(1, size):
                    if rank != victim:
                        assert fleet[rank].do(reached, version) == (True, [])
                fleet[victim].signal(signal.SIGCONT)
            else:
                fleet[victim].kill()
                fleet.restart(victim)
        version += 1
        fleet[0].do(publish, version)
        for rank in range(1, size):
            assert fleet[rank].do(reached, version) == (True, [])
        for worker in fleet.workers:
            worker.do(end)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_kills_and_freezes(tmp_path: Path, transport: str) -> None:
    accidents(tmp_path, transport, 3, 4)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("seed", range(4, 7))
def test_many_kills_and_freezes(tmp_path: Path, transport: str, seed: int) -> None:
    accidents(tmp_path, transport, seed, 25, size=6)

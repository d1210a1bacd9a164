"""Count the modules of Telegrad that run during one call of each kind: the length of its path.

Two workers in this process use unix sockets and shared memory. Each walk runs a few times first, so
that connections exist and functions are known; then the modules of both workers are recorded that
execute a function while the walk runs twice more. The walks in ARCHITECTURE.md are from here.

    python scripts/count_walk.py [-v] [walk ...]
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import telegrad
from telegrad import batched, ps, remote
from telegrad.agent import Agent
from telegrad.testing import LocalCluster

_ROOT = str(Path(telegrad.__file__).parent) + "/"
_SETTLE_SECONDS = 0.3  # for replies, acknowledgements and releases that follow a call


class _Recorder:
    """Record the modules of Telegrad whose functions are called while it is active."""

    def __init__(self) -> None:
        self.active = False
        self.modules: set[str] = set()

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        if self.active and event == "call":
            name = frame.f_code.co_filename
            # Not the clock's thread, which sends heartbeats.
            if name.startswith(_ROOT) and not threading.current_thread().name.endswith("-clock"):
                self.modules.add(name[len(_ROOT) :].removesuffix(".py"))


class Adder:
    """An object that a reference refers to."""

    def add(self, number: int) -> int:
        return number + 1


@batched
def double(values: torch.Tensor) -> torch.Tensor:
    """A function whose calls run together."""
    return values * 2


def call_with_tensor(agent: Agent) -> None:
    """Make a synchronous call with 1 MB in both directions."""
    agent.call("w1", torch.neg, torch.ones(1 << 18))


def submit(agent: Agent) -> None:
    """Make an asynchronous call."""
    agent.submit("w1", abs, -3).wait()


def use_reference(agent: Agent) -> None:
    """Create an object, call a method of it, and release it."""
    reference = remote("w1", Adder, agent=agent)
    reference.rpc_sync().add(1)
    del reference
    gc.collect()


def call_batched(agent: Agent) -> None:
    """Make four calls that run as one batch."""
    futures = [agent.submit("w1", double, torch.ones(4)) for _ in range(4)]
    for future in futures:
        future.wait()


_optimizers: dict[Agent, ps.Optimizer] = {}


def train_step(agent: Agent) -> None:
    """Make a step of a trainer whose parameters are on the other worker."""
    optimizer = _optimizers.get(agent)
    if optimizer is None:
        model = torch.nn.Linear(64, 64)
        optimizer = _optimizers[agent] = ps.Optimizer(model, ["w1"], lr=0.1, agent=agent)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


WALKS: dict[str, Callable[[Agent], None]] = {
    "synchronous": call_with_tensor,
    "asynchronous": submit,
    "reference": use_reference,
    "batched": call_batched,
    "ps": train_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walks", nargs="*", metavar="walk", help=", ".join(WALKS))
    parser.add_argument("-v", "--verbose", action="store_true", help="print the modules")
    options = parser.parse_args()
    for name in options.walks or WALKS:
        modules = count(WALKS[name])
        print(f"{name:13} {len(modules):3} modules")
        if options.verbose:
            print("   ", " ".join(sorted(modules)))


def count(walk: Callable[[Agent], None]) -> set[str]:
    """Return the modules that a walk enters when it does not run for the first time."""
    recorder = _Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        with LocalCluster(2, transports=("unix",)) as cluster:
            agent = cluster["w0"]
            for _ in range(5):
                walk(agent)
            time.sleep(_SETTLE_SECONDS)
            walk(agent)  # the clock ticks again
            recorder.active = True
            for _ in range(2):
                walk(agent)
            time.sleep(_SETTLE_SECONDS)
            recorder.active = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        _optimizers.clear()
    return recorder.modules


if __name__ == "__main__":
    main()

"""A signal handler that raises, at any moment of any kind of call, costs at most the call that it
interrupted.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import Config
from telegrad.current import process_state
from tests.process.fleet import Fleet
from tests.refs.objects import Thing, until

pytestmark = pytest.mark.process


class Interrupt(KeyboardInterrupt):
    """What the signal handler raises."""


def join(rank: int, size: int, path: str, transport: str) -> None:
    config = Config(secret="for the tests of signals", transports=(transport,))
    options = rpc.RpcBackendOptions(init_method=f"file://{path}", config=config)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def echo(value: Any) -> Any:
    return value


def checked(value: Any, expected: Any) -> None:
    same = torch.equal(value, expected) if isinstance(expected, torch.Tensor) else value == expected
    if not same:
        raise AssertionError(f"{value} instead of {expected}")


def check_all(futures: list[Any], expected: Any) -> None:
    for future in futures:
        checked(future.wait(), expected)


def operations(to: str, number: int) -> list[Callable[[], None]]:
    """Calls of every kind, each of which checks its result."""
    large = torch.full((300_000,), float(number))
    return [
        lambda: checked(rpc.rpc_sync(to, echo, (number,)), number),
        lambda: checked(rpc.rpc_sync(to, echo, (large,)), large),
        lambda: check_all([rpc.rpc_async(to, echo, (number,)) for _ in range(20)], number),
        lambda: check_all([rpc.rpc_async(to, echo, (large,)) for _ in range(3)], large),
        lambda: checked(rpc.remote(to, Thing, (number,)).rpc_async().get().wait(), number),
        lambda: checked(rpc.remote(to, Thing, (number,)).rpc_sync().add(1), number + 1),
        lambda: checked(rpc.remote(to, echo, (number,)).to_here(), number),
        lambda: checked(list(rpc.remote(to, Thing, (0,)).stream().count_to(5)), [0, 1, 2, 3, 4]),
        lambda: checked(
            rpc.rpc_async(to, echo, (number,)).then(lambda done: done.value() + 1).wait(),
            number + 1,
        ),
    ]


class Storm:
    """Sends this process a signal every few milliseconds while an operation runs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.armed = False
        self.signals = 0
        self.completed = 0
        signal.signal(signal.SIGALRM, self.handle)

    def handle(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            self.signals += 1
            raise Interrupt

    def run(self, operation: Callable[[], None]) -> None:
        try:
            try:
                self.armed = True
                signal.setitimer(signal.ITIMER_REAL, self.random.uniform(0.00002, 0.004))
                operation()
                self.completed += 1
            finally:
                self.armed = False
        except Interrupt:
            return
        # of a callback that was interrupted, as `Future.then` reports it
        except RuntimeError as error:
            if not str(error).startswith("Interrupt"):
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def interrupt_calls(to: str, signals: int, seed: int) -> int:
    """Make calls until so many have been interrupted; how many completed in spite of it."""
    storm = Storm(seed)
    number = 0
    # A tracer (coverage) runs signal handlers at points where they do not run otherwise.
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        while storm.signals < signals:
            number += 1
            storm.run(storm.random.choice(operations(to, number)))
    finally:
        sys.settrace(tracer)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for operation in operations(to, number):  # nothing is broken now
        operation()
    return storm.completed


def is_settled() -> bool:
    agent = process_state.runtime.agent
    assert agent is not None
    figures = agent.statistics()
    names = (
        "calls_pending",
        "owned_objects",
        "objects_not_created",
        "held_objects",
        "shared_blocks_in_use",
    )
    return not any(figures.get(name, 0) for name in names)


def settle() -> bool:
    def settled() -> bool:
        gc.collect()
        return is_settled()

    until(settled, lambda: str(process_state.runtime and process_state.runtime.statistics()))
    return True


def pid() -> int:
    return os.getpid()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.parametrize("signals", [300, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_interrupted_calls_cost_only_themselves(
    tmp_path: Path, transport: str, signals: int
) -> None:
    with Fleet(2, join, str(tmp_path / "store"), transport) as fleet:
        pids = [worker.do(pid) for worker in fleet.workers]
        left = signals
        while left > 0:  # in parts: each must answer in time
            fleet.workers[0].do(interrupt_calls, "w1", min(left, 500), left)
            left -= 500
        assert fleet.workers[0].do(settle)
        assert fleet.workers[1].do(settle)
        assert [worker.do(pid) for worker in fleet.workers] == pids

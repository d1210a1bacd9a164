"""Kill parameter servers and trainers in real processes, and compare their counts of steps.

    python -m tests.process.ps_oracle sync 2 --kills 25 --seed 1

Each incarnation of a trainer has its own element in the parameters of every server, and the
optimizer counts the steps in which the element had a gradient. So each server counts the steps of
each incarnation. The count must equal the number of steps that were acknowledged to the
incarnation. It may be one more if the incarnation was killed while it waited for a reply.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from telegrad import ps
from telegrad.agent import Agent
from telegrad.config import Config
from telegrad.current import process_state as this_process

RULES: dict[str, Any] = {
    "sync": ps.Sync(),
    "quorum": ps.Sync(quorum=2),
    "async": ps.Async(),
    "stale": ps.Stale(3),
}
MAX_INCARNATIONS = 256  # of trainers
HANG = 90.0  # seconds without any step
SETTINGS: dict[str, Any] = {
    "heartbeat_interval": 1.0,
    "heartbeat_timeout": 30.0,
    "timeout": 60.0,
    "join_timeout": 80.0,
}


class CountingOptimizer(torch.optim.Optimizer):
    """Count, for each element, the steps in which it had a gradient."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.add_((each.grad != 0).to(each.dtype))


def agent(name: str, port: int) -> Agent:
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    made = Agent(name, store=store, config=Config(secret="only for this test", **SETTINGS))
    made.open()
    this_process.runtime = made._runtime
    return made


def serve(name: str, port: int) -> None:
    agent(name, port)
    while True:
        time.sleep(3600)


def join(me: Agent, rule: str, servers: int, folder: str) -> tuple[nn.ParameterList, ps.Optimizer]:
    model = nn.ParameterList([nn.Parameter(torch.zeros(MAX_INCARNATIONS)) for _ in range(servers)])
    optimizer = ps.Optimizer(
        model,
        [f"ps{number}" for number in range(servers)],
        CountingOptimizer,
        consistency=RULES[rule],
        checkpoint=ps.Checkpoint(folder, every=1, wait=True),
        patience=HANG,
        agent=me,
    )
    return model, optimizer


def train(
    name: str,
    port: int,
    rule: str,
    servers: int,
    folder: str,
    incarnation: int,
    acknowledged: Any,
    stop: Any,
) -> None:
    """Make steps, and count those that were acknowledged and not dropped."""
    torch.set_num_threads(1)
    me = agent(name, port)
    model, optimizer = join(me, rule, servers, folder)
    while not stop.value:
        for each in model:
            each.grad = torch.zeros(MAX_INCARNATIONS)
            each.grad[incarnation] = 1.0
        before = optimizer.dropped
        optimizer.step()
        acknowledged[incarnation] += 1 - (optimizer.dropped - before)
    optimizer.close()
    me.close()


class Run:
    """The processes of one run, and what was acknowledged to the trainers."""

    def __init__(self, rule: str, servers: int, trainers: int, seed: int) -> None:
        self.rule, self.count = rule, servers
        self.rng = random.Random(seed)
        multiprocessing.set_forkserver_preload(["torch", "telegrad.ps"])
        self.context = multiprocessing.get_context("forkserver")
        self.folder = tempfile.mkdtemp(prefix="oracle")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.acknowledged = self.context.Array("l", MAX_INCARNATIONS, lock=False)
        self.stop = self.context.Value("b", 0, lock=False)
        self.incarnations = 0
        self.killed: set[int] = set()
        self.servers = {
            f"ps{number}": self.start_server(f"ps{number}") for number in range(servers)
        }
        self.wait_for_servers()
        self.trainers: dict[str, tuple[int, BaseProcess]] = {}
        for number in range(trainers):
            self.start_trainer(f"t{number}")

    def start(self, target: Callable[..., None], *args: Any) -> BaseProcess:
        process = self.context.Process(target=target, args=args, daemon=True)
        process.start()
        return process

    def start_server(self, name: str) -> BaseProcess:
        return self.start(serve, name, self.store.port)

    def wait_for_servers(self) -> None:
        self.checker = agent("checker", self.store.port)
        until = time.monotonic() + HANG
        for name in self.servers:
            while not self.is_reachable(name):
                if time.monotonic() > until:
                    raise AssertionError(f"server {name} did not come up")
                time.sleep(0.05)

    def is_reachable(self, name: str) -> bool:
        try:
            self.checker.call(name, os.getpid)
        except Exception:
            return False
        return True

    def start_trainer(self, name: str) -> None:
        args = (
            name,
            self.store.port,
            self.rule,
            self.count,
            self.folder,
            self.incarnations,
            self.acknowledged,
            self.stop,
        )
        self.trainers[name] = self.incarnations, self.start(train, *args)
        self.incarnations += 1

    def kill_server(self) -> None:
        name = self.rng.choice(list(self.servers))
        self.servers[name].kill()
        self.servers[name].join()
        self.servers[name] = self.start_server(name)

    def kill_trainer(self) -> None:
        name = self.rng.choice(list(self.trainers))
        incarnation, process = self.trainers[name]
        process.kill()
        process.join()
        self.killed.add(incarnation)
        self.start_trainer(name)

    def await_steps(self, count: int) -> None:
        """Wait until `count` more steps have been acknowledged."""
        goal, until = sum(self.acknowledged) + count, time.monotonic() + HANG
        while sum(self.acknowledged) < goal:
            for name, (_, process) in self.trainers.items():
                assert process.exitcode is None, (
                    f"trainer {name} failed with exit code {process.exitcode}"
                )
            assert time.monotonic() < until, (
                f"no step for {HANG} s: {list(self.acknowledged[: self.incarnations])}"
            )
            time.sleep(0.005)

    def kill_at_random(self, kills: int) -> tuple[int, int]:
        """Kill servers and trainers, one or two at a time. Return the numbers of both."""
        servers = trainers = 0
        while servers + trainers < kills:
            self.await_steps(self.rng.randint(1, 12))
            both = self.rng.random() < 0.25
            server = self.rng.random() < 0.5
            if server or both:
                self.kill_server()
                servers += 1
            if not server or both:
                self.kill_trainer()
                trainers += 1
        self.await_steps(10)
        return servers, trainers

    def check(self) -> None:
        """Compare the counts of each server with the acknowledged steps of each incarnation."""
        self.stop.value = 1
        for name, (_, process) in self.trainers.items():
            process.join(HANG)
            assert process.exitcode == 0, f"trainer {name} did not end: {process.exitcode}"
        model, optimizer = join(self.checker, self.rule, self.count, self.folder)
        counted: list[Tensor] = [each.detach().clone() for each in model]
        optimizer.close()
        for incarnation in range(self.incarnations):
            acknowledged = self.acknowledged[incarnation]
            allowed = (
                {acknowledged, acknowledged + 1} if incarnation in self.killed else {acknowledged}
            )
            counts = [int(each[incarnation]) for each in counted]
            assert set(counts) <= allowed, (
                f"incarnation {incarnation}: acknowledged {acknowledged}, counted {counts}, "
                f"killed {incarnation in self.killed}"
            )
            if self.rule in ("sync", "quorum"):
                assert len(set(counts)) == 1, (
                    f"the servers differ in incarnation {incarnation}: {counts}"
                )

    def close(self) -> None:
        for process in [
            *self.servers.values(),
            *(process for _, process in self.trainers.values()),
        ]:
            process.kill()
            process.join()
        self.checker._runtime.abort()
        shutil.rmtree(self.folder, ignore_errors=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rule", choices=list(RULES))
    parser.add_argument("servers", type=int)
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    run = Run(options.rule, options.servers, options.trainers, options.seed)
    try:
        servers, trainers = run.kill_at_random(options.kills)
        run.check()
        print(
            f"{options.rule}, {options.servers} servers: {sum(run.acknowledged)} steps agree, "
            f"{servers} servers and {trainers} trainers killed"
        )
    finally:
        run.close()


if __name__ == "__main__":
    main(sys.argv[1:])

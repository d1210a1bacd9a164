"""Train a CartPole policy with a learner and actors that have a copy of the policy each.

    pip install 'telegrad[examples]'
    telegrad train rl                                # or: python examples/rl.py
    telegrad train rl --actors 4 --max-staleness 2   # the learner does not wait for all actors
    telegrad train rl --kill actor1:30 --kill learner:60

Each actor is a process that plays many games of CartPole with its own copy of the policy. The
learner makes a step of policy gradients with what they have seen, and publishes the new version of
the weights with `telegrad.weights`.

`--kill` ends a worker with SIGKILL as soon as a version is published. An actor has no state that is
lost: its replacement gets the newest version and plays the same games. The learner returns from its
checkpoint and goes on with the next version. So the same seed gives the same policy, bit for bit,
with and without kills, unless `--max-staleness` lets the learner take what comes first.
A plot, a page and the policy are written into build/rl.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import telegrad
from telegrad import plurals
from telegrad.cli import training
from telegrad.cli.actor_learner import (
    ActorLearnerReport,
    ActorRecord,
    Kill,
    StepRecord,
    append,
    following,
)
from telegrad.cli.help_text import HelpFormatter
from telegrad.errors import PeerLost
from telegrad.refs import RRef, remote
from telegrad.weights import Publisher, StalenessFilter, Subscriber

GAMMA = 0.99
CLIP = 0.2
LONGEST = 500  # steps of an episode
CHECKPOINT, RECORDS = "policy.pt", "records.jsonl"
PATIENCE = 120.0  # seconds that a killed worker may take to come back


class CartPoles:
    """Several poles on carts, which are pushed left (0) or right (1) at the same time.

    The equations of motion are those of Barto, Sutton and Anderson (1983), as in CartPole-v1.
    """

    def __init__(self, count: int, random: np.random.Generator) -> None:
        self.states = random.uniform(-0.05, 0.05, (count, 4)).astype(np.float32)

    def step(self, actions: np.ndarray) -> np.ndarray:
        """Return which poles have fallen after a step of 20 ms."""
        _, speed, angle, turning = self.states.T
        sine, cosine = np.sin(angle), np.cos(angle)
        swing = (np.where(actions, 10.0, -10.0) + 0.05 * turning**2 * sine) / 1.1
        falling = (9.8 * sine - cosine * swing) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        rolling = swing - 0.05 * falling * cosine / 1.1
        change = np.stack([speed, rolling, turning, falling], 1)
        self.states = (self.states + 0.02 * change).astype(np.float32)
        fallen: np.ndarray = (abs(self.states[:, 0]) > 2.4) | (abs(self.states[:, 2]) > 0.2095)
        return fallen


class Batch(NamedTuple):
    """What an actor has seen: all steps of its games, and the version of the policy."""

    version: int
    states: Tensor
    actions: Tensor
    probabilities: Tensor  # of the actions, in the policy that played
    returns: Tensor  # discounted, from this step on
    mean_return: float  # of an episode, not discounted
    pid: int


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


@torch.no_grad()
def play(policy: nn.Module, games: int, seed: Sequence[int], version: int) -> Batch:
    """Play games, each until its pole falls. The result depends on these arguments only."""
    random = np.random.default_rng(seed)
    poles = CartPoles(games, random)
    playing = np.ones(games, bool)
    states: list[np.ndarray] = []
    actions: list[np.ndarray] = []
    probabilities: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    while playing.any() and len(states) < LONGEST:
        right = policy(torch.from_numpy(poles.states)).softmax(1)[:, 1].numpy()
        states.append(poles.states)
        actions.append(random.random(games) < right)
        probabilities.append(np.where(actions[-1], right, 1 - right))
        masks.append(playing)
        playing = playing & ~poles.step(actions[-1])
    mask = np.stack(masks)
    returns = np.zeros(mask.shape, np.float32)
    following = np.zeros(games, np.float32)
    for step in reversed(range(len(mask))):
        returns[step] = following = mask[step] * (1 + GAMMA * following)
    return Batch(
        version,
        torch.from_numpy(np.stack(states)[mask]),
        torch.from_numpy(np.stack(actions)[mask].astype(np.int64)),
        torch.from_numpy(np.stack(probabilities)[mask]),
        torch.from_numpy(returns[mask]),
        float(mask.sum(0).mean()),
        os.getpid(),
    )


class Actor:
    """Lives in the process of an actor. Its copy of the policy follows the learner."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        self.subscriber = Subscriber("policy", publisher="learner0")
        self.policy = network()
        self.version: int | None = None
        self.number = number
        self.options = options

    def collect(self, step: int) -> Batch:
        """Play with the newest version of the policy, but not with one that is too old."""
        oldest = step - self.options.max_staleness
        self.subscriber.newer_than(oldest - 1).wait()
        self.version = self.subscriber.pull_into(self.policy, have=self.version)
        seed = (self.options.seed, self.number, step)
        return play(self.policy, self.options.games, seed, self.version)


class Learner:
    """The policy, its optimizer and its version."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.policy = network()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=options.lr)
        self.version = 0
        self.record: StepRecord | None = None  # of the last step

    def step(self, batches: Sequence[Batch]) -> None:
        """Make one step of policy gradients with normalised returns.

        What an older policy has seen counts by how likely its actions are now, within limits. So
        a stale batch cannot move the policy further than a fresh one (the clipped objective of
        PPO). With fresh batches this is REINFORCE.
        """
        states, actions, probabilities, returns = (
            torch.cat(parts) for parts in list(zip(*batches, strict=True))[1:5]
        )
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        now = self.policy(states).softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)
        ratio = now / probabilities
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        self.optimizer.zero_grad()
        (-torch.minimum(ratio * advantages, clipped * advantages)).mean().backward()
        self.optimizer.step()
        self.version += 1

    def save(self, path: Path) -> None:
        """Write a checkpoint. It is there completely or not at all."""
        state = {
            "version": self.version,
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "record": self.record,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint."""
        state = torch.load(path, weights_only=False)
        self.version, self.record = state["version"], state["record"]
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])


class Actors:
    """The learner's references to its actors. An actor that is lost is replaced."""

    def __init__(self, agent: telegrad.Agent, options: argparse.Namespace) -> None:
        self._agent = agent
        self._options = options
        self._done: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._names = [f"actor{number}" for number in range(options.actors)]
        self._actors: dict[str, RRef[Actor]] = {}

    def __len__(self) -> int:
        return len(self._names)

    def start(self, step: int, names: Sequence[str] | None = None) -> None:
        """Let actors collect a batch for a step."""
        for name in self._names if names is None else names:
            until = time.monotonic() + PATIENCE
            telegrad.WorkerGroup(self._agent).match(name).wait_for(1, timeout=PATIENCE)
            while not self._submit(name, step):
                if time.monotonic() > until:
                    raise PeerLost(f"{name} did not come back after {PATIENCE:.0f} s", peer=name)
                time.sleep(0.05)

    def _submit(self, name: str, step: int) -> bool:
        """Ask an actor for a batch. Return False if it is lost and not back yet."""
        try:
            if name not in self._actors:
                arguments = (self._names.index(name), self._options)
                self._actors[name] = remote(name, Actor, arguments, agent=self._agent)
            future = self._actors[name].rpc_async(0).collect(step)
        except PeerLost:
            self._actors.pop(name, None)
            return False
        future.add_done_callback(lambda done: self._done.put((name, done)))
        return True

    def batches(self, step: int, count: int) -> dict[str, Batch]:
        """Wait for batches of `count` actors, and return those with all others that are there."""
        found: dict[str, Batch] = {}
        while len(found) < count or not self._done.empty():
            name, future = self._done.get()
            try:
                found[name] = future.value()
            except PeerLost:
                self._actors.pop(name, None)
                self.start(step, [name])
        return dict(sorted(found.items()))


def learn(agent: telegrad.Agent, options: argparse.Namespace) -> None:
    """Make all steps that are left, and publish the weights after each."""
    learner = Learner(options)
    if (options.out / CHECKPOINT).exists():  # this process replaces one that was killed
        learner.restore(options.out / CHECKPOINT)
    if learner.record is not None:
        append(options.out / RECORDS, learner.record)
    publisher = Publisher(learner.policy, "policy", agent=agent)
    publisher.publish(learner.version)
    fresh = StalenessFilter(publisher, max_staleness=options.max_staleness)
    actors = Actors(agent, options)
    actors.start(learner.version)
    while learner.version < options.versions:
        count = 1 if options.max_staleness else len(actors)
        batches = actors.batches(learner.version, count)
        seen = {name: actor_record(batch, fresh) for name, batch in batches.items()}
        used = list(fresh(batches.values()))
        if used:
            learner.step(used)
            learner.record = step_record(learner.version, used, seen)
            # A version that anyone has seen must not be lost, so the checkpoint comes first.
            learner.save(options.out / CHECKPOINT)
            append(options.out / RECORDS, learner.record)
            publisher.publish(learner.version)
            agent.report(learner.version, mean_return=learner.record.mean_return)
        if learner.version < options.versions:
            actors.start(learner.version, list(batches))
    publisher.flush()


def actor_record(batch: Batch, fresh: StalenessFilter) -> ActorRecord:
    staleness = fresh.staleness(batch)
    is_used = staleness <= fresh.max_staleness
    return ActorRecord(batch.version, staleness, batch.mean_return, batch.pid, is_used)


def step_record(version: int, used: Sequence[Batch], seen: dict[str, ActorRecord]) -> StepRecord:
    mean_return = sum(batch.mean_return for batch in used) / len(used)
    env_steps = sum(len(batch.actions) for batch in used)
    return StepRecord(version, mean_return, env_steps, os.getpid(), seen)


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with telegrad.Agent() as agent:  # the launcher says which worker this is
        if agent.name == "learner0":
            learn(agent, options)
        agent.shutdown()  # actors serve calls until the learner is here


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="telegrad train rl", description=__doc__, formatter_class=HelpFormatter
    )
    number = training.at_least_one
    parser.add_argument("--actors", type=number, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--versions", type=number, default=150, metavar="N", help="steps to make (default: 150)"
    )
    parser.add_argument(
        "--games",
        type=number,
        default=16,
        metavar="N",
        help="games of each actor for each batch (default: 16)",
    )
    parser.add_argument(
        "--max-staleness",
        type=int,
        default=0,
        metavar="VERSIONS",
        help="how much older than the newest version the policy of a batch may be; 0: all actors "
        "play with the newest one, and the learner waits for all of them",
    )
    parser.add_argument(
        "--kill",
        type=Kill.parse,
        action="append",
        default=[],
        metavar="WORKER:VERSION",
        help="kill a worker (learner, actor0, actor1, ...) when this version is published; "
        "may be repeated",
    )
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate (default: 0.01)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/rl"),
        metavar="DIR",
        help="folder for plot, page and policy (default: build/rl)",
    )
    options = parser.parse_args(argv)
    check(parser, options)
    training.check_folder(options.out)
    (options.out / CHECKPOINT).unlink(missing_ok=True)  # of an earlier run
    actors = plurals.count(options.actors, "actor")
    title = f"CartPole, 1 learner, {actors}, seed {options.seed}"
    report = ActorLearnerReport(title, options.versions, options.actors, options.kill)
    roles = {"learner": 1, "actor": options.actors}
    with training.keeping_results(
        lambda: training.write(report, options.out) if report.records else None
    ):
        with report, following(options.out / RECORDS, report):
            telegrad.launch(work, roles, (options,), restarts=len(options.kill), show=False)
    training.write(report, options.out)
    print(f"mean return {report.recent_return():.1f} after version {report.records[-1].version}")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the command if the options are not valid, or packages are missing."""
    if find_spec("matplotlib") is None:
        sys.exit("the plot needs matplotlib: pip install 'telegrad[examples]'")
    if options.max_staleness < 0:
        parser.error(f"--max-staleness {options.max_staleness} is negative")
    if options.seed < 0 or not options.lr > 0:
        parser.error("--seed must not be negative, and --lr must be positive")
    workers = {"learner0", *(f"actor{number}" for number in range(options.actors))}
    for kill in options.kill:
        if kill.worker not in workers:
            parser.error(f"--kill {kill.worker}:{kill.version}: there is no such worker")
        if kill.version >= options.versions:
            parser.error(f"--kill {kill.worker}:{kill.version}: the training ends before")


if __name__ == "__main__":
    main()

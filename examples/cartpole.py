"""Train a CartPole policy that many observers query with batched calls.

    pip install 'telegrad[examples]'
    telegrad train cartpole              # solved in one or two minutes on 2 cores
    telegrad train cartpole --observers 10 --plot cartpole.png
    telegrad train cartpole --no-batch   # one forward pass per call, to compare

Each observer is a process with its own environment. In every step, it asks the learner's policy for
an action. The learner updates the policy with REINFORCE after every round, in which each observer
plays one episode. The decorator on `Learner.act` is all that batching needs.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

import telegrad
from telegrad.cli import training
from telegrad.cli.help_text import HelpFormatter
from telegrad.refs import RRef, remote

try:
    import gymnasium
except ImportError:  # `--help` works without it
    gymnasium = None  # type: ignore[assignment]

SOLVED = 195.0  # mean reward of the last 100 episodes
GAMMA = 0.99


class Learner:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.policy = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=5e-3)

    @telegrad.batched(max_wait=0.001)
    def act(self, states: torch.Tensor) -> list[float]:
        """Return, for each of n observers, the probability of pushing to the right."""
        with torch.no_grad():
            return self.policy(states).softmax(1)[:, 1].tolist()  # type: ignore[no-any-return]

    def act_unbatched(self, state: torch.Tensor) -> float:
        with torch.no_grad():
            return float(self.policy(state).softmax(0)[1])

    def learn(self, episodes: Sequence[Episode]) -> None:
        """Make one step of REINFORCE with the normalised returns of a round."""
        states, actions, returns = (
            torch.from_numpy(np.concatenate(parts)) for parts in zip(*episodes, strict=True)
        )
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        log_probs = self.policy(states).log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)
        self.optimizer.zero_grad()
        (-log_probs * advantages).mean().backward()
        self.optimizer.step()


Episode = tuple[np.ndarray, np.ndarray, np.ndarray]  # states, actions and returns of its steps


class Observer:
    def __init__(self, learner: RRef[Learner], batch: bool, seed: int) -> None:
        self.env = gymnasium.make("CartPole-v1")
        self.env.reset(seed=seed)
        self.random = np.random.default_rng(seed)
        self.act = learner.rpc_sync().act if batch else learner.rpc_sync().act_unbatched

    def play(self) -> Episode:
        """Play one episode."""
        state, _ = self.env.reset()
        states, actions, rewards = [], [], []
        ended = False
        while not ended:
            action = int(self.random.random() < self.act(torch.from_numpy(state)))
            states.append(state)
            actions.append(action)
            state, reward, terminated, truncated, _ = self.env.step(action)
            rewards.append(float(reward))
            ended = terminated or truncated
        return np.stack(states), np.array(actions), _returns(rewards)


def _returns(rewards: list[float]) -> np.ndarray:
    returns, following = np.zeros(len(rewards), dtype=np.float32), 0.0
    for step in reversed(range(len(rewards))):
        returns[step] = following = rewards[step] + GAMMA * following
    return returns


def train(agent: telegrad.Agent, options: argparse.Namespace) -> list[float]:
    """Play and learn until the task is solved. Return the reward of each episode."""
    learner = Learner(options.seed)
    reference = RRef(learner, agent=agent)
    observers = [
        remote(
            f"observer{number}",
            Observer,
            (reference, not options.no_batch, options.seed + number),
            agent=agent,
        )
        for number in range(options.observers)
    ]
    rewards: list[float] = []
    last: collections.deque[float] = collections.deque(maxlen=100)
    while len(rewards) < options.episodes and not (len(last) == 100 and np.mean(last) > SOLVED):
        started = time.perf_counter()
        episodes = [
            future.wait() for future in [observer.rpc_async(0).play() for observer in observers]
        ]
        seconds = time.perf_counter() - started
        learner.learn(episodes)
        lengths = [float(len(actions)) for _, actions, _ in episodes]
        rewards += lengths
        last.extend(lengths)
        agent.report(len(rewards), samples=int(sum(lengths)), reward=float(np.mean(lengths)))
        size = Learner.act.batching.statistics().mean_size
        print(
            f"episode {len(rewards):4}  reward {np.mean(lengths):5.1f}  "
            f"last {len(last):3}: {np.mean(last):5.1f}  "
            f"{sum(lengths) / seconds:6,.0f} steps/s  batch {size:4.1f}",
            flush=True,
        )
    print(f"{'solved' if np.mean(last) > SOLVED else 'stopped'} after {len(rewards)} episodes")
    return rewards


def plot(rewards: list[float], path: str) -> None:
    """Save a plot of the rewards."""
    import matplotlib.pyplot as plt  # noqa: PLC0415  # only `--plot` needs it

    means = [np.mean(rewards[max(end - 100, 0) : end]) for end in range(1, len(rewards) + 1)]
    plt.plot(rewards, ".", markersize=3, alpha=0.4, label="reward of an episode")
    plt.plot(means, label="mean of the last 100")
    plt.axhline(SOLVED, color="grey", linestyle="--", label="solved")
    plt.xlabel("episode")
    plt.legend()
    plt.savefig(path, dpi=120)
    print(f"plot in {path}")


def work(options: argparse.Namespace) -> list[float]:
    with telegrad.Agent() as agent:  # the launcher says which worker this is
        rewards = train(agent, options) if agent.name == "learner0" else []
        agent.shutdown()  # observers serve calls until the learner is here
    return rewards


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="telegrad train cartpole", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--observers", type=training.at_least_one, default=8, metavar="N", help="default: 8"
    )
    parser.add_argument(
        "--episodes",
        type=training.at_least_one,
        default=3000,
        metavar="N",
        help="stop after this many, solved or not (default: 3000)",
    )
    parser.add_argument("--seed", type=int, default=543, metavar="N", help="default: 543")
    parser.add_argument("--no-batch", action="store_true", help="one forward pass per call")
    parser.add_argument("--plot", metavar="FILE", help="save a plot of the rewards")
    options = parser.parse_args(argv)
    if gymnasium is None:
        sys.exit("CartPole needs gymnasium: pip install 'telegrad[examples]'")
    if options.plot and not Path(options.plot).absolute().parent.is_dir():
        sys.exit(f"cannot write --plot {options.plot}: there is no such folder")
    if options.plot and find_spec("matplotlib") is None:
        sys.exit("--plot needs matplotlib: pip install 'telegrad[examples]'")

    roles = {"learner": 1, "observer": options.observers}
    rewards = telegrad.launch(work, roles, (options,))["learner0"]
    if options.plot:
        plot(rewards, options.plot)
    return 0 if len(rewards) >= options.episodes or np.mean(rewards[-100:]) > SOLVED else 1


if __name__ == "__main__":
    sys.exit(main())

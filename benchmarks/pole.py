"""The shared code of all entries of the CartPole benchmark: environment, policy and observer loop.

The environment is gymnasium's CartPole-v1 or, if that is not installed, `Pole`: the same system in
plain Python, with the equations of motion of Barto, Sutton and Anderson (1983).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

WARM = 50  # warm-up steps of each observer
GYMNASIUM, PLAIN = "gymnasium", "plain"

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, TICK = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FARTHEST, STEEPEST, LONGEST = 2.4, math.radians(12), 500


class Pole:
    """A pole on a cart that is pushed left (0) or right (1), with the interface of gymnasium."""

    def __init__(self) -> None:
        self._random = random.Random()
        self._state = [0.0] * 4
        self._steps = 0

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self._random.seed(seed)
        self._state = [self._random.uniform(-0.05, 0.05) for _ in range(4)]
        self._steps = 0
        return self._observed(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        place, speed, angle, turning = self._state
        sine, cosine = math.sin(angle), math.cos(angle)
        push = FORCE if action else -FORCE
        swing = (push + POLE * HALF_LENGTH * turning**2 * sine) / (CART + POLE)
        falling = (GRAVITY * sine - cosine * swing) / (
            HALF_LENGTH * (4 / 3 - POLE * cosine**2 / (CART + POLE))
        )
        rolling = swing - POLE * HALF_LENGTH * falling * cosine / (CART + POLE)
        self._state = [
            place + TICK * speed,
            speed + TICK * rolling,
            angle + TICK * turning,
            turning + TICK * falling,
        ]
        self._steps += 1
        fell = abs(self._state[0]) > FARTHEST or abs(self._state[2]) > STEEPEST
        return self._observed(), 1.0, fell, self._steps >= LONGEST, {}

    def _observed(self) -> np.ndarray:
        return np.array(self._state, dtype=np.float32)


def available() -> str:
    """Return the name of the environment that this interpreter has."""
    return PLAIN if importlib.util.find_spec("gymnasium") is None else GYMNASIUM


def environment(name: str) -> Any:
    return Pole() if name == PLAIN else importlib.import_module("gymnasium").make("CartPole-v1")


class Policy:
    """The network of PyTorch's tutorial. It samples an action for each state."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.network = nn.Sequential(
            nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2), nn.Softmax(1)
        )
        self.network.to(device)

    @torch.no_grad()
    def decide(self, states: Tensor) -> Tensor:
        return torch.multinomial(self.network(states.to(self.device)), 1).squeeze(1).cpu()


def observe(act: Callable[[Tensor], Any], name: str, number: int, steps: int) -> float:
    """Run this number of steps and return the steps per second, without the warm-up."""
    env = environment(name)
    state, _ = env.reset(seed=number)
    for step in range(WARM + steps):
        if step == WARM:
            begin = time.perf_counter()
        state, _, fell, over, _ = env.step(int(act(torch.from_numpy(state))))
        if fell or over:
            state, _ = env.reset()
    return steps / (time.perf_counter() - begin)

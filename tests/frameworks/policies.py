"""A policy for TorchRL, in a module that its processes can import."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from telegrad.integrations.torchrl import TelegradWeightSyncScheme

PATIENCE = 60.0


def make_policy() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


def fill(policy: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(value)


def observation() -> TensorDict:
    return TensorDict({"observation": torch.ones(4)})


def make_sender(policy: nn.Module, **options: Any) -> TelegradWeightSyncScheme:
    sender = TelegradWeightSyncScheme(timeout=PATIENCE, **options)
    sender.init_on_sender(model=policy)
    sender.connect()
    return sender

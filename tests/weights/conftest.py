from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from telegrad.testing import LocalCluster
from telegrad.weights import Subscriber

PATIENCE = 40.0  # seconds after which a test has hung
Subscribe = Callable[..., Subscriber]


class Model(nn.Module):
    """Tied weights, several dtypes, a buffer, and a tensor without values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 10, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.layer = nn.Linear(40, 30)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("absent", torch.empty(5, device="meta"))


def fill(model: nn.Module, value: int) -> None:
    """Set all values to a number."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if not tensor.is_meta:
                tensor.fill_(value)


def values_of(tensors: dict[str, Tensor]) -> set[float]:
    """Return all different values of a model: one if it is not a mix of versions."""
    return {
        value
        for tensor in tensors.values()
        if not tensor.is_meta
        for value in tensor.double().unique().tolist()
    }


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """With unix sockets, workers share memory. With TCP alone, each is like a host of its own."""
    return str(request.param)


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    """Makes subscribers that are closed at the end."""
    subscribers: list[Subscriber] = []

    def make(cluster: LocalCluster, worker: str, **options: object) -> Subscriber:
        subscriber = Subscriber("policy", agent=cluster[worker], **options)  # type: ignore[arg-type]
        subscribers.append(subscriber)
        return subscriber

    yield make
    while subscribers:
        subscribers.pop().close()

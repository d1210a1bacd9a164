"""`StreamPublisher`: a publisher of weights that come one tensor at a time.

Trainers whose weights are sharded over devices gather each tensor, pass it on and free it. Here it
is copied to host memory; when all are there, they are a version.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import torch
from torch import Tensor

from telegrad.agent import Agent
from telegrad.weights import Publisher


class StreamPublisher:
    """Publishes weights under a name that begins with `prefix`.

    The name is another one for each publisher: versions begin with 1, and must not be taken for
    those of a trainer that was restarted.
    """

    def __init__(self, prefix: str, agent: Agent) -> None:
        self.name = f"{prefix}-{secrets.token_hex(8)}"
        self._agent = agent
        self._tensors: dict[str, Tensor] = {}
        self._publisher: Publisher | None = None

    @property
    def version(self) -> int:
        """The version that was published last; 0 before the first."""
        return 0 if self._publisher is None else self._publisher.version or 0

    @torch.no_grad()
    def publish(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Publish pairs of name and tensor as the next version. Return its number, from 1."""
        received = {name: self._copy(name, tensor) for name, tensor in weights}
        self._tensors.clear()
        self._tensors.update(received)
        if self._publisher is None:
            self._publisher = Publisher(self._tensors, self.name, agent=self._agent)
        return self._publisher.publish(self.version + 1)

    def close(self) -> None:
        """Stop publishing. May be repeated."""
        if self._publisher is not None:
            self._publisher.close()

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor into the memory that it had in the version before."""
        copy = self._tensors.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return copy.copy_(tensor)

"""`UntrackedResults`: results of calls that were made outside of any context.

State: a table of weak references, one for the whole process. Each operation on it is atomic.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor

from telegrad.errors import UsageError


class UntrackedResults:
    """Leaves that represent tensors which another worker computed outside of any context.

    Their gradients would have to continue to that worker. So a pass that reaches one is an error.
    """

    def __init__(self) -> None:
        # By the id of a leaf: the leaf, and the name of the worker that computed it.
        self._leaves: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def add(self, leaf: Tensor, peer: str) -> None:
        key, leaves = id(leaf), self._leaves
        leaves[key] = weakref.ref(leaf, lambda _: leaves.pop(key, None)), peer

    def raise_if_reached(
        self, leaves: Iterable[Tensor], gradients: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Raise if one of the leaves, or of those in `gradients`, is an untracked result."""
        if not self._leaves:
            return
        for leaf in (*leaves, *(leaf for leaf, _ in gradients)):
            found = self._leaves.get(id(leaf))
            if found is not None and found[0]() is leaf:
                raise UsageError(
                    f"the loss depends on a tensor of shape {tuple(leaf.shape)} that worker "
                    f"{found[1]!r} computed in a call outside of this autograd context, so its "
                    "gradient would be lost. Make the call inside the context, and with the agent "
                    "that it belongs to; in a thread, with contextvars.copy_context().run(...), "
                    "since threads do not inherit it. If no gradient is wanted, detach() the tensor"
                )


untracked_results = UntrackedResults()

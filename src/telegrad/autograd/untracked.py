"""Results of calls that were made outside of any context."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from telegrad.errors import UsageError

if TYPE_CHECKING:
    pass


class UntrackedResults:
    """Leaves that stand for tensors which another worker computed, and which came outside of any context.

    Their gradients would have to go on to that worker, so a pass that reaches one of them is an error.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def add(self, leaf: Tensor, peer: str) -> None:
        key, known = id(leaf), self._known
        known[key] = weakref.ref(leaf, lambda _: known.pop(key, None)), peer

    def refuse(
        self, leaves: Iterable[Tensor], with_gradients: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Raise if one of these is such a leaf."""
        if not self._known:
            return
        for leaf in (*leaves, *(leaf for leaf, _ in with_gradients)):
            found = self._known.get(id(leaf))
            if found is not None and found[0]() is leaf:
                raise UsageError(
                    f"the loss depends on a tensor of shape {tuple(leaf.shape)} that worker {found[1]!r} computed in a "
                    "call outside of this autograd context, so its gradient would be lost. Make the call inside the "
                    "context; in a thread, with contextvars.copy_context().run(...), since threads do not inherit it. "
                    "If no gradient is wanted, detach() the tensor"
                )


untracked_results = UntrackedResults()

"""Gradients in the local graph: `PendingGradients`, and the run of torch's engine that uses them.

State: a `PendingGradients` belongs to one backward pass, which is used by one thread at a time.
Threads of torch's engine add to it during a run, under `_lock`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import hooks
from telegrad.scheduling.executor import apply_torch_num_threads

_run_backward = torch.autograd.graph._engine_run_backward


class NodeGradient(NamedTuple):
    """A gradient that a node gets."""

    tensor: Tensor
    is_exclusive: bool  # there are no other references to the tensor, so it can be written to


class RunRoot(NamedTuple):
    """An edge where a run of the engine starts, and the gradient there."""

    edge: GradientEdge
    gradient: NodeGradient


class PendingGradients:
    """Gradients for nodes that have not run, until these nodes run."""

    def __init__(self) -> None:
        # By node and by the index of its input.
        self.gradients: dict[Node, dict[int, NodeGradient]] = {}
        # Nodes that get an undefined gradient, with a node that precedes each of them.
        self.undefined: dict[Node, Node] = {}
        self._lock = threading.Lock()

    def __contains__(self, node: Node) -> bool:
        return node in self.gradients or node in self.undefined

    def __iter__(self) -> Iterator[Node]:
        return iter({**self.gradients, **self.undefined})

    def add(self, node: Node, index: int, gradient: Tensor) -> None:
        """Add a gradient to what an input of a node gets."""
        pending = self.gradients.setdefault(node, {})
        known = pending.get(index)
        if known is None:
            pending[index] = NodeGradient(gradient, False)
        elif known.is_exclusive and _can_add_in_place(known.tensor, gradient):
            known.tensor.add_(gradient)
        else:
            pending[index] = NodeGradient(add_gradients(known.tensor, gradient), True)

    def add_during_run(self, node: Node, index: int, gradient: Tensor) -> None:
        """Add a gradient on a thread of the engine, which has one thread for each device."""
        with self._lock:
            self.add(node, index, gradient)

    def take_outputs(self, node: Node, count: int) -> list[Tensor | None]:
        """Remove and return the gradients for the first inputs of a node."""
        gradients = self.gradients.pop(node)
        return [gradients[index].tensor if index in gradients else None for index in range(count)]

    def take_roots(self, nodes: Iterable[Node]) -> list[RunRoot]:
        """Remove the gradients for nodes that are about to run, and return them as roots."""
        roots = []
        for node in nodes:
            for index, gradient in self.gradients.pop(node, {}).items():
                roots.append(RunRoot(GradientEdge(node, index), gradient))
            preceding = self.undefined.pop(node, None)
            if preceding is not None:
                # The engine takes no undefined root. So it starts with zeros at the preceding
                # node, and a hook there replaces them.
                metadata: Any = preceding._input_metadata[0]
                zeros = torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)
                hooks.register_own_hook(preceding.register_hook, _return_undefined)
                roots.append(RunRoot(GradientEdge(preceding, 0), NodeGradient(zeros, False)))
        return roots


_layout, _is_cpu = attrgetter("layout"), attrgetter("is_cpu")


def _return_undefined(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[None, ...]:
    return (None,) * len(gradients)


def _can_add_in_place(total: Tensor, gradient: Tensor) -> bool:
    return (
        type(total) is Tensor
        and type(gradient) is Tensor
        and total.layout is torch.strided
        and gradient.layout is torch.strided
        and total.dtype == gradient.dtype
        and total.shape == gradient.shape
        and total.device == gradient.device
    )


def add_gradients(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of two gradients. Torch adds a sparse tensor only to a dense one."""
    return b + a if a.is_sparse and not b.is_sparse else a + b


def leaf_gradient(gradient: Tensor, leaf: Tensor, is_exclusive: bool) -> Tensor:
    """Return a gradient that has no other references and the layout of its leaf, as `.grad` has."""
    is_strided = gradient.layout is torch.strided
    if is_exclusive and (not is_strided or gradient.stride() == leaf.stride()):
        return gradient
    if not is_strided or leaf.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def exclusive_leaf_gradients(
    leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Iterable[tuple[Tensor, Tensor]] | None:
    """Return leaves with their gradients if `leaf_gradient` would return all of these unchanged.

    There are no other references to the gradients. Return None if one of them needs more.
    """
    if set(map(type, gradients)) != {Tensor}:
        return None
    found = cast(Sequence[Tensor], gradients)
    if {*map(_layout, leaves), *map(_layout, found)} != {torch.strided}:
        return None
    if not all(map(_is_cpu, leaves)) or not all(map(_is_cpu, found)):
        return None
    if list(map(Tensor.stride, leaves)) != list(map(Tensor.stride, found)):
        return None
    return zip(leaves, found, strict=True)


def leaf_gradients(
    leaves: list[Tensor], gradients: Sequence[Tensor | None], roots: list[RunRoot]
) -> list[tuple[Tensor, Tensor]]:
    """Return leaves with the gradients that a run returned for them, as `leaf_gradient` does.

    A run can return the same tensor for several leaves, or one that was a root.
    """
    uses = {id(root.gradient.tensor): 1 for root in roots if not root.gradient.is_exclusive}
    for gradient in gradients:
        uses[id(gradient)] = uses.get(id(gradient), 0) + 1
    return [
        (leaf, leaf_gradient(gradient, leaf, uses[id(gradient)] == 1))
        for leaf, gradient in zip(leaves, gradients, strict=False)
        if gradient is not None
    ]


def run_engine(
    roots: list[RunRoot],
    ends: Sequence[Tensor | GradientEdge],
    keep_graph: bool,
    *,
    accumulate: bool = False,
) -> list[Tensor | None]:
    """Run torch's engine from the roots, and return the gradients at the ends.

    With `accumulate`, gradients of leaves are added to `.grad`, and nothing is returned.
    """
    if not ends:
        return []
    apply_torch_num_threads()
    gradients: Any = _run_backward(
        tuple([root.edge for root in roots]),
        tuple([root.gradient.tensor for root in roots]),
        keep_graph,
        False,
        tuple(ends),
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return [] if accumulate else list(gradients)

"""`PendingGradients`: gradients of nodes that have not run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import hooks

_run_backward = torch.autograd.graph._engine_run_backward


class NodeGradient(NamedTuple):
    tensor: Tensor
    is_exclusive: bool  # nobody else has it


class RunRoot(NamedTuple):
    """Where a run of the engine starts."""

    edge: GradientEdge
    gradient: NodeGradient


class PendingGradients:
    """Gradients of nodes that have not run, until these run."""

    def __init__(self) -> None:
        self.gradients: dict[Node, dict[int, NodeGradient]] = {}
        self.undefined: dict[Node, Node] = {}  # reached by undefined gradients; a node behind each
        self._lock = threading.Lock()

    def __contains__(self, node: Node) -> bool:
        return node in self.gradients or node in self.undefined

    def __iter__(self) -> Iterator[Node]:
        return iter({**self.gradients, **self.undefined})

    def add(self, node: Node, output: int, gradient: Tensor) -> None:
        pending = self.gradients.setdefault(node, {})
        known = pending.get(output)
        if known is None:
            pending[output] = NodeGradient(gradient, False)
        elif known.is_exclusive and _can_add_in_place(known.tensor, gradient):
            known.tensor.add_(gradient)
        else:
            pending[output] = NodeGradient(add_gradients(known.tensor, gradient), True)

    def add_locked(self, node: Node, output: int, gradient: Tensor) -> None:
        """Add a gradient on a thread of the engine; there is one for each device."""
        with self._lock:
            self.add(node, output, gradient)

    def take_roots(self, nodes: Iterable[Node]) -> list[RunRoot]:
        """Return edges and gradients to start the engine with, for nodes that are about to run."""
        roots = []
        for node in nodes:
            for output, gradient in self.gradients.pop(node, {}).items():
                roots.append(RunRoot(GradientEdge(node, output), gradient))
            preceding = self.undefined.pop(node, None)
            if preceding is not None:
                metadata: Any = preceding._input_metadata[0]
                zeros = torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)
                hooks.register_own_hook(preceding.register_hook, _return_undefined)
                roots.append(RunRoot(GradientEdge(preceding, 0), NodeGradient(zeros, False)))
        return roots


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
    return b + a if a.is_sparse and not b.is_sparse else a + b


def exclusive_gradients(
    leaves: list[Tensor], gradients: Sequence[Tensor | None], roots: list[RunRoot]
) -> list[tuple[Tensor, Tensor]]:
    """Return leaves with gradients that belong to nobody else and are laid out like the leaf, as in `.grad`."""
    uses = {id(root.gradient.tensor): 1 for root in roots if not root.gradient.is_exclusive}
    for gradient in gradients:
        uses[id(gradient)] = uses.get(id(gradient), 0) + 1
    return [
        (
            leaf,
            gradient
            if uses[id(gradient)] == 1 and has_layout_of(gradient, leaf)
            else copy_to_layout(gradient, leaf),
        )
        for leaf, gradient in zip(leaves, gradients, strict=False)
        if gradient is not None
    ]


def has_layout_of(gradient: Tensor, leaf: Tensor) -> bool:
    return gradient.layout is not torch.strided or gradient.stride() == leaf.stride()


def copy_to_layout(gradient: Tensor, leaf: Tensor) -> Tensor:
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def run_engine(
    roots: list[RunRoot],
    ends: Sequence[Tensor | GradientEdge],
    keep_graph: bool,
    *,
    accumulate: bool = False,
) -> list[Tensor | None]:
    if not ends:
        return []
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

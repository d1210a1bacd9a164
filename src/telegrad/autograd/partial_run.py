"""`PartialRunner`: runs a part of the local graph while some sources are not resolved.

Where a part ends, a node that runs has an edge to a node that must not run yet: a blocked node.
Torch's engine cannot stop there. So a post-hook of the node that runs stores the gradients for
blocked nodes as pending and returns undefined gradients instead. The engine still visits the
blocked nodes, with undefined gradients, and can visit nodes behind them. Hooks and functions
written in Python would notice that, so they are suppressed during the run (`hooks`).

Undefined gradients for blocked nodes are not stored. If received tensors get no other gradients,
the answers for them are undefined gradients too (`take_undefined`).

State: belongs to one backward pass, which is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import hooks
from telegrad.autograd.dependencies import Dependencies
from telegrad.autograd.gradients import PendingGradients, RunRoot, run_engine
from telegrad.autograd.send_recv import ACCUMULATE_GRAD, RECEIVED, ReceivedGroup, leaf_of

# By node of received tensors: their gradients.
GroupGradients = dict[Node, Sequence[Tensor | None]]


class PartialRunner:
    """Runs parts of the graph of one pass."""

    def __init__(
        self,
        dependencies: Dependencies,
        pending: PendingGradients,
        receives: Mapping[Node, ReceivedGroup],
        retain_graph: bool,
    ) -> None:
        self.dependencies = dependencies
        self._pending = pending
        self._receives = receives
        self._retain_graph = retain_graph
        self._observing_nodes: list[_ObservingNode] | None = None  # of those that have not run

    def run(self, ends: list[Node]) -> GroupGradients:
        """Run the nodes that lead to the ends, and return the gradients at the ends."""
        nodes = self.dependencies.take_nodes_before(ends)
        gradients, ends = self.take_undefined(ends, nodes)
        if ends:
            gradients.update(self._run_nodes(nodes, ends))
        return gradients

    def take_undefined(
        self, ends: list[Node], nodes: Collection[Node]
    ) -> tuple[GroupGradients, list[Node]]:
        """Return the gradients of ends that the engine does not reach with `nodes`, and the others.

        Earlier parts had undefined gradients for those ends. The engine would call their hooks with
        None, so this calls them too, except those of shared nodes (`hooks`).
        """
        undefined: GroupGradients = {}
        others = []
        for node in ends:
            if node in self._pending or self.dependencies.follows(node, nodes):
                others.append(node)
            elif len(self._receives[node]) == 1:
                undefined[node] = [hooks.call_tensor_hooks(node, None)]
            else:
                undefined[node] = [None] * len(self._receives[node])
        return undefined, others

    def _run_nodes(self, nodes: dict[Node, None], ends: list[Node]) -> GroupGradients:
        """Run nodes, and return the gradients at the ends."""
        children = self.dependencies.children
        inside = {*nodes, *ends}
        # Leaves without hooks: the engine can return their gradients, since nothing observes that.
        leaves: dict[Node, None] = {}
        blocked_edges: dict[Node, list[int]] = {}  # by node: the indices of edges to blocked nodes
        blocked: dict[Node, int] = {}  # blocked nodes, with the index of an input
        for node in nodes:
            for edge_index, (child, input_index) in enumerate(children[node]):
                if child is None or child in inside:
                    continue
                if type(child) is ACCUMULATE_GRAD and not leaf_of(child)._backward_hooks:
                    leaves[child] = None
                else:
                    blocked_edges.setdefault(node, []).append(edge_index)
                    blocked[child] = input_index
        if (
            not nodes
            and not self._pending.undefined
            and all(self._receives[node].is_unobserved(node) for node in ends)
        ):
            return {
                node: self._pending.take_outputs(node, len(self._receives[node])) for node in ends
            }
        roots = self._pending.take_roots(inside)
        others = [GradientEdge(node, 0) for node in leaves]
        others += [GradientEdge(node, input_index) for node, input_index in blocked.items()]
        # If a blocked node leads to another wanted node, the engine runs the blocked one, with
        # undefined gradients. Then it must not free the graph.
        none_can_run = len(blocked) + len(leaves) == 1 or all(
            not children[node] for node in blocked
        )
        keep_graph = self._retain_graph or not none_can_run
        if blocked_edges:
            suppressed = self._suppressed_hooks(blocked, inside, none_can_run)
        else:
            suppressed = hooks.SuppressedHooks((), ())
        handles = []
        for node, edge_indices in blocked_edges.items():
            block = self._blocking_hook(self.dependencies.children[node], edge_indices, suppressed)
            handles.append(hooks.register_own_hook(node.register_hook, block))
        try:
            with suppressed:
                of_others, found = run_to_ends(roots, others, ends, self._receives, keep_graph)
        finally:
            for handle in handles:
                handle.remove()
        for leaf, gradient in zip(leaves, of_others, strict=False):
            if gradient is not None:
                self._pending.add(leaf, 0, gradient)
        return found

    def _blocking_hook(
        self,
        edges: Sequence[tuple[Node | None, int]],
        blocked_indices: list[int],
        suppressed: hooks.SuppressedHooks,
    ) -> Any:
        """Return a post-hook that stores the gradients for blocked edges and passes on None."""

        def block(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
            suppressed.start()
            passed_on = list(gradients)
            for edge_index in blocked_indices:
                child, input_index = edges[edge_index]
                gradient, passed_on[edge_index] = gradients[edge_index], None
                if gradient is not None:
                    assert child is not None
                    self._pending.add_during_run(child, input_index, gradient)
            return tuple(passed_on)

        return block

    def _suppressed_hooks(
        self, blocked: Iterable[Node], inside: set[Node], none_can_run: bool
    ) -> hooks.SuppressedHooks:
        """Return the hooks and functions that must not notice the visit of the engine."""
        if none_can_run:
            # The engine calls the tensor hooks of the blocked nodes and nothing else.
            tensor_hooks = [each for node in blocked for each in hooks.tensor_hooks(node)]
            return hooks.SuppressedHooks(tensor_hooks, [])
        if self._observing_nodes is None:
            self._observing_nodes = _find_observing_nodes(self.dependencies.children)
        observing = [each for each in self._observing_nodes if each.node not in inside]
        self._observing_nodes = observing
        return hooks.SuppressedHooks(
            [found for each in observing for found in each.hooks],
            [each.node for each in observing if each.is_function],
        )


def run_to_ends(
    roots: list[RunRoot],
    others: list[GradientEdge],
    ends: Sequence[Node],
    receives: Mapping[Node, ReceivedGroup],
    keep_graph: bool,
) -> tuple[list[Tensor | None], GroupGradients]:
    """Run the engine. Return the gradients at other edges, and those of received tensors."""
    edges: list[Tensor | GradientEdge] = [*others]
    for node in ends:
        edges += receives[node].edges(node)
    found = run_engine(roots, edges, keep_graph)
    gradients: GroupGradients = {}
    start = len(others)
    for node in ends:
        gradients[node] = found[start : start + len(receives[node])]
        start += len(receives[node])
    return found[: len(others)], gradients


class _ObservingNode(NamedTuple):
    """A node that would notice if the engine ran it with undefined gradients."""

    node: Node
    hooks: list[dict[int, Any]]
    is_function: bool  # an `autograd.Function` written in Python


def _find_observing_nodes(nodes: Iterable[Node]) -> list[_ObservingNode]:
    found = []
    may_have_node_hooks = hooks.count_foreign_hooks() > 0
    for node in nodes:
        if type(node) is RECEIVED or type(node) is ACCUMULATE_GRAD:
            # The run ends at these: only their tensor hooks are called.
            each = _ObservingNode(node, hooks.tensor_hooks(node), False)
        else:
            is_function = isinstance(node, torch._C._FunctionBase)
            found_hooks = hooks.tensor_hooks(node)
            if may_have_node_hooks:
                found_hooks += hooks.node_hooks(node)
            each = _ObservingNode(node, found_hooks, is_function)
        if each.hooks or each.is_function:
            found.append(each)
    return found

"""Runs a part of the local graph while some sources are not resolved."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import hooks
from telegrad.autograd.dependencies import Dependencies
from telegrad.autograd.gradients import PendingGradients, RunRoot, run_engine
from telegrad.autograd.send_recv import ACCUMULATE_GRAD, RECEIVED, GradientCapture, leaf_of


class PartialRunner:
    """Runs parts of the graph of one pass."""

    def __init__(
        self,
        dependencies: Dependencies,
        pending: PendingGradients,
        captures: Mapping[Node, GradientCapture],
        retain_graph: bool,
    ) -> None:
        self.dependencies = dependencies
        self._pending = pending
        self._captures = captures
        self._retain_graph = retain_graph
        self._observing_nodes: list[_ObservingNode] | None = None

    def run(self, ends: list[Node]) -> dict[Node, Tensor | None]:
        """Run the nodes that lead to `ends`, and keep what they give to other nodes."""
        nodes = self.dependencies.take_nodes_before(ends)
        answers, ends = self.take_undefined(ends, nodes)
        if ends:
            answers.update(zip(ends, self._run_nodes(nodes, ends), strict=True))
        return answers

    def take_undefined(
        self, ends: list[Node], nodes: Collection[Node]
    ) -> tuple[dict[Node, Tensor | None], list[Node]]:
        """Return the answers for ends that the engine does not come by if it runs `nodes`, and the other ends.

        Earlier parts had undefined gradients for them. The engine would call their hooks with None.
        """
        undefined: dict[Node, Tensor | None] = {}
        others = []
        for node in ends:
            if node in self._pending or self.dependencies.follows(node, nodes):
                others.append(node)
            else:
                undefined[node] = hooks.call_tensor_hooks(node, None)
        return undefined, others

    def _run_nodes(self, nodes: dict[Node, None], ends: list[Node]) -> list[Tensor | None]:
        dependencies = self.dependencies
        inside = {*nodes, *ends}
        leaves: dict[Node, None] = {}  # these can be asked for, since nobody sees that they are
        cuts: dict[Node, list[int]] = {}  # edges to other nodes that must not run now
        outside: dict[Node, int] = {}  # those nodes
        for node in nodes:
            for number, (child, output) in enumerate(dependencies.children[node]):
                if child is None or child in inside:
                    continue
                if type(child) is ACCUMULATE_GRAD and not leaf_of(child)._backward_hooks:
                    leaves[child] = None
                else:
                    cuts.setdefault(node, []).append(number)
                    outside[child] = output
        if (
            not nodes
            and not self._pending.undefined
            and all(self._captures[node].is_unobserved(node) for node in ends)
        ):
            return [self._pending.gradients.pop(node)[0].tensor for node in ends]
        roots = self._pending.take_roots(inside)
        wanted = [GradientEdge(node, 0) for node in (*ends, *leaves)]
        wanted += [GradientEdge(node, output) for node, output in outside.items()]
        # If a node outside leads to another one, or to a leaf, the engine runs it with undefined gradients.
        is_alone = len(outside) + len(leaves) == 1 or all(
            not dependencies.children[node] for node in outside
        )
        keep_graph = self._retain_graph or not is_alone
        if cuts:
            suppressed = self._suppressed_hooks(outside, inside, is_alone)
            found = self._execute_cut(roots, wanted, cuts, suppressed, keep_graph)
        else:
            found = run_engine(roots, wanted, keep_graph)
        for leaf, gradient in zip(leaves, found[len(ends) :], strict=False):
            if gradient is not None:
                self._pending.add(leaf, 0, gradient)
        return found[: len(ends)]

    def _execute_cut(
        self,
        roots: list[RunRoot],
        wanted: list[GradientEdge],
        cuts: dict[Node, list[int]],
        suppressed: hooks.SuppressedHooks,
        keep_graph: bool,
    ) -> list[Tensor | None]:
        """Run, with post-hooks that take off the gradients which go to nodes outside."""
        handles = []
        for node, numbers in cuts.items():
            cut = self._cut(self.dependencies.children[node], numbers, suppressed)
            handles.append(hooks.register_own_hook(node.register_hook, cut))
        try:
            with suppressed:
                return run_engine(roots, wanted, keep_graph)
        finally:
            for handle in handles:
                handle.remove()

    def _cut(
        self,
        edges: Sequence[tuple[Node | None, int]],
        numbers: list[int],
        suppressed: hooks.SuppressedHooks,
    ) -> Any:
        """Return a post-hook that keeps the gradients for some edges and lets none through."""

        def cut(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
            suppressed.start()
            through = list(gradients)
            for number in numbers:
                child, output = edges[number]
                gradient, through[number] = gradients[number], None
                if gradient is not None:
                    assert child is not None
                    self._pending.add_locked(child, output, gradient)
            return tuple(through)

        return cut

    def _suppressed_hooks(
        self, outside: Iterable[Node], inside: set[Node], is_alone: bool
    ) -> hooks.SuppressedHooks:
        """Return what must not notice that the engine comes by."""
        if is_alone:
            return hooks.SuppressedHooks(
                [each for node in outside for each in hooks.tensor_hooks(node)], []
            )
        if self._observing_nodes is None:
            self._observing_nodes = _find_observing_nodes(self.dependencies.children)
        self._observing_nodes = [each for each in self._observing_nodes if each.node not in inside]
        return hooks.SuppressedHooks(
            [found for each in self._observing_nodes for found in each.hooks],
            [each.node for each in self._observing_nodes if each.is_function],
        )


class _ObservingNode(NamedTuple):
    """A node that would notice if the engine ran it with undefined gradients."""

    node: Node
    hooks: list[dict[int, Any]]
    is_function: bool  # written in Python


def _find_observing_nodes(nodes: Iterable[Node]) -> list[_ObservingNode]:
    found = []
    look_closely = hooks.any_foreign_hook_added()
    for node in nodes:
        # nothing but tensor hooks runs
        if type(node) is RECEIVED or type(node) is ACCUMULATE_GRAD:
            each = _ObservingNode(node, hooks.tensor_hooks(node), False)
        else:
            is_function = isinstance(node, torch._C._FunctionBase)
            of_node = hooks.tensor_hooks(node)
            if look_closely:
                of_node += hooks.node_hooks(node)
            each = _ObservingNode(node, of_node, is_function)
        if each.hooks or each.is_function:
            found.append(each)
    return found

"""`LocalGraph`: the part of a backward pass that one worker computes, with torch's own engine.

Gradients enter at sources (the roots of the pass; tensors that were sent and whose gradients come
back) and are wanted at ends: leaves, and tensors that were received. Sources are resolved one after
the other: the loss depends on the source, and then it has a gradient (None if the gradient is
undefined), or it does not. Each node runs once in a pass, when its gradient is complete, so hooks
and functions see what they would see in one process.

- Usually everything is resolved when `run` is called. Then one call of the engine computes all.
- Often what is resolved and what is not lead to different parts of the graph, as before and after a
  remote call. Then one call of the engine computes each part.
- Otherwise `Dependencies` counts, for each node, the incoming edges that are not decided. It is
  made once per pass and each edge is counted down once, so a pass takes linear time. `run` calls
  the engine for the received tensors whose gradients are complete, since other workers wait for
  them, and for the nodes that lead to these. The other nodes run when all sources are resolved. A
  node runs only if all nodes that lead to it and that the loss depends on have run or run with it.

Where such a part ends, a node that runs has an edge to a node that must not run yet. Gradients for
those edges are taken off by a post-hook and kept in `_pending` until their node runs. The engine
sees undefined gradients there, and `hooks.Silenced` keeps hooks and functions from seeing these.
Undefined gradients for those edges are not kept. If a received tensor gets nothing else, its answer
is an undefined gradient, too (`_take_undefined`).

Leaves whose accumulation somebody watches (`DistributedDataParallel`, hooks) get their gradients
the way these expect, through `.grad`, which is put back afterwards.

State belongs to one pass, which lets one thread in at a time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import accumulation
from telegrad.autograd.dependencies import Dependencies, other_context_error
from telegrad.autograd.gradients import (
    PendingGradients,
    RunRoot,
    copy_to_layout,
    exclusive_gradients,
    has_layout_of,
    run_engine,
)
from telegrad.autograd.partial_run import PartialRunner
from telegrad.autograd.send_recv import (
    ACCUMULATE_GRAD,
    RECEIVED,
    GradientCapture,
    TensorOrigin,
    leaf_of,
)
from telegrad.autograd.untracked import untracked_results

_MAX_UNRESOLVED = 16  # unresolved sources; with more, `Dependencies` are likely to be needed
_grad_attribute_lock = threading.Lock()  # held while gradients pass through `.grad`


class GradientSource(Protocol):
    """Where a gradient enters the graph."""

    leaf: Tensor | None  # if it enters at a leaf

    def edge(self) -> GradientEdge: ...

    def preceding_node(self) -> Node:
        """Return a node of torch's own that leads to the edge."""


# What a pass found for a received tensor: whether the loss depends on it, and its gradient.
# There can be many, and a named tuple takes several times as long to make.
ReceivedGradient = tuple[TensorOrigin, bool, Tensor | None]


class RunResult(NamedTuple):
    """What a run found: gradients of leaves, and answers for received tensors."""

    leaves: list[tuple[Tensor, Tensor]]
    receives: list[ReceivedGradient]


class _Subgraph(NamedTuple):
    """Nodes that some sources lead to, and which of them are leaves."""

    leaves: list[Node]
    nodes: set[Node]


class _SubgraphsOverlap(Exception):
    """Two parts of the graph have a node in common."""


class LocalGraph:
    def __init__(
        self,
        sources: Mapping[Any, GradientSource],
        receives: Mapping[Node, TensorOrigin],
        captures: Mapping[Node, GradientCapture],
        retain_graph: bool,
    ) -> None:
        self._sources = sources
        self._unresolved = dict.fromkeys(sources, 1)  # how many gradients are to be added up
        self._partly_reached: set[Any] = set()
        self._receives = receives
        self._captures = captures
        self._unanswered = dict.fromkeys(receives)
        self._retain_graph = retain_graph
        self._pending = PendingGradients()
        self._leaf_gradients: list[tuple[Tensor, Tensor]] = []  # of sources that are leaves
        self._partial: PartialRunner | None = None
        self._tried_separate_run = False
        # what the unresolved sources lead to, if that is a part of its own
        self._unresolved_subgraph: _Subgraph | None = None
        self._replicated = accumulation.replicated()

    def __repr__(self) -> str:
        return (
            f"<LocalGraph {len(self._unresolved)} of {len(self._sources)} sources open, "
            f"{len(self._unanswered)} unanswered>"
        )

    def expect_another(self, name: Any) -> None:
        """Wait for one more gradient of a source, which is the sum of all of them."""
        self._unresolved[name] += 1

    def resolve(
        self, name: Any, gradient: Tensor | None, *, reached: bool = True, exclusive: bool = False
    ) -> None:
        """Take the gradient of a source, which nobody else has if it is `exclusive`.

        Not `reached`: the loss does not depend on it.
        """
        missing = self._unresolved.pop(name) - 1
        if missing:
            self._unresolved[name] = missing
            if reached:
                self._partly_reached.add(name)
        if not reached:
            self._unresolved_subgraph = None
        source = self._sources[name]
        if (
            reached
            and source.leaf is not None
            and self._take_for_leaf(source.leaf, gradient, exclusive)
        ):
            return
        if reached:
            node, output = source.edge()[:2]
            if gradient is not None:
                self._pending.add(node, output, gradient)
            else:
                self._pending.undefined[node] = source.preceding_node()
        if self._partial is not None and source.leaf is None and not missing:
            self._partial.dependencies.decide(
                source.edge().node, reached or name in self._partly_reached
            )

    def resolve_all(self, gradients: Iterable[tuple[Any, Tensor | None]], exclusive: bool) -> None:
        """Take the gradients of many sources, by name; many of them may be leaves."""
        sources, unresolved, leaf_gradients = self._sources, self._unresolved, self._leaf_gradients
        is_observed = accumulation.observation_check(self._replicated)
        for name, gradient in gradients:
            leaf = sources[name].leaf
            if (
                leaf is None
                or gradient is None
                or unresolved[name] != 1
                or leaf._backward_hooks
                or is_observed(leaf)
            ):
                self.resolve(name, gradient, exclusive=exclusive)
                continue
            del unresolved[name]
            leaf_gradients.append(
                (
                    leaf,
                    gradient
                    if exclusive and has_layout_of(gradient, leaf)
                    else copy_to_layout(gradient, leaf),
                )
            )

    def _take_for_leaf(self, leaf: Tensor, gradient: Tensor | None, exclusive: bool) -> bool:
        """Take the gradient of a leaf past the engine, if nobody could notice. False: somebody could."""
        if leaf._backward_hooks or accumulation.observation_check(self._replicated)(leaf):
            return False
        if gradient is not None:
            self._leaf_gradients.append(
                (
                    leaf,
                    gradient
                    if exclusive and has_layout_of(gradient, leaf)
                    else copy_to_layout(gradient, leaf),
                )
            )
        return True

    def run(self) -> RunResult:
        """Compute what is ready, if somebody waits for it."""
        if not self._unresolved:
            return self._run_rest()
        if self._partial is None:
            outcome = self._run_separate_part()
            if outcome is not None:
                return outcome
            self._partial = PartialRunner(
                self._count(), self._pending, self._captures, self._retain_graph
            )
        decided = self._partial.dependencies.take_receives()
        for node, _ in decided:
            del self._unanswered[node]
        ends = [node for node, reached in decided if reached]
        answers: list[ReceivedGradient] = [
            (self._receives[node], False, None) for node, reached in decided if not reached
        ]
        if ends:
            gradients = self._partial.run(ends)
            answers += [
                (self._receives[node], True, gradient) for node, gradient in gradients.items()
            ]
        return RunResult([], answers)

    def _count(self) -> Dependencies:
        """Count dependencies, with the sources that are resolved already."""
        sources = [self._sources[name] for name in self._unresolved]
        unresolved = [source.edge().node for source in sources if source.leaf is None]
        resolved = list(self._pending)
        dependencies = Dependencies((*unresolved, *resolved), self._receives)
        for node in resolved:
            dependencies.decide(node, True)
        dependencies.receives += [
            (node, False) for node in self._unanswered if node not in dependencies.children
        ]
        return dependencies

    # Everything is resolved, of the whole graph or of a part that nothing else leads to

    def _run_rest(self) -> RunResult:
        receives, self._unanswered = self._unanswered, {}
        return self._run_whole(self._rest(), receives)

    def _rest(self) -> _Subgraph:
        """Return the leaves that the loss depends on, and the received tensors, not answered yet."""
        if self._partial is not None:
            dependencies = self._partial.dependencies
            decided = dependencies.take_receives()
            found, dependencies.leaves = dict.fromkeys(dependencies.leaves), []
            found.update(
                (node, None) for node in self._pending.gradients if type(node) is ACCUMULATE_GRAD
            )
            return _Subgraph(list(found), {node for node, reached in decided if reached})
        part, self._unresolved_subgraph = self._unresolved_subgraph, None
        return part or self._explore(self._pending)

    def _explore(
        self, starts: Iterable[Node], others: Collection[Node] = (), *, reached: bool = True
    ) -> _Subgraph:
        """Return what nodes lead to; `_SubgraphsOverlap` is raised if that is one of the `others`.

        Not `reached`: it is not known yet whether the loss depends on them.
        """
        leaves = []
        seen = set(starts)
        stack = list(seen)
        receives = self._receives
        for node in stack:
            if others and node in others:
                raise _SubgraphsOverlap
            if type(node) is ACCUMULATE_GRAD:
                leaves.append(node)
            elif node not in receives:
                if type(node) is RECEIVED:
                    raise other_context_error() if reached else _SubgraphsOverlap()
                for following, _ in node.next_functions:
                    if following is not None and following not in seen:
                        seen.add(following)
                        stack.append(following)
        return _Subgraph(leaves, seen)

    def _run_separate_part(self) -> RunResult | None:
        """Run what the resolved sources lead to, if the others do not lead there. None: they do."""
        if self._tried_separate_run or len(self._unresolved) > _MAX_UNRESOLVED:
            return None
        self._tried_separate_run = True
        sources = [self._sources[name] for name in self._unresolved]
        starts = [source.edge().node for source in sources]
        try:
            later = self._explore(starts, reached=False)
            part = self._explore(self._pending, later.nodes)
        except _SubgraphsOverlap:
            return None
        if part.leaves and accumulation.any_observed(part.leaves, self._replicated):
            return None  # they may belong together with others
        if all(source.leaf is None for source in sources):
            self._unresolved_subgraph = later
        receives = {node: None for node in self._unanswered if node not in later.nodes}
        for node in receives:
            del self._unanswered[node]
        return self._run_whole(part, receives)

    def _run_whole(self, part: _Subgraph, receives: Iterable[Node]) -> RunResult:
        """Run a part of the graph that is complete, and answer for `receives`."""
        nodes = part.leaves
        leaf_gradients, self._leaf_gradients = self._leaf_gradients, []
        leaves = [leaf_of(node) for node in nodes]
        untracked_results.refuse(leaves, leaf_gradients)
        accumulation.raise_if_sharded(leaves, leaf_gradients)
        wanted = [node for node in receives if node in part.nodes]
        answers: dict[Node, Tensor | None] = {}
        if self._partial is not None:
            answers, wanted = self._partial.take_undefined(wanted, self._partial.dependencies.ready)
        if self._is_only_passed_on(wanted):
            gradients: Sequence[Tensor | None] = [
                self._pending.gradients.pop(node)[0].tensor for node in wanted
            ]
        else:
            roots = self._pending.take_roots(list(self._pending))
            if nodes and accumulation.any_observed(nodes, self._replicated):
                gradients = self._run_through_grad(roots, nodes, wanted)
            else:
                ends = list(map(GradientEdge, (*nodes, *wanted), itertools.repeat(0)))
                gradients = run_engine(roots, ends, self._retain_graph)
            if nodes:
                leaf_gradients += exclusive_gradients(leaves, gradients, roots)
        answers.update(zip(wanted, gradients[len(leaves) :], strict=True))
        known = self._receives
        return RunResult(
            leaf_gradients, [(known[node], node in answers, answers.get(node)) for node in receives]
        )

    def _is_only_passed_on(self, receives: list[Node]) -> bool:
        """Return True if the gradients that came are the answers for received tensors as they are."""
        gradients = self._pending.gradients
        if self._pending.undefined or len(receives) != len(gradients):
            return False
        return all(
            node in gradients and self._captures[node].is_unobserved(node) for node in receives
        )

    def _run_through_grad(
        self, roots: list[RunRoot], nodes: list[Node], receives: list[Node]
    ) -> list[Tensor | None]:
        """Compute ends with `.grad` as the place where gradients of leaves go, as `loss.backward()` does."""
        leaves = [leaf_of(node) for node in nodes]
        captures = [self._captures[node] for node in receives]
        with _grad_attribute_lock:
            before = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            for capture in captures:
                capture.is_active = True
            try:
                ends: list[Tensor | GradientEdge] = [*leaves]
                ends += [GradientEdge(node, 0) for node in receives]
                run_engine(roots, ends, self._retain_graph, accumulate=True)
                found = [accumulation.take_gradient(leaf, self._replicated) for leaf in leaves]
                return found + [capture.gradient for capture in captures]
            finally:
                for capture in captures:
                    capture.is_active, capture.gradient = False, None
                for leaf, gradient in zip(leaves, before, strict=True):
                    leaf.grad = gradient

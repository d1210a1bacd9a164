"""`LocalGraph`: the part of a backward pass that one worker computes, with torch's own engine.

Gradients enter the graph at sources: the roots of the pass, and tensors that were sent and whose
gradients come back. The graph ends at leaves and at tensors that were received. Sources are
resolved one after the other. If the loss depends on a source, it has a gradient (None if the
gradient is undefined). Each node runs once in a pass, when its gradient is complete, so hooks and
functions see the same gradients as in one process.

- Usually all sources are resolved when `run` is called. Then one run of the engine computes
  everything.
- Often the resolved and the unresolved sources lead to different parts of the graph, as before and
  after a remote call. Then one run of the engine computes each part.
- Otherwise `Dependencies` counts, for each node, the incoming edges that are not decided. It is
  created once per pass, and each edge is counted once, so a pass takes linear time. `run` then
  computes the gradients of received tensors that are complete, since other workers wait for them
  (`PartialRunner`). The other nodes run when all sources are resolved. A node runs only if all
  nodes that lead to it and that the loss depends on have run or run with it.

Some leaves have their accumulation observed, by `DistributedDataParallel` or by hooks. They get
their gradients through `.grad`, which is restored afterwards.

State: belongs to one backward pass, which is used by one thread at a time. `_grad_attribute_lock`
is held while gradients go through `.grad`, since all passes of the process share these.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import hooks, observed_leaves
from telegrad.autograd.dependencies import Dependencies, other_context_error
from telegrad.autograd.gradients import (
    PendingGradients,
    RunRoot,
    exclusive_leaf_gradients,
    leaf_gradient,
    leaf_gradients,
    run_engine,
)
from telegrad.autograd.partial_run import PartialRunner, run_to_ends
from telegrad.autograd.send_recv import (
    ACCUMULATE_GRAD,
    RECEIVED,
    ReceivedGroup,
    leaf_of,
)
from telegrad.autograd.untracked_results import untracked_results

_MAX_UNRESOLVED = 16  # sources; with more, two separate parts are unlikely
_grad_attribute_lock = threading.Lock()


class GradientSource(Protocol):
    """A point where a gradient enters the graph."""

    leaf: Tensor | None  # if it enters at a leaf

    def edge(self) -> GradientEdge:
        """Return the edge where the gradient enters."""

    def preceding_node(self) -> Node:
        """Return a node of a torch operation whose only edge is `edge()`."""


class ReceivedGradients(NamedTuple):
    """The answers for the received tensors of one node: their gradients.

    `unreached` are the indices of tensors that the loss does not depend on.
    """

    group: ReceivedGroup
    gradients: Sequence[Tensor | None]
    unreached: Collection[int]


class RunResult(NamedTuple):
    """What a run computed: gradients of leaves, and answers for received tensors."""

    leaves: list[tuple[Tensor, Tensor]]
    receives: list[ReceivedGradients]


class _Subgraph(NamedTuple):
    """The nodes that some sources lead to, and which of them are leaves."""

    leaves: list[Node]
    nodes: set[Node]


class _SubgraphsOverlap(Exception):
    """Two parts of the graph have a node in common."""


class LocalGraph:
    """The graph of one worker in one pass. Sources are identified by any hashable name."""

    def __init__(
        self,
        sources: Mapping[Any, GradientSource],
        receives: Mapping[Node, ReceivedGroup],
        retain_graph: bool,
    ) -> None:
        self._sources = sources
        # By the name of a source: how many gradients are missing, which are added up.
        self._unresolved = dict.fromkeys(sources, 1)
        self._sums: set[Any] = set()  # sources with several gradients
        # Unresolved sources that have got a gradient.
        self._partly_reached: set[Any] = set()
        self._receives = receives
        self._unanswered = dict.fromkeys(receives)
        # Outputs of nodes in `_receives` that sources with a gradient lead to directly.
        self._reached_outputs: dict[Node, set[int]] = {}
        self._retain_graph = retain_graph
        self._pending = PendingGradients()
        self._leaf_gradients: list[tuple[Tensor, Tensor]] = []  # of sources that are leaves
        self._partial_runner: PartialRunner | None = None
        self._tried_separate_run = False
        # What the unresolved sources lead to, if nothing else leads there.
        self._unresolved_subgraph: _Subgraph | None = None
        self._replicated = observed_leaves.replicated_parameters()

    def __repr__(self) -> str:
        return (
            f"<LocalGraph {len(self._unresolved)} of {len(self._sources)} sources unresolved, "
            f"{sum(map(len, map(self._receives.__getitem__, self._unanswered)))} receives "
            "unanswered>"
        )

    # Sources

    def expect_another(self, name: Any) -> None:
        """Expect one more gradient of a source. All its gradients are added up."""
        self._unresolved[name] += 1
        self._sums.add(name)

    def resolve(
        self, name: Any, gradient: Tensor | None, *, reached: bool = True, exclusive: bool = False
    ) -> None:
        """Take a gradient of a source.

        `reached` is False if the loss does not depend on the source. `exclusive` is True if there
        are no other references to the gradient.
        """
        missing = self._unresolved.pop(name) - 1
        if missing:
            self._unresolved[name] = missing
            if reached:
                self._partly_reached.add(name)
        if not reached:
            self._unresolved_subgraph = None
        source = self._sources[name]
        leaf = source.leaf
        if reached and leaf is not None and self._bypass_engine(leaf, gradient, exclusive):
            return
        if reached:
            node, index = source.edge()[:2]
            if node in self._receives:
                self._reached_outputs.setdefault(node, set()).add(index)
            if gradient is not None:
                self._pending.add(node, index, gradient)
            else:
                self._pending.undefined[node] = source.preceding_node()
        if self._partial_runner is not None and leaf is None and not missing:
            reached = reached or name in self._partly_reached
            self._partial_runner.dependencies.decide(source.edge().node, reached)

    def resolve_leaves(
        self,
        names: Sequence[Any],
        leaves: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
    ) -> bool:
        """Take the only gradients of sources that are leaves, without other references to them.

        Do nothing and return False if one of the gradients needs more than being stored.
        """
        if self._sums.isdisjoint(names) and observed_leaves.are_plain(leaves, self._replicated):
            found = exclusive_leaf_gradients(cast(Sequence[Tensor], leaves), gradients)
            if found is not None:
                self._leaf_gradients += found
                deque(map(self._unresolved.__delitem__, names), 0)
                return True
        return False

    def _bypass_engine(self, leaf: Tensor, gradient: Tensor | None, exclusive: bool) -> bool:
        """Take the gradient of a leaf without the engine. Return False if hooks would notice."""
        if leaf._backward_hooks or not observed_leaves.is_known_unobserved(leaf, self._replicated):
            return False
        if gradient is not None:
            self._leaf_gradients.append((leaf, leaf_gradient(gradient, leaf, exclusive)))
        return True

    # Runs

    def run(self) -> RunResult:
        """Compute what can be computed and other workers wait for, or everything at the end."""
        if not self._unresolved:
            receives, self._unanswered = self._unanswered, {}
            return self._run_complete(self._remaining_subgraph(), receives)
        if self._partial_runner is None:
            result = self._run_separate_part()
            if result is not None:
                return result
            self._partial_runner = PartialRunner(
                self._count_dependencies(), self._pending, self._receives, self._retain_graph
            )
        decided = self._partial_runner.dependencies.take_receives()
        for node, _ in decided:
            del self._unanswered[node]
        ends = [node for node, reached in decided if reached]
        answers = [self._unreached(node) for node, reached in decided if not reached]
        if ends:
            answers += self._reached(self._partial_runner.run(ends), ())
        return RunResult([], answers)

    def _count_dependencies(self) -> Dependencies:
        """Return dependencies in which the sources that are resolved are decided."""
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

    def _remaining_subgraph(self) -> _Subgraph:
        """Return the leaves and received tensors that the loss depends on and that have not run."""
        if self._partial_runner is not None:
            dependencies = self._partial_runner.dependencies
            decided = dependencies.take_receives()
            leaves, dependencies.leaves = dict.fromkeys(dependencies.leaves), []
            for node in self._pending.gradients:
                if type(node) is ACCUMULATE_GRAD:
                    leaves[node] = None
            return _Subgraph(list(leaves), {node for node, reached in decided if reached})
        subgraph, self._unresolved_subgraph = self._unresolved_subgraph, None
        return subgraph or self._explore(self._pending)

    def _explore(
        self, starts: Iterable[Node], others: Collection[Node] = (), *, reached: bool = True
    ) -> _Subgraph:
        """Return what the starts lead to. Raise `_SubgraphsOverlap` at one of the `others`.

        `reached` is False if it is not known whether the loss depends on the starts.
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
        """Run what the resolved sources lead to. Return None if unresolved ones lead there too."""
        if self._tried_separate_run or len(self._unresolved) > _MAX_UNRESOLVED:
            return None
        self._tried_separate_run = True
        sources = [self._sources[name] for name in self._unresolved]
        starts = [source.edge().node for source in sources]
        try:
            unresolved = self._explore(starts, reached=False)
            resolved = self._explore(self._pending, unresolved.nodes)
        except _SubgraphsOverlap:
            return None
        if resolved.leaves and observed_leaves.any_observed(resolved.leaves, self._replicated):
            # Their observer can expect them together with leaves of the other part.
            return None
        if all(source.leaf is None for source in sources):
            self._unresolved_subgraph = unresolved
        receives = {node: None for node in self._unanswered if node not in unresolved.nodes}
        for node in receives:
            del self._unanswered[node]
        return self._run_complete(resolved, receives)

    def _run_complete(self, subgraph: _Subgraph, receives: Iterable[Node]) -> RunResult:
        """Run a part of the graph whose gradients are all complete, and answer for `receives`."""
        leaf_nodes = subgraph.leaves
        of_leaves, self._leaf_gradients = self._leaf_gradients, []
        leaves = [leaf_of(node) for node in leaf_nodes]
        untracked_results.raise_if_reached(leaves, of_leaves)
        observed_leaves.raise_if_sharded(leaves, of_leaves)
        wanted = [node for node in receives if node in subgraph.nodes]
        answers: dict[Node, Sequence[Tensor | None]] = {}
        if self._partial_runner is not None:
            ready = self._partial_runner.dependencies.ready
            answers, wanted = self._partial_runner.take_undefined(wanted, ready)
        if self._has_all_gradients(wanted):
            for node in wanted:
                answers[node] = self._pending.take_outputs(node, len(self._receives[node]))
        else:
            roots = self._pending.take_roots(list(self._pending))
            if leaf_nodes and observed_leaves.any_observed(leaf_nodes, self._replicated):
                gradients, found = self._run_through_grad(roots, leaves, wanted)
            else:
                ends = list(map(GradientEdge, leaf_nodes, itertools.repeat(0)))
                gradients, found = run_to_ends(
                    roots, ends, wanted, self._receives, self._retain_graph
                )
            answers.update(found)
            if leaf_nodes:
                of_leaves += leaf_gradients(leaves, gradients, roots)
        unreached = [self._unreached(node) for node in receives if node not in answers]
        return RunResult(of_leaves, unreached + self._reached(answers, subgraph.nodes))

    # Answers for received tensors

    def _unreached(self, node: Node) -> ReceivedGradients:
        """Return the answers for tensors that the loss does not depend on."""
        group = self._receives[node]
        return ReceivedGradients(group, (None,) * len(group), range(len(group)))

    def _reached(
        self, gradients: Mapping[Node, Sequence[Tensor | None]], explored: Collection[Node]
    ) -> list[ReceivedGradients]:
        """Return the answers for tensors of nodes that the loss depends on.

        `explored` are the nodes that were found in this run, if there are no `Dependencies`.
        """
        answers = []
        for node, found in gradients.items():
            group = self._receives[node]
            missing = []
            if len(group) > 1:
                missing = [output for output, each in enumerate(found) if each is None]
            if not missing:
                answers.append(ReceivedGradients(group, found, ()))
                continue
            reached = self._find_reached_outputs(node, explored)
            for output in missing:
                if output in reached:
                    hooks.call_hooks_of_output(node, output)
            answers.append(ReceivedGradients(group, found, {*missing} - reached))
        return answers

    def _find_reached_outputs(self, node: Node, explored: Collection[Node]) -> set[int]:
        """Return the outputs of a node of received tensors that the loss depends on."""
        direct = self._reached_outputs.get(node, set())
        if self._partial_runner is not None:
            return direct | self._partial_runner.dependencies.reached_outputs(node)
        return direct | {
            output
            for parent in explored
            if parent not in self._receives
            for child, output in parent.next_functions
            if child is node
        }

    def _has_all_gradients(self, receives: list[Node]) -> bool:
        """Return True if the pending gradients are those of the received tensors, without a run."""
        gradients = self._pending.gradients
        if self._pending.undefined or len(receives) != len(gradients):
            return False
        return all(
            node in gradients and self._receives[node].is_unobserved(node) for node in receives
        )

    def _run_through_grad(
        self, roots: list[RunRoot], leaves: list[Tensor], receives: list[Node]
    ) -> tuple[list[Tensor | None], dict[Node, Sequence[Tensor | None]]]:
        """Run the engine so that gradients of leaves go to `.grad`, as in `loss.backward()`."""
        groups = [self._receives[node] for node in receives]
        with _grad_attribute_lock:
            before = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            for group in groups:
                group.is_active = True
            try:
                ends: list[Tensor | GradientEdge] = [*leaves]
                ends += [GradientEdge(node, 0) for node in receives]
                run_engine(roots, ends, self._retain_graph, accumulate=True)
                found = [observed_leaves.take_gradient(leaf, self._replicated) for leaf in leaves]
                return found, {
                    node: group.gradients or (None,) * len(group)
                    for node, group in zip(receives, groups, strict=True)
                }
            finally:
                for group in groups:
                    group.is_active, group.gradients = False, None
                for leaf, gradient in zip(leaves, before, strict=True):
                    leaf.grad = gradient

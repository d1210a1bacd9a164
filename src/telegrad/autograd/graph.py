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

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import accumulation, hooks
from telegrad.autograd.send_recv import (
    ANCHOR,
    GradientSlot,
    Receive,
    ReceivedTensor,
    accumulator,
    add_gradients,
)
from telegrad.autograd.untracked import untracked_results
from telegrad.errors import UsageError

_AccumulateGrad = type(accumulator(ANCHOR))
_RECEIVED: Any = ReceivedTensor._backward_cls  # the type of the node of a received tensor
_run_backward = torch.autograd.graph._engine_run_backward
_FEW = 16  # unresolved sources; with more, `Dependencies` are likely to be needed
_LONGEST_WAY = 4  # nodes between one that runs and a leaf that need not wait
_through_grad = threading.Lock()  # held while gradients pass through `.grad`


class GradientSource(Protocol):
    """Where a gradient enters the graph."""

    leaf: Tensor | None  # if it enters at a leaf

    def edge(self) -> GradientEdge: ...

    def node_behind(self) -> Node:
        """Return a node of torch's own that leads to the edge."""


# What a pass found for a received tensor: whether the loss depends on it, and its gradient.
# There can be many, and a named tuple takes several times as long to make.
ReceivedGradient = tuple[Receive, bool, Tensor | None]


class RunResult(NamedTuple):
    """What a run found: gradients of leaves, and answers for received tensors."""

    leaves: list[tuple[Tensor, Tensor]]
    receives: list[ReceivedGradient]


class _NodeGradient(NamedTuple):
    tensor: Tensor
    is_own: bool  # nobody else has it


class _RunRoot(NamedTuple):
    """Where a run of the engine starts."""

    edge: GradientEdge
    gradient: _NodeGradient


class _Subgraph(NamedTuple):
    """Nodes that some sources lead to, and which of them are leaves."""

    leaves: list[Node]
    nodes: set[Node]


class _SubgraphsOverlap(Exception):
    """Two parts of the graph have a node in common."""


class Dependencies:
    """For each node, how many of its incoming edges are not decided yet, and whether one reaches it.

    An edge is decided when the node that it comes from is decided: all gradients for that node are
    complete, or it is known that there are none. `decided` goes on from there.
    """

    def __init__(self, starts: Iterable[Node], receives: Mapping[Node, Receive]) -> None:
        self._receives = receives
        self.children: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        self._parents: dict[Node, list[Node]] = {}
        self._missing: dict[Node, int] = {}
        self._reached: set[Node] = set()
        self.ready: dict[Node, None] = {}  # nodes inside the graph that can run and have not run
        self.leaves: list[Node] = []  # those that the loss depends on
        self.receives: list[tuple[Node, bool]] = []  # decided since `take_receives`: is it reached?
        self._explore(starts)

    def _explore(self, starts: Iterable[Node]) -> None:
        children, parents, missing = self.children, self._parents, self._missing
        stack = []
        for node in starts:
            if node in missing:
                missing[node] += 1
            else:
                missing[node] = 1
                stack.append(node)
        while stack:
            node = stack.pop()
            if node in self._receives or type(node) is _AccumulateGrad or type(node) is _RECEIVED:
                children[node] = ()
                continue
            following = children[node] = node.next_functions
            for child, _ in following:
                if child is None:
                    continue
                if child in missing:
                    missing[child] += 1
                else:
                    missing[child] = 1
                    stack.append(child)
                parents.setdefault(child, []).append(node)

    def decide(self, node: Node, reached: bool) -> None:
        """One more of the sources that were given as starts is resolved."""
        stack = [(node, reached)]
        missing = self._missing
        while stack:
            node, reached = stack.pop()
            if reached:
                self._reached.add(node)
            missing[node] -= 1
            if missing[node]:
                continue
            reached = node in self._reached
            if node in self._receives:
                self.receives.append((node, reached))
            elif reached and type(node) is _AccumulateGrad:
                self.leaves.append(node)
            elif reached:
                if type(node) is _RECEIVED:
                    raise _other_context()
                self.ready[node] = None
            stack += [(child, reached) for child, _ in self.children[node] if child is not None]

    def take_receives(self) -> list[tuple[Node, bool]]:
        """Return the received tensors that have been decided since the last call."""
        receives, self.receives = self.receives, []
        return receives

    def take_nodes_before(self, ends: Iterable[Node]) -> dict[Node, None]:
        """Return the nodes that lead to ends and have not run; they are about to."""
        found: dict[Node, None] = {}
        stack = list(ends)
        ready, parents = self.ready, self._parents
        while stack:
            for parent in parents.get(stack.pop(), ()):
                if parent in ready and parent not in found:
                    found[parent] = None
                    stack.append(parent)
        for node in found:
            del ready[node]
        found.update(self._take_nodes_between(found))
        return found

    def follows(self, node: Node, nodes: Collection[Node]) -> bool:
        """Return True if one of `nodes` leads to this node directly."""
        return any(parent in nodes for parent in self._parents.get(node, ()))

    def _take_nodes_between(self, nodes: Iterable[Node]) -> dict[Node, None]:
        """Return the ready nodes between `nodes` and leaves, such as the transposition of a weight.

        These take next to no time, and the part that runs then ends at leaves alone.
        """
        found: dict[Node, None] = {}
        for node in nodes:
            for child, _ in self.children[node]:
                if child in self.ready:
                    for following in self._path_to_leaf(child):
                        found[following] = None
                        del self.ready[following]
        return found

    def _path_to_leaf(self, node: Node) -> list[Node]:
        """Return the nodes from `node` to a leaf; none if it is far, or they cannot run now."""
        path = [node]
        if self._waits(node):
            return []
        while len(path) <= _LONGEST_WAY:
            following = [child for child, _ in self.children[path[-1]] if child is not None]
            if len(following) != 1:
                break
            if type(following[0]) is _AccumulateGrad:
                return path
            if following[0] not in self.ready or self._waits(following[0], path[-1]):
                break
            path.append(following[0])
        return []

    def _waits(self, node: Node, runs_now: Node | None = None) -> bool:
        """Return True if a node that has not run and is not `runs_now` leads to this ready node."""
        parents = self._parents.get(node, [])
        while parents:
            if parents[-1] not in self.ready:
                parents.pop()  # it has run or never will, so that nobody need look at it again
            elif parents[-1] is not runs_now:
                return True
            elif len(parents) == 1:
                break
            else:
                parents[0], parents[-1] = parents[-1], parents[0]
        return False


class LocalGraph:
    def __init__(
        self,
        sources: Mapping[Any, GradientSource],
        receives: Mapping[Node, Receive],
        slots: Mapping[Node, GradientSlot],
        retain_graph: bool,
    ) -> None:
        self._sources = sources
        self._unresolved = dict.fromkeys(sources, 1)  # how many gradients are to be added up
        self._partly_reached: set[Any] = set()
        self._receives = receives
        self._slots = slots
        self._unanswered = dict.fromkeys(receives)
        self._retain_graph = retain_graph
        self._pending: dict[Node, dict[int, _NodeGradient]] = {}  # for nodes that have not run
        self._undefined: dict[Node, Node] = {}  # reached by undefined gradients; a node behind each
        self._of_leaves: list[tuple[Tensor, Tensor]] = []  # of sources that are leaves
        self._dependencies: Dependencies | None = None
        self._sensitive: list[_ObservingNode] | None = None
        self._has_run = False
        # what the unresolved sources lead to, if that is a part of its own
        self._later: _Subgraph | None = None
        self._lock = threading.Lock()
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
        self, name: Any, gradient: Tensor | None, *, reached: bool = True, own: bool = False
    ) -> None:
        """Take the gradient of a source, which nobody else has if it is `own`.

        Not `reached`: the loss does not depend on it.
        """
        missing = self._unresolved.pop(name) - 1
        if missing:
            self._unresolved[name] = missing
            if reached:
                self._partly_reached.add(name)
        if not reached:
            self._later = None
        source = self._sources[name]
        if reached and source.leaf is not None and self._take_for_leaf(source.leaf, gradient, own):
            return
        if reached:
            node, output = source.edge()[:2]
            if gradient is not None:
                self._add_pending(node, output, gradient)
            else:
                self._undefined[node] = source.node_behind()
        if self._dependencies is not None and source.leaf is None and not missing:
            self._dependencies.decide(source.edge().node, reached or name in self._partly_reached)

    def resolve_all(self, gradients: Iterable[tuple[Any, Tensor | None]], own: bool) -> None:
        """Take the gradients of many sources, by name; many of them may be leaves."""
        sources, unresolved, of_leaves = self._sources, self._unresolved, self._of_leaves
        is_watched = accumulation.checker(self._replicated)
        for name, gradient in gradients:
            leaf = sources[name].leaf
            if (
                leaf is None
                or gradient is None
                or unresolved[name] != 1
                or leaf._backward_hooks
                or is_watched(leaf)
            ):
                self.resolve(name, gradient, own=own)
                continue
            del unresolved[name]
            of_leaves.append(
                (leaf, gradient if own and _is_like(gradient, leaf) else _copy(gradient, leaf))
            )

    def _take_for_leaf(self, leaf: Tensor, gradient: Tensor | None, own: bool) -> bool:
        """Take the gradient of a leaf past the engine, if nobody could notice. False: somebody could."""
        if leaf._backward_hooks or accumulation.checker(self._replicated)(leaf):
            return False
        if gradient is not None:
            self._of_leaves.append(
                (leaf, gradient if own and _is_like(gradient, leaf) else _copy(gradient, leaf))
            )
        return True

    def run(self) -> RunResult:
        """Compute what is ready, if somebody waits for it."""
        if not self._unresolved:
            return self._run_rest()
        if self._dependencies is None:
            outcome = self._run_separate_part()
            if outcome is not None:
                return outcome
            self._dependencies = self._count()
        decided = self._dependencies.take_receives()
        for node, _ in decided:
            del self._unanswered[node]
        ends = [node for node, reached in decided if reached]
        answers: list[ReceivedGradient] = [
            (self._receives[node], False, None) for node, reached in decided if not reached
        ]
        if ends:
            gradients = self._run_part(self._dependencies, ends)
            answers += [
                (self._receives[node], True, gradient) for node, gradient in gradients.items()
            ]
        return RunResult([], answers)

    def _count(self) -> Dependencies:
        """Count dependencies, with the sources that are resolved already."""
        sources = [self._sources[name] for name in self._unresolved]
        unresolved = [source.edge().node for source in sources if source.leaf is None]
        resolved = list(dict.fromkeys((*self._pending, *self._undefined)))
        dependencies = Dependencies((*unresolved, *resolved), self._receives)
        for node in resolved:
            dependencies.decide(node, True)
        dependencies.receives += [
            (node, False) for node in self._unanswered if node not in dependencies.children
        ]
        return dependencies

    def _add_pending(self, node: Node, output: int, gradient: Tensor) -> None:
        pending = self._pending.setdefault(node, {})
        known = pending.get(output)
        if known is None:
            pending[output] = _NodeGradient(gradient, False)
        elif known.is_own and _can_add_in_place(known.tensor, gradient):
            known.tensor.add_(gradient)
        else:
            pending[output] = _NodeGradient(add_gradients(known.tensor, gradient), True)

    def _take_pending(self, nodes: Iterable[Node]) -> list[_RunRoot]:
        """Return edges and gradients to start the engine with, for nodes that are about to run."""
        roots = []
        for node in nodes:
            for output, gradient in self._pending.pop(node, {}).items():
                roots.append(_RunRoot(GradientEdge(node, output), gradient))
            behind = self._undefined.pop(node, None)
            if behind is not None:
                metadata: Any = behind._input_metadata[0]
                zeros = torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)
                hooks.add_hook(behind.register_hook, _return_undefined)
                roots.append(_RunRoot(GradientEdge(behind, 0), _NodeGradient(zeros, False)))
        return roots

    # Everything is resolved, of the whole graph or of a part that nothing else leads to

    def _run_rest(self) -> RunResult:
        receives, self._unanswered = self._unanswered, {}
        return self._run_whole(self._rest(), receives)

    def _rest(self) -> _Subgraph:
        """Return the leaves that the loss depends on, and the received tensors, not answered yet."""
        if self._dependencies is not None:
            decided = self._dependencies.take_receives()
            found, self._dependencies.leaves = dict.fromkeys(self._dependencies.leaves), []
            found.update((node, None) for node in self._pending if type(node) is _AccumulateGrad)
            return _Subgraph(list(found), {node for node, reached in decided if reached})
        part, self._later = self._later, None
        return part or self._explore((*self._pending, *self._undefined))

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
            if type(node) is _AccumulateGrad:
                leaves.append(node)
            elif node not in receives:
                if type(node) is _RECEIVED:
                    raise _other_context() if reached else _SubgraphsOverlap()
                for following, _ in node.next_functions:
                    if following is not None and following not in seen:
                        seen.add(following)
                        stack.append(following)
        return _Subgraph(leaves, seen)

    def _run_separate_part(self) -> RunResult | None:
        """Run what the resolved sources lead to, if the others do not lead there. None: they do."""
        if self._has_run or len(self._unresolved) > _FEW:
            return None
        self._has_run = True
        sources = [self._sources[name] for name in self._unresolved]
        starts = [source.edge().node for source in sources]
        try:
            later = self._explore(starts, reached=False)
            part = self._explore((*self._pending, *self._undefined), later.nodes)
        except _SubgraphsOverlap:
            return None
        if part.leaves and accumulation.any_watched(part.leaves, self._replicated):
            return None  # they may belong together with others
        if all(source.leaf is None for source in sources):
            self._later = later
        receives = {node: None for node in self._unanswered if node not in later.nodes}
        for node in receives:
            del self._unanswered[node]
        return self._run_whole(part, receives)

    def _run_whole(self, part: _Subgraph, receives: Iterable[Node]) -> RunResult:
        """Run a part of the graph that is complete, and answer for `receives`."""
        nodes = part.leaves
        of_leaves, self._of_leaves = self._of_leaves, []
        leaves = [_leaf(node) for node in nodes]
        untracked_results.refuse(leaves, of_leaves)
        accumulation.refuse_sharded(leaves, of_leaves)
        wanted = [node for node in receives if node in part.nodes]
        answers: dict[Node, Tensor | None] = {}
        if self._dependencies is not None:
            answers, wanted = self._take_undefined(
                self._dependencies, wanted, self._dependencies.ready
            )
        if self._is_only_passed_on(wanted):
            gradients: Sequence[Tensor | None] = [
                self._pending.pop(node)[0].tensor for node in wanted
            ]
        else:
            roots = self._take_pending({**self._pending, **self._undefined})
            if nodes and accumulation.any_watched(nodes, self._replicated):
                gradients = self._run_through_grad(roots, nodes, wanted)
            else:
                ends = list(map(GradientEdge, (*nodes, *wanted), itertools.repeat(0)))
                gradients = self._execute(roots, ends, self._retain_graph)
            if nodes:
                of_leaves += _owned(leaves, gradients, roots)
        answers.update(zip(wanted, gradients[len(leaves) :], strict=True))
        known = self._receives
        return RunResult(
            of_leaves, [(known[node], node in answers, answers.get(node)) for node in receives]
        )

    def _take_undefined(
        self, dependencies: Dependencies, ends: list[Node], nodes: Collection[Node]
    ) -> tuple[dict[Node, Tensor | None], list[Node]]:
        """Return the answers for ends that the engine does not come by if it runs `nodes`, and the other ends.

        Earlier parts had undefined gradients for them. The engine would call their hooks with None.
        """
        undefined: dict[Node, Tensor | None] = {}
        others = []
        for node in ends:
            if (
                node in self._pending
                or node in self._undefined
                or dependencies.follows(node, nodes)
            ):
                others.append(node)
            else:
                undefined[node] = hooks.call_tensor_hooks(node, None)
        return undefined, others

    def _is_only_passed_on(self, receives: list[Node]) -> bool:
        """Return True if the gradients that came are the answers for received tensors as they are."""
        if self._undefined or len(receives) != len(self._pending):
            return False
        return all(
            node in self._pending and self._slots[node].is_unobserved(node) for node in receives
        )

    def _run_through_grad(
        self, roots: list[_RunRoot], nodes: list[Node], receives: list[Node]
    ) -> list[Tensor | None]:
        """Compute ends with `.grad` as the place where gradients of leaves go, as `loss.backward()` does."""
        leaves = [_leaf(node) for node in nodes]
        slots = [self._slots[node] for node in receives]
        with _through_grad:
            before = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            for slot in slots:
                slot.catching = True
            try:
                ends: list[Tensor | GradientEdge] = [*leaves]
                ends += [GradientEdge(node, 0) for node in receives]
                self._execute(roots, ends, self._retain_graph, accumulate=True)
                found = [accumulation.take_gradient(leaf, self._replicated) for leaf in leaves]
                return found + [slot.gradient for slot in slots]
            finally:
                for slot in slots:
                    slot.catching, slot.gradient = False, None
                for leaf, gradient in zip(leaves, before, strict=True):
                    leaf.grad = gradient

    # Some sources are not resolved

    def _run_part(self, dependencies: Dependencies, ends: list[Node]) -> dict[Node, Tensor | None]:
        """Run the nodes that lead to `ends`, and keep what they give to other nodes."""
        nodes = dependencies.take_nodes_before(ends)
        answers, ends = self._take_undefined(dependencies, ends, nodes)
        if ends:
            answers.update(zip(ends, self._run_nodes(dependencies, nodes, ends), strict=True))
        return answers

    def _run_nodes(
        self, dependencies: Dependencies, nodes: dict[Node, None], ends: list[Node]
    ) -> list[Tensor | None]:
        inside = {*nodes, *ends}
        leaves: dict[Node, None] = {}  # these can be asked for, since nobody sees that they are
        cuts: dict[Node, list[int]] = {}  # edges to other nodes that must not run now
        outside: dict[Node, int] = {}  # those nodes
        for node in nodes:
            for number, (child, output) in enumerate(dependencies.children[node]):
                if child is None or child in inside:
                    continue
                if type(child) is _AccumulateGrad and not _leaf(child)._backward_hooks:
                    leaves[child] = None
                else:
                    cuts.setdefault(node, []).append(number)
                    outside[child] = output
        if (
            not nodes
            and not self._undefined
            and all(self._slots[node].is_unobserved(node) for node in ends)
        ):
            return [self._pending.pop(node)[0].tensor for node in ends]
        roots = self._take_pending(inside)
        wanted = [GradientEdge(node, 0) for node in (*ends, *leaves)]
        wanted += [GradientEdge(node, output) for node, output in outside.items()]
        # If a node outside leads to another one, or to a leaf, the engine runs it with undefined gradients.
        is_alone = len(outside) + len(leaves) == 1 or all(
            not dependencies.children[node] for node in outside
        )
        keep_graph = self._retain_graph or not is_alone
        if cuts:
            silenced = self._silence(dependencies, outside, inside, is_alone)
            found = self._execute_cut(roots, wanted, dependencies, cuts, silenced, keep_graph)
        else:
            found = self._execute(roots, wanted, keep_graph)
        for leaf, gradient in zip(leaves, found[len(ends) :], strict=False):
            if gradient is not None:
                self._add_pending(leaf, 0, gradient)
        return found[: len(ends)]

    def _execute_cut(
        self,
        roots: list[_RunRoot],
        wanted: list[GradientEdge],
        dependencies: Dependencies,
        cuts: dict[Node, list[int]],
        silenced: hooks.SilencedHooks,
        keep_graph: bool,
    ) -> list[Tensor | None]:
        """Run, with post-hooks that take off the gradients which go to nodes outside."""
        handles = []
        for node, numbers in cuts.items():
            cut = self._cut(dependencies.children[node], numbers, silenced)
            handles.append(hooks.add_hook(node.register_hook, cut))
        try:
            with silenced:
                return self._execute(roots, wanted, keep_graph)
        finally:
            for handle in handles:
                handle.remove()

    def _cut(
        self,
        edges: Sequence[tuple[Node | None, int]],
        numbers: list[int],
        silenced: hooks.SilencedHooks,
    ) -> Any:
        """Return a post-hook that keeps the gradients for some edges and lets none through."""

        def cut(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
            silenced.start()
            through = list(gradients)
            for number in numbers:
                child, output = edges[number]
                gradient, through[number] = gradients[number], None
                if gradient is not None:
                    assert child is not None
                    with self._lock:  # there is one thread of the engine for each device
                        self._add_pending(child, output, gradient)
            return tuple(through)

        return cut

    def _silence(
        self, dependencies: Dependencies, outside: Iterable[Node], inside: set[Node], is_alone: bool
    ) -> hooks.SilencedHooks:
        """Return what must not notice that the engine comes by."""
        if is_alone:
            return hooks.SilencedHooks(
                [each for node in outside for each in hooks.tensor_hooks(node)], []
            )
        if self._sensitive is None:
            self._sensitive = _sensitive_nodes(dependencies.children)
        self._sensitive = [each for each in self._sensitive if each.node not in inside]
        return hooks.SilencedHooks(
            [found for each in self._sensitive for found in each.hooks],
            [each.node for each in self._sensitive if each.is_function],
        )

    def _execute(
        self,
        roots: list[_RunRoot],
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


class _ObservingNode(NamedTuple):
    """A node that would notice if the engine ran it with undefined gradients."""

    node: Node
    hooks: list[dict[int, Any]]
    is_function: bool  # written in Python


def _sensitive_nodes(nodes: Iterable[Node]) -> list[_ObservingNode]:
    found = []
    look_closely = hooks.some_were_added()
    for node in nodes:
        # nothing but tensor hooks runs
        if type(node) is _RECEIVED or type(node) is _AccumulateGrad:
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


def _return_undefined(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[None, ...]:
    return (None,) * len(gradients)


def _leaf(accumulator: Any) -> Tensor:
    leaf: Tensor = accumulator.variable
    return leaf


def _owned(
    leaves: list[Tensor], gradients: Sequence[Tensor | None], roots: list[_RunRoot]
) -> list[tuple[Tensor, Tensor]]:
    """Return leaves with gradients that belong to nobody else and are laid out like the leaf, as in `.grad`."""
    uses = {id(root.gradient.tensor): 1 for root in roots if not root.gradient.is_own}
    for gradient in gradients:
        uses[id(gradient)] = uses.get(id(gradient), 0) + 1
    return [
        (
            leaf,
            gradient
            if uses[id(gradient)] == 1 and _is_like(gradient, leaf)
            else _copy(gradient, leaf),
        )
        for leaf, gradient in zip(leaves, gradients, strict=False)
        if gradient is not None
    ]


def _is_like(gradient: Tensor, leaf: Tensor) -> bool:
    return gradient.layout is not torch.strided or gradient.stride() == leaf.stride()


def _copy(gradient: Tensor, leaf: Tensor) -> Tensor:
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


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


def _other_context() -> UsageError:
    return UsageError(
        "the loss depends on a tensor that came from another worker under another autograd context, where "
        "gradients cannot go. Fetch it again under this context, or detach it"
    )

"""`LocalGraph`: the part of a backward pass that one worker computes, with torch's own engine.

Gradients enter at sources (the roots of the pass; tensors that were sent and whose gradients come back) and are wanted
at ends: leaves, and tensors that were received. Sources are resolved one after the other, each with a gradient or with
None. An end is computed once all sources that reach it are resolved, so whatever runs has its whole gradient, and hooks
see what they would see in one process:

- usually everything is resolved when `run` is called, and one call of the engine computes all ends;
- otherwise `_reach` finds which sources reach which end, and `run` computes the received tensors that are ready, since
  other workers wait for them, and the leaves that are. What lies between them and an end that is not ready runs again
  later, with the same gradients.

Leaves whose accumulation somebody watches (`DistributedDataParallel`, hooks) get their gradients the way these expect,
through `.grad`, which is put back afterwards.

State belongs to one pass, which lets one thread in at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import watched
from telegrad.autograd.contexts import ANCHOR, Arrived, Receive, Slot, accumulator, plus
from telegrad.errors import UsageError

_AccumulateGrad = type(accumulator(ANCHOR))
_FOREIGN: Any = Arrived._backward_cls  # the type of a node of a received tensor, if it is not of this context
_run_backward = torch.autograd.graph._engine_run_backward
_through_grad = threading.Lock()  # held while gradients pass through `.grad`


class Outcome(NamedTuple):
    """What a run found: gradients of leaves, and of received tensors; None where the loss does not depend on one."""

    leaves: list[tuple[Tensor, Tensor]]
    receives: list[tuple[Receive, Tensor | None]]


class LocalGraph:
    def __init__(
        self,
        sources: Sequence[tuple[Any, GradientEdge]],
        receives: Mapping[Node, Receive],
        slots: Mapping[Node, Slot],
        retain_graph: bool,
    ) -> None:
        self._sources = {name: (edge, 1 << number) for number, (name, edge) in enumerate(sources)}
        self._unresolved = (1 << len(sources)) - 1  # as bits
        self._given = 0  # those that have a gradient
        self._receives = receives
        self._slots = slots
        self._unanswered = dict.fromkeys(receives)
        self._retain_graph = retain_graph
        self._gradients: dict[tuple[Node, int], Tensor] = {}  # of resolved sources
        self._reached: dict[Node, int] | None = None  # for each end, the sources that reach it, as bits
        self._done: set[Node] = set()  # leaves that have their gradient
        self._replicated = watched.replicated()

    def __repr__(self) -> str:
        unresolved = bin(self._unresolved).count("1")
        return f"<LocalGraph {unresolved} of {len(self._sources)} sources open, {len(self._unanswered)} unanswered>"

    def resolve(self, name: Any, gradient: Tensor | None) -> None:
        """The gradient of a source; None if the loss does not depend on it."""
        edge, bit = self._sources[name]
        self._unresolved &= ~bit
        if gradient is not None:
            self._given |= bit
            place = edge.node, edge.output_nr
            known = self._gradients.get(place)
            self._gradients[place] = gradient if known is None else plus(known, gradient)

    def run(self) -> Outcome:
        """Compute what is ready, if somebody waits for it."""
        leaves, receives = self._ready()
        for node in receives:
            del self._unanswered[node]
        if not receives and self._unresolved:
            return Outcome([], [])
        self._done.update(leaves)
        wanted = [node for node, depends in receives.items() if depends]
        if watched.any_watched(leaves, self._replicated):
            gradients = self._run_through_grad(leaves, wanted)
        else:
            ends = [GradientEdge(node, 0) for node in (*leaves, *wanted)]
            gradients = self._execute(ends, accumulate=False)
        answers = dict(zip(wanted, gradients[len(leaves) :], strict=True))
        return Outcome(
            self._own([_leaf(node) for node in leaves], gradients),
            [(self._receives[node], answers.get(node)) for node in receives],
        )

    def _own(self, leaves: list[Tensor], gradients: list[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """Leaves with their gradients, which belong to nobody else and are laid out like the leaf: as in `.grad`."""
        found = [id(gradient) for gradient in (*gradients, *self._gradients.values())]
        shared = set() if len(set(found)) == len(found) else {each for each in found if found.count(each) > 1}
        return [
            (leaf, gradient if id(gradient) not in shared and _is_like(gradient, leaf) else _copy(gradient, leaf))
            for leaf, gradient in zip(leaves, gradients, strict=False)
            if gradient is not None
        ]

    def _ready(self) -> tuple[list[Node], dict[Node, bool]]:
        """Leaves and received tensors, not computed yet, that no unresolved source reaches; of these, does any?

        The engine is not asked for what no gradient reaches: it would run the hooks of a source that leads elsewhere.
        """
        if self._unresolved:
            if self._reached is None:
                self._reached = self._reach()
            reached, given = self._reached, self._given
            ready = {node: mask for node, mask in reached.items() if not mask & self._unresolved}
            leaves = [node for node, mask in ready.items() if mask & given and node not in self._done]
            leaves = [node for node in leaves if node not in self._receives]
            unanswered = {node: reached.get(node, 0) for node in self._unanswered}
            return leaves, {
                node: bool(mask & given) for node, mask in unanswered.items() if not mask & self._unresolved
            }
        leaves, behind = self._walk(node for node, _ in self._gradients)
        return leaves, {node: node in behind for node in self._unanswered}

    def _walk(self, starts: Iterable[Node]) -> tuple[list[Node], set[Node]]:
        """Leaves behind `starts` that are not computed yet, and all nodes there, as far as they are on this worker."""
        receives, done, leaves = self._receives, self._done, []
        seen = set(starts)
        stack = list(seen)
        for node in stack:
            if type(node) is _AccumulateGrad:
                if node not in done:
                    leaves.append(node)
            elif node not in receives:
                for following, _ in _inputs_of(node):
                    if following is not None and following not in seen:
                        seen.add(following)
                        stack.append(following)
        return leaves, seen

    def _reach(self) -> dict[Node, int]:
        """For each end, the sources that reach it.

        Tensors of other contexts are no ends. Whether a gradient would go there is known when all sources are resolved.
        """
        masks: dict[Node, int] = {}
        order: list[Node] = []
        stack: list[tuple[Node, bool]] = [(edge.node, False) for edge, _ in self._sources.values()]
        while stack:
            node, visited = stack.pop()
            if visited:
                order.append(node)
            elif node not in masks:
                masks[node] = 0
                stack.append((node, True))
                if node not in self._receives and type(node) is not _FOREIGN:
                    stack += [(following, False) for following, _ in node.next_functions if following is not None]
        for edge, bit in self._sources.values():
            masks[edge.node] |= bit
        ends: dict[Node, int] = {}
        for node in reversed(order):
            mask = masks[node]
            if node in self._receives:
                ends[node] = mask
            elif type(node) is _AccumulateGrad:
                ends[node] = -1 if id(_leaf(node)) in self._replicated else mask  # -1: all of them
            elif type(node) is not _FOREIGN:
                for following, _ in node.next_functions:
                    if following is not None:
                        masks[following] |= mask
        return ends

    def _run_through_grad(self, nodes: list[Node], receives: list[Node]) -> list[Tensor | None]:
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
                self._execute([*leaves, *(GradientEdge(node, 0) for node in receives)], accumulate=True)
                found = [watched.take_gradient(leaf, self._replicated) for leaf in leaves]
                return found + [slot.gradient for slot in slots]
            finally:
                for slot in slots:
                    slot.catching, slot.gradient = False, None
                for leaf, gradient in zip(leaves, before, strict=True):
                    leaf.grad = gradient

    def _execute(self, ends: Sequence[Tensor | GradientEdge], *, accumulate: bool) -> list[Tensor | None]:
        if not ends:
            return []
        gradients = _run_backward(
            tuple(GradientEdge(node, number) for node, number in self._gradients),
            tuple(self._gradients.values()),
            self._retain_graph or bool(self._unresolved),
            False,
            tuple(ends),
            allow_unreachable=True,
            accumulate_grad=accumulate,
        )
        return [] if accumulate else list(gradients)


def _leaf(accumulator: Any) -> Tensor:
    leaf: Tensor = accumulator.variable
    return leaf


def _is_like(gradient: Tensor, leaf: Tensor) -> bool:
    return gradient.layout is not torch.strided or gradient.stride() == leaf.stride()


def _copy(gradient: Tensor, leaf: Tensor) -> Tensor:
    if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
        return gradient.clone()
    return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def _inputs_of(node: Node) -> tuple[tuple[Node | None, int], ...]:
    if type(node) is _FOREIGN:
        raise UsageError(
            "the loss depends on a tensor that came from another worker under another autograd context, where "
            "gradients cannot go. Fetch it again under this context, or detach it"
        )
    return node.next_functions

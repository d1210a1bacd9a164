"""`Dependencies`: which nodes of the local graph can run while some sources are not resolved.

State: belongs to one backward pass, which is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch.autograd.graph import Node

from telegrad.autograd.send_recv import ACCUMULATE_GRAD, RECEIVED, ReceivedGroup
from telegrad.errors import UsageError

_MAX_PATH_LENGTH = 4  # nodes between one that runs and a leaf, if they are to run with it


class Dependencies:
    """Counts, for each node, the incoming edges that are not decided.

    An edge is decided when the node that it comes from is decided. A node is decided when all its
    incoming edges are: then its gradient is complete, or the loss does not depend on it. Each edge
    is counted once, so all decisions of a pass together take linear time.
    """

    def __init__(self, starts: Iterable[Node], receives: Mapping[Node, ReceivedGroup]) -> None:
        self._receives = receives
        self.children: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        self._parents: dict[Node, list[Node]] = {}
        self._undecided_edges: dict[Node, int] = {}
        self._reached: set[Node] = set()  # the loss depends on these
        self.ready: dict[Node, None] = {}  # decided and reached inner nodes that have not run
        self.leaves: list[Node] = []  # decided and reached
        # Received tensors that were decided since `take_receives`, and whether they are reached.
        self.receives: list[tuple[Node, bool]] = []
        self._explore(starts)

    def _explore(self, starts: Iterable[Node]) -> None:
        """Find all nodes that the starts lead to, and count their incoming edges."""
        children, parents, undecided_edges = self.children, self._parents, self._undecided_edges
        stack = []
        for node in starts:
            if node in undecided_edges:
                undecided_edges[node] += 1
            else:
                undecided_edges[node] = 1
                stack.append(node)
        while stack:
            node = stack.pop()
            if node in self._receives or type(node) is ACCUMULATE_GRAD or type(node) is RECEIVED:
                children[node] = ()
                continue
            following = children[node] = node.next_functions
            for child, _ in following:
                if child is None:
                    continue
                if child in undecided_edges:
                    undecided_edges[child] += 1
                else:
                    undecided_edges[child] = 1
                    stack.append(child)
                parents.setdefault(child, []).append(node)

    def decide(self, node: Node, reached: bool) -> None:
        """Decide one of the edges that lead from sources to the starts."""
        stack = [(node, reached)]
        undecided_edges = self._undecided_edges
        while stack:
            node, reached = stack.pop()
            if reached:
                self._reached.add(node)
            undecided_edges[node] -= 1
            if undecided_edges[node]:
                continue
            reached = node in self._reached
            if node in self._receives:
                self.receives.append((node, reached))
            elif reached and type(node) is ACCUMULATE_GRAD:
                self.leaves.append(node)
            elif reached:
                if type(node) is RECEIVED:
                    raise other_context_error()
                self.ready[node] = None
            stack += [(child, reached) for child, _ in self.children[node] if child is not None]

    def take_receives(self) -> list[tuple[Node, bool]]:
        """Return the received tensors that were decided since the last call."""
        receives, self.receives = self.receives, []
        return receives

    def take_nodes_before(self, ends: Iterable[Node]) -> dict[Node, None]:
        """Return the ready nodes that lead to the ends. They are no longer `ready`."""
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
        """Return True if one of `nodes` has an edge to this node."""
        return any(parent in nodes for parent in self._parents.get(node, ()))

    def reached_outputs(self, node: Node) -> set[int]:
        """Return the outputs of a decided node that reached nodes have edges to."""
        return {
            output
            for parent in set(self._parents.get(node, ()))
            if parent in self._reached
            for child, output in self.children[parent]
            if child is node
        }

    def _take_nodes_between(self, nodes: Iterable[Node]) -> dict[Node, None]:
        """Return the ready nodes between `nodes` and leaves, such as the transposition of a weight.

        These take very little time. If they run too, fewer edges lead to nodes that must not run.
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
        """Return the nodes from `node` to a leaf. Return none if the path is long or not ready."""
        path = [node]
        if self._has_ready_parent(node):
            return []
        while len(path) <= _MAX_PATH_LENGTH:
            following = [child for child, _ in self.children[path[-1]] if child is not None]
            if len(following) != 1:
                break
            if type(following[0]) is ACCUMULATE_GRAD:
                return path
            if following[0] not in self.ready or self._has_ready_parent(following[0], path[-1]):
                break
            path.append(following[0])
        return []

    def _has_ready_parent(self, node: Node, besides: Node | None = None) -> bool:
        """Return True if another node than `besides` leads to this node and has not run."""
        parents = self._parents.get(node, [])
        while parents:
            if parents[-1] not in self.ready:
                parents.pop()  # it has run or never will, so no later call has to look at it
            elif parents[-1] is not besides:
                return True
            elif len(parents) == 1:
                break
            else:
                parents[0], parents[-1] = parents[-1], parents[0]
        return False


def other_context_error() -> UsageError:
    return UsageError(
        "the loss depends on a tensor that was received under another autograd context, where "
        "gradients cannot go. Fetch it again under this context, or detach it"
    )

"""`Dependencies`: which nodes of the local graph can run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch.autograd.graph import Node

from telegrad.autograd.send_recv import ACCUMULATE_GRAD, RECEIVED, TensorOrigin
from telegrad.errors import UsageError

_MAX_PATH_LENGTH = 4  # nodes between one that runs and a leaf that need not wait


class Dependencies:
    """For each node, how many of its incoming edges are not decided yet, and whether one reaches it.

    An edge is decided when the node that it comes from is decided: all gradients for that node are
    complete, or it is known that there are none. `decided` goes on from there.
    """

    def __init__(self, starts: Iterable[Node], receives: Mapping[Node, TensorOrigin]) -> None:
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
            if node in self._receives or type(node) is ACCUMULATE_GRAD or type(node) is RECEIVED:
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
            elif reached and type(node) is ACCUMULATE_GRAD:
                self.leaves.append(node)
            elif reached:
                if type(node) is RECEIVED:
                    raise other_context_error()
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
        while len(path) <= _MAX_PATH_LENGTH:
            following = [child for child, _ in self.children[path[-1]] if child is not None]
            if len(following) != 1:
                break
            if type(following[0]) is ACCUMULATE_GRAD:
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


def other_context_error() -> UsageError:
    return UsageError(
        "the loss depends on a tensor that came from another worker under another autograd context, where "
        "gradients cannot go. Fetch it again under this context, or detach it"
    )

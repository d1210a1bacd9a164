"""`Topology`: from which worker each subscriber gets the weights.

One worker of each host, its receiver, gets them from another host; the others read its memory. The
receivers form a tree with the publisher as its root. A worker that reports that its source does not
answer gets another one. The source is then suspected: no one else is sent to it until it calls.

This is a state machine without locks, threads or clock; its user holds a lock. `_receivers` has the
receiver of each host, `_parents` the source of each receiver. What must never be true: a receiver
is its own ancestor.
"""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    """From where a subscriber gets the weights: through shared memory, or as a receiver."""

    worker: str
    is_shared: bool


class Topology:
    """The tree of one publisher, which is the worker `root` on the host `root_host`."""

    def __init__(self, root: str, root_host: str | None, fan_out: int) -> None:
        self._root = root
        self._fan_out = fan_out
        self._receivers: dict[str, str] = {} if root_host is None else {root_host: root}
        self._parents: dict[str, str] = {}
        self._suspects: set[str] = set()

    def __repr__(self) -> str:
        return f"<Topology of {self._root}: {self._parents}, suspects {sorted(self._suspects)}>"

    @property
    def is_empty(self) -> bool:
        """Whether no receiver is in the tree."""
        return not self._parents

    def join(self, worker: str, host: str | None, failed: str | None) -> Source:
        """Return the source of a subscriber. `failed` is one that did not answer.

        `host` is None if the worker cannot share memory with others.
        """
        self._suspects.discard(worker)
        if failed is not None and failed != self._root:
            self._suspects.add(failed)
            self._parents.pop(failed, None)
        if host is not None:
            receiver = self._receivers.get(host)
            if receiver == self._root and failed != self._root:
                return Source(self._root, True)
            if receiver not in (None, worker, self._root) and receiver not in self._suspects:
                self._parents.pop(worker, None)
                return Source(str(receiver), True)
            if receiver != self._root:
                self._receivers[host] = worker
        self._parents.pop(worker, None)
        parent = self._find_parent(worker)
        self._parents[worker] = parent
        return Source(parent, False)

    def remove(self, worker: str) -> None:
        """Forget a worker that left or was lost. Its children report it themselves."""
        self._suspects.discard(worker)
        self._parents.pop(worker, None)
        for host, receiver in list(self._receivers.items()):
            if receiver == worker and worker != self._root:
                del self._receivers[host]

    def _find_parent(self, worker: str) -> str:
        """Return the highest node with room that does not depend on the worker."""
        children: dict[str, list[str]] = {}
        for child, parent in self._parents.items():
            children.setdefault(parent, []).append(child)
        level = [self._root]
        while level:
            for node in level:
                if len(children.get(node, ())) < self._fan_out and node not in self._suspects:
                    return node
            # nodes below the worker are not reached, because it has no parent now
            level = [child for node in level for child in children.get(node, ())]
        return self._root

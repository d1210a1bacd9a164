"""The points where the autograd graph of one worker continues on another.

`SentTensor` is the point where the gradient of a sent tensor enters the local graph again.
`ReceivedTensors` is the node of tensors that one message brought, where the local graph ends. Small
tensors of a container share a node (`MAX_GROUP`), because the engine of torch takes longer for a
node than for a gradient. Their gradients are computed when all of them are complete. That never
prevents another gradient: whatever was computed from one of them came after the whole message.

Locks: a thread that creates the `AccumulateGrad` node of a leaf holds a lock of the leaf while it
waits for the GIL. A thread that waits for that lock and holds the GIL would block the whole
process. `Function.apply` does that, and for leaves that are views, so do `grad_fn` and `is_leaf`.
Therefore functions in this module find nodes through an operation that releases the GIL.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd import hooks
from telegrad.errors import UsageError

# Tensors of one node. For each gradient, the engine of torch looks at all outputs of a node.
MAX_GROUP = 64


class SentTensor:
    """A tensor that was sent to a peer, and the edge where its gradient enters the local graph."""

    __slots__ = ("_edge", "_preceding_node", "device", "leaf", "peer")

    def __init__(self, tensor: Tensor, peer: str) -> None:
        self.peer = peer
        self.device = tensor.device
        # A view can be a leaf too, but reading its `grad_fn` takes a lock: see above.
        is_leaf = not tensor._is_view() and tensor.grad_fn is None
        self.leaf: Tensor | None = tensor if is_leaf else None
        # Created now, since an operation in place would change where the gradient goes.
        self._preceding_node = None if is_leaf else _new_preceding_node(tensor)
        self._edge: GradientEdge | None = None

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        """The node that the gradient goes to, in the form of `Node.next_functions`."""
        edge = self.edge()
        return ((edge.node, edge.output_nr),)

    def edge(self) -> GradientEdge:
        """Return the edge where the gradient enters the local graph."""
        if self._edge is None:
            node, output = self.preceding_node().next_functions[0]
            assert node is not None
            self._edge = GradientEdge(node, output)
        return self._edge

    def preceding_node(self) -> Node:
        """Return a node of a torch operation whose only edge is `edge()`."""
        if self._preceding_node is None:
            assert self.leaf is not None
            self._preceding_node = _new_preceding_node(self.leaf)
        return self._preceding_node


class ReceivedGroup:
    """The tensors of one `ReceivedTensors` node: where they came from, and their gradients.

    The node stores the gradients if torch's engine reaches it while `is_active` is set: in runs in
    which the engine returns no gradients, since those of leaves go to `.grad`. Otherwise the node
    runs only in the user's own `loss.backward()`.
    """

    __slots__ = ("_tensors", "gradients", "is_active", "peer", "tensor_ids")

    def __init__(self, peer: str, tensor_ids: Sequence[int]) -> None:
        self.peer = peer  # the incarnation of the sender
        self.tensor_ids = tensor_ids  # of the sender, by the index of the node's output
        self.is_active = False
        self.gradients: Sequence[Tensor | None] | None = None
        self._tensors: list[weakref.ref[Tensor]] = []

    def __len__(self) -> int:
        return len(self.tensor_ids)

    def set_tensors(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(map(weakref.ref, tensors))

    def edges(self, node: Node) -> list[GradientEdge]:
        """Return the edges where the gradients of the tensors leave the graph."""
        return [GradientEdge(node, output) for output in range(len(self.tensor_ids))]

    def is_unobserved(self, node: Node) -> bool:
        """Return True if no hook sees the gradients and no tensor retains its gradient."""
        if not self._tensors or hooks.tensor_hooks(node):
            return False
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None and tensor.retains_grad:
                return False
        return True


class ReceivedTensors(torch.autograd.Function):
    """The node of tensors that were received from another worker."""

    @staticmethod
    def forward(
        ctx: Any, dummy: Tensor, tensors: Sequence[Tensor], group: ReceivedGroup
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an undefined gradient stays undefined
        ctx.group = group
        # Torch refuses operations in place on views that a function returns.
        return tuple([data.detach() if data._is_view() else data for data in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if not ctx.group.is_active:
            raise UsageError(
                "this graph continues on another worker: call telegrad.autograd.backward("
                "context_id, [loss]) inside the context instead of loss.backward()"
            )
        ctx.group.gradients = gradients
        return None, None, None


# An input that requires a gradient, so that torch records `ReceivedTensors`.
DUMMY_LEAF = torch.empty(0, requires_grad=True)


def attach_receive_nodes(
    data: Sequence[Tensor], tensor_ids: Sequence[int], peer: str
) -> tuple[list[Tensor], dict[Node, ReceivedGroup]]:
    """Return received data as the outputs of new `ReceivedTensors` nodes, and these nodes."""
    if len(data) == 1:
        group = ReceivedGroup(peer, tensor_ids)
        (tensor,) = ReceivedTensors.apply(DUMMY_LEAF, data, group)  # type: ignore[no-untyped-call]
        group.set_tensors((tensor,))
        return [tensor], {tensor.grad_fn: group}
    tensors: list[Tensor] = []
    nodes: dict[Node, ReceivedGroup] = {}
    for start in range(0, len(data), MAX_GROUP):
        part = slice(start, start + MAX_GROUP)
        group = ReceivedGroup(peer, tensor_ids[part])
        outputs = ReceivedTensors.apply(DUMMY_LEAF, data[part], group)  # type: ignore[no-untyped-call]
        group.set_tensors(outputs)
        tensors += outputs
        nodes[outputs[0].grad_fn] = group
    return tensors, nodes


def gradient_edge(tensor: Tensor) -> tuple[Node, int]:
    """Return the node and input that the gradient of a tensor goes to, without taking a lock."""
    node, output = _new_preceding_node(tensor).next_functions[0]
    assert node is not None
    return node, output


def _new_preceding_node(tensor: Tensor) -> Node:
    """Return a new node of a torch operation that passes its gradient on to that of a tensor."""
    if type(tensor) is Tensor and torch.is_grad_enabled() and tensor.layout is torch.strided:
        node = tensor.view_as(tensor).grad_fn
    else:
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            copy = tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()
            node = copy.grad_fn
    assert node is not None
    return node


def is_shared_node(node: Any) -> bool:
    """Return True for the node of several received tensors."""
    return type(node) is RECEIVED and len(node.group) > 1


def is_non_leaf(tensor: Tensor) -> bool:
    """Return True if a tensor that requires a gradient is not a leaf, without taking a lock."""
    if tensor._is_view():
        return type(gradient_edge(tensor)[0]) is not ACCUMULATE_GRAD
    return tensor.grad_fn is not None


def accumulate_grad_node(leaf: Tensor) -> Node:
    """Return the `AccumulateGrad` node of a leaf."""
    return gradient_edge(leaf)[0]


def leaf_of(accumulate_grad: Any) -> Tensor:
    """Return the leaf that an `AccumulateGrad` node belongs to."""
    leaf: Tensor = accumulate_grad.variable
    return leaf


ACCUMULATE_GRAD = type(accumulate_grad_node(DUMMY_LEAF))  # the type of `AccumulateGrad` nodes
RECEIVED: Any = ReceivedTensors._backward_cls  # the type of the nodes of received tensors

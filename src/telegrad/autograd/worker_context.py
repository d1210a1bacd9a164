"""`Context`: one worker's part of a distributed autograd context.

A context starts with `autograd.context()` on one worker. Its id travels with every call that is
made under it (a context is a `messages.call_scope.CallScope`), and a part of it is created on each
worker that such a call reaches (`registry`). Each part records the tensors that require gradients
when they are sent (`sends`) and received (`receives`). A backward pass follows these in reverse
order (`engine`). Gradients of leaves are stored in the context, not in `.grad`.

State: `sends`, `receives`, `peers`, `gradients` and `passes` change under `lock`.
`callees` is only added to until `released` is set. `release` sets that once and clears the rest.
`broken` is set once.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from telegrad.autograd.ended_contexts import MAX_IDS_PER_CALL, EndedContexts
from telegrad.autograd.gradients import add_gradients
from telegrad.autograd.send_recv import ReceivedGroup, SentTensor, attach_receive_nodes
from telegrad.autograd.shared_parameters import SharedParameters
from telegrad.errors import PeerLost
from telegrad.messages.call_scope import current_scope
from telegrad.messages.packing import MessageContext
from telegrad.wire.handshake import Incarnation

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime

# The low bits of an id count the contexts of a worker; the bits above are the worker's rank.
CONTEXT_ID_BITS = 48
_ID_SIZE = 8  # bytes
# By the number of ended contexts: the format of a context's id followed by theirs.
_ID_FORMATS = [struct.Struct(f"<{count + 1}Q") for count in range(MAX_IDS_PER_CALL + 1)]


class Context:
    """One worker's part of a context."""

    def __init__(
        self,
        context_id: int,
        agent: AgentRuntime,
        tensor_ids: Iterator[int],
        ended_contexts: EndedContexts,
        shared_parameters: SharedParameters,
    ) -> None:
        self.context_id = context_id
        self.agent = agent
        self.tensor_ids = tensor_ids  # the source of new ids for sent tensors
        self._ended_contexts = ended_contexts
        self._shared_parameters = shared_parameters
        self.lock: threading.Lock = threading.Lock()
        self.sends: dict[int, SentTensor] = {}  # by tensor id
        self.receives: dict[Node, ReceivedGroup] = {}
        # Peers that tensors were sent to or received from: incarnation to name.
        self.peers: dict[str, str] = {}
        # Peers that calls under this context were sent to: incarnation to name.
        self.callees: dict[str, str] = {}
        self.gradients: dict[Tensor, Tensor] = {}  # by leaf
        self.passes: dict[tuple[str, int], Any] = {}  # by pass id: `engine.BackwardPass`
        self.broken: PeerLost | None = None
        self.released: bool = False

    def __repr__(self) -> str:
        state = "released" if self.released else "broken" if self.broken else "open"
        return (
            f"<Context {self.context_id} on {self.agent.name!r}: {state}, {len(self.sends)} sends, "
            f"{self.count_received()} receives, {len(self.gradients)} gradients>"
        )

    @property
    def rank(self) -> int:
        """The rank of the worker where the context started."""
        return self.context_id >> CONTEXT_ID_BITS

    # The protocol `CallScope`

    def follow(self, to: MessageContext) -> bytes:
        """Return what a call carries: the id of this context, and ids of contexts that ended.

        Nothing if another agent of this process makes the call: gradients would come back to it.
        """
        if to.runtime is not self.agent or not torch.is_grad_enabled():
            return b""
        if not self.add_callee(to.peer, to.incarnation):
            return b""
        ended = self._ended_contexts.take(to.incarnation) if self._ended_contexts else ()
        return _ID_FORMATS[len(ended)].pack(self.context_id, *ended)

    def run(self, call: Callable[[], None]) -> None:
        """Run a call that arrived under this context."""
        if not self._shared_parameters.active:
            call()
            return
        with self._shared_parameters.call():
            call()

    # Tensors and gradients

    def add_callee(self, name: str, incarnation: Incarnation) -> bool:
        """Record a worker that has a part of this context. Return False if it has ended."""
        with self.lock:
            if not self.released:
                self.callees[incarnation] = name
            return not self.released

    def record_sent(self, tensors: Iterable[tuple[int, Tensor]], to: MessageContext) -> None:
        """Record tensors of a message to a peer, with their ids."""
        with self.lock:
            if not self.released:
                peer = to.incarnation
                for tensor_id, tensor in tensors:
                    self.sends[tensor_id] = SentTensor(tensor, peer)
                self.peers[peer] = to.peer

    def record_received(
        self, data: Sequence[Tensor], tensor_ids: Sequence[int], sender: MessageContext
    ) -> list[Tensor]:
        """Return received tensors as outputs of new nodes, and record these nodes."""
        if torch.is_grad_enabled():
            tensors, nodes = attach_receive_nodes(data, tensor_ids, sender.incarnation)
        else:
            with torch.enable_grad():
                tensors, nodes = attach_receive_nodes(data, tensor_ids, sender.incarnation)
        with self.lock:
            if not self.released:
                self.receives.update(nodes)
                self.peers[sender.incarnation] = sender.peer
        return tensors

    def count_received(self) -> int:
        """Return the number of received tensors that are recorded."""
        with self.lock:
            return sum(map(len, self.receives.values()))

    def accumulate(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add gradients of leaves on this worker to those that the context has."""
        with self.lock:
            for leaf, gradient in gradients:
                known = self.gradients.setdefault(leaf, gradient)
                if known is not gradient:
                    self.gradients[leaf] = add_gradients(known, gradient)

    def replace_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        """Set the gradient of a leaf."""
        with self.lock:
            self.gradients[leaf] = gradient

    # Failures and the end

    def raise_if_broken(self) -> None:
        """Raise `PeerLost` if a worker was lost that this context exchanged tensors with."""
        if self.broken is not None:
            raise PeerLost(
                str(self.broken), peer=self.broken.peer, leave_reason=self.broken.leave_reason
            )

    def on_worker_lost(self, name: str, incarnation: Incarnation) -> None:
        """Mark the context as broken if it exchanged tensors with a lost worker."""
        if incarnation in self.peers and self.broken is None:
            self.broken = PeerLost(
                f"worker {name!r} was lost, and gradients of autograd context {self.context_id} "
                "went through it. Start a new context",
                peer=name,
            )

    def release(self) -> None:
        """Drop everything that the context has, and inform the workers that calls went to."""
        with self.lock:
            if self.released:
                return
            self.released = True
            callees, self.callees = self.callees, {}
            dropped = self.sends, self.receives, self.gradients, self.passes
            self.sends, self.receives, self.gradients, self.passes = {}, {}, {}, {}
        # Freeing graphs can take long, so it happens outside the lock.
        del dropped
        self._ended_contexts.add(self.context_id, callees)

    # The methods of torch.distributed.autograd.DistAutogradContext

    def _context_id(self) -> int:
        return self.context_id

    def _known_worker_ids(self) -> set[int]:
        """Return the ranks of the workers that calls under this context were sent to."""
        return {self.agent.get_worker_info(name).id for name in list(self.callees.values())}

    def _send_functions(self) -> dict[int, SentTensor]:
        """Return the sent tensors by an id that the receiver uses too."""
        with self.lock:
            return {
                _message_id(self.agent.local_member.rank, tensor_id): send
                for tensor_id, send in self.sends.items()
            }

    def _recv_functions(self) -> dict[int, Node]:
        """Return the nodes of the received tensors by an id that the sender uses too."""
        with self.lock:
            received = [
                (node, self.peers[group.peer], tensor_id)
                for node, group in self.receives.items()
                for tensor_id in group.tensor_ids
            ]
        return {
            _message_id(self.agent.get_worker_info(name).id, tensor_id): node
            for node, name, tensor_id in received
        }


def _message_id(sender_rank: int, tensor_id: int) -> int:
    return (max(sender_rank, 0) << CONTEXT_ID_BITS) | tensor_id


def decode_ids(encoded: bytes) -> tuple[int, ...]:
    """Return the ids that `Context.follow` encoded: of the context, then of ended ones."""
    return _ID_FORMATS[len(encoded) // _ID_SIZE - 1].unpack(encoded)


def current_context() -> Context | None:
    """Return the context that the calling thread runs under."""
    context = current_scope.get()
    return context if isinstance(context, Context) else None

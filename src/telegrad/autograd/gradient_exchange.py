"""`GradientExchange`: which gradients one worker receives and sends in a backward pass.

Gradients are sent in the reverse direction of tensors. Each worker answers for the tensors that it
received from a peer. An answer is a gradient (None if it is undefined, as after a function whose
backward returns None), or says that the loss does not depend on the tensor. The first message to a
peer also lists the tensors that will be answered later; that the loss does not depend on a tensor
is the answer for all others. So every sent tensor is answered exactly once, also results that were
not used and replies that were dropped, and no worker waits for an answer that does not come.

Shortcuts: a worker often sends a tensor back to the peer that it came from, as in a chain of calls
or an RNN. The gradient of the tensor that was sent back goes to that peer again, so the peer can
add it itself. A `Shortcut` informs the peer. It is part of the first message to the peer, if the
worker has not received a message from the peer before and no hook observes the gradient. The peer
uses it if it has not sent its first message yet. Otherwise the two first messages crossed, and
both sides notice (`has_heard`): the peer sends its answers as if there were no shortcut, and the
worker forwards them. With shortcuts a chain of calls to one worker takes one round trip.

State: belongs to one `BackwardPass`, which lets one thread at a time call it. There are no locks
and no calls to other workers in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd.gradient_messages import GradientMessage, pack, unpack
from telegrad.autograd.gradients import add_gradients
from telegrad.autograd.local_graph import GradientSource, LocalGraph, ReceivedGradients
from telegrad.autograd.send_recv import ReceivedGroup, SentTensor
from telegrad.autograd.worker_context import Context
from telegrad.errors import InternalError, TelegradError

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


_MANY = 8  # gradients; with fewer, checks over all of them at once take longer


class _Outgoing:
    """Answers that were not sent yet."""

    def __init__(self) -> None:
        self.tensor_ids: list[int] = []  # of `gradients`
        self.gradients: list[Tensor | None] = []
        self.unreached: list[int] = []


class GradientExchange:
    """One worker's part of the exchange of gradients in a backward pass.

    Workers are identified by their incarnations, tensors by their ids.
    """

    def __init__(
        self,
        context: Context,
        retain_graph: bool,
        roots: Sequence[Tensor] = (),
        activated_by: str | None = None,
    ) -> None:
        self._context = context
        self._own_incarnation = context.agent.local_member.incarnation
        with context.lock:
            sends, receives = context.sends.copy(), context.receives.copy()
            self.peers = context.peers.copy()
        # Shortcuts by peer, as a map from the first to the second id of each `Shortcut`.
        self._own_shortcuts: dict[str, dict[int, int]] = {}  # to be sent
        self._used_shortcuts: dict[str, dict[int, int]] = {}  # of the peer, used on this worker
        self._forwarded: dict[str, dict[int, int]] = {}  # of this worker, not used by the peer
        sources: dict[Any, GradientSource] = {}
        # By peer: the ids of tensors that were sent to it and that it has not answered.
        self._unanswered_sends: dict[str, set[int]] = {}
        for tensor_id, send in sends.items():
            peer = send.peer
            if (
                send.leaf is None
                and peer != activated_by
                and self._add_shortcut(send, tensor_id, receives)
            ):
                continue
            sources[tensor_id] = send
            if peer in self._unanswered_sends:
                self._unanswered_sends[peer].add(tensor_id)
            else:
                self._unanswered_sends[peer] = {tensor_id}
        # By peer: the ids of tensors that were received from it and that have no answer.
        self._unanswered_receives: dict[str, set[int]] = {}
        for group in receives.values():
            if group.peer in self._unanswered_receives:
                self._unanswered_receives[group.peer].update(group.tensor_ids)
            else:
                self._unanswered_receives[group.peer] = set(group.tensor_ids)
        for index, root in enumerate(roots):
            sources[index, "root"] = _RootTensor(root)
        self._sends = sends
        self._graph = LocalGraph(sources, receives, retain_graph)
        for index, root in enumerate(roots):
            self._graph.resolve((index, "root"), torch.ones_like(root))
        # By tensor id: how many further answers the peer sends, all of which are added up.
        self._extra_answers: dict[int, int] = {}
        # By tensor id: the sum of the answers so far, for tensors in `_forwarded`.
        self._partial_answers: dict[int, tuple[bool, Tensor | None]] = {}
        # Messages of peers whose first message has not been received.
        self._early_messages: dict[str, list[GradientMessage]] = {}
        self._informed: set[str] = set()  # peers that the first message was created for
        self._heard_from: set[str] = set()  # peers whose first message was received
        # By peer: answers for the next message.
        self._outgoing: dict[str, _Outgoing] = {}

    def __repr__(self) -> str:
        return f"<GradientExchange: {self._graph!r}>"

    def _add_shortcut(
        self, send: SentTensor, tensor_id: int, receives: dict[Node, ReceivedGroup]
    ) -> bool:
        """Add a shortcut and return True if a tensor was sent back to where it came from."""
        node, output = send.edge()[:2]
        group = receives.get(node)
        if group is None or group.peer != send.peer or send.peer == self._own_incarnation:
            return False
        if not group.is_unobserved(node):
            return False
        self._own_shortcuts.setdefault(send.peer, {})[tensor_id] = group.tensor_ids[output]
        return True

    @property
    def unanswered(self) -> int:
        """The number of sent tensors whose gradients have not been received."""
        return sum(len(tensor_ids) for tensor_ids in self._unanswered_sends.values())

    # Messages of peers

    def apply(self, peer: str, message: GradientMessage) -> None:
        """Take the answers in a message of a peer."""
        is_first = message.announced is not None and peer not in self._heard_from
        if not is_first and peer not in self._heard_from:
            self._early_messages.setdefault(peer, []).append(message)
            return
        received = unpack(message.gradients)
        if is_first:
            self._heard_from.add(peer)
            self._agree_on_shortcuts(peer, message)
        for tensor_id in message.unreached:
            self._take_answer(peer, tensor_id, None, reached=False)
        for tensor_ids, gradients in received:
            self._take_gradients(peer, tensor_ids, gradients)
        if is_first:
            if self._unanswered_sends.get(peer):
                mentioned = {*(message.announced or ()), *message.unreached}
                mentioned.update(*(tensor_ids for tensor_ids, _ in received))
                for tensor_id in self._unanswered_sends[peer] - mentioned:
                    self._take_answer(peer, tensor_id, None, reached=False)
            for early in self._early_messages.pop(peer, ()):
                self.apply(peer, early)

    def _agree_on_shortcuts(self, peer: str, message: GradientMessage) -> None:
        """Find out from the first message of a peer which shortcuts are used."""
        own_shortcuts = self._own_shortcuts.pop(peer, None)
        if own_shortcuts and not message.has_heard:
            # The peer had sent its first message before it knew them.
            self._forwarded[peer] = own_shortcuts
            self._unanswered_sends.setdefault(peer, set()).update(own_shortcuts)
        sends = self._unanswered_sends.get(peer, ())
        receives = self._unanswered_receives.get(peer, ())
        for sent_back, original in message.shortcuts:
            if original not in sends:
                continue  # it was sent after this pass started
            if peer in self._informed:
                # The first messages crossed: the peer sends this gradient in addition.
                self._extra_answers[original] = self._extra_answers.get(original, 0) + 1
                if original in self._forwarded.get(peer, ()):
                    continue
            elif sent_back in receives:
                self._used_shortcuts.setdefault(peer, {})[sent_back] = original
            else:
                continue  # it was never received
            self._graph.expect_another(original)

    def _take_gradients(
        self, peer: str, tensor_ids: Sequence[int], gradients: Sequence[Tensor | None]
    ) -> None:
        """Take gradients of a peer, many at once if they are of leaves and complete."""
        if len(tensor_ids) < _MANY:
            for tensor_id, gradient in zip(tensor_ids, gradients, strict=True):
                self._take_answer(peer, tensor_id, gradient)
            return
        unanswered = self._unanswered_sends.get(peer, set())
        leaves = [self._sends[tensor_id].leaf for tensor_id in tensor_ids]
        if (
            peer != self._own_incarnation
            and not self._extra_answers
            and not self._forwarded
            and unanswered.issuperset(tensor_ids)
            and self._graph.resolve_leaves(tensor_ids, leaves, gradients)
        ):
            unanswered.difference_update(tensor_ids)
            return
        for tensor_id, gradient in zip(tensor_ids, gradients, strict=True):
            self._take_answer(peer, tensor_id, gradient)

    def _take_answer(
        self, peer: str, tensor_id: int, gradient: Tensor | None, *, reached: bool = True
    ) -> None:
        """Take one answer for a sent tensor."""
        unanswered = self._unanswered_sends.get(peer)
        if unanswered is None or tensor_id not in unanswered:
            return
        extra_answers = self._extra_answers.get(tensor_id)
        if extra_answers:
            self._extra_answers[tensor_id] = extra_answers - 1
        else:
            unanswered.discard(tensor_id)
        forwarded = self._forwarded.get(peer)
        if forwarded and tensor_id in forwarded:
            reached_before, total = self._partial_answers.pop(tensor_id, (False, None))
            if total is None:
                total = gradient
            elif gradient is not None:
                total = add_gradients(total, gradient)
            reached = reached or reached_before
            if extra_answers:
                self._partial_answers[tensor_id] = reached, total
            else:
                self._add_outgoing(peer, forwarded[tensor_id], reached, total)
            return
        if gradient is not None and gradient.device != self._sends[tensor_id].device:
            gradient = gradient.to(self._sends[tensor_id].device)  # pragma: gpu
        self._graph.resolve(
            tensor_id, gradient, reached=reached, exclusive=peer != self._own_incarnation
        )

    # The local graph

    def run(self) -> None:
        """Run the local graph until it needs answers of other workers.

        Answers for tensors that this worker sent to itself are taken at once.
        """
        while True:
            try:
                result = self._graph.run()
            except Exception as error:
                raise _with_worker(error, self._context.agent) from error
            if result.leaves:
                self._context.accumulate(result.leaves)
            has_resolved = False
            for answers in result.receives:
                has_resolved |= self._take_own_answers(answers)
            message_to_self = None
            if self._own_incarnation in self.peers:
                message_to_self = self.next_message(self._own_incarnation)
            if message_to_self is not None:
                self.apply(self._own_incarnation, message_to_self)
            elif not has_resolved:
                return

    def _take_own_answers(self, answers: ReceivedGradients) -> bool:
        """Take answers for received tensors. Return True if a shortcut uses one of them."""
        group, gradients, unreached = answers
        peer, tensor_ids = group.peer, group.tensor_ids
        self._unanswered_receives[peer].difference_update(tensor_ids)
        used = self._used_shortcuts.get(peer, {})
        if not unreached and used.keys().isdisjoint(tensor_ids):
            outgoing = self._outgoing.setdefault(peer, _Outgoing())
            outgoing.tensor_ids += tensor_ids
            outgoing.gradients += gradients
            return False
        has_resolved = False
        for index, (tensor_id, gradient) in enumerate(zip(tensor_ids, gradients, strict=True)):
            if tensor_id in used:
                self._graph.resolve(used[tensor_id], gradient, reached=index not in unreached)
                has_resolved = True
            else:
                self._add_outgoing(peer, tensor_id, index not in unreached, gradient)
        return has_resolved

    # Messages to peers

    def _add_outgoing(
        self, peer: str, tensor_id: int, reached: bool, gradient: Tensor | None
    ) -> None:
        """Add an answer to the next message to a peer."""
        outgoing = self._outgoing.setdefault(peer, _Outgoing())
        if reached:
            outgoing.tensor_ids.append(tensor_id)
            outgoing.gradients.append(gradient)
        else:
            outgoing.unreached.append(tensor_id)

    def take_messages(self, activator: str, is_waiting: bool) -> list[tuple[str, GradientMessage]]:
        """Return the messages that have to be sent now, with their peers.

        Answers for the activator can wait for the reply to it, unless that has to wait
        (`is_waiting`, or there are messages to others).
        """
        messages = []
        for peer in self.peers:
            if peer not in (activator, self._own_incarnation):
                message = self.next_message(peer)
                if message is not None:
                    messages.append((peer, message))
        if (messages or is_waiting) and self._outgoing.get(activator):
            message = self.next_message(activator)
            assert message is not None
            messages.append((activator, message))
        return messages

    def next_message(self, peer: str) -> GradientMessage | None:
        """Return what has to be sent to a peer, or None if there is nothing."""
        outgoing = self._outgoing.pop(peer, None) or _Outgoing()
        unreached = outgoing.unreached
        # The peer can be missing in `peers`, if its tensors arrived after the pass started.
        if peer not in self._informed:
            self._informed.add(peer)
            announced = list(self._unanswered_receives.get(peer, ()))
            if peer in self._used_shortcuts:
                used = self._used_shortcuts[peer]
                announced = [tensor_id for tensor_id in announced if tensor_id not in used]
            forwarded = self._forwarded.get(peer, {})
            shortcuts = list(self._own_shortcuts.get(peer, forwarded).items())
            # Unreached tensors are not mentioned, except those that get several answers.
            with_several_answers = set(forwarded.values())
            unreached = [tensor_id for tensor_id in unreached if tensor_id in with_several_answers]
            has_heard = peer in self._heard_from
            gradients = pack(outgoing.tensor_ids, outgoing.gradients)
            return GradientMessage(gradients, unreached, announced, shortcuts, has_heard)
        if not outgoing.gradients and not unreached:
            return None
        return GradientMessage(pack(outgoing.tensor_ids, outgoing.gradients), unreached, None)


class _RootTensor:
    """A root of the pass as a `GradientSource`."""

    leaf: Tensor | None = None

    def __init__(self, root: Tensor) -> None:
        self._root = root

    def edge(self) -> GradientEdge:
        assert self._root.grad_fn is not None
        return GradientEdge(self._root.grad_fn, self._root.output_nr)

    def preceding_node(self) -> Node:
        raise InternalError("the gradient of a root is always defined")


def _with_worker(error: Exception, agent: AgentRuntime) -> Exception:
    """Return an error of the user's graph with the name of the worker.

    It is always a `RuntimeError`, as in torch.
    """
    if isinstance(error, TelegradError):
        return error
    what = str(error) if isinstance(error, RuntimeError) else f"{error} ({type(error).__name__})"
    return RuntimeError(
        f"Error on Node {agent.local_member.rank}: {what} "
        f"[worker {agent.name!r}, in the backward pass]"
    )

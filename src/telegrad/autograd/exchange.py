"""`GradientExchange`: which gradients one worker gets and sends in a backward pass.

Gradients go the way the tensors came. In a pass each worker tells each peer that it exchanged
tensors with, once, which of the tensors that it has from that peer will be answered later. An
answer is a gradient (None if it is undefined, as after a function whose backward returns None), or
says that the loss does not depend on the tensor. That is also the answer for whatever is neither
answered nor announced then. So every tensor that was sent is answered exactly once, unused results
and dropped replies included, and nobody waits in vain.

A worker often sends a tensor back to the peer that it came from, as in a chain of calls or an RNN.
The gradient of what was sent back then goes to that peer again, so the peer can add it itself. A
`Shortcut` says so. It travels with the first message to the peer, if nothing was heard of the peer
before and nobody observes the gradient on the way. The peer uses it if it has told nothing yet.
Otherwise the two first messages crossed, which both sides notice: the peer sends its answers as if
there were no shortcut, and the worker passes them on. So a chain of calls to one worker takes one
round trip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from telegrad.autograd.gradient_messages import (
    GradientMessage,
    Gradients,
    pack,
    unpack,
)
from telegrad.autograd.gradients import add_gradients
from telegrad.autograd.local_graph import GradientSource, LocalGraph
from telegrad.autograd.send_recv import SentTensor, TensorOrigin
from telegrad.autograd.worker_context import Context
from telegrad.errors import InternalError, TelegradError

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


class GradientExchange:
    """One worker's part of the exchange of gradients in a backward pass."""

    def __init__(
        self,
        context: Context,
        retain_graph: bool,
        roots: Sequence[Tensor] = (),
        activated_by: str | None = None,
    ) -> None:
        self._context = context
        self._me = context.agent.local_member.incarnation
        with context.lock:
            sends, receives, self.peers = (
                context.sends.copy(),
                context.receives.copy(),
                context.peers.copy(),
            )
        self._shortcuts: dict[str, dict[int, int]] = {}  # ours, by peer
        # by peer, those of its shortcuts that are used here
        self._used_shortcuts: dict[str, dict[int, int]] = {}
        # by peer, those of ours that it did not use
        self._forwarded: dict[str, dict[int, int]] = {}
        self._unanswered_sends: dict[
            str, set[int]
        ] = {}  # by peer, the tickets that it has not answered
        sources: dict[Any, GradientSource] = {}
        for tensor_id, send in sends.items():
            peer = send.peer
            if (
                send.leaf is None
                and peer != activated_by
                and self._is_shortcut(send, tensor_id, receives)
            ):
                continue
            sources[tensor_id] = send
            if peer in self._unanswered_sends:
                self._unanswered_sends[peer].add(tensor_id)
            else:
                self._unanswered_sends[peer] = {tensor_id}
        self._unanswered_receives: dict[
            str, set[int]
        ] = {}  # by peer, the tickets that it has no answer for
        for peer, tensor_id in receives.values():
            if peer in self._unanswered_receives:
                self._unanswered_receives[peer].add(tensor_id)
            else:
                self._unanswered_receives[peer] = {tensor_id}
        for number, root in enumerate(roots):
            sources[number, "root"] = _RootTensor(root)
        self._sends = sends
        self._graph = LocalGraph(sources, receives, context.captures, retain_graph)
        for number, root in enumerate(roots):
            self._graph.resolve((number, "root"), torch.ones_like(root))
        # by ticket, how many further gradients the peer will send
        self._extra_answers: dict[int, int] = {}
        # by ticket, what came of answers to pass on
        self._partial: dict[int, tuple[bool, Tensor | None]] = {}
        # messages of peers whose first message has not come
        self._early_messages: dict[str, list[GradientMessage]] = {}
        self._greeted: set[str] = set()
        self._heard_from: set[str] = set()
        self._outgoing: dict[str, tuple[list[tuple[int, Tensor | None]], list[int]]] = {}

    def __repr__(self) -> str:
        return f"<GradientExchange: {self._graph!r}>"

    def _is_shortcut(
        self, send: SentTensor, tensor_id: int, receives: dict[Node, TensorOrigin]
    ) -> bool:
        """Note if a tensor was sent back to where it came from, so that the peer can answer for it itself."""
        node = send.edge().node
        receive = receives.get(node)
        if receive is None or receive[0] != send.peer or send.peer == self._me:
            return False
        if not self._context.captures[node].is_unobserved(node):
            return False
        self._shortcuts.setdefault(send.peer, {})[tensor_id] = receive[1]
        return True

    @property
    def unanswered(self) -> int:
        """How many tensors went out whose gradients have not come back."""
        return sum(len(tensor_ids) for tensor_ids in self._unanswered_sends.values())

    def apply(self, peer: str, message: GradientMessage) -> None:
        is_first = message.announced is not None and peer not in self._heard_from
        if not is_first and peer not in self._heard_from:
            self._early_messages.setdefault(peer, []).append(message)
            return
        gradients = unpack(message.gradients)
        if is_first:
            self._heard_from.add(peer)
            self._agree_on_shortcuts(peer, message)
        for tensor_id in message.unreached:
            self._take_answer(peer, tensor_id, None, reached=False)
        if self._extra_answers or self._forwarded:
            for tensor_id, gradient in gradients:
                self._take_answer(peer, tensor_id, gradient)
        else:
            self._take_gradients(peer, gradients)
        if is_first:
            mentioned = {
                *(message.announced or ()),
                *message.unreached,
                *(tensor_id for tensor_id, _ in gradients),
            }
            for tensor_id in self._unanswered_sends.get(peer, set()) - mentioned:
                self._take_answer(peer, tensor_id, None, reached=False)
            for early in self._early_messages.pop(peer, ()):
                self.apply(peer, early)

    def _agree_on_shortcuts(self, peer: str, message: GradientMessage) -> None:
        """Find out from the first message of a peer which shortcuts are used, the peer's and ours."""
        ours = self._shortcuts.pop(peer, None)
        if ours and not message.has_heard:
            self._forwarded[peer] = ours
            self._unanswered_sends.setdefault(peer, set()).update(ours)
        waiting, owed = (
            self._unanswered_sends.get(peer, ()),
            self._unanswered_receives.get(peer, ()),
        )
        for sent_back, came in message.shortcuts:
            if came not in waiting:
                continue  # it was sent after this pass began
            if peer in self._greeted:
                self._extra_answers[came] = self._extra_answers.get(came, 0) + 1
                if came in self._forwarded.get(peer, ()):
                    continue
            elif sent_back in owed:
                self._used_shortcuts.setdefault(peer, {})[sent_back] = came
            else:
                continue  # it never arrived
            self._graph.expect_another(came)

    def _take_gradients(self, peer: str, gradients: Gradients) -> None:
        """Take gradients of tensors that nothing is added to and that are not passed on."""
        waiting, sends = self._unanswered_sends.get(peer, set()), self._sends
        taken: Gradients = []
        for answer in gradients:
            tensor_id, gradient = answer
            if tensor_id in waiting:
                waiting.discard(tensor_id)
                # a map moved the tensor
                if gradient is not None and gradient.device != sends[tensor_id].device:
                    answer = (tensor_id, gradient.to(sends[tensor_id].device))
                taken.append(answer)
        self._graph.resolve_all(taken, exclusive=peer != self._me)

    def _take_answer(
        self, peer: str, tensor_id: int, gradient: Tensor | None, *, reached: bool = True
    ) -> None:
        waiting = self._unanswered_sends.get(peer)
        if waiting is None or tensor_id not in waiting:
            return
        additions = self._extra_answers.get(tensor_id)
        if additions:
            self._extra_answers[tensor_id] = additions - 1
        else:
            waiting.discard(tensor_id)
        forwarded = self._forwarded.get(peer)
        if forwarded and tensor_id in forwarded:
            before_reached, before = self._partial.pop(tensor_id, (False, None))
            total = (
                add_gradients(before, gradient)
                if before is not None and gradient is not None
                else gradient
            )
            answer = (reached or before_reached, before if total is None else total)
            if additions:
                self._partial[tensor_id] = answer
            else:
                self._add_outgoing(peer, forwarded[tensor_id], *answer)
            return
        if gradient is not None and gradient.device != self._sends[tensor_id].device:
            gradient = gradient.to(self._sends[tensor_id].device)
        self._graph.resolve(tensor_id, gradient, reached=reached, exclusive=peer != self._me)

    def _add_outgoing(
        self, peer: str, tensor_id: int, reached: bool, gradient: Tensor | None
    ) -> None:
        outgoing = self._outgoing.get(peer)
        if outgoing is None:
            outgoing = self._outgoing[peer] = ([], [])
        if reached:
            outgoing[0].append((tensor_id, gradient))
        else:
            outgoing[1].append(tensor_id)

    def run(self) -> None:
        """Run until only others can help. Answers for this worker itself are taken on the spot."""
        while True:
            try:
                outcome = self._graph.run()
            except Exception as error:
                raise _with_worker(error, self._context.agent) from error
            if outcome.leaves:
                self._context.add(outcome.leaves)
            go_on = False
            used = self._used_shortcuts
            for (peer, tensor_id), reached, gradient in outcome.receives:
                self._unanswered_receives[peer].discard(tensor_id)
                if used and tensor_id in used.get(peer, ()):
                    self._graph.resolve(used[peer][tensor_id], gradient, reached=reached)
                    go_on = True
                else:
                    self._add_outgoing(peer, tensor_id, reached, gradient)
            to_myself = self.next_message(self._me) if self._me in self.peers else None
            if to_myself is not None:
                self.apply(self._me, to_myself)
            elif not go_on:
                return

    def messages(self, waker: str, is_waiting: bool) -> list[tuple[str, GradientMessage]]:
        """What peers have to be told now. The waker can wait for its reply, unless others make that late."""
        messages = []
        for peer in self.peers:
            if peer not in (waker, self._me):
                message = self.next_message(peer)
                if message is not None:
                    messages.append((peer, message))
        if (messages or is_waiting) and self._outgoing.get(waker):
            to_waker = self.next_message(waker)
            assert to_waker is not None
            messages.append((waker, to_waker))
        return messages

    def next_message(self, peer: str) -> GradientMessage | None:
        """What a peer has not been told yet."""
        gradients, unreached = self._outgoing.pop(peer, ([], []))
        # it may not be one of the peers: what it sent can have come after the pass began
        if peer not in self._greeted:
            self._greeted.add(peer)
            announced = list(self._unanswered_receives.get(peer, ()))
            if peer in self._used_shortcuts:
                announced = [
                    tensor_id
                    for tensor_id in announced
                    if tensor_id not in self._used_shortcuts[peer]
                ]
            forwarded = self._forwarded.get(peer, {})
            shortcuts = list(self._shortcuts.get(peer, forwarded).items())
            added_to = set(forwarded.values())  # what is not mentioned of others is unreached
            unreached = [tensor_id for tensor_id in unreached if tensor_id in added_to]
            return GradientMessage(
                pack(gradients), unreached, announced, shortcuts, peer in self._heard_from
            )
        if not gradients and not unreached:
            return None
        return GradientMessage(pack(gradients), unreached, None)


class _RootTensor:
    """A tensor that a pass begins with."""

    leaf: Tensor | None = None

    def __init__(self, root: Tensor) -> None:
        self._root = root

    def edge(self) -> GradientEdge:
        assert self._root.grad_fn is not None
        return GradientEdge(self._root.grad_fn, self._root.output_nr)

    def preceding_node(self) -> Node:
        raise InternalError("a root always has a gradient")


def _with_worker(error: Exception, agent: AgentRuntime) -> Exception:
    """An error of the user's own graph, with the worker that it happened on; as torch, always a RuntimeError."""
    if isinstance(error, TelegradError):
        return error
    what = str(error) if isinstance(error, RuntimeError) else f"{error} ({type(error).__name__})"
    return RuntimeError(
        f"Error on Node {agent.local_member.rank}: {what} [worker {agent.name!r}, in the backward pass]"
    )

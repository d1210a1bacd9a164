"""The backward pass over all workers of a context: `BackwardPass` is one worker's part of it.

A message makes a worker run what it can (`graph`) and send messages of its own. It replies to the
message that woke it when all of its own have been replied to, and to all others at once (Dijkstra
and Scholten's way to notice the end of a diffusing computation). When the worker that began has its
replies, everybody is done. Replies carry gradients too, so a call and its backward pass take one
round trip each.

State: `_inbox`, `_busy`, `_unreplied` under `_lock`; the thread that set `_busy` alone touches the
rest. A pass that failed fails everybody who waits for it and takes nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from telegrad.autograd.exchange import GradientExchange
from telegrad.autograd.gradient_messages import (
    GradientMessage,
    GradientReply,
)
from telegrad.autograd.registry import ContextRegistry
from telegrad.autograd.worker_context import Context
from telegrad.errors import InternalError, PeerLost, UsageError
from telegrad.futures import Future
from telegrad.messages.routes import allow_any_device
from telegrad.messages.scope import current_scope
from telegrad.runtime import active_runtime
from telegrad.server.functions import DeferredReply, trusted

PassId = tuple[str, int]


class _ReceivedMessage(NamedTuple):
    peer: str
    message: Sequence[Any] | Exception | None  # the fields of a `GradientMessage`
    reply: GradientReply | None  # None: this is itself a reply


def run(context: Context, roots: Sequence[Tensor], retain_graph: bool) -> None:
    """A backward pass that begins here."""
    agent = context.agent
    pass_id = (agent.local_member.incarnation, next(context.contexts.passes))
    this = BackwardPass(context, pass_id, retain_graph, roots)
    with context.lock:
        context.passes[pass_id] = this
    # the messages of a pass do not run under the context themselves
    token = current_scope.set(None)
    try:
        this.begin()
    finally:
        current_scope.reset(token)
    if this.unanswered:
        raise InternalError(
            f"the backward pass ended without the gradients of {this.unanswered} tensors; {this!r}"
        )


class BackwardPass:
    def __init__(
        self,
        context: Context,
        pass_id: PassId,
        retain_graph: bool,
        roots: Sequence[Tensor] = (),
        activated_by: str | None = None,
    ) -> None:
        self._context = context
        self._agent = context.agent
        self._me = context.agent.local_member.incarnation
        self._pass_id = pass_id
        self._retain_graph = retain_graph
        self._exchange = GradientExchange(context, retain_graph, roots, activated_by)
        self._waker: _ReceivedMessage | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._inbox: list[_ReceivedMessage] = []
        self._busy = False
        self._unreplied = 0

    def __repr__(self) -> str:
        return (
            f"<BackwardPass {self._pass_id} on {self._agent.name!r}: {self._exchange!r}, "
            f"{self._unreplied} messages under way>"
        )

    @property
    def unanswered(self) -> int:
        """How many tensors went out whose gradients have not come back."""
        return self._exchange.unanswered

    def begin(self) -> None:
        """Start here, and return when all workers are done."""
        done = GradientReply()
        self._handle(_ReceivedMessage(self._me, None, done))
        outcome = done.take()
        if isinstance(outcome, Future):
            outcome.wait()

    def receive(self, peer: str, message: Sequence[Any]) -> Any:
        """A message of another worker; returns the reply."""
        reply = GradientReply()
        self._handle(_ReceivedMessage(peer, message, reply))
        outcome = reply.take()
        return DeferredReply(outcome) if isinstance(outcome, Future) else outcome

    def _handle(self, received: _ReceivedMessage) -> None:
        if self._enqueue(received):
            self._process_inbox()

    def _enqueue(self, received: _ReceivedMessage) -> bool:
        """True if the calling thread has to deal with it, since nobody else is busy."""
        with self._lock:
            self._inbox.append(received)
            if received.reply is None:
                self._unreplied -= 1
            was_busy, self._busy = self._busy, True
            return not was_busy

    def _process_inbox(self) -> None:
        """Deal with what arrives until nothing is left to do here."""
        while True:
            with self._lock:
                received_messages, self._inbox = self._inbox, []
                if not received_messages and (self._unreplied or self._waker is None):
                    self._busy = False
                    return
            if not received_messages:
                self._reply_to_waker()
                continue
            try:
                messages = self._step(received_messages)
            except Exception as error:
                self._fail(error, received_messages)
                continue
            if not self._send(messages):
                return

    def _step(self, received_messages: list[_ReceivedMessage]) -> list[tuple[str, GradientMessage]]:
        """Apply messages, run, reply to those that need not wait; returns the messages to send."""
        if self._error is not None:
            raise self._error
        self._context.check()
        for received in received_messages:
            if isinstance(received.message, Exception):
                raise received.message
            if received.message is not None:
                self._exchange.apply(received.peer, GradientMessage(*received.message))
        self._exchange.run()
        for received in received_messages:
            if received.reply is not None:
                if self._waker is None:
                    self._waker = received
                else:
                    received.reply.settle(self._exchange.next_message(received.peer))
        waker = self._me if self._waker is None else self._waker.peer
        return self._exchange.messages(waker, self._unreplied > 0)

    def _reply_to_waker(self) -> None:
        """All is done here, unless somebody died since: what went through it, or ended there, is lost."""
        try:
            self._context.check()
        except PeerLost as error:
            self._fail(error, [])
            return
        waker, self._waker = self._waker, None
        assert waker is not None and waker.reply is not None  # noqa: PT018
        waker.reply.settle(
            None if waker.peer == self._me else self._exchange.next_message(waker.peer)
        )

    def _fail(self, error: Exception, received_messages: list[_ReceivedMessage]) -> None:
        """End the pass on this worker: everybody who waits for it learns why."""
        if self._agent.closing:  # whoever it could not reach is not to blame
            name = self._agent.name
            error = PeerLost(f"worker {name!r} left the group during the backward pass", peer=name)
        self._error = error
        waiting = received_messages if self._waker is None else [self._waker, *received_messages]
        self._waker = None
        for received in waiting:
            if received.reply is not None:
                received.reply.settle(None, error)

    def _send(self, messages: list[tuple[str, GradientMessage]]) -> bool:
        """Send messages. This thread waits for the last reply, if nothing else is to be done.

        False: somebody else deals with what arrives from now on.
        """
        if not messages:
            return True
        with self._lock:
            self._unreplied += len(messages)
        for peer, message in messages[:-1]:
            self._start(peer, message)
        peer, message = messages[-1]
        with self._lock:
            more = bool(self._inbox)
            self._busy = more
        if more:
            self._start(peer, message)
            return True
        try:
            reply = self._agent.invoke(
                self._exchange.peers[peer],
                _receive_message,
                self._arguments(peer, message),
                None,
                None,
            )
        except Exception as error:
            reply = error
        return self._enqueue(_ReceivedMessage(peer, reply, None))

    def _start(self, peer: str, message: GradientMessage) -> None:
        try:
            future = self._agent.start(
                self._exchange.peers[peer],
                _receive_message,
                self._arguments(peer, message),
                None,
                None,
            )
        except Exception as error:
            # for the thread that is busy, which is this one
            self._enqueue(_ReceivedMessage(peer, error, None))
            return

        def take() -> None:
            error = future.exception()
            self._handle(
                _ReceivedMessage(
                    peer, error if isinstance(error, Exception) else future.wait(), None
                )
            )

        future.add_done_callback(lambda _: self._agent.threads.start(take))

    def _arguments(self, peer: str, message: GradientMessage) -> tuple[Any, ...]:
        return (
            peer,
            self._context.number,
            self._pass_id,
            self._retain_graph,
            self._me,
            tuple(message),
        )


@trusted
@allow_any_device
def _receive_message(
    me: str, number: int, pass_id: PassId, retain_graph: bool, sender: str, message: Sequence[Any]
) -> Any:
    """A message of a pass arrives."""
    agent = active_runtime()
    if agent is None or agent.local_member.incarnation != me:
        raise PeerLost(
            "a worker restarted since tensors were sent to it under this autograd context; start a new one"
        )
    contexts = ContextRegistry.of(agent)
    context = contexts.find(number)
    if context is None:
        if contexts.has_ended(number):
            raise UsageError(
                f"autograd context {number} has ended on worker {agent.name!r}, and its graph is gone"
            )
        return tuple(GradientMessage([], [], []))  # nothing of the context has arrived here
    with context.lock:
        this = context.passes.get(pass_id)
    if this is None:
        made = BackwardPass(context, pass_id, retain_graph, activated_by=sender)
        with context.lock:
            this = context.passes.setdefault(pass_id, made)
    return this.receive(sender, message)

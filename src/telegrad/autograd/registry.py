"""`ContextRegistry`: all contexts of one agent."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING

from telegrad.autograd import hooks
from telegrad.autograd.shared_parameters import SharedParameters
from telegrad.autograd.worker_context import (
    CONTEXT_ID_BITS,
    MAX_ENDED_PER_CALL,
    Context,
    decode_ids,
)
from telegrad.errors import PeerLost, TelegradError, UsageError
from telegrad.group.membership import Member
from telegrad.messages.packing import MessageContext
from telegrad.runtime import active_runtime
from telegrad.server.functions import internal

if TYPE_CHECKING:
    from telegrad.runtime import AgentRuntime


_REMEMBERED = 10_000
_AUDIT_EVERY = 20.0
_PATIENCE = 30.0
_TELL_WITHIN = 0.01
_log = logging.getLogger(__name__)
_begun: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()


class ContextRegistry:
    """The contexts of one agent."""

    def __init__(self, agent: AgentRuntime) -> None:
        self.agent = agent
        self.tensor_ids = itertools.count(1)
        self.passes = itertools.count(1)
        self._numbers = itertools.count(secrets.randbits(CONTEXT_ID_BITS - 1))
        self.versions = SharedParameters()
        self._open: dict[int, Context] = {}
        self._ended: dict[int, None] = {}
        # by incarnation: name, numbers it has not been told ended
        self._untold: dict[str, tuple[str, list[int]]] = {}
        self._tells_soon = False  # a timer runs until all are told
        self._lock = threading.Lock()
        self._passes_begun_here = 0
        hooks.record_hooks()
        agent.on_loss(self._lost)
        agent.add_statistics(self.statistics)
        agent.clock.every(_AUDIT_EVERY, self._tick)

    @classmethod
    def of(cls, agent: AgentRuntime) -> ContextRegistry:
        return agent.service(cls)

    def __repr__(self) -> str:
        return f"<Contexts of {self.agent.name!r}: {list(self._open)}>"

    def begin(self) -> Context:
        """A new context, which begins here."""
        number = (max(self.agent.local_member.rank, 0) << CONTEXT_ID_BITS) | (
            next(self._numbers) & ((1 << CONTEXT_ID_BITS) - 1)
        )
        context = Context(number, self)
        with self._lock:
            self._open[number] = context
        _begun[number] = context
        return context

    def open(self, number: int) -> Context | None:
        """This worker's part of a context that a call brought; None if it has ended here."""
        context = self._open.get(number)
        if context is None:
            with self._lock:
                if number in self._ended:
                    return None
                context = self._open.setdefault(number, Context(number, self))
        return context

    def find(self, number: int) -> Context | None:
        return self._open.get(number)

    def has_ended(self, number: int) -> bool:
        """Was a part of this context here? As far back as is remembered."""
        return number in self._ended

    def end(self, number: int) -> None:
        """Forget a context, here and wherever it went from here."""
        with self._lock:
            context = self._open.pop(number, None)
            self._ended[number] = None
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
        if context is not None:
            context.release()

    @property
    def owes_news(self) -> bool:
        """Is there a peer that does not know yet of contexts that ended?"""
        return bool(self._untold)

    def tell_ended(self, number: int, callees: dict[str, str]) -> None:
        """Let peers know soon that a context has ended."""
        with self._lock:
            for incarnation, name in callees.items():
                if incarnation != self.agent.local_member.incarnation:
                    self._untold.setdefault(incarnation, (name, []))[1].append(number)
            if self._tells_soon or not self._untold or self.agent.closing:
                return
            self._tells_soon = True
        self.agent.clock.at(time.monotonic() + _TELL_WITHIN, self._tell_now)

    def take_ended(self, incarnation: str) -> list[int]:
        """What a call that is about to leave can tell a peer."""
        with self._lock:
            _, numbers = self._untold.get(incarnation, ("", []))
            told, numbers[:] = numbers[:MAX_ENDED_PER_CALL], numbers[MAX_ENDED_PER_CALL:]
            if not numbers:
                self._untold.pop(incarnation, None)
            return told

    def _tell_now(self) -> None:
        with self._lock:
            self._tells_soon = False
            if not self._untold:
                return  # calls have told everybody
        self.agent.threads.start(self._tell_all)

    def _tell_all(self) -> None:
        with self._lock:
            untold, self._untold = self._untold, {}
        for incarnation, (name, numbers) in untold.items():
            if not self.agent.closing:
                self.agent.start(
                    name, _release, (incarnation, numbers), None, _PATIENCE, internal=True
                )

    def count_running(self, change: int) -> None:
        """Note that a backward pass begins here (1) or is over (-1)."""
        with self._lock:
            self._passes_begun_here += change

    def count_passes(self) -> int:
        """Count the backward passes that began here, and those of others that this worker waits for gradients of."""
        me = self.agent.local_member.incarnation
        waiting = 0
        for context in list(self._open.values()):
            with context.lock:
                waiting += sum(
                    1
                    for (began, _), each in context.passes.items()
                    if began != me and each.unanswered
                )
        return self._passes_begun_here + waiting

    def statistics(self) -> dict[str, int]:
        contexts = list(self._open.values())
        return {
            "autograd_contexts": len(contexts),
            "autograd_tensors_sent": sum(len(context.sends) for context in contexts),
            "autograd_tensors_received": sum(len(context.receives) for context in contexts),
        }

    def audit(self) -> None:
        """Forget the contexts that have ended where they began, or whose beginning is gone."""
        by_rank: dict[int, list[int]] = {}
        for context in list(self._open.values()):
            if context.number not in _begun or context.rank != self.agent.local_member.rank:
                by_rank.setdefault(context.rank, []).append(context.number)
        for rank, numbers in by_rank.items():
            try:
                alive = self.agent.start(
                    rank, _alive, (numbers, self.agent.local_member), None, _PATIENCE, internal=True
                ).wait()
            except PeerLost:
                alive = [False] * len(numbers)
            except TelegradError as error:
                _log.debug("nothing was heard of contexts of rank %s: %s", rank, error)
                continue
            for number, is_alive in zip(numbers, alive, strict=True):
                if not is_alive:
                    self.end(number)

    def _tick(self) -> None:
        if self._open and not self.agent.closing:
            self.agent.threads.start(self.audit)

    def _lost(self, name: str, incarnation: str) -> None:
        contexts = list(self._open.values())
        for context in contexts:
            context.lost(name, incarnation)
        if contexts and not self.agent.closing:
            self.agent.threads.start(self.audit)


def open_context(said: bytes, envelope: MessageContext) -> Context | None:
    """The context that a call came with; those that it says have ended are forgotten."""
    number, *ended = decode_ids(said)
    contexts = ContextRegistry.of(envelope.agent)
    for each in ended:
        contexts.end(each)
    return contexts.open(number)


def find_context(number: int) -> Context:
    """This worker's part of a context."""
    agent = active_runtime()
    context = _begun.get(number) if agent is None else ContextRegistry.of(agent).find(number)
    if context is None or context.released:
        raise UsageError(
            f"Could not find autograd context with id: {number}. It ended, or nothing of it has come to this worker"
        )
    return context


@internal
def _release(incarnation: str, numbers: list[int]) -> None:
    agent = active_runtime()
    if agent is not None and agent.local_member.incarnation == incarnation:
        for number in numbers:
            ContextRegistry.of(agent).end(number)


@internal
def _alive(numbers: list[int], asker: Member) -> list[bool]:
    """Which contexts that began here go on? Whoever asks will hear of their end, even if those between us are dead."""
    agent = active_runtime()
    if agent is None:
        return [False] * len(numbers)
    found = [ContextRegistry.of(agent).find(number) for number in numbers]
    return [
        context is not None and context.add_callee(asker.name, asker.incarnation)
        for context in found
    ]

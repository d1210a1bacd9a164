"""Random sequences of reference operations, checked against a model of which worker holds what.

Several agents live in this process. Steps create objects, pass references on, drop them, and kill a
worker. The messages that users send to owners are intercepted, so that the machine decides when
each is delivered: late, out of order, or twice. Calls that use a reference (`HELD`) are intercepted
at the owner in the same way, as if they waited behind other calls. Meanwhile the reference that
they use may be dropped, and their caller may give up.

After every step, every object that a live worker refers to still exists (`nothing_is_lost`). Once
everything is delivered, every call that was not given up has its result, and no object without
references exists (`nothing_is_left`).
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from telegrad.agent import Agent
from telegrad.futures import Future
from telegrad.refs import RRef, remote
from telegrad.refs.manager import MessageOutbox, ReferenceManager, ReferenceMessage
from telegrad.server.connection import ServerConnection
from telegrad.testing import LocalCluster
from telegrad.wire.frames import Frame, Kind
from tests.refs import objects
from tests.refs.objects import LateThing, Thing, until

NAMES = ["w0", "w1", "w2", "w3"]
HELD = {
    "method late_get",
    "remote method late_get",
    "remote LateThing",
    "fetch",
    "late_local",
    "late_use",
    "late_copy",
}
WAYS = ["method", "fetch", "remote", "argument", "third", "temporary", "own", "derived"]
_handle = ServerConnection.handle


class Waiting(NamedTuple):
    """A call that was made, and what it must return."""

    future: Future[Any]
    thing: int
    workers: frozenset[str]  # if one of them dies, the call fails


class Held(NamedTuple):
    """A call that has arrived at its callee and has not begun."""

    connection: ServerConnection
    frame: Frame

    def run(self) -> None:
        served_function = self.connection._find_function(self.frame)
        call = self.connection._begin(self.frame)
        self.connection._runtime.threads.start(
            lambda: self.connection._execute(self.frame, served_function, call)
        )


_transmit = MessageOutbox._transmit
_start_sweep = ReferenceManager._start_sweep


class Lives(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        gc.freeze()  # `nothing_is_left` need not collect existing objects again
        self.cluster = LocalCluster(len(NAMES), transports=("memory",))
        self.cluster.__enter__()
        self.dead: set[str] = set()
        self.made = 0
        self.holders: dict[int, tuple[str, int, str]] = {}  # slot -> (holder, object, owner)
        self.under_way: list[tuple[MessageOutbox, int, list[ReferenceMessage]]] = []
        self.held: list[Held] = []
        self.waiting: list[Waiting] = []
        ReferenceManager._start_sweep = lambda self: None  # type: ignore[method-assign]  # a step of the machine sweeps
        under_way = self.under_way
        MessageOutbox._transmit = lambda *batch: under_way.append(batch)  # type: ignore[method-assign]
        held = self.held

        def hold(connection: ServerConnection, frame: Frame) -> None:
            served_function = connection._find_function(frame) if frame.kind == Kind.CALL else None
            if served_function is not None and served_function.name in HELD:
                held.append(Held(connection, frame))
            else:
                _handle(connection, frame)

        ServerConnection.handle = hold  # type: ignore[assignment, method-assign]

    def teardown(self) -> None:
        try:
            if hasattr(self, "cluster") and sys.exc_info()[0] is None:
                self.nothing_is_left()
        finally:
            self.restore()

    def restore(self) -> None:
        MessageOutbox._transmit = _transmit  # type: ignore[method-assign]
        ReferenceManager._start_sweep = _start_sweep  # type: ignore[method-assign]
        ServerConnection.handle = _handle  # type: ignore[method-assign]
        for call in self.held:
            call.run()
        objects.kept.clear()
        gc.collect()
        gc.unfreeze()  # afterwards: to collect all objects of the process takes far longer
        if hasattr(self, "cluster"):
            self.cluster.close()

    def living(self) -> list[str]:
        return [name for name in NAMES if name not in self.dead]

    def agent(self, name: str) -> Agent:
        return self.cluster[name]

    def put(self, slot: int, holder: str, rref: RRef[Any], thing: int, owner: str) -> None:
        objects.kept[holder, slot] = rref
        self.holders[slot] = holder, thing, owner

    @rule(data=st.data(), by_remote=st.booleans())
    def make(self, data: st.DataObject, by_remote: bool) -> None:
        holder = data.draw(st.sampled_from(self.living()))
        owner = data.draw(st.sampled_from(self.living())) if by_remote else holder
        self.made += 1
        if by_remote:
            rref = remote(owner, Thing, (self.made,), agent=self.agent(holder))
        else:
            rref = RRef(Thing(self.made), agent=self.agent(holder))
        self.put(self.made, holder, rref, self.made, owner)

    def choose(self, data: st.DataObject) -> int:
        """Return a reference that some worker holds."""
        return data.draw(st.sampled_from(sorted(self.holders)))

    @rule(data=st.data(), moves=st.booleans())
    @precondition(lambda self: self.holders)
    def pass_on(self, data: st.DataObject, moves: bool) -> None:
        """Send a reference to a worker; if it `moves`, the sender drops its own."""
        slot = self.choose(data)
        holder, thing, owner = self.holders[slot]
        if owner in self.dead:
            return
        to = data.draw(st.sampled_from(self.living()))
        self.made += 1
        self.agent(holder).call(to, objects.keep, self.made, objects.kept[holder, slot])
        self.holders[self.made] = to, thing, owner
        if moves:
            self.forget(slot)
            ReferenceManager.of(self.agent(holder)._runtime).sweep()

    @rule(
        data=st.data(),
        way=st.sampled_from(WAYS),
        then=st.sampled_from(["wait", "cancel", "time out"]),
    )
    @precondition(lambda self: self.holders)
    def call(self, data: st.DataObject, way: str, then: str) -> None:
        """Use a reference in a call that is held back. Only the call keeps temporaries alive."""
        slot = self.choose(data)
        holder, thing, owner = self.holders[slot]
        if owner in self.dead:
            return
        agent, rref = self.agent(holder), objects.kept[holder, slot]
        workers = {holder, owner}
        limit = 0.001 if then == "time out" else -1.0
        if way == "method":
            future = rref.rpc_async(limit).late_get()
        elif way == "fetch":
            future = rref.fetch_async(limit).then(lambda done: done.value().value)
        elif way == "remote":
            future = rref.remote().late_get().fetch_async(limit)
        elif way == "argument":
            future = agent.submit(owner, objects.late_local, rref)
        elif way == "third":
            third = data.draw(st.sampled_from(self.living()))
            workers.add(third)
            future = agent.submit(third, objects.late_use, rref)
        else:
            self.made += 1
            thing = self.made
            if way == "temporary":
                future = remote(owner, LateThing, (thing,), agent=agent).rpc_async(limit).late_get()
            elif way == "own":
                workers = {holder}
                future = RRef(Thing(thing), agent=agent).remote().late_get().fetch_async(limit)
            else:  # the creation times out here, and another worker waits for the object
                derived = remote(owner, LateThing, (thing,), agent=agent).remote(0.001).late_get()
                other = data.draw(st.sampled_from(self.living()))
                workers.add(other)
                future = agent.submit(other, objects.late_copy, derived)
                del derived
        del rref
        if then == "cancel":
            future.cancel()
        elif then == "wait":
            self.waiting.append(Waiting(future, thing, frozenset(workers)))

    @rule(choice=st.integers(0, 1000))
    def begin(self, choice: int) -> None:
        """Run one of the calls that are held back."""
        if self.held:
            self.held.pop(choice % len(self.held)).run()

    @rule(data=st.data())
    @precondition(lambda self: self.holders)
    def drop(self, data: st.DataObject) -> None:
        self.forget(self.choose(data))

    def forget(self, slot: int) -> None:
        holder, _, _ = self.holders.pop(slot)
        objects.kept.pop((holder, slot), None)

    @rule(data=st.data())
    @precondition(lambda self: len(self.dead) < 2)
    def kill(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.living()))
        for outbox, sequence_number, messages in list(self.under_way):
            # messages of a worker arrive before the end of its connection
            if outbox._runtime.name == name:
                self.deliver_one((outbox, sequence_number, messages))
        self.dead.add(name)
        self.cluster.kill(name)
        for slot, (holder, _, _) in list(self.holders.items()):
            if holder == name:
                self.forget(slot)

    @rule()
    def sweep(self) -> None:
        for name in self.living():
            ReferenceManager.of(self.agent(name)._runtime).sweep()

    @rule(choice=st.integers(0, 1000), twice=st.booleans())
    def deliver(self, choice: int, twice: bool) -> None:
        if not self.under_way:
            return
        # the simplest choice is the newest: out of order
        batch = self.under_way[-1 - choice % len(self.under_way)]
        if twice:
            _transmit(*batch)
        self.deliver_one(batch)

    def deliver_one(self, batch: tuple[MessageOutbox, int, list[ReferenceMessage]]) -> None:
        self.under_way.remove(batch)
        _transmit(*batch)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "cluster"):
            return
        for slot, (holder, thing, owner) in self.holders.items():
            if owner not in self.dead:
                rref = objects.kept[holder, slot]
                assert rref.rpc_sync().get() == thing, f"{holder} lost object {thing} of {owner}"

    @rule()
    @precondition(lambda self: self.made % 8 == 0)  # seldom enough that messages pile up
    def nothing_is_left(self) -> None:
        wanted = {
            name: {thing for _, thing, owner in self.holders.values() if owner == name}
            for name in self.living()
        }

        def settled() -> bool:
            gc.collect()  # a call that failed has left its frames to its exception
            self.sweep()
            for batch in list(self.under_way):
                self.deliver_one(batch)
            while self.held:
                self.held.pop().run()
            if not all(call.future.done() for call in self.waiting):
                return False
            return all(objects.owned(self.agent(name)) == len(wanted[name]) for name in wanted)

        def state() -> str:
            managers = [ReferenceManager.of(self.agent(name)._runtime) for name in wanted]
            return f"{wanted}, {self.waiting}, {managers}"

        until(settled, state)
        for call in self.waiting:
            if not call.workers & self.dead:
                assert call.future.wait() == call.thing
        self.waiting.clear()
        for name in wanted:
            assert objects.reference_statistics(self.agent(name))["objects_not_created"] == 0


def lives(count: int, *, derandomize: bool) -> Any:
    """Return the test of this number of random lives."""
    case: Any = type("Case", (Lives.TestCase,), {})
    case.settings = settings(
        max_examples=count,
        stateful_step_count=40,
        # threads of the agents run beside the machine, so a case is not replayed exactly
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=derandomize,
    )
    return case


TestLives = pytest.mark.timeout(900)(lives(80, derandomize=True))  # minutes under coverage
TestManyLives = pytest.mark.soak(pytest.mark.timeout(3000)(lives(1000, derandomize=False)))

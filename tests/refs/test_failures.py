"""References that cannot be made, sent or used, and messages about them that are lost."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import telegrad
from telegrad import Future, autograd, batched
from telegrad.agent import Agent
from telegrad.errors import (
    InternalError,
    PeerLost,
    SerializationError,
    StaleReference,
    UsageError,
)
from telegrad.refs import RRef, remote
from telegrad.refs import manager as manager_module
from telegrad.refs.manager import ReferenceManager
from telegrad.refs.owned_objects import ObjectKey, OwnedObject
from telegrad.rpc.functions import async_execution
from telegrad.testing import LocalCluster
from telegrad.wire.handshake import Incarnation
from tests.conftest import Clusters
from tests.local.conftest import gate
from tests.local.gates import PATIENCE, Gate
from tests.refs import objects
from tests.refs.objects import Thing, owned, until

__all__ = ["gate"]

STRANGER = Incarnation("a worker that nobody knows")
GONE = ObjectKey(STRANGER, 1)


@pytest.fixture
def transport() -> str:
    return "unix"


@pytest.fixture
def pair(cluster: Clusters) -> Iterator[LocalCluster]:
    yield cluster(2)
    objects.kept.clear()
    gc.collect()


def manager_of(agent: Agent) -> ReferenceManager:
    return ReferenceManager.of(agent._runtime)


# Creation


def test_without_an_agent_there_are_no_references() -> None:
    with pytest.raises(UsageError, match="agent is not set"):
        RRef(3)
    with pytest.raises(UsageError, match="has not been initialized"):
        remote("w1", Thing)
    with pytest.raises(InternalError, match="need an agent"):
        ReferenceManager.of(None)


def test_an_object_of_our_own_that_cannot_be_made_leaves_nothing(pair: LocalCluster) -> None:
    w0 = pair["w0"]
    with pytest.raises(SerializationError):
        remote("w0", Thing, (threading.Lock(),), agent=w0)
    assert owned(w0) == 0
    assert objects.reference_statistics(w0)["unconfirmed_creations"] == 0
    assert remote("w0", Thing, (2,), agent=w0).rpc_sync().get() == 2


@async_execution
def returns_no_future() -> Any:
    return 3


@async_execution
def fails_later(error: BaseException) -> Any:
    future: Future[Any] = Future()
    threading.Thread(target=future.set_exception, args=(error,)).start()
    return future


def test_an_async_function_that_fails_tells_every_later_use(pair: LocalCluster) -> None:
    w0 = pair["w0"]
    with pytest.raises(UsageError, match=r"must return .*Future object, but .* returned int"):
        remote("w1", returns_no_future, agent=w0).to_here()
    broken = remote("w1", fails_later, (ValueError("late"),), agent=w0)
    for _ in range(2):
        with pytest.raises(ValueError, match="late"):
            broken.to_here()
    del broken
    # the tracebacks of these errors refer to the references, in cycles
    until(lambda: gc.collect() >= 0 and owned(pair["w1"]) == 0)


class Doubling:
    @batched(min_size=2, max_size=2)
    def double(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]


@async_execution
def make_doubling(gate: Gate) -> Future[Doubling]:
    future: Future[Doubling] = Future()

    def make() -> None:
        gate.hold()
        future.set_result(Doubling())

    threading.Thread(target=make).start()
    return future


def test_batched_methods_of_an_object_that_is_still_made_run_together(
    pair: LocalCluster, gate: Gate
) -> None:
    w0 = pair["w0"]
    model = remote("w1", make_doubling, (gate,), agent=w0)
    calls = [model.rpc_async().double(number) for number in (1, 2)]
    assert w0.submit("w1", abs, -1).wait() == 1  # read after them
    assert not any(call.done() for call in calls)
    gate.open()
    assert [call.result(PATIENCE) for call in calls] == [2, 4]


@telegrad.expose
class Exposed:
    def __init__(self, value: int) -> None:
        self.value = value

    def hidden(self) -> int:
        return self.value

    @telegrad.expose
    def shown(self) -> int:
        return self.value


def test_only_registered_functions_make_objects_and_run_on_them(cluster: Clusters) -> None:
    w0 = cluster(2, only_registered=True)["w0"]
    exposed = remote("w1", Exposed, (4,), agent=w0)
    assert exposed.rpc_sync().shown() == 4
    with pytest.raises(UsageError, match=r"hidden is not one: mark it with @telegrad.expose"):
        exposed.rpc_sync().hidden()
    refused = remote("w1", Thing, (4,), agent=w0)
    # whether or not the first reply has arrived
    with pytest.raises((UsageError, StaleReference), match="serves only registered functions"):
        refused.to_here()
    with pytest.raises(UsageError):
        refused._get_future().wait()
    # calls that arrive before and after the owner knows that there will be no such object
    for _ in range(20):
        with pytest.raises((UsageError, StaleReference), match="serves only registered functions"):
            refused.fetch_async().wait()


def test_a_function_is_remembered_until_there_are_too_many(
    pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telegrad.refs.owner_calls.MAX_FUNCTIONS", 0)
    for _ in range(2):
        assert remote("w1", new_number, agent=pair["w0"]).to_here() == 5


def new_number() -> int:
    return 5


def test_the_value_of_an_object_is_set_once() -> None:
    made = OwnedObject(ObjectKey(Incarnation("w0"), 1))
    made.complete(1, None)
    made.complete(2, ValueError("too late"))
    assert made.future.result(PATIENCE) == made.value() == 1


def test_the_future_of_a_reference_that_came_from_elsewhere_is_complete(pair: LocalCluster) -> None:
    given = pair["w0"].call("w1", objects.make_thing, 3)
    assert given._get_future().result(PATIENCE) is None


# Use


def test_only_a_tensor_has_gradients(pair: LocalCluster) -> None:
    with pytest.raises(UsageError, match=r"should contain a tensor for .backward"):
        RRef(3, agent=pair["w0"]).backward()
    with pytest.raises(UsageError, match=r"should contain a tensor for .backward"):
        with autograd.context(agent=pair["w0"]) as context_id:
            remote("w1", Thing, agent=pair["w0"]).backward(context_id)


def test_another_agent_of_the_process_cannot_send_a_reference(pair: LocalCluster) -> None:
    thing = remote("w1", Thing, agent=pair["w0"])
    thing.to_here()
    with pytest.raises(SerializationError, match="belongs to another agent"):
        pair["w1"].call("w0", objects.use, thing)


def test_a_reference_is_built_from_a_message_only(pair: LocalCluster) -> None:
    thing = remote("w1", Thing, agent=pair["w0"])
    thing.to_here()
    build, args = telegrad.refs.rref._reduce, (thing,)
    with pytest.raises(SerializationError, match="only be pickled when using RPC"):
        build(*args)
    with pytest.raises(SerializationError, match="outside a call"):
        telegrad.refs.rref._rebuild("w1", 1, GONE.creator, GONE.creator, 1)
    with pytest.raises(SerializationError, match="outside a call"):
        telegrad.refs.rref._rebuild_at_owner(*GONE)
    with pytest.raises(SerializationError):
        pickle.dumps(thing)


# Messages


def test_an_unknown_message_is_an_error(pair: LocalCluster) -> None:
    with pytest.raises(InternalError, match="unknown reference message"):
        manager_of(pair["w0"])._apply_message(("borrow", ObjectKey(Incarnation("w0"), 1)))


def test_many_dead_references_are_released_before_the_next_sweep(
    pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "_SWEEP_THRESHOLD", 5)
    w0 = pair["w0"]
    monkeypatch.setattr(manager_of(w0), "sweep", sweeps := Counted(manager_of(w0).sweep))
    for _ in range(20):
        remote("w1", Thing, agent=w0).to_here()
    until(lambda: sweeps.count > 0)
    until(lambda: owned(pair["w1"]) < 20)


class Counted:
    """Count the calls of a function."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self.function()


def aged(agent: Agent) -> list[OwnedObject]:
    """Make all counts of an agent old enough for an audit, and return its objects."""
    made = list(manager_of(agent).owned._objects.values())
    for each in made:
        each.changed_at -= 1000
    return made


def test_an_audit_removes_what_its_user_does_not_know(pair: LocalCluster) -> None:
    w0, w1 = pair["w0"], pair["w1"]
    thing = remote("w1", Thing, agent=w0)
    thing.to_here()
    until(thing.confirmed_by_owner)
    (made,) = aged(w1)
    user = w0._runtime.local_member.incarnation
    own = w1._runtime.local_member.incarnation
    manager_of(w1).audit()
    assert made.user_counts[user] == 1  # known
    made.user_counts[own] = 1  # a message of this worker to itself that never arrived
    manager_of(w1).audit()
    assert own in made.user_counts  # a message may have been under way
    manager_of(w1).audit()
    assert made.user_counts == {user: 1}
    made.user_counts[user] = -1  # a release that overtook its lend is not a reference
    manager_of(w1).audit()
    manager_of(w1).audit()
    assert made.user_counts == {user: -1}
    made.user_counts[user] = 1


def test_an_audit_keeps_counts_that_change_or_cannot_be_asked_for(pair: LocalCluster) -> None:
    w1 = pair["w1"]
    thing = remote("w1", Thing, agent=pair["w0"])
    thing.to_here()
    (made,) = aged(w1)
    made.user_counts[STRANGER] = 1
    for _ in range(2):
        manager_of(w1).audit()
    assert made.user_counts[STRANGER] == 1
    manager_of(w1).owned.clear_count(made.key, STRANGER, made.changed_at - 1)
    assert made.user_counts[STRANGER] == 1
    manager_of(w1).owned.clear_count(made.key, STRANGER, made.changed_at)
    assert STRANGER not in made.user_counts


def test_an_agent_that_has_closed_is_not_audited(cluster: Clusters) -> None:
    w0 = cluster(2)["w0"]
    thing = remote("w0", Thing, agent=w0)
    assert thing.rpc_sync().get() == 0
    (made,) = aged(w0)
    made.user_counts[STRANGER] = 1
    w0.close()
    for _ in range(2):
        manager_of(w0).audit()
    assert made.user_counts == {STRANGER: 1}


def test_objects_without_a_value_fail_when_their_owner_leaves(cluster: Clusters) -> None:
    agent = cluster(2)["w0"]
    waits = manager_of(agent).owned.find(ObjectKey(STRANGER, 1))
    agent.close()
    with pytest.raises(PeerLost, match="left the group"):
        waits.value(PATIENCE)


def test_a_reference_that_is_dropped_after_its_object_is_harmless(pair: LocalCluster) -> None:
    owned_objects = manager_of(pair["w0"]).owned
    owned_objects.drop_local_references([GONE])
    owned_objects.clear_count(GONE, STRANGER, 0.0)
    assert owned(pair["w0"]) == 0


def test_every_part_describes_itself(pair: LocalCluster) -> None:
    thing = remote("w1", Thing, agent=pair["w0"])
    thing.to_here()
    pair["w0"].call("w1", objects.use, thing)
    text = repr(manager_of(pair["w0"]))
    for part in ("ReferenceManager of w0", "OwnedObjects: 0", "HeldReferences: 1", "MessageInbox"):
        assert part in text
    assert "ReferenceManager of w1: <OwnedObjects: 1>" in repr(manager_of(pair["w1"]))
    assert "UserRRef(owner='w1'" in repr(thing.rpc_sync())

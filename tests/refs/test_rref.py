"""References: making, using, passing on."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from telegrad.agent import Agent
from telegrad.errors import (
    CallCancelled,
    CallTimeout,
    PeerLost,
    SerializationError,
    StaleReference,
    UsageError,
)
from telegrad.refs import RRef, remote
from telegrad.refs.manager import ReferenceManager
from telegrad.refs.owned_objects import ObjectKey
from telegrad.testing import LocalCluster
from telegrad.wire.handshake import Incarnation
from tests.conftest import Clusters
from tests.local.gates import PATIENCE
from tests.refs import objects
from tests.refs.objects import Thing, owned, until


@pytest.fixture
def trio(cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = cluster(3)
    yield made
    objects.kept.clear()
    gc.collect()


@pytest.fixture
def w0(trio: LocalCluster) -> Agent:
    return trio["w0"]


def test_a_remote_object_is_used_like_one_at_hand(w0: Agent) -> None:
    thing = remote("w1", Thing, (5,), agent=w0)
    assert thing.rpc_sync().add(2) == 7
    assert thing.rpc_async().add(1).wait() == 8
    assert thing.remote().add(1).to_here() == 9
    assert thing.rpc_sync().where() == "w1"
    assert thing.to_here().value == 9
    assert thing.rpc_sync().later(1) == 10
    assert thing.remote().later(2).to_here() == 11


def test_what_a_reference_says_of_itself(w0: Agent) -> None:
    thing = remote("w1", Thing, agent=w0)
    thing.to_here()
    assert not thing.is_owner()
    assert thing.owner_name() == "w1"
    assert thing.owner().id == 1
    until(thing.confirmed_by_owner)
    assert "UserRRef(owner='w1'" in repr(thing)
    mine = RRef(3, agent=w0)
    assert mine.is_owner()
    assert mine.local_value() == 3
    assert mine.to_here() == 3
    assert "OwnerRRef(owner='w0'" in repr(mine)
    with pytest.raises(UsageError, match="can't call localValue"):
        thing.local_value()


def test_an_object_of_our_own_is_not_copied(w0: Agent) -> None:
    thing = Thing()
    assert RRef(thing, agent=w0).to_here() is thing
    made = remote("w0", Thing, (4,), agent=w0)
    assert made.is_owner()
    assert made.to_here() is made.local_value()
    assert made.rpc_sync().get() == 4


def test_references_travel_anywhere(trio: LocalCluster, w0: Agent) -> None:
    thing = remote("w1", Thing, (5,), agent=w0)
    assert w0.call("w2", objects.use, thing) == 5
    assert w0.call("w1", objects.local, thing) == 5
    assert w0.call("w0", objects.use, thing) == 5
    assert w0.call("w2", objects.pass_on, thing, ["w0", "w1", "w2", "w1", "w0", "w2"]) == 5
    back = w0.call("w2", objects.give_back, thing)
    assert back.rpc_sync().get() == 5
    assert (
        w0.call("w2", objects.give_back, {"deep": [(thing,)]})["deep"][0][0].rpc_sync().get() == 5
    )
    made = w0.call("w2", objects.make_thing, 8)
    assert made.owner_name() == "w2"
    assert made.rpc_sync().get() == 8
    elsewhere = w0.call("w2", objects.make_elsewhere, "w1", 9)
    assert elsewhere.owner_name() == "w1"
    assert elsewhere.rpc_sync().get() == 9
    mine = RRef(Thing(3), agent=w0)
    assert trio["w0"].call("w1", objects.use, mine) == 3


def test_a_reference_is_used_before_its_owner_has_made_the_object(
    w0: Agent, trio: LocalCluster
) -> None:
    gate = threading.Event()
    objects.gates["slow"] = gate
    try:
        slow = remote("w1", objects.make_when_open, ("slow", 6), agent=w0)
        assert not slow.confirmed_by_owner()
        uses = [
            w0.submit("w2", objects.use, slow),
            slow.rpc_async().get(),
            w0.submit("w1", objects.use, slow),
        ]
        second = slow.remote().where()
        assert not any(future.done() for future in uses)
    finally:
        gate.set()
    assert [future.wait() for future in uses] == [6, 6, 6]
    assert second.to_here() == "w1"


def test_a_failed_remote_tells_every_later_use(w0: Agent) -> None:
    broken: RRef[Any] = remote("w1", objects.raise_error, agent=w0)
    for _ in range(2):
        with pytest.raises(ValueError, match="it cannot be made") as caught:
            broken.to_here()
        assert caught.value.args == ("it cannot be made", 7)
    with pytest.raises(ValueError):
        broken.rpc_sync().anything()
    with pytest.raises(ValueError):
        w0.call("w2", objects.use, broken)
    assert not broken.confirmed_by_owner()


def test_errors_of_methods_arrive_as_themselves(w0: Agent) -> None:
    thing = remote("w1", Thing, agent=w0)
    with pytest.raises(KeyError, match="no such thing"):
        thing.rpc_sync().fail()
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        thing.rpc_sync().missing()
    with pytest.raises(KeyError):
        thing.remote().fail().to_here()


def test_the_future_of_a_creation_can_be_asked_for_at_any_time(w0: Agent) -> None:
    early = remote("w1", Thing, agent=w0)
    assert early._get_future() is early._get_future()
    assert early._get_future().result(PATIENCE) is None
    assert early.confirmed_by_owner()
    broken = remote("w1", objects.raise_error, agent=w0)
    with pytest.raises(ValueError):
        broken.to_here()
    with pytest.raises(ValueError):
        broken._get_future().result(PATIENCE)


def test_a_creation_can_be_cancelled(w0: Agent) -> None:
    objects.gates["cancelled"] = threading.Event()
    try:
        unwanted = remote("w1", objects.make_when_open, ("cancelled", 6), agent=w0)
        assert unwanted._get_future().cancel()
        with pytest.raises(CallCancelled):
            unwanted.to_here()
        assert objects.reference_statistics(w0)["unconfirmed_creations"] == 0
    finally:
        objects.gates["cancelled"].set()


def test_time_limits(w0: Agent) -> None:
    gate = threading.Event()
    objects.gates["never"] = gate
    try:
        slow = remote("w1", objects.make_when_open, ("never", 6), timeout=0.05, agent=w0)
        with pytest.raises(CallTimeout):
            slow._get_future().wait()
        with pytest.raises(CallTimeout, match="RRef creation"):
            slow.to_here()
        patient = remote("w1", objects.make_when_open, ("never", 6), agent=w0)
        with pytest.raises(CallTimeout):
            patient.to_here(timeout=0.05)
        with pytest.raises(CallTimeout):
            patient.rpc_sync(timeout=0.05).get()
    finally:
        gate.set()
    assert patient.to_here().value == 6


def test_references_are_awaited(w0: Agent) -> None:
    thing = remote("w1", Thing, (1,), agent=w0)

    async def main() -> list[Any]:
        return [(await thing).value, await thing.rpc_async().add(1), (await RRef(5, agent=w0))]

    assert asyncio.run(main()) == [1, 2, 5]


def test_streams_bring_items_as_they_are_used(w0: Agent) -> None:
    thing = remote("w1", Thing, agent=w0)

    async def collect() -> list[int]:
        return [number async for number in thing.stream().count_to(7)]

    assert asyncio.run(collect()) == list(range(7))
    assert list(thing.stream(chunk=3).count_to(10)) == list(range(10))
    assert list(thing.stream().count_to(0)) == []
    endless = iter(thing.stream().count_to(1_000_000))
    assert [next(endless) for _ in range(3)] == [0, 1, 2]
    assert thing.rpc_sync().get() <= 4  # no more than the next item has been made
    with pytest.raises(UsageError):
        thing.stream(chunk=0)


def test_a_stream_of_something_that_is_no_iterator_is_an_error(w0: Agent) -> None:
    words: RRef[dict[str, int]] = remote("w1", dict, ({"a": 1, "b": 2},), agent=w0)
    stream = iter(words.stream().keys())
    with pytest.raises(UsageError, match="iterator, not dict_keys"):
        next(stream)


def test_an_error_inside_a_stream_arrives(w0: Agent) -> None:
    with pytest.raises(KeyError, match="no such thing"):
        list(remote("w1", Thing, agent=w0).stream().fail())


def test_a_reference_cannot_be_pickled_outside_a_call(w0: Agent) -> None:
    thing = remote("w1", Thing, agent=w0)
    with pytest.raises(SerializationError, match="only be pickled when using RPC"):
        pickle.dumps(thing)
    with pytest.raises(SerializationError):
        copy.deepcopy(thing)


def test_an_object_lives_while_somebody_refers_to_it(trio: LocalCluster, w0: Agent) -> None:
    w1 = trio["w1"]
    thing = remote("w1", Thing, ("watched",), agent=w0)
    w0.call("w2", objects.keep, "a", thing)
    thing.to_here()
    assert owned(w1) == 1
    del thing
    until(lambda: objects.reference_statistics(w0)["held_objects"] == 0)
    assert owned(w1) == 1
    assert objects.count_alive("watched") == 1
    w0.call("w2", objects.release, "a")
    until(lambda: owned(w1) == 0)
    until(lambda: objects.count_alive("watched") == 0)


def test_a_reference_that_is_an_argument_for_its_owner_costs_no_note(
    trio: LocalCluster, w0: Agent
) -> None:
    thing = remote("w1", Thing, ("home",), agent=w0)
    thing.to_here()
    messages: list[Any] = []
    manager = ReferenceManager.of(w0._runtime)
    send_messages = manager.send_messages

    def send_and_note(*args: Any) -> None:
        messages.append(args)
        send_messages(*args)

    manager.send_messages = send_and_note  # type: ignore[assignment, method-assign]
    for _ in range(3):
        assert w0.call("w1", objects.local, thing) == "home"
        assert w0.submit("w1", objects.local, thing).wait() == "home"
    assert not messages
    del thing
    until(lambda: owned(trio["w1"]) == 0)
    assert len(messages) == 1  # it was given back


def test_an_argument_for_its_owner_lives_as_long_as_the_call(trio: LocalCluster, w0: Agent) -> None:
    w1 = trio["w1"]
    objects.gates["busy"] = threading.Event()
    slow = w0.submit("w1", objects.make_when_open, "busy", 0)
    thing = remote("w1", Thing, ("home",), agent=w0)
    thing.to_here()
    kept = w0.submit("w1", objects.keep_when_open, "busy", "a", thing)
    del thing
    ReferenceManager.of(w0._runtime).sweep()
    objects.gates["busy"].set()
    slow.wait()
    kept.wait()
    until(lambda: objects.reference_statistics(w0)["held_objects"] == 0)
    assert owned(w1) == 1
    assert objects.kept["w1", "a"].local_value().value == "home"
    objects.kept.clear()
    until(lambda: owned(w1) == 0)


def test_the_death_of_a_user_gives_up_its_references(trio: LocalCluster, w0: Agent) -> None:
    w1 = trio["w1"]
    thing = remote("w1", Thing, agent=w0)
    w0.call("w2", objects.keep, "a", thing)
    del thing
    until(lambda: objects.reference_statistics(w0)["held_objects"] == 0)
    trio.kill("w2")
    until(lambda: owned(w1) == 0)


def test_a_dead_owner_is_an_error_at_once(trio: LocalCluster, w0: Agent) -> None:
    thing = remote("w1", Thing, agent=w0)
    thing.to_here()
    trio.kill("w1")
    for use in (thing.to_here, thing.rpc_sync().get, lambda: thing.rpc_async().get().wait()):
        with pytest.raises(PeerLost, match="w1"):
            use()
    with pytest.raises(PeerLost):
        remote("w1", Thing, agent=w0).to_here()


def test_a_reference_to_an_earlier_life_of_its_owner_says_so(
    cluster: Callable[..., LocalCluster],
) -> None:
    trio = cluster(2, fixed_size=False)
    w0 = trio["w0"]
    thing = remote("w1", Thing, agent=w0)
    thing.to_here()
    trio.kill("w1")
    until(lambda: all(link.lost for link in w0._runtime.peers.all() if link.member.name == "w1"))
    trio.join("w1", 1)
    for use in (thing.to_here, thing.rpc_sync().get):
        with pytest.raises(StaleReference, match="earlier incarnation"):
            use()
    assert remote("w1", Thing, (2,), agent=w0).rpc_sync().get() == 2


def test_a_result_that_was_dropped_at_once_is_still_made(trio: LocalCluster, w0: Agent) -> None:
    for _ in range(50):
        remote("w1", Thing, agent=w0)
    until(lambda: trio["w1"]._runtime.calls_served >= 50 and owned(trio["w1"]) == 0)


def test_an_argument_that_cannot_be_sent_leaves_nothing(trio: LocalCluster, w0: Agent) -> None:
    with pytest.raises(SerializationError):
        remote("w1", Thing, (threading.Lock(),), agent=w0)
    assert remote("w1", Thing, (2,), agent=w0).rpc_sync().get() == 2
    until(lambda: objects.reference_statistics(w0)["held_objects"] == 0)
    until(lambda: objects.reference_statistics(trio["w1"])["objects_not_created"] == 0)


def test_many_short_lived_references_leave_nothing(trio: LocalCluster, w0: Agent) -> None:
    for number in range(2000):
        thing = remote("w1", Thing, (number,), agent=w0)
        if number % 10 == 0:
            assert w0.call("w2", objects.use, thing) == number
    del thing
    for agent in trio:

        def holds_nothing(agent: Agent = agent) -> bool:
            return owned(agent) == 0 and objects.reference_statistics(agent)["held_objects"] == 0

        until(holds_nothing)


def test_a_tensor_that_lives_elsewhere(w0: Agent) -> None:
    matrix = remote("w1", torch.ones, (300, 300), agent=w0)
    assert matrix.rpc_sync().sum().item() == 90_000
    matrix.rpc_sync().add_(1)
    assert matrix.to_here().sum().item() == 180_000


def test_what_is_left_is_counted_and_reported(
    cluster: Callable[..., LocalCluster], caplog: pytest.LogCaptureFixture
) -> None:
    pair = cluster(2)
    thing = remote("w1", Thing, agent=pair["w0"])
    thing.to_here()
    assert pair["w1"].statistics()["owned_objects"] == 1
    assert pair["w0"].statistics()["held_objects"] == 1
    with caplog.at_level("INFO", logger="telegrad"):
        pair["w1"].close()
    assert "worker 'w1' leaves while references are alive: {'owned_objects': 1" in caplog.text


def test_an_object_that_is_asked_for_after_its_owner_has_left_never_comes(
    cluster: Clusters,
) -> None:
    agent = cluster(2)["w0"]
    owned_objects = ReferenceManager.of(agent._runtime).owned
    agent.close()
    creator = Incarnation("one that has created nothing yet")
    owned_object = owned_objects.find(ObjectKey(creator, 1))
    with pytest.raises(PeerLost, match="left the group"):
        owned_object.value(PATIENCE)

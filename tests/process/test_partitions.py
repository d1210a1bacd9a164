"""Links between hosts that are cut, in one direction or both, and heal or not.

A short interruption is survived: every call is answered once and has run once, and references keep
their counts. After a long one, both sides know that they have lost each other.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import telegrad.rpc as rpc
from benchmarks.namespaces import Network
from telegrad import current_agent
from telegrad.errors import PeerLost
from telegrad.futures import Future
from telegrad.refs import RRef
from tests.local.gates import PATIENCE, until
from tests.process.fleet import Fleet
from tests.process.hosts import (
    everywhere,
    fleet_on,
    proxy_of,
    reset_proxy,
    resume_proxy,
)

pytestmark = [pytest.mark.process, pytest.mark.netns]

CALLS = 5
INTERRUPTION = 5.0  # seconds
REFUSAL = 6.0
SURVIVED = {
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": 2.0,
    "connect_timeout": 2.0,
    "resume_timeout": 60.0,
}
REFUSED = {**SURVIVED, "heartbeat_timeout": 30.0}  # for which refusals are survived
NOT_SURVIVED = {"heartbeat_interval": 0.2, "heartbeat_timeout": 1.5, "resume_timeout": 1.5}

_runs: Counter[str] = Counter()
_lock = threading.Lock()
_gate = threading.Event()
_pending: dict[str, Future[Any]] = {}
_references: list[RRef[Any]] = []
_lent: list[RRef[Any]] = []


def count_run(call_id: str, wait: bool) -> str:
    """Note that a call has run. With `wait`, it is under way until the gate is open."""
    with _lock:
        _runs[call_id] += 1
    if wait and not _gate.wait(PATIENCE * 2):
        raise AssertionError("nobody opened the gate")
    return call_id


def own_name() -> str:
    return rpc.get_worker_info().name


def begin_calls(to: list[str], when: str, wait: bool) -> None:
    """Begin calls whose results are collected later."""
    for name in to:
        for number in range(CALLS):
            call_id = f"{own_name()} to {name} {when} {number}"
            _pending[call_id] = rpc.rpc_async(name, count_run, (call_id, wait))


def begin_synchronous_calls(to: list[str]) -> None:
    for name in to:
        call_id = f"{own_name()} to {name} synchronously"
        _pending[call_id] = Future()
        threading.Thread(target=_call, args=(name, call_id), daemon=True).start()


def _call(to: str, call_id: str) -> None:
    try:
        _pending[call_id].set_result(rpc.rpc_sync(to, count_run, (call_id, False)))
    except Exception as error:
        _pending[call_id].set_exception(error)


def calls_have_begun(count: int) -> None:
    until(lambda: sum(_runs.values()) == count)


def open_gate() -> None:
    _gate.set()


def collect() -> set[str]:
    """Return the ids of this worker's calls. Every call must return its own."""
    for call_id, future in _pending.items():
        assert future.result(timeout=50) == call_id
    return set(_pending)


def runs() -> Counter[str]:
    return _runs


# References


class Box:
    """An object to refer to."""


def make_references(to: list[str]) -> None:
    _references[:] = [rpc.remote(name, Box) for name in to]
    for reference in _references:
        reference.to_here()


def lend_and_drop(to: list[str]) -> None:
    """Begin to lend the references to other workers, and drop them here."""
    for name in to:
        call_id = f"{own_name()} lends to {name}"
        _pending[call_id] = rpc.rpc_async(name, take, (list(_references), call_id))
    _references.clear()
    gc.collect()


def take(references: list[RRef[Any]], call_id: str) -> str:
    _lent.extend(references)
    return count_run(call_id, False)


def lent_references_work() -> None:
    assert _lent
    for reference in _lent:
        assert isinstance(reference.to_here(), Box)


def drop_references() -> None:
    _lent.clear()
    _pending.clear()
    gc.collect()


def references_end() -> None:
    """Wait until this worker owns no object and refers to none."""
    gc.collect()
    until(lambda: set(rpc._rref_context_get_debug_info().values()) == {"0"})


# Interruptions that are survived. w0 is well; the links of the others are interrupted.


def check_survival(
    fleet: Fleet, interrupt: Callable[[], object], restore: Callable[[], object]
) -> None:
    """Check calls in both directions: some begin before the interruption, some during it.

    The former have run before and are replied to during the interruption.
    """
    others = [f"w{rank}" for rank in range(1, len(fleet.workers))]
    everyone = list(zip(fleet.workers, [others] + [["w0"]] * len(others), strict=True))

    def each(function: Callable[..., Any], *args: Any) -> None:
        for worker, to in everyone:
            worker.begin(function, to, *args)
        for worker, _ in everyone:
            worker.result()

    each(make_references)
    each(begin_calls, "before", True)
    for worker, to in everyone:
        worker.do(calls_have_begun, CALLS * len(to))
    interrupt()
    everywhere(fleet, open_gate)
    each(begin_calls, "during", False)
    each(begin_synchronous_calls)
    each(lend_and_drop)
    restore()
    made = set[str]().union(*everywhere(fleet, collect))
    assert len(made) == 2 * len(others) * (2 * CALLS + 2)
    assert sum(everywhere(fleet, runs), Counter[str]()) == Counter(made)
    everywhere(fleet, lent_references_work)
    everywhere(fleet, drop_references)
    everywhere(fleet, references_end)


def test_calls_and_references_survive_short_cuts(network: Callable[[int], Network]) -> None:
    """w1 is cut off, w2 cannot send and w3 cannot receive, all at the same time."""
    hosts = network(4)

    def cut() -> None:
        hosts.cut(1)
        hosts.cut_sending(2)
        hosts.cut_receiving(3)

    def heal() -> None:
        time.sleep(INTERRUPTION)
        for index in (1, 2, 3):
            hosts.heal(index)

    with fleet_on(hosts, **SURVIVED) as fleet:
        check_survival(fleet, cut, heal)


def test_calls_and_references_survive_reset_connections(
    network: Callable[[int], Network],
) -> None:
    """A proxy between the workers resets their connections and refuses others for a while."""
    hosts = network(2)
    proxy = proxy_of(hosts)

    def reset() -> None:
        assert proxy.do(reset_proxy) >= 2  # one in each direction

    def resume() -> None:
        time.sleep(REFUSAL)
        proxy.do(resume_proxy)

    try:
        with fleet_on(hosts, advertise=hosts.switch.address, **REFUSED) as fleet:
            check_survival(fleet, reset, resume)
    finally:
        proxy.close()


@pytest.mark.skipif(shutil.which("iptables") is None, reason="needs iptables")
def test_calls_and_references_survive_a_firewall_that_refuses(
    network: Callable[[int], Network],
) -> None:
    """It resets the connections to w1 and refuses others for a while."""
    hosts = network(2)

    def firewall(action: str) -> None:
        rule = "INPUT -i eth0 -p tcp -j REJECT --reject-with tcp-reset"
        subprocess.run([*hosts.hosts[1].prefix, "iptables", action, *rule.split()], check=True)

    def heal() -> None:
        time.sleep(REFUSAL)
        firewall("-D")

    with fleet_on(hosts, **REFUSED) as fleet:
        check_survival(fleet, lambda: firewall("-I"), heal)


# Interruptions that are not survived


def how_calls_failed() -> dict[str, str]:
    """Return by which error the calls to each worker failed."""
    found = {}
    for future in _pending.values():
        error = future.exception(timeout=30)
        assert isinstance(error, PeerLost), error
        found[str(error.peer)] = type(error).__name__
    return found


def call_error(to: str) -> str:
    with pytest.raises(PeerLost) as caught:
        rpc.rpc_sync(to, own_name)
    return str(caught.value.peer)


def test_long_cuts_are_losses_on_both_sides(network: Callable[[int], Network]) -> None:
    hosts = network(4)
    with fleet_on(hosts, **NOT_SURVIVED) as fleet:
        for rank in (1, 2, 3):
            fleet[0].do(begin_calls, [f"w{rank}"], "before", True)
            fleet[rank].do(begin_calls, ["w0"], "before", True)
            fleet[rank].do(calls_have_begun, CALLS)
        fleet[0].do(calls_have_begun, 3 * CALLS)
        hosts.cut(1)
        hosts.cut_sending(2)
        hosts.cut_receiving(3)
        lost = everywhere(fleet, how_calls_failed)
        assert lost == [dict.fromkeys(("w1", "w2", "w3"), "PeerLost")] + [{"w0": "PeerLost"}] * 3
        for rank in (1, 2, 3):
            hosts.heal(rank)
        for rank in (1, 2, 3):  # a loss is final
            assert fleet[0].do(call_error, f"w{rank}") == f"w{rank}"
            assert fleet[rank].do(call_error, "w0") == "w0"


def test_a_killed_worker_of_another_host_is_lost_soon(network: Callable[[int], Network]) -> None:
    """Its host refuses connections: that is silence, long before `resume_timeout` has passed."""
    hosts = network(3)
    with fleet_on(hosts, **SURVIVED) as fleet:
        fleet[0].do(begin_calls, ["w1"], "before", True)
        fleet[1].do(begin_calls, ["w2"], "before", True)
        fleet[1].do(calls_have_begun, CALLS)
        fleet[2].do(calls_have_begun, CALLS)
        fleet[1].kill()
        assert fleet[0].do(how_calls_failed) == {"w1": "PeerLost"}
        fleet[2].do(until_lost, "w1")  # it never called w1
        assert [fleet[rank].do(call_error, "w1") for rank in (0, 2)] == ["w1", "w1"]


def until_lost(name: str) -> None:
    agent = current_agent()
    assert agent is not None
    until(lambda: name in agent._runtime.failures.lost_names())


def test_a_worker_that_was_started_again_is_not_waited_for(
    network: Callable[[int], Network],
) -> None:
    """The directory says that it has ended, while its old address still refuses connections."""
    hosts = network(2)
    with fleet_on(
        hosts, **{**SURVIVED, "heartbeat_timeout": 120.0, "resume_timeout": 120.0}
    ) as fleet:
        fleet[0].do(begin_calls, ["w1"], "before", True)
        fleet[1].do(calls_have_begun, CALLS)
        fleet[1].kill()
        fleet.restart(1)
        assert fleet[0].do(how_calls_failed) == {"w1": "PeerLost"}
        fleet[0].do(call_succeeds, "w1")


def call_succeeds(to: str) -> None:
    assert rpc.rpc_sync(to, own_name) == to

"""Calls with large tensors over TCP, which the receiver pulls over several connections."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from telegrad.client.multiplexed import MultiplexedConnection
from telegrad.errors import CallTimeout, PeerLost, SerializationError
from telegrad.testing import LocalCluster
from telegrad.transport import stripes
from telegrad.transport.stripes import Stripe
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import PATIENCE, Log, note_in, until

MIN_BYTES = 1 << 16
NUMBERS = 2_000_000  # 8 MB as float32


@pytest.fixture(params=["on", "off"])
def tls(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def transport() -> str:
    return "tcp"


@pytest.fixture
def pair(cluster: Clusters, tls: str) -> Iterator[LocalCluster]:
    """Two workers. In the end, none of their transfers is left."""
    workers = cluster(2, bulk_min_bytes=MIN_BYTES, tls=tls)
    yield workers
    for agent in workers:
        until(lambda agent=agent: not in_use(agent))  # type: ignore[misc]


def in_use(agent: Any) -> int:
    statistics = agent._runtime.statistics()
    return int(statistics["bulk_registrations"] + statistics["bulk_pulls"])


def tensor(count: int = NUMBERS, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def same(*values: Any) -> Any:
    return values


def add(value: torch.Tensor, number: int = 0) -> torch.Tensor:
    return value[:1] + number


def small(number: int) -> int:
    return number


class Hold:
    """Holds the threads that send chunks until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        send = stripes.send_chunk

        def held(stripe: Stripe, chunk: Iterable[memoryview], about: bytes) -> None:
            self.reached.set()
            assert self.opened.wait(PATIENCE)
            send(stripe, chunk, about)

        monkeypatch.setattr(stripes, "send_chunk", held)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """Name it after the cluster, so that it opens first."""
    hold = Hold(monkeypatch)
    yield hold
    hold.opened.set()


@pytest.mark.parametrize("count", [1, MIN_BYTES // 4 - 1, MIN_BYTES // 4, 300_001, NUMBERS])
def test_requests_and_results_of_any_size(pair: LocalCluster, count: int) -> None:
    value = tensor(count)
    assert torch.equal(pair["w0"].call("w1", double, value), value * 2)
    assert torch.equal(pair["w0"].submit("w1", double, value).wait(), value * 2)


def test_tensors_of_all_kinds_in_one_call(pair: LocalCluster) -> None:
    values = (
        tensor(1 << 20).view(1024, 1024).t(),  # not contiguous
        tensor(1 << 20)[::3],
        torch.empty(0),
        torch.arange(200_000, dtype=torch.int16),
        tensor(1 << 18).bool(),
        *[tensor(40_000, seed) for seed in range(50)],
    )
    for received in (
        pair["w0"].call("w1", same, *values),
        pair["w0"].submit("w1", same, *values).wait(),
    ):
        assert all(torch.equal(a, b) for a, b in zip(received, values, strict=True))


def test_both_directions_and_many_callers_at_once(
    pair: LocalCluster, in_background: Background
) -> None:
    def calls(sender: str, receiver: str, seed: int) -> bool:
        value = tensor(NUMBERS // 4, seed)
        agent = pair[sender]
        return all(
            torch.equal(result, value * 2)
            for _ in range(3)
            for result in (
                agent.call(receiver, double, value),
                agent.submit(receiver, double, value).wait(),
            )
        )

    running = [in_background(calls, f"w{seed % 2}", f"w{1 - seed % 2}", seed) for seed in range(8)]
    assert all(each.result(PATIENCE) for each in running)


def test_a_sender_may_change_its_tensor_after_submit(pair: LocalCluster) -> None:
    value = tensor()
    expected = value * 2
    future = pair["w0"].submit("w1", double, value)
    value.zero_()
    assert torch.equal(future.wait(), expected)


def test_small_calls_do_not_wait_for_a_large_one(
    pair: LocalCluster, hold: Hold, log: Log, in_background: Background
) -> None:
    def large() -> None:
        pair["w0"].submit("w1", double, tensor()).wait()
        note_in(log, "large")

    pair["w0"].call("w1", small, 0)
    running = in_background(large)
    assert hold.reached.wait(PATIENCE)
    for number in range(20):  # on the connection of the large one, and on another
        assert pair["w0"].submit("w1", small, number).wait() == number
        assert pair["w0"].call("w1", small, number) == number
    note_in(log, "small")
    hold.opened.set()
    running.result(PATIENCE)
    assert log.entries == ["small", "large"]


def test_small_calls_do_not_wait_for_a_large_result(
    pair: LocalCluster, hold: Hold, in_background: Background
) -> None:
    running = [in_background(pair["w0"].call, "w1", torch.ones, NUMBERS) for _ in range(3)]
    assert hold.reached.wait(PATIENCE)
    for number in range(20):
        assert pair["w0"].submit("w1", small, number).wait() == number
    hold.opened.set()
    assert all(each.result(PATIENCE).sum() == NUMBERS for each in running)


def test_a_function_that_a_large_call_defines_is_known_to_later_calls(
    pair: LocalCluster, hold: Hold, in_background: Background
) -> None:
    """A small call of the function that overtakes the large one defines it itself."""
    pair["w0"].call("w1", small, 0)  # connected: calls do not wait in the queue
    value = tensor()
    large = in_background(lambda: pair["w0"].submit("w1", add, value, 1).wait())
    assert hold.reached.wait(PATIENCE)
    assert pair["w0"].submit("w1", add, value[:1], 2).wait() == value[0] + 2
    hold.opened.set()
    assert large.result(PATIENCE) == value[0] + 1
    assert pair["w0"].submit("w1", add, value[:1], 3).wait() == value[0] + 3


def test_a_large_call_whose_deadline_passes_fails_alone(pair: LocalCluster, hold: Hold) -> None:
    pair["w0"].call("w1", small, 0)
    runtime = pair["w0"]._runtime

    def release() -> None:
        assert hold.reached.wait(PATIENCE)
        until(lambda: not runtime.statistics()["bulk_registrations"])
        hold.opened.set()

    for call in (
        lambda: runtime.invoke("w1", double, (tensor(),), timeout=0.2),
        lambda: runtime.start("w1", double, (tensor(),), timeout=0.2).wait(),
    ):
        hold.opened.clear()
        hold.reached.clear()
        releasing = threading.Thread(target=release)
        releasing.start()
        with pytest.raises(CallTimeout):
            call()
        releasing.join()
    assert pair["w0"].call("w1", small, 1) == 1
    assert torch.equal(pair["w0"].call("w1", double, tensor()), tensor() * 2)


def test_small_calls_load_no_cipher() -> None:
    """It takes 20 ms and 9 MB, which a group that sends no large tensors does not need."""
    program = (
        "import sys\n"
        "from telegrad.testing import LocalCluster\n"
        "with LocalCluster(2, transports=('unix',)) as cluster:\n"
        "    assert cluster['w0'].call('w1', abs, -1) == 1\n"
        "assert 'cryptography' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_reply_that_overtakes_the_end_of_its_own_deadline(
    pair: LocalCluster, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callee learns that the sender gave up before the call has failed on the caller."""
    pair["w0"].call("w1", small, 0)
    abandon = MultiplexedConnection._abandon

    def abandon_later(connection: MultiplexedConnection, call_id: int, *args: Any) -> None:
        until(lambda: not in_use(pair["w0"]))  # the thread that sends has given up, too
        hold.opened.set()
        until(lambda: call_id not in connection.pending)
        abandon(connection, call_id, *args)

    monkeypatch.setattr(MultiplexedConnection, "_abandon", abandon_later)
    with pytest.raises(CallTimeout):
        pair["w0"]._runtime.start("w1", double, (tensor(),), timeout=0.5).wait()


@pytest.mark.parametrize("dies", ["w0", "w1"])
def test_a_worker_that_dies_during_a_transfer(
    pair: LocalCluster, hold: Hold, in_background: Background, dies: str
) -> None:
    pair["w0"].call("w1", small, 0)
    running = [
        in_background(pair["w0"].call, "w1", double, tensor()),
        in_background(lambda: pair["w0"].submit("w1", double, tensor()).wait()),
    ]
    until(lambda: pair["w0"]._runtime.statistics()["bulk_registrations"] == 2)
    assert hold.reached.wait(PATIENCE)
    threading.Thread(target=pair.kill, args=(dies,), name="killing").start()
    until(lambda: pair[dies]._runtime.closing)
    hold.opened.set()
    for each in running:
        with pytest.raises((PeerLost, SerializationError)):
            each.result(PATIENCE)


def test_stripes_that_break_all_the_time(
    pair: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, count = stripes.send_chunk, iter(range(10**6))

    def unreliable(stripe: Stripe, chunk: Iterable[memoryview], about: bytes) -> None:
        if next(count) % 3 == 0:
            stripes.shut([stripe])
        send(stripe, chunk, about)

    monkeypatch.setattr(stripes, "send_chunk", unreliable)
    value = tensor()
    assert torch.equal(pair["w0"].call("w1", double, value), value * 2)
    assert torch.equal(pair["w0"].submit("w1", double, value).wait(), value * 2)


def test_without_streams_large_tensors_are_in_the_connection(cluster: Clusters) -> None:
    workers = cluster(2, bulk_streams=0)
    value = tensor()
    assert torch.equal(workers["w0"].call("w1", double, value), value * 2)
    assert not workers["w0"]._runtime.statistics()["bulk_stripes"]


def test_a_value_for_many_workers(cluster: Clusters) -> None:
    workers = cluster(4, bulk_min_bytes=MIN_BYTES)
    value = tensor()
    futures = [workers["w0"].submit(f"w{rank}", double, value) for rank in range(1, 4)]
    assert all(torch.equal(future.wait(), value * 2) for future in futures)

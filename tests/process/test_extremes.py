"""Messages and loads far from the ordinary: very large, very many, never answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import telegrad.rpc as rpc
from telegrad import Agent, Config
from telegrad.errors import CallTimeout, UsageError
from telegrad.refs import remote
from telegrad.testing import LocalCluster
from tests.process.fleet import Fleet
from tests.process.test_soak import echo, join, settle, this_agent
from tests.refs.objects import Thing, owned, until

pytestmark = pytest.mark.process
_forever = threading.Event()


def never_return() -> None:
    _forever.wait()


def ends(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.numel(), int(tensor[0]), int(tensor[-1])


def send_large(to: str, nbytes: int, asynchronous: bool) -> tuple[int, int, int]:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    tensor[0], tensor[-1] = 3, 7
    agent = this_agent()
    if asynchronous:
        return agent._runtime.start(to, ends, (tensor,), None, 300.0).wait()  # type: ignore[no-any-return]
    return agent._runtime.invoke(to, ends, (tensor,), None, 300.0)  # type: ignore[no-any-return]


def send_many(to: str, count: int, size: int) -> bool:
    sent = [torch.full((size,), float(index)) for index in range(count)]
    back = this_agent().call(to, echo, sent)
    return len(back) == count and all(
        torch.equal(one, other) for one, other in zip(sent, back, strict=True)
    )


def flood(to: str, count: int) -> int:
    futures = [this_agent().submit(to, echo, index) for index in range(count)]
    return sum(future.wait() == index for index, future in enumerate(futures))


def temporaries(to: str, count: int) -> int:
    """Use references that nothing but their call keeps alive; how many results were right."""
    agent, right = this_agent(), 0
    for start in range(0, count, 500):
        numbers = range(start, min(start + 500, count))
        futures = [
            remote(to, Thing, (number,), agent=agent).rpc_async().get() for number in numbers
        ]
        right += sum(
            future.wait() == number for number, future in zip(numbers, futures, strict=True)
        )
    return right


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(2, join, str(tmp_path / "store")) as fleet:
        yield fleet


@pytest.mark.soak
@pytest.mark.parametrize("nbytes", [2_200_000_000, 5_000_000_000])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.timeout(600)
def test_tensors_of_gigabytes(fleet: Fleet, nbytes: int, asynchronous: bool) -> None:
    assert fleet[0].do(send_large, "w1", nbytes, asynchronous) == (nbytes, 3, 7)


def test_a_hundred_thousand_small_tensors_in_a_list(fleet: Fleet) -> None:
    assert fleet[0].do(send_many, "w1", 100_000, 1)


def test_four_thousand_buffers_in_one_message(fleet: Fleet) -> None:
    assert fleet[0].do(send_many, "w1", 4_000, 10_000)


def test_a_flood_of_calls_from_one_member(fleet: Fleet) -> None:
    assert fleet[0].do(flood, "w1", 20_000) == 20_000


@pytest.mark.parametrize("count", [5_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(1800)
def test_temporary_references_under_load(fleet: Fleet, count: int) -> None:
    for start in range(0, count, 20_000):
        part = min(20_000, count - start)
        fleet[1].begin(temporaries, "w0", part)
        assert fleet[0].do(temporaries, "w1", part) == part
        assert fleet[1].result() == part
    for worker in fleet.workers:
        assert worker.do(settle) == {}


def test_calls_that_never_return_end_with_their_deadline_and_stop_nobody() -> None:
    with LocalCluster(2, transports=("unix",), threads=2) as cluster:
        w0, w1 = cluster["w0"], cluster["w1"]
        try:
            stuck = [w0._runtime.start("w1", never_return, (), None, 0.5) for _ in range(40)]
            assert w0._runtime.invoke("w1", abs, (-3,), None, 20.0) == 3
            assert w0._runtime.start("w1", abs, (-3,), None, 20.0).wait() == 3
            for future in stuck:
                assert isinstance(future.exception(timeout=20), CallTimeout)
        finally:
            _forever.set()
        until(lambda: owned(w1) == 0)


def test_a_corrupt_key_file_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Agent("first", store=dist.HashStore()) as first:
        assert first.call("first", abs, -1) == 1
    (key,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    for content in (b"", b"short", b"\xff" * 64):
        key.write_bytes(content)
        with pytest.raises(UsageError, match="delete it"):
            Agent("second", store=dist.HashStore()).open()


def test_a_rank_outside_the_group_is_an_error_at_once(tmp_path: Path) -> None:
    options = rpc.RpcBackendOptions(
        init_method="tcp://127.0.0.1:1", config=Config(join_timeout=300.0)
    )
    with pytest.raises(UsageError, match="rank 2 is outside"):
        rpc.init_rpc("late", rank=2, world_size=2, rpc_backend_options=options)

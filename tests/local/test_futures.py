"""Futures: wait, await, cancel, chain."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import gc
import operator
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from telegrad import Future
from telegrad.agent import Agent
from telegrad.errors import CallCancelled, CallTimeout, RemoteError, RemoteTraceback
from telegrad.futures import wait_all
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, Log, hold_at, until

flavour = contextvars.ContextVar("flavour", default="none")


class Odd(Exception):
    pass


def fail(message: str) -> None:
    raise Odd(message)


@pytest.fixture
def transport() -> str:
    return "unix"


# Waiting


def test_wait_value_and_result_agree(w0: Agent) -> None:
    future = w0.submit("w1", operator.add, 1, 2)
    assert isinstance(future, Future)
    assert isinstance(future, torch.futures.Future)
    assert future.wait() == future.result() == future.result(timeout=1) == future.value() == 3
    assert future.done()
    assert future.exception() is None


def test_a_failed_call_raises_wherever_it_is_looked_at(w0: Agent) -> None:
    future = w0.submit("w1", fail, "no")
    for look in (future.wait, future.result, future.value):
        with pytest.raises(Odd, match="no"):
            look()
    error = future.exception()
    assert isinstance(error, Odd)
    assert isinstance(error.__cause__, RemoteTraceback)


def test_result_with_a_time_limit_leaves_the_call_alone(w0: Agent, gate: Gate) -> None:
    future = w0.submit("w1", hold_at, gate, "late")
    for wait in (future.result, future.exception):
        with pytest.raises(TimeoutError, match="still under way"):
            wait(timeout=0.01)
    assert not future.done()
    gate.open()
    assert future.result(timeout=PATIENCE) == "late"


def test_a_time_limit_of_zero_only_looks(w0: Agent, gate: Gate) -> None:
    future = w0.submit("w1", hold_at, gate)
    with pytest.raises(CallTimeout):
        future.result(0)
    with pytest.raises(CallTimeout):
        future.exception(-1)


def test_many_threads_wait_for_one_future(w0: Agent, gate: Gate) -> None:
    future = w0.submit("w1", hold_at, gate, 5)
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        waiters = [pool.submit(future.wait) for _ in range(20)]
        gate.wait_for()
        gate.open()
        assert [waiter.result(PATIENCE) for waiter in waiters] == [5] * 20


def test_looking_again_and_again_leaves_nothing_on_the_future(
    w0: Agent, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[Any] = []
    add = Future.add_done_callback

    def add_and_note(self: Future[Any], run: Any) -> None:
        added.append(run)
        add(self, run)

    monkeypatch.setattr(Future, "add_done_callback", add_and_note)
    future = w0.submit("w1", hold_at, gate, 5)
    for _ in range(50):
        with pytest.raises(CallTimeout):
            future.result(0.0001)
    assert len(added) <= 1
    gate.open()
    assert future.result(PATIENCE) == 5


# Ctrl-C


@pytest.mark.parametrize(
    "wait", [Future.wait, lambda future: future.result(PATIENCE), Future.exception]
)
def test_ctrl_c_interrupts_a_waiting_future(
    w0: Agent, gate: Gate, wait: Callable[[Future[Any]], Any]
) -> None:
    future = w0.submit("w1", hold_at, gate, 5)
    with pytest.raises(KeyboardInterrupt):
        _interrupted_at(gate, lambda: wait(future))
    gate.open()
    assert future.wait() == 5


@pytest.mark.parametrize("transport", ["memory", "unix", "tcp"])
def test_ctrl_c_interrupts_a_synchronous_call(w0: Agent, gate: Gate, transport: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        _interrupted_at(gate, lambda: w0.call("w1", hold_at, gate))
    gate.open()
    assert w0.call("w1", abs, -1) == 1


def _interrupted_at(gate: Gate, block: Callable[[], Any]) -> None:
    """Run `block` and interrupt this thread once the remote function is at the gate and this thread
    sleeps.
    """
    main = threading.main_thread()
    assert main.ident == threading.get_ident()

    def interrupt() -> None:
        gate.wait_for()
        until(lambda: _is_asleep(f"/proc/self/task/{main.native_id}/stat"))
        signal.pthread_kill(main.ident or 0, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        helper.start()
        block()
    finally:
        helper.join()
        signal.signal(signal.SIGINT, before)


def _is_asleep(path: str) -> bool:
    with open(path) as file:
        return file.read().rpartition(")")[2].split()[0] == "S"


# Chaining


def test_then_gets_the_finished_future(w0: Agent) -> None:
    chained = w0.submit("w1", operator.add, 1, 2).then(lambda done: done.wait() * 10)
    assert isinstance(chained, Future)
    assert chained.wait() == 30


def test_then_chains(w0: Agent) -> None:
    future: Future[int] = w0.submit("w1", abs, -1)
    for _ in range(50):
        future = future.then(lambda done: done.wait() + 1)
    assert future.wait() == 51


def test_then_after_completion_runs_too(w0: Agent) -> None:
    future = w0.submit("w1", abs, -1)
    future.wait()
    assert future.then(lambda done: done.value() + 1).wait() == 2


def test_then_runs_in_the_context_of_whoever_chained(w0: Agent, gate: Gate) -> None:
    token = flavour.set("vanilla")
    chained = w0.submit("w1", hold_at, gate).then(lambda _: flavour.get())
    flavour.reset(token)
    gate.open()
    assert chained.wait() == "vanilla"


def test_an_error_in_then_is_a_runtime_error_with_the_original_as_its_cause(w0: Agent) -> None:
    chained = w0.submit("w1", abs, -1).then(lambda _: fail("chained"))
    with pytest.raises(RuntimeError, match="Odd: chained") as caught:
        chained.wait()
    assert isinstance(caught.value.__cause__, Odd)


def test_an_error_of_the_call_goes_through_then_that_waits(w0: Agent) -> None:
    chained = w0.submit("w1", fail, "first").then(lambda done: done.wait())
    with pytest.raises(RuntimeError, match="first") as caught:
        chained.wait()
    assert isinstance(caught.value.__cause__, Odd)


def test_then_wants_a_callable(w0: Agent) -> None:
    with pytest.raises(TypeError, match="callable"):
        w0.submit("w1", abs, -1).then(3)  # type: ignore[arg-type]


def test_a_future_follows_the_value_of_another(w0: Agent, gate: Gate) -> None:
    follower: Future[str] = Future()
    follower.follow(w0.submit("w1", hold_at, gate), lambda _: "done")
    gate.wait_for()
    assert not follower.done()
    gate.open()
    assert follower.result(PATIENCE) == "done"


@pytest.mark.parametrize("make", [Future, torch.futures.Future], ids=["telegrad", "torch"])
@pytest.mark.parametrize("is_complete", [False, True], ids=["pending", "complete"])
def test_a_future_follows_futures_of_either_kind(make: Any, is_complete: bool) -> None:
    source, failing = make(), make()
    follower: Future[int] = Future()
    failed: Future[int] = Future()
    if not is_complete:
        follower.follow(source)
        failed.follow(failing, int)
    source.set_result(3)
    failing.set_exception(Odd("source"))
    if is_complete:
        follower.follow(source)
        failed.follow(failing, int)
    assert follower.wait() == 3
    with pytest.raises(Odd, match="source"):
        failed.wait()


def test_an_error_that_is_followed_is_not_tied_to_frames() -> None:
    source: Future[int] = Future()
    follower: Future[int] = Future()
    follower.follow(source)
    error = Odd("source")
    source.set_exception(error)
    assert follower.exception() is error
    assert error.__traceback__ is None


def test_a_transform_that_raises_fails_the_follower_alone() -> None:
    source: Future[str] = Future()
    follower: Future[None] = Future()
    ended: Future[None] = Future()
    follower.follow(source, fail)
    ended.follow(source, sys.exit)
    source.set_result("transform")
    with pytest.raises(Odd, match="transform"):
        follower.wait()
    with pytest.raises(RemoteError, match="SystemExit: transform"):
        ended.wait()
    assert source.wait() == "transform"


def test_a_follower_that_is_complete_ignores_its_source() -> None:
    source: Future[int] = Future()
    follower: Future[int] = Future()
    follower.follow(source)
    assert not follower.is_call
    assert follower.cancel()
    source.set_result(1)
    assert follower.cancelled()
    assert source.wait() == 1


def test_cancelling_a_follower_can_cancel_its_source(w0: Agent, gate: Gate) -> None:
    source = w0.submit("w1", hold_at, gate)
    follower: Future[Any] = Future()
    follower.follow(source, cancels_source=True)
    gate.wait_for()
    assert follower.is_call
    assert follower.cancel()
    assert source.cancelled()
    gate.open()

    torchs: torch.futures.Future[int] = torch.futures.Future()
    other: Future[int] = Future()
    other.follow(torchs, cancels_source=True)
    assert other.cancel()
    assert not torchs.done()


def test_the_code_of_a_transform_stands_for_its_follower() -> None:
    """Slow callbacks are recognized by their code: those of `follow` must not all look the same."""
    source: Future[int] = Future()
    for transform in (fail, None, None):
        Future[Any]().follow(source, transform)  # type: ignore[arg-type]
    first, second, third = source._callback_codes
    assert first is fail.__code__
    assert second is third is not first


def test_callbacks_run_once_each_in_order(w0: Agent, gate: Gate) -> None:
    future = w0.submit("w1", hold_at, gate)
    order: list[int] = []

    def note(number: int, _: object) -> None:
        order.append(number)

    for number in range(10):
        future.add_done_callback(partial(note, number))
    gate.open()
    future.wait()
    until(lambda: len(order) == 10)
    assert order == list(range(10))


def test_a_callback_may_make_calls(w0: Agent) -> None:
    made: Future[list[int]] = Future()

    def call_on(done: torch.futures.Future[int]) -> None:
        number = done.value()
        made.set_result(
            [w0.call("w1", operator.neg, number), w0.submit("w1", operator.pos, number).wait()]
        )

    w0.submit("w1", abs, -3).add_done_callback(call_on)
    assert made.result(PATIENCE) == [-3, 3]


def test_a_callback_that_raises_harms_nobody(w0: Agent) -> None:
    future = w0.submit("w1", abs, -3)
    future.add_done_callback(lambda _: fail("in a callback"))
    assert future.wait() == 3
    assert w0.submit("w1", abs, -4).wait() == 4


def test_what_a_callback_raises_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    early: Future[int] = Future()
    early.add_done_callback(lambda _: fail("early"))
    early.set_result(1)
    early.add_done_callback(partial(fail_with, "late"))  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == [
        "a callback of a future failed: "
        "test_what_a_callback_raises_is_logged_with_its_name.<locals>.<lambda>",
        "a callback of a future failed: fail_with",
    ]
    assert "early" in caplog.text
    assert "late" in caplog.text


def fail_with(message: str, _: object) -> None:
    fail(message)


def test_an_interrupted_completion_wakes_everybody_and_runs_the_other_callbacks() -> None:
    future: Future[int] = Future()
    ran: list[str] = []

    def interrupt(_: object) -> None:  # as a signal handler does while a callback runs
        ran.append("interrupted")
        raise KeyboardInterrupt

    future.add_done_callback(interrupt)
    future.add_done_callback(lambda _: ran.append("second"))
    chained = future.then(lambda done: done.value() + 1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(future.wait)
        until(lambda: future._completed is not None)
        with pytest.raises(KeyboardInterrupt):
            future.set_result(1)
        assert waiter.result(PATIENCE) == 1
    assert ran == ["interrupted", "second"]
    assert chained.result(PATIENCE) == 2


def test_other_threads_log_what_ends_a_callback(caplog: pytest.LogCaptureFixture) -> None:
    future: Future[int] = Future()
    future.add_done_callback(lambda _: sys.exit(3))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(future.set_result, 1).result(PATIENCE)
    assert "SystemExit: 3" in caplog.text


def test_a_future_that_is_settled_takes_callbacks_until_it_is_announced() -> None:
    future: Future[int] = Future()
    values: list[int] = []
    assert future._settle(1, None)
    assert future.done()
    assert future.wait() == future.result() == 1
    future.add_done_callback(lambda done: values.append(done.value()))
    assert not future._try_complete(2, None)  # and does not announce it either
    assert values == []
    future._announce()
    future.add_done_callback(lambda done: values.append(done.value()))
    assert values == [1, 1]


# torch's own functions


def test_torch_waits_for_all(w0: Agent) -> None:
    futures: list[Any] = [w0.submit("w1", abs, -i) for i in range(10)]
    assert torch.futures.wait_all(futures) == list(range(10))


def test_torch_wait_all_raises_what_a_call_raised(w0: Agent) -> None:
    with pytest.raises(Odd, match="no"):
        torch.futures.wait_all([w0.submit("w1", abs, -1), w0.submit("w1", fail, "no")])


def test_torch_collects_all(w0: Agent, gate: Gate) -> None:
    futures: list[Any] = [w0.submit("w1", hold_at, gate, i) for i in range(5)]
    collected = torch.futures.collect_all(futures).then(
        lambda done: [each.value() for each in done.value()]
    )
    assert not collected.done()
    gate.open()
    assert collected.wait() == list(range(5))


# Made by hand


def test_a_future_is_completed_once() -> None:
    future: Future[int] = Future()
    future.set_result(1)
    with pytest.raises(RuntimeError):
        future.set_exception(ValueError("too late"))
    assert future.wait() == 1
    assert not future.cancel()


def test_a_future_can_be_given_an_error() -> None:
    future: Future[int] = Future()
    future.set_exception(ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        future.wait()
    assert not future.cancelled()


def test_completions_race_and_one_wins() -> None:
    for _ in range(20):
        future: Future[int] = Future()
        start = threading.Barrier(4)

        def settle(
            number: int, future: Future[int] = future, start: threading.Barrier = start
        ) -> bool:
            start.wait(PATIENCE)
            return future._try_complete(number, None)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            won = list(pool.map(settle, range(4)))
        assert won.count(True) == 1
        assert future.wait() == won.index(True)


# Cancelling


def test_a_cancelled_call_ends_at_once(w0: Agent, gate: Gate) -> None:
    future = w0.submit("w1", hold_at, gate)
    gate.wait_for()
    assert future.cancel()
    assert future.cancelled()
    assert future.done()
    assert not future.cancel()
    for look in (future.wait, future.result):
        with pytest.raises(CallCancelled):
            look()
    assert w0.statistics()["calls_pending"] == 0


def test_a_cancelled_call_is_a_cancelled_future_of_the_standard_library(
    w0: Agent, gate: Gate
) -> None:
    future = w0.submit("w1", hold_at, gate)
    future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.wait()


def test_a_finished_call_cannot_be_cancelled(w0: Agent) -> None:
    future = w0.submit("w1", abs, -1)
    future.wait()
    assert not future.cancel()
    assert not future.cancelled()
    assert future.wait() == 1


def test_a_call_that_was_cancelled_in_the_queue_never_runs(
    cluster: Clusters, gate: Gate, log: Log
) -> None:
    w0 = cluster(2, threads=2, max_threads=2)["w0"]
    # one of them by the reader
    running = [w0.submit("w1", hold_at_then_note, gate, log, "running") for _ in range(3)]
    gate.wait_for(3)
    unwanted = w0.submit("w1", hold_at_then_note, gate, log, "unwanted")
    wanted = w0.submit("w1", hold_at_then_note, gate, log, "wanted")
    assert unwanted.cancel()
    assert w0.submit("w1", abs, -1).wait() == 1  # what was sent before it has been read
    gate.open()
    for future in (*running, wanted):
        future.result(PATIENCE)
    assert sorted(log.entries) == ["running", "running", "running", "wanted"]


def hold_at_then_note(gate: Gate, log: Log, entry: str) -> None:
    gate.hold()
    log.note(entry)


def test_callbacks_of_a_cancelled_call_run(w0: Agent, gate: Gate) -> None:
    future = w0.submit("w1", hold_at, gate)
    chained = future.then(lambda done: isinstance(_error_of(done), CallCancelled))
    future.cancel()
    assert chained.wait()


def _error_of(future: torch.futures.Future[Any]) -> Exception | None:
    try:
        future.value()
    except Exception as error:
        return error
    return None


def test_waiting_threads_hear_of_a_cancellation(w0: Agent, gate: Gate) -> None:
    future = w0.submit("w1", hold_at, gate)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(future.exception)
        gate.wait_for()
        future.cancel()
        assert isinstance(waiter.result(PATIENCE), CallCancelled)


# asyncio


def test_a_future_can_be_awaited(w0: Agent) -> None:
    async def main() -> list[int]:
        first = await w0.submit("w1", abs, -1)
        rest = await asyncio.gather(*(_await(w0.submit("w1", abs, -i)) for i in range(2, 20)))
        return [first, *rest]

    assert asyncio.run(main()) == list(range(1, 20))


async def _await(future: Future[Any]) -> Any:
    return await future


def test_a_finished_future_can_be_awaited_again(w0: Agent) -> None:
    async def main() -> tuple[int, int]:
        future = w0.submit("w1", abs, -1)
        return await future, await future

    assert asyncio.run(main()) == (1, 1)


def test_awaiting_does_not_block_the_loop(w0: Agent, gate: Gate) -> None:
    async def main() -> str:
        held = asyncio.ensure_future(_await(w0.submit("w1", hold_at, gate, "held")))
        assert await w0.submit("w1", abs, -1) == 1
        assert not held.done()
        gate.open()
        return str(await held)

    assert asyncio.run(main()) == "held"


def test_await_raises_what_the_call_raised(w0: Agent) -> None:
    with pytest.raises(Odd, match="no"):
        asyncio.run(_await(w0.submit("w1", fail, "no")))


def test_cancelling_the_task_cancels_the_call(w0: Agent, gate: Gate) -> None:
    async def main() -> Future[Any]:
        future = w0.submit("w1", hold_at, gate)
        task = asyncio.ensure_future(_await(future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return future

    assert asyncio.run(main()).cancelled()
    assert w0.statistics()["calls_pending"] == 0


def test_asyncio_time_limits_cancel_the_call(w0: Agent, gate: Gate) -> None:
    future = w0.submit("w1", hold_at, gate)
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(_await(future), 0.01))
    assert future.cancelled()


def test_a_reply_after_the_loop_has_closed_is_no_problem(w0: Agent, gate: Gate) -> None:
    future = w0.submit("w1", hold_at, gate, 5)

    async def look() -> None:
        future._as_asyncio()

    asyncio.run(look())
    gate.open()
    assert future.result(PATIENCE) == 5


def test_one_future_serves_two_loops(w0: Agent, gate: Gate) -> None:
    future = w0.submit("w1", hold_at, gate, 5)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiters = [pool.submit(lambda: asyncio.run(_await(future))) for _ in range(2)]
        gate.wait_for()
        gate.open()
        assert [waiter.result(PATIENCE) for waiter in waiters] == [5, 5]


def test_a_failed_future_keeps_nobody_alive() -> None:
    class Thing:
        pass

    def fail() -> weakref.ref[Thing]:
        thing = Thing()
        future: Future[int] = Future()
        future.set_exception(ValueError("not today"))
        for wait in (future.wait, future.result, future.value):
            with pytest.raises(ValueError, match="not today"):
                wait()
        return weakref.ref(thing)

    left = fail()
    gc.collect()
    assert left() is None


class CopiedAsAnother(Exception):
    def __reduce__(self) -> Any:
        return ValueError, ("a copy",)


class CannotBeCopied(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit


@pytest.mark.parametrize("kind", [CopiedAsAnother, CannotBeCopied])
def test_an_error_that_cannot_be_copied_is_raised_as_it_is(kind: type[Exception]) -> None:
    error = kind("original")
    future: Future[None] = Future()
    future.set_exception(error)
    for wait in (future.wait, future.result, future.value):
        with pytest.raises(kind) as caught:
            wait()
        assert caught.value is error
    with pytest.raises(kind, match="original"):
        torch._C.Future.wait(future)  # as torch's own functions do


def test_only_exceptions_are_set_as_such() -> None:
    future: Future[None] = Future()
    with pytest.raises(AssertionError, match="not an Exception"):
        future.set_exception("text")  # type: ignore[arg-type]
    assert not future.done()


def test_nothing_to_wait_for_is_complete() -> None:
    assert wait_all([]) == []

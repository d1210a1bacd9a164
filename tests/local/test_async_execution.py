"""Functions that return a future: their callers get its value, and no thread waits for it."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from telegrad import Future, current_agent, current_caller
from telegrad.agent import Agent
from telegrad.errors import RemoteTraceback, UsageError
from telegrad.rpc.functions import async_execution
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, Log, hold_at, until


class Odd(Exception):
    pass


class Promises(Log):
    """The futures that a remote function handed out."""


@pytest.fixture
def transport() -> str:
    return "unix"


def finished(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def forward(to: str, function: Any, *args: Any) -> Future[Any]:
    agent = current_agent()
    assert agent is not None
    return agent.submit(to, function, *args)


@async_execution
def add_elsewhere(to: str, x: int, y: int) -> Future[int]:
    return forward(to, operator.add, x, y)


@async_execution
def add_then_double(to: str, x: int, y: int) -> Future[int]:
    return forward(to, operator.add, x, y).then(lambda done: done.wait() * 2)


@async_execution
def add_in_a_chain(to: str, x: int, steps: int) -> Future[int]:
    future = forward(to, operator.add, x, 0)
    for _ in range(steps):
        future = future.then(lambda done: forward(to, operator.add, done.wait(), 1).wait())
    return future


@async_execution
def at_once(value: Any) -> Any:
    return finished(value)


@async_execution
def torch_future(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@async_execution
def promise(promises: Promises) -> Any:
    future: Future[Any] = Future()
    promises.note(future)
    return future


@async_execution
def hold_elsewhere(promises: Promises, to: str, gate: Gate) -> Future[Any]:
    future = forward(to, hold_at, gate)
    promises.note(future)
    return future


@async_execution
def same_promise(promises: Promises) -> Any:
    """Everybody who calls gets the one future, as the trainers of a parameter server do."""
    (promised,) = promises.entries
    return promised


@async_execution
def not_a_future() -> int:
    return 3


@async_execution
def fail_at_once() -> Future[Any]:
    raise Odd("before any future")


@async_execution
def fail_in_future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(Odd("in the future"))
    return future


@async_execution
def fail_in_then() -> Future[Any]:
    def raise_odd(done: torch.futures.Future[int]) -> int:
        raise Odd("in then")

    return finished(1).then(raise_odd)


@async_execution
def fail_elsewhere(to: str) -> Future[Any]:
    return forward(to, int, "no number")


@async_execution
def unsendable() -> Future[Any]:
    return finished(lambda: (_ for _ in ())).then(lambda done: done.wait()())


@async_execution
def who_called() -> Future[str | None]:
    return finished(current_caller())


class Adder:
    """Every kind of method, the decorator over and under it."""

    def __init__(self, start: int) -> None:
        self.start = start

    @async_execution
    def method(self, to: str, x: int) -> Future[int]:
        return forward(to, operator.add, self.start, x)

    @staticmethod
    @async_execution
    def static_outside(to: str, x: int) -> Future[int]:
        return forward(to, operator.add, x, 1)

    @async_execution
    @staticmethod
    def static_inside(to: str, x: int) -> Future[int]:
        return forward(to, operator.add, x, 1)

    @classmethod
    @async_execution
    def class_outside(cls, to: str, x: int) -> Future[int]:
        return forward(to, operator.add, x, len(cls.__name__))

    @async_execution
    @classmethod
    def class_inside(cls, to: str, x: int) -> Future[int]:
        return forward(to, operator.add, x, len(cls.__name__))


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    return cluster(3)


@pytest.fixture
def w0(workers: LocalCluster) -> Agent:
    return workers["w0"]


@pytest.fixture(params=["synchronous", "asynchronous"])
def call(request: pytest.FixtureRequest, w0: Agent) -> Any:
    if request.param == "synchronous":
        return w0.call
    return lambda *args: w0.submit(*args).wait()


@pytest.mark.parametrize("transport", ["memory", "unix", "tcp"])
def test_the_caller_gets_the_value_of_the_future(w0: Agent, call: Any, transport: str) -> None:
    assert call("w1", add_elsewhere, "w2", 1, 2) == 3
    assert call("w1", add_elsewhere, "w0", 1, 2) == 3
    assert call("w1", add_elsewhere, "w1", 1, 2) == 3


def test_the_future_may_be_chained(call: Any) -> None:
    assert call("w1", add_then_double, "w2", 1, 2) == 6
    assert call("w1", add_in_a_chain, "w2", 5, 10) == 15


@pytest.mark.parametrize("function", [at_once, torch_future])
def test_the_future_may_be_finished_already_or_be_torchs_own(call: Any, function: Any) -> None:
    assert call("w1", function, {"a": 1}) == {"a": 1}


def test_a_tensor_is_a_fine_value(call: Any) -> None:
    assert call("w1", at_once, torch.ones(300_000)).sum() == 300_000


@pytest.mark.parametrize(
    ("method", "result"),
    [
        (Adder(10).method, 11),
        (Adder.static_outside, 2),
        (Adder.static_inside, 2),
        (Adder.class_outside, 6),
        (Adder.class_inside, 6),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_methods_of_every_kind(call: Any, method: Any, result: int) -> None:
    assert call("w1", method, "w2", 1) == result


def test_a_local_function_and_a_lambda(call: Any) -> None:
    @async_execution
    def local(x: int) -> Future[int]:
        return finished(x + 1)

    assert call("w1", local, 1) == 2
    assert call("w1", async_execution(lambda x: finished(x + 2)), 1) == 3


def test_a_builtin_may_be_marked_without_touching_it(call: Any) -> None:
    marked = async_execution(operator.itemgetter(0))
    assert call("w1", marked, [FinishedWhenUnpickled(4)]) == 4


class FinishedWhenUnpickled:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return finished, (self._value,)


def test_called_directly_it_returns_its_future() -> None:
    assert at_once(3).wait() == 3


def test_the_call_knows_its_caller(call: Any) -> None:
    assert call("w1", who_called) == "w0"


def test_what_is_not_a_future_is_refused(call: Any) -> None:
    with pytest.raises(
        UsageError, match=r"must return a torch.futures.Future.*not_a_future returned int"
    ):
        call("w1", not_a_future)


def test_an_error_before_the_future_arrives_as_itself(call: Any) -> None:
    with pytest.raises(Odd, match="before any future"):
        call("w1", fail_at_once)


def test_an_error_in_the_future_arrives_as_itself(call: Any) -> None:
    with pytest.raises(Odd, match="in the future") as caught:
        call("w1", fail_in_future)
    assert isinstance(caught.value.__cause__, RemoteTraceback)


def test_an_error_in_then_arrives_as_a_runtime_error(call: Any) -> None:
    with pytest.raises(RuntimeError, match="in then") as caught:
        call("w1", fail_in_then)
    assert "Odd" in str(caught.value.__cause__)


def test_an_error_from_a_third_worker_arrives_as_itself(call: Any) -> None:
    with pytest.raises(ValueError, match="no number") as caught:
        call("w1", fail_elsewhere, "w2")
    assert "'w1'" in str(caught.value.__cause__)


def test_a_value_that_cannot_travel_is_an_error_and_not_silence(call: Any) -> None:
    with pytest.raises(TypeError, match="generator"):
        call("w1", unsendable)


def test_thousands_wait_without_a_thread_each(w0: Agent, workers: LocalCluster) -> None:
    promises = Promises()
    futures = [w0.submit("w1", promise, promises) for _ in range(1000)]
    handed_out = promises.wait_for(1000)
    assert len(workers["w1"]._runtime.threads._alive) < 50
    for number, future in enumerate(handed_out):
        future.set_result(number)
    assert sorted(future.result(PATIENCE) for future in futures) == list(range(1000))


def test_cancelling_the_call_cancels_the_call_that_it_waits_for(w0: Agent, gate: Gate) -> None:
    promises = Promises()
    future = w0.submit("w1", hold_elsewhere, promises, "w2", gate)
    (passed_on,) = promises.wait_for(1)
    future.cancel()
    until(passed_on.cancelled)
    assert w0.submit("w1", at_once, 1).wait() == 1


@pytest.mark.parametrize("how", ["cancelled", "timed out", "killed"])
def test_a_future_that_several_calls_wait_for_survives_the_end_of_one(
    workers: LocalCluster, how: str
) -> None:
    promises = Promises()
    promises.note(Future())
    hasty = workers["w0"]._runtime.start(
        "w1", same_promise, (promises,), None, 0.05 if how == "timed out" else None
    )
    patient = workers["w2"].submit("w1", same_promise, promises)
    until(
        lambda: (
            sum(
                connection.calls_in_progress
                for connection in workers["w1"]._runtime.listener.connections
            )
            == 2
        )
    )
    if how == "cancelled":
        hasty.cancel()
    elif how == "killed":
        workers.kill("w0")
    assert hasty.exception(PATIENCE) is not None
    until(
        lambda: (
            sum(
                connection.calls_in_progress
                for connection in workers["w1"]._runtime.listener.connections
            )
            <= 1
        )
    )
    promises.entries[0].set_result("for all who are left")
    assert patient.result(PATIENCE) == "for all who are left"


def test_the_death_of_the_caller_cancels_the_call_that_it_waits_for(
    workers: LocalCluster, gate: Gate
) -> None:
    promises = Promises()
    lost = workers["w0"].submit("w1", hold_elsewhere, promises, "w2", gate)
    (passed_on,) = promises.wait_for(1)
    workers.kill("w0")
    assert lost.exception(PATIENCE) is not None
    until(passed_on.cancelled)


def test_completing_a_future_whose_caller_gave_up_is_no_problem(w0: Agent) -> None:
    promises = Promises()
    futures = [w0._runtime.start("w1", promise, (promises,), None, 0.02) for _ in range(2)]
    first, second = promises.wait_for(2)
    assert all(future.exception(PATIENCE) is not None for future in futures)
    assert w0.submit("w1", at_once, 1).wait() == 1
    first.set_result("late")
    second.set_exception(Odd("late"))


def test_a_future_that_a_caller_gave_up_on_still_serves_the_next(w0: Agent) -> None:
    """The first trainer of a batch times out; those who come later wait for the very same
    future.
    """
    promises = Promises()
    promises.note(Future())
    assert (
        w0._runtime.start("w1", same_promise, (promises,), None, 0.02).exception(PATIENCE)
        is not None
    )
    later = w0.submit("w1", same_promise, promises)
    assert w0.submit("w1", at_once, 1).wait() == 1  # what was sent before has been read
    promises.entries[0].set_result("for all who are left")
    assert later.result(PATIENCE) == "for all who are left"

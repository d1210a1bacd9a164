"""What goes wrong while calls wait for a batch or run in one, and that every call ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad import Deadline, Future, batched, current_agent
from telegrad.batching.calls import BatchedCall
from telegrad.batching.queue import BatchQueue
from telegrad.errors import CallTimeout, PeerLost, TelegradError, UsageError
from telegrad.refs import remote
from telegrad.rpc.functions import async_execution
from telegrad.testing import LocalCluster
from tests.batching.models import answers, tensor
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, Log, Shared, until


class Fragile(Shared):
    """Log each batch, block the first one at a gate, and fail for negative numbers."""

    def __init__(self, log: Log, gate: Gate | None = None) -> None:
        super().__init__()
        self.log = log
        self.gate = gate

    def _note(self, x: torch.Tensor) -> bool:
        """Log a batch. Return whether it has a negative number."""
        self.log.note(x.tolist())
        if self.gate is not None:
            gate, self.gate = self.gate, None
            gate.hold()
        return bool((x < 0).any())

    @batched
    @async_execution
    def raises(self, x: torch.Tensor) -> Future[torch.Tensor]:
        if self._note(x):
            raise ValueError(f"negative: {x.tolist()}")
        return done(x * 2)

    @batched
    @async_execution
    def fails_later(self, x: torch.Tensor) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        if self._note(x):
            future.set_exception(ValueError(f"negative: {x.tolist()}"))
        else:
            future.set_result(x * 2)
        return future

    @batched(retry_alone=False)
    @async_execution
    def fails_together(self, x: torch.Tensor) -> Future[torch.Tensor]:
        if self._note(x):
            raise ValueError(f"negative: {x.tolist()}")
        return done(x * 2)

    @batched
    @async_execution
    def returns_no_future(self, x: torch.Tensor) -> Any:
        return x if self._note(x) else done(x)

    @batched
    def exits(self, x: torch.Tensor) -> torch.Tensor:
        if self._note(x):
            raise SystemExit(3)
        return x * 2

    @batched
    def drops_a_row(self, x: torch.Tensor) -> torch.Tensor:
        self._note(x)
        return x[:1]

    @batched(pad_to=(4, 8), max_size=8)
    def padded(self, x: torch.Tensor) -> torch.Tensor:
        self._note(x)
        return x * 2

    @batched(max_size=1, max_queue=1)
    def held_up(self, x: torch.Tensor) -> torch.Tensor:
        self._note(x)
        return x * 2

    @batched(max_wait=0.2)
    def unhurried(self, x: torch.Tensor) -> torch.Tensor:
        self._note(x)
        return x * 2

    @batched(max_wait=0.5, max_size=2)
    def in_pairs(self, x: torch.Tensor) -> torch.Tensor:
        self._note(x)
        return x * 2


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def queue_of(method: Any, owner: Fragile) -> BatchQueue:
    queue: BatchQueue = method.batching._queue_of(owner)
    return queue


def batch_of(model: Fragile, gate: Gate, in_background: Any, method: str, *values: float) -> Any:
    """Call a method alone, and then with these values in one batch. Return the outcomes."""
    call, queue = getattr(model, method), queue_of(getattr(Fragile, method), model)
    first = in_background(call, tensor(0))
    gate.wait_for()
    calls = []
    for number, value in enumerate(values, 1):
        calls.append(in_background(call, tensor(value)))
        until(lambda number=number: len(queue) == number)  # type: ignore[misc]
    gate.open()
    first.result(PATIENCE)
    return [call.exception(PATIENCE) or call.result() for call in calls]


# Functions that return futures


@pytest.mark.parametrize("method", ["raises", "fails_later"])
def test_a_future_that_fails_is_retried_for_each_call(
    log: Log, gate: Gate, in_background: Any, method: str
) -> None:
    futures = batch_of(Fragile(log, gate), gate, in_background, method, 1, -2, 3)
    good, bad, late = answers(futures)
    assert (good, late) == ([2], [6])
    assert isinstance(bad, ValueError)
    assert "[[-2.0]]" in str(bad)
    assert [len(batch) for batch in log.entries] == [1, 3, 1, 1, 1]


def test_without_a_retry_all_calls_of_a_future_fail(
    log: Log, gate: Gate, in_background: Any
) -> None:
    futures = batch_of(Fragile(log, gate), gate, in_background, "fails_together", 1, -2)
    assert all(isinstance(error, ValueError) for error in answers(futures))
    assert [len(batch) for batch in log.entries] == [1, 2]


def test_an_async_function_must_return_a_future(log: Log) -> None:
    error = Fragile(log).returns_no_future(tensor(-1)).exception(PATIENCE)
    assert isinstance(error, UsageError)
    assert "must return a torch.futures.Future, but returned Tensor" in str(error)


def test_a_graph_cannot_contain_a_future() -> None:
    with pytest.raises(UsageError, match=r"cuda_graph does not support .*returns a future"):
        batched(cuda_graph=True, pad_to=(64,))(async_execution(done))(tensor(1))


# Results


def test_a_result_without_a_row_for_each_call_fails_all(
    log: Log, gate: Gate, in_background: Any
) -> None:
    errors = batch_of(Fragile(log, gate), gate, in_background, "drops_a_row", 1, 2)
    assert [type(error) for error in errors] == [UsageError, UsageError]


def test_an_exit_in_a_batch_ends_its_calls_and_no_thread(
    log: Log, gate: Gate, in_background: Any
) -> None:
    model = Fragile(log, gate)
    errors = batch_of(model, gate, in_background, "exits", 1, -2)
    assert [type(error) for error in errors] == [TelegradError, TelegradError]
    assert "SystemExit ended the batch" in str(errors[0])
    assert model.exits(tensor(4)).tolist() == [8]


def test_the_thread_that_runs_the_batch_gets_its_own_error(log: Log) -> None:
    model = Fragile(log)
    queue = queue_of(Fragile.exits, model)
    with pytest.raises(SystemExit):
        queue.submit(BatchedCall(None, "w0", None, (model,), (tensor(-1),), {}))
    assert model.exits(tensor(4)).tolist() == [8]


def test_a_batch_is_padded_to_the_next_size(log: Log, gate: Gate, in_background: Any) -> None:
    outcomes = batch_of(Fragile(log, gate), gate, in_background, "padded", 1, 2, 3, 4, 5)
    assert [each.tolist() for each in outcomes] == [[2], [4], [6], [8], [10]]
    assert [len(batch) for batch in log.entries] == [4, 8]
    assert log.entries[1] == [[1], [2], [3], [4], [5], [5], [5], [5]]


def test_without_a_device_a_function_with_graphs_runs_as_it_is() -> None:
    @batched(cuda_graph=True, pad_to=(2,), max_size=2)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert [double(tensor(n)).tolist() for n in range(4)] == [[0], [2], [4], [6]]


# A full queue


def test_a_call_that_comes_after_its_deadline_does_not_run(log: Log) -> None:
    model = Fragile(log)
    late = BatchedCall(None, "w0", Deadline.after(0.0), (model,), (tensor(2),), {})
    reply = queue_of(Fragile.exits, model).submit(late)
    assert isinstance(reply.future.exception(PATIENCE), CallTimeout)
    assert log.entries == []


def test_the_deadline_of_a_call_ends_its_wait_for_a_full_queue(
    log: Log, gate: Gate, in_background: Any
) -> None:
    model = Fragile(log, gate)
    queue = queue_of(Fragile.held_up, model)
    calls = [in_background(model.held_up, tensor(0))]
    gate.wait_for()
    calls.append(in_background(model.held_up, tensor(1)))
    until(lambda: len(queue) == 1)
    late = BatchedCall(None, "w0", Deadline.after(0.05), (model,), (tensor(2),), {})
    with pytest.raises(CallTimeout, match="waited for a batch"):
        queue.submit(late)
    gate.open()
    assert [call.result(PATIENCE).tolist() for call in calls] == [[0], [2]]
    assert log.entries == [[[0]], [[1]]]


@batched
def relay_held_up(models: list[Fragile], numbers: list[int]) -> list[torch.Tensor]:
    return [model.held_up(tensor(n)) for model, n in zip(models, numbers, strict=True)]


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_batch_may_wait_for_the_full_queue_of_another(
    cluster: Clusters, log: Log, gate: Gate, in_background: Any, where: str
) -> None:
    model = Fragile(log, gate)
    queue = queue_of(Fragile.held_up, model)
    calls = [in_background(model.held_up, tensor(0))]
    gate.wait_for()
    calls.append(in_background(model.held_up, tensor(1)))
    until(lambda: len(queue) == 1)
    if where == "here":
        calls += [in_background(relay_held_up, model, n) for n in (2, 3)]
    else:
        w0 = cluster(2)["w0"]
        calls += [in_background(w0.call, "w1", relay_held_up, model, n) for n in (2, 3)]
    until(lambda: bool(queue._space_freed._waiters))  # type: ignore[attr-defined]
    gate.open()
    assert [call.result(PATIENCE).tolist() for call in calls] == [[0], [2], [4], [6]]


# Callers that give up, and agents that end


def call_double(model: Fragile) -> Any:
    return model.held_up(tensor(1))


def test_a_direct_call_gives_up_at_the_deadline_of_the_call_that_made_it(
    cluster: Clusters, log: Log, gate: Gate, in_background: Any
) -> None:
    model, w0 = Fragile(log, gate), cluster(2)["w0"]
    first = in_background(model.held_up, tensor(0))
    gate.wait_for()
    with pytest.raises(CallTimeout):
        w0.with_timeout(0.1).call("w1", call_double, model)
    queue = queue_of(Fragile.held_up, model)
    until(lambda: len(queue) == 0 and queue.metrics.given_up == 1)
    gate.open()
    assert first.result(PATIENCE).tolist() == [0]
    assert log.entries == [[[0]]]


def test_giving_up_a_call_that_has_run_changes_nothing(
    log: Log, gate: Gate, in_background: Any
) -> None:
    model = Fragile(log, gate)
    queue = queue_of(Fragile.exits, model)
    first = in_background(model.exits, tensor(0))
    gate.wait_for()
    reply = queue.submit(BatchedCall(None, "w0", None, (model,), (tensor(1),), {}))
    gate.open()
    assert reply.future.result(PATIENCE).tolist() == [2]
    reply.on_abandoned()
    assert first.result(PATIENCE).tolist() == [0]
    assert (queue.metrics.given_up, len(queue)) == (0, 0)


def test_a_call_of_a_worker_without_a_connection_is_not_waited_for(cluster: Clusters) -> None:
    workers = cluster(2)
    assert workers["w0"].call("w1", together, 1) == 1
    runtime = workers["w1"]._runtime
    late = BatchedCall(runtime, "no longer there", None, (), (2,), {})
    reply = together.batching._queue_of(runtime).submit(late)
    error = reply.future.exception(PATIENCE)
    assert isinstance(error, PeerLost)
    assert error.peer == "no longer there"
    assert workers["w0"].call("w1", together, 3) == 3


@batched(min_size="all")
def together(numbers: list[int]) -> list[int]:
    return numbers


def test_an_agent_that_closes_fails_its_own_calls_alone(
    cluster: Clusters, log: Log, gate: Gate
) -> None:
    workers, model = cluster(3), Fragile(log, gate)
    w0 = workers["w0"]
    w0.submit("w2", call_exits, model, 0)
    gate.wait_for()
    queue = queue_of(Fragile.exits, model)
    futures = []
    for number, worker in enumerate(("w1", "w2"), 1):
        futures.append(w0.submit(worker, call_exits, model, number))
        until(lambda number=number: len(queue) == number)  # type: ignore[misc]
    workers["w1"].close()
    assert isinstance(futures[0].exception(PATIENCE), PeerLost)
    until(lambda: len(queue) == 1)
    gate.open()
    assert futures[1].result(PATIENCE).tolist() == [4]


@async_execution
def call_exits(model: Fragile, number: int) -> Any:
    """Queue a call of this worker, and do not block a thread until it has run."""
    queue = queue_of(Fragile.exits, model)
    agent = current_agent()
    assert agent is not None
    call = BatchedCall(agent._runtime, "w0", None, (model,), (tensor(number),), {})
    queue._register_with(agent._runtime)
    outcome = queue.submit(call)
    return outcome.future if hasattr(outcome, "future") else done(outcome)


# Timers


def block_and_call(model: Fragile) -> Any:
    """Block first, after which this thread no longer reads connections, and wait for others."""
    agent = current_agent()
    assert agent is not None
    agent.call("w0", abs, -1)
    return model.unhurried(tensor(3))


@batched
def relay_unhurried(models: list[Fragile]) -> list[torch.Tensor]:
    return [model.unhurried(tensor(3)) for model in models]


@pytest.mark.parametrize("function", [block_and_call, relay_unhurried])
def test_a_wait_for_others_ends_on_whichever_thread_it_began(
    cluster: Clusters, log: Log, function: Any
) -> None:
    workers: LocalCluster = cluster(2)
    model = Fragile(log)
    assert workers["w0"].call("w1", function, model).tolist() == [6]
    assert remote("w1", function, (model,), agent=workers["w0"]).to_here().tolist() == [6]
    assert log.entries == [[[3]], [[3]]]


def test_a_later_wait_ends_after_an_earlier_one_ended_early(log: Log, in_background: Any) -> None:
    model = Fragile(log)
    for pair in ((1, 2), (3, 4)):
        calls = [in_background(model.in_pairs, tensor(n)) for n in pair]
        assert [call.result(PATIENCE).tolist() for call in calls] == [[2 * n] for n in pair]
    assert model.in_pairs(tensor(5)).tolist() == [10]


def test_a_queue_describes_itself(log: Log) -> None:
    model = Fragile(log)
    queue = queue_of(Fragile.exits, model)
    assert "Fragile.exits: 0 waiting, 0 running" in repr(queue)
    assert "Fragile.exits" in repr(Fragile.exits.batching)
    statistics = Fragile.exits.batching.statistics(model)
    assert (statistics.queue_time.mean, statistics.mean_size) == (0.0, 0.0)

"""Concurrent calls run together, and every caller gets the result of a call that runs alone."""

from __future__ import annotations

import gc
import threading
import weakref
from contextvars import ContextVar
from typing import Any

import pytest
import torch

from telegrad import Deadline, Future, batched, current_agent, current_caller, current_deadline
from telegrad.agent import Agent
from telegrad.batching.calls import BatchedCall
from telegrad.errors import CallTimeout, PeerLost, QueueFull, UsageError
from telegrad.refs import remote
from telegrad.rpc.functions import async_execution
from telegrad.testing import LocalCluster
from tests.batching.models import Model, answers, model_on, starting, tensor, waiting
from tests.conftest import Clusters
from tests.local.gates import PATIENCE, Gate, Log, Meeting, until


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    return cluster(4)


def crowd(workers: LocalCluster, log: Log, gate: Gate, method: str, *values: float) -> list[Any]:
    """Make calls from w0, of which all but the first run together; then open the gate."""
    call = starting(model_on(workers["w0"], "w1", log, gate), method)
    futures = [call(tensor(values[0]))]
    gate.wait_for()
    for number, value in enumerate(values[1:], 1):
        futures.append(call(tensor(value)))
        waiting(getattr(Model, method), number)
    gate.open()
    return futures


@pytest.mark.parametrize("transport", ["memory", "unix", "tcp"])
def test_what_gathers_while_a_batch_runs_is_the_next(
    workers: LocalCluster, log: Log, gate: Gate
) -> None:
    assert answers(crowd(workers, log, gate, "double", 0, 1, 2, 3)) == [[0], [2], [4], [6]]
    assert log.entries == [[[0]], [[1], [2], [3]]]


def test_a_batch_is_at_most_so_large(workers: LocalCluster, log: Log, gate: Gate) -> None:
    assert answers(crowd(workers, log, gate, "double", *range(7))) == [[2 * n] for n in range(7)]
    assert [len(batch) for batch in log.entries] == [1, 4, 2]


def test_synchronous_callers_share_a_batch_and_no_thread_waits(
    workers: LocalCluster, log: Log, gate: Gate, in_background: Any
) -> None:
    model = model_on(workers["w0"], "w1", log, gate)
    calls = [in_background(model.rpc_sync().double, tensor(0))]
    gate.wait_for()
    calls += [in_background(model.rpc_sync().double, tensor(n)) for n in range(1, 5)]
    waiting(Model.double, 4)
    gate.open()
    assert [call.result(PATIENCE).tolist() for call in calls] == [[0], [2], [4], [6], [8]]
    assert sorted(len(batch) for batch in log.entries) == [1, 4]


def test_an_idle_queue_runs_a_call_on_the_thread_that_brought_it(workers: LocalCluster) -> None:
    w0 = workers["w0"]
    for _ in range(3):
        assert w0.call("w1", thread_of_batch, 1) == w0.call("w1", threading.get_ident)


@batched
def thread_of_batch(numbers: list[int]) -> list[int]:
    return [threading.get_ident()] * len(numbers)


# Every kind of function


@batched
def scale(x: torch.Tensor, factors: list[int]) -> torch.Tensor:
    return x * torch.tensor(factors).unsqueeze(1)


@batched
@async_execution
def scale_elsewhere(x: torch.Tensor) -> Future[torch.Tensor]:
    agent = current_agent()
    assert agent is not None
    return agent.submit("w2", torch.mul, x, 3)


@async_execution
@batched
def scale_elsewhere_too(x: torch.Tensor) -> Future[torch.Tensor]:
    agent = current_agent()
    assert agent is not None
    return agent.submit("w2", torch.mul, x, 3)


class Kinds:
    @staticmethod
    @batched
    def static_outside(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @batched
    @staticmethod
    def static_inside(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @classmethod
    @batched
    def class_outside(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)

    @batched(max_size=3)
    @classmethod
    def class_inside(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)

    @batched
    def method(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self, Kinds)
        return x * 3


class Child(Kinds):
    def method(  # type: ignore[override]  # not batched itself
        self, x: torch.Tensor
    ) -> torch.Tensor:
        return super().method(x) + 1


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (scale_elsewhere, [3.0, 6.0]),
        (scale_elsewhere_too, [3.0, 6.0]),
        (Kinds.static_outside, [3.0, 6.0]),
        (Kinds.static_inside, [3.0, 6.0]),
        (Kinds.class_outside, [5.0, 10.0]),
        (Kinds.class_inside, [5.0, 10.0]),
        (Kinds().method, [3.0, 6.0]),
        (Child().method, [4.0, 7.0]),
        (batched(lambda x: x * 3), [3.0, 6.0]),
    ],
)
def test_functions_and_methods_of_every_kind(
    workers: LocalCluster, function: Any, result: list[float]
) -> None:
    x = torch.tensor([1.0, 2.0])
    assert workers["w0"].call("w1", function, x).tolist() == result
    assert workers["w0"].submit("w1", function, x).wait().tolist() == result


def test_arguments_by_name_and_what_is_no_tensor(workers: LocalCluster) -> None:
    assert workers["w0"].call("w1", scale, torch.ones(2), factors=5).tolist() == [5, 5]
    assert scale(torch.ones(2), 4).tolist() == [4, 4]


def test_a_reference_to_the_result(workers: LocalCluster) -> None:
    model = remote("w1", Kinds, agent=workers["w0"])
    assert model.remote().method(torch.ones(2)).to_here().tolist() == [3, 3]
    assert remote("w1", scale, (torch.ones(1), 2), agent=workers["w0"]).to_here().tolist() == [2]


def test_a_function_that_is_not_importable_travels_with_its_settings(workers: LocalCluster) -> None:
    offset = 7

    @batched(max_size=3)
    def shift(x: torch.Tensor) -> torch.Tensor:
        return x + offset

    assert workers["w0"].call("w1", shift, torch.ones(1)).tolist() == [8]
    assert shift.batching.statistics().calls == 0  # it ran as another one


def test_an_async_function_splits_what_its_future_holds(workers: LocalCluster) -> None:
    futures = [workers["w0"].submit("w1", scale_elsewhere, tensor(n)) for n in range(20)]
    assert answers(futures) == [[3 * n] for n in range(20)]


def test_called_directly_it_returns_its_result() -> None:
    assert Kinds().method(torch.ones(2)).tolist() == [3, 3]
    assert isinstance(async_double(tensor(4)), Future)
    assert async_double(tensor(4)).wait().tolist() == [8]


@batched
@async_execution
def async_double(x: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(x * 2)
    return future


def test_direct_calls_join_the_batches_of_others(log: Log, gate: Gate, in_background: Any) -> None:
    model = Model(log, gate)
    calls = [in_background(model.double, tensor(0))]
    gate.wait_for()
    calls += [in_background(model.double, tensor(n)) for n in (1, 2, 3)]
    until(lambda: Model.double.batching.statistics(model).waiting == 3)
    gate.open()
    assert [call.result(PATIENCE).tolist() for call in calls] == [[0], [2], [4], [6]]
    assert [len(batch) for batch in log.entries] == [1, 3]


def test_a_direct_call_runs_in_the_grad_mode_of_its_caller(
    log: Log, gate: Gate, in_background: Any
) -> None:
    model = Model(log, gate)

    def infer(value: float) -> torch.Tensor:
        with torch.no_grad():
            return model.double(tensor(value).requires_grad_())

    calls = [in_background(model.double, tensor(0))]
    gate.wait_for()
    calls += [
        in_background(infer, 1),
        in_background(lambda: model.double(tensor(2).requires_grad_())),
    ]
    until(lambda: Model.double.batching.statistics(model).waiting == 2)
    gate.open()
    _, without, with_gradient = (call.result(PATIENCE) for call in calls)
    assert (without.requires_grad, with_gradient.requires_grad) == (False, True)
    assert sorted(len(batch) for batch in log.entries) == [1, 1, 1]


def test_gradients_flow_through_a_batch(log: Log, gate: Gate, in_background: Any) -> None:
    model = Model(log, gate)
    inputs = [tensor(n).requires_grad_() for n in range(3)]
    calls = [in_background(model.double, inputs[0])]
    gate.wait_for()
    calls += [in_background(model.double, x) for x in inputs[1:]]
    until(lambda: Model.double.batching.statistics(model).waiting == 2)
    gate.open()
    (5 * calls[2].result(PATIENCE)).sum().backward()
    assert [x.grad if x.grad is None else x.grad.tolist() for x in inputs] == [None, [0], [10]]


# Whose call it is


@batched
def who_and_until_when(numbers: list[int]) -> list[Any]:
    return [(current_agent().name, current_caller(), current_deadline() is not None)] * len(numbers)  # type: ignore[union-attr]


def test_the_function_knows_its_agent_and_who_calls(workers: LocalCluster) -> None:
    assert workers["w0"].call("w1", who_and_until_when, 1) == ("w1", "w0", True)


def test_agents_of_one_process_have_queues_of_their_own(workers: LocalCluster) -> None:
    for _ in range(3):
        workers["w0"].call("w1", scale, torch.ones(1), 1)
    workers["w0"].call("w2", scale, torch.ones(1), 1)
    assert scale.batching.statistics(workers["w1"]).calls == 3
    assert scale.batching.statistics(workers["w2"]).calls == 1
    assert workers["w1"].statistics()["batched_calls"] == 3
    assert workers["w2"].statistics()["batches"] == 1


def test_an_object_is_not_kept_alive_by_its_queue(log: Log) -> None:
    model = Model(log)
    before = Model.double.batching.statistics().calls
    model.double(tensor(1))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert Model.double.batching.statistics().calls == before + 1


def test_an_object_that_cannot_be_watched_is_refused() -> None:
    with pytest.raises(UsageError, match="__weakref__"):
        Slotted().method(torch.ones(1))


class Slotted:
    __slots__ = ()

    @batched
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x


# One bad input


def test_a_bad_input_fails_its_caller_alone(workers: LocalCluster, log: Log, gate: Gate) -> None:
    good, alone, bad, late = answers(crowd(workers, log, gate, "check", 0, 1, -2, 3))
    assert (good, alone, late) == ([0], [1], [3])
    assert isinstance(bad, ValueError)
    assert "[[-2.0]]" in str(bad)
    assert "run again alone" in str(bad.__cause__)
    assert [len(batch) for batch in log.entries] == [1, 3, 1, 1, 1]


def test_without_a_second_try_the_batch_fails_together(
    workers: LocalCluster, log: Log, gate: Gate
) -> None:
    first, *others = answers(crowd(workers, log, gate, "check_once", 0, 1, -2))
    assert first == [0]
    assert all(
        isinstance(error, ValueError) and "batch of 2" in str(error.__cause__) for error in others
    )
    assert [len(batch) for batch in log.entries] == [1, 2]


def test_another_shape_runs_in_a_batch_of_its_own(
    workers: LocalCluster, log: Log, gate: Gate
) -> None:
    call = starting(model_on(workers["w0"], "w1", log, gate), "double")
    futures = [call(tensor(0))]
    gate.wait_for()
    others = [tensor(1), torch.ones(2), tensor(2), torch.ones(1, dtype=torch.int64)]
    for number, x in enumerate(others, 1):
        futures.append(call(x))
        # a function that blocked runs on the executor, which keeps no order
        waiting(Model.double, number)
    gate.open()
    assert answers(futures) == [[0], [2], [2, 2], [4], [2]]
    assert log.entries[1:] == [[[1], [2]], [[1, 1]], [[1]]]


def test_wrong_arguments_fail_their_caller(workers: LocalCluster, log: Log) -> None:
    call = starting(model_on(workers["w0"], "w1", log), "double")
    assert isinstance(call().exception(PATIENCE), TypeError)
    assert isinstance(call(tensor(1), bogus=2).exception(PATIENCE), TypeError)
    assert answers([call(tensor(1))]) == [[2]]


@batched
def pick(numbers: list[int]) -> list[Any]:
    return [KeyError(number) if number < 0 else number for number in numbers]


@batched
def too_few(numbers: list[int]) -> list[int]:
    return numbers[1:]


@batched
def no_results(numbers: list[int]) -> int:
    return 3


def test_a_function_may_fail_single_calls(workers: LocalCluster) -> None:
    futures = [workers["w0"].submit("w1", pick, number) for number in (1, -1, 2)]
    assert isinstance(futures[1].exception(PATIENCE), KeyError)
    assert [futures[0].wait(), futures[2].wait()] == [1, 2]
    with pytest.raises(KeyError):
        pick(-1)


@pytest.mark.parametrize(
    ("function", "message"),
    [(too_few, "0 results for a batch of 1"), (no_results, "no_results returned int")],
)
def test_a_function_that_does_not_answer_every_call_is_told_so(
    workers: LocalCluster, function: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        workers["w0"].call("w1", function, 1)


# Waiting for other calls


def test_a_quorum_is_waited_for(workers: LocalCluster, log: Log) -> None:
    calls = [starting(model_on(workers["w0"], "w1", log), "by_three")]
    futures = [calls[0](tensor(n)) for n in range(2)]
    waiting(Model.by_three, 2)
    assert log.entries == []
    futures.append(calls[0](tensor(2)))
    assert answers(futures) == [[0], [2], [4]]
    assert [len(batch) for batch in log.entries] == [3]


def from_everybody(
    workers: LocalCluster, log: Log, method: str, gate: Gate | None = None
) -> list[Any]:
    """Return functions that call a model of w0 from each of the other workers."""
    model = Model(log, gate)
    workers["w0"]._test_model = model  # type: ignore[attr-defined]  # as long as the worker
    references = [remote("w0", owned_model, agent=workers[name]) for name in ("w1", "w2", "w3")]
    return [starting(reference, method) for reference in references]


def owned_model() -> Model:
    return current_agent()._test_model  # type: ignore[union-attr,no-any-return]


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_those_who_call_are_waited_for_while_they_are_there(
    workers: LocalCluster, log: Log, how: str
) -> None:
    first, second, _ = from_everybody(workers, log, "together")
    assert answers([first(tensor(1))]) == [[2]]  # nobody else is known
    together = [second(tensor(2))]
    waiting(Model.together, 1)
    together.append(first(tensor(3)))
    assert answers(together) == [[4], [6]]
    assert [len(batch) for batch in log.entries] == [1, 2]
    left = first(tensor(4))
    waiting(Model.together, 1)
    workers["w2"]._runtime.abort() if how == "dies" else workers["w2"].close()
    assert answers([left]) == [[8]]
    assert answers([first(tensor(5))]) == [[10]]


def test_a_caller_that_dies_while_its_call_waits_takes_it_along(
    workers: LocalCluster, log: Log
) -> None:
    calls = from_everybody(workers, log, "by_three")
    patient = [calls[0](tensor(1))]
    waiting(Model.by_three, 1)
    calls[1](tensor(2))
    waiting(Model.by_three, 2)
    workers.kill("w2")
    waiting(Model.by_three, 1)
    patient.append(calls[2](tensor(3)))
    assert answers(patient) == [[2], [6]]  # two of the three that the quorum was meant for
    assert log.entries == [[[1], [3]]]


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_a_caller_that_gives_up_leaves_the_queue(
    workers: LocalCluster, log: Log, gate: Gate, how: str
) -> None:
    model = model_on(workers["w0"], "w1", log, gate)
    before = Model.double.batching.statistics().given_up
    first = model.rpc_async().double(tensor(0))
    gate.wait_for()
    hasty = model.rpc_async(0.05 if how == "timed out" else -1).double(tensor(1))
    patient = model.rpc_async().double(tensor(2))
    if how == "cancelled":
        waiting(Model.double, 2)
        hasty.cancel()
    assert hasty.exception(PATIENCE) is not None
    waiting(Model.double, 1)
    gate.open()
    assert answers([first, patient]) == [[0], [4]]
    assert log.entries == [[[0]], [[2]]]
    assert Model.double.batching.statistics().given_up == before + 1


def test_a_synchronous_caller_that_times_out_leaves_too(
    workers: LocalCluster, log: Log, gate: Gate
) -> None:
    model = model_on(workers["w0"], "w1", log, gate)
    first = model.rpc_async().double(tensor(0))
    gate.wait_for()
    with pytest.raises(CallTimeout):
        model.rpc_sync(0.05).double(tensor(1))
    waiting(Model.double, 0)
    gate.open()
    assert answers([first]) == [[0]]
    assert log.entries == [[[0]]]


def test_an_agent_that_closes_fails_what_waits(cluster: Clusters, log: Log) -> None:
    workers = cluster(2)
    waits = starting(model_on(workers["w0"], "w1", log), "by_three")(tensor(1))
    waiting(Model.by_three, 1)
    workers["w1"].close()
    assert isinstance(waits.exception(PATIENCE), PeerLost)
    assert Model.by_three.batching.statistics().waiting == 0


def test_the_urgent_go_first_and_callers_take_turns(
    workers: LocalCluster, log: Log, gate: Gate
) -> None:
    calls = from_everybody(workers, log, "mixed", gate)
    futures = [calls[0](tensor(0))]
    gate.wait_for()
    order = [(0, 1, 0), (0, 2, 0), (0, 3, 0), (0, 4, 0), (1, 5, 0), (1, 6, 0), (2, 7, 9)]
    for number, (caller, value, urgent) in enumerate(order, 1):
        futures.append(calls[caller](tensor(value), urgent=urgent))
        waiting(Model.mixed, number)
    gate.open()
    assert answers(futures) == [[2 * n] for n in range(8)]
    assert log.entries == [[[0]], [[7], [1], [5]], [[2], [6], [3]], [[4]]]


def test_a_call_whose_deadline_passes_in_the_queue_does_not_run(
    log: Log, gate: Gate, in_background: Any
) -> None:
    model = Model(log, gate)
    queue = Model.double.batching._queue_of(model)
    first = in_background(model.double, tensor(0))
    gate.wait_for()
    late = queue.submit(BatchedCall(None, "w0", Deadline.after(0.0), (model,), (tensor(1),), {}))
    patient = in_background(model.double, tensor(2))
    until(lambda: len(queue) == 2)
    gate.open()
    assert isinstance(late.future.exception(PATIENCE), CallTimeout)
    assert [first.result(PATIENCE).tolist(), patient.result(PATIENCE).tolist()] == [[0], [4]]
    assert log.entries == [[[0]], [[2]]]
    assert Model.double.batching.statistics(model).expired == 1


def test_companions_are_waited_for_no_longer_than_told(workers: LocalCluster) -> None:
    waited = []
    # the first few wait to see who else is there, then this caller knows that it is alone
    while True:
        assert workers["w0"].call("w1", patient, 7) == 7
        waited.append(patient.batching.statistics(workers["w1"]).queue_time.count)
        if waited[-1:] == waited[-2:-1]:
            break
    assert waited[:3] == [1, 2, 3]
    assert patient.batching.statistics(workers["w1"]).queue_time.total >= 3 * 0.01


def test_a_wait_ends_even_if_the_agent_whose_clock_was_to_end_it_closes(
    cluster: Clusters, log: Log, in_background: Any
) -> None:
    workers, model = cluster(2), Model(log)
    for name in ("w0", "w1"):  # the model belongs to w1; the test calls it directly
        workers[name]._test_model = model  # type: ignore[attr-defined]
    remote("w1", owned_model, agent=workers["w0"]).rpc_async().unhurried(tensor(0))
    waiting(Model.unhurried, 1)
    direct = in_background(model.unhurried, tensor(1))
    waiting(Model.unhurried, 2)
    workers["w1"].close()
    assert direct.result(PATIENCE).tolist() == [2]
    assert log.entries == [[[1]]]


@batched(max_wait=0.01)
def patient(numbers: list[int]) -> list[int]:
    return numbers


def test_a_full_batch_ends_the_wait(workers: LocalCluster) -> None:
    futures = [workers["w0"].submit("w1", very_patient, number) for number in range(4)]
    assert [future.result(PATIENCE) for future in futures] == [0, 1, 2, 3]


@batched(max_wait=1000.0, max_size=2)
def very_patient(numbers: list[int]) -> list[int]:
    return numbers


# A full queue


def test_a_full_queue_holds_up_its_callers(
    workers: LocalCluster, log: Log, gate: Gate, in_background: Any
) -> None:
    model = model_on(workers["w0"], "w1", log, gate)
    first = in_background(model.rpc_sync().held_up, tensor(0))
    gate.wait_for()
    futures = [model.rpc_async().held_up(tensor(n)) for n in range(1, 20)]
    waiting(Model.held_up, 2)
    until(lambda: held_up(workers["w1"]))
    assert workers["w2"].call("w1", abs, -1) == 1  # only who fills the queue is held up
    gate.open()
    assert first.result(PATIENCE).tolist() == [0]
    assert answers(futures) == [[2 * n] for n in range(1, 20)]
    assert max(len(batch) for batch in log.entries) == 2


def held_up(agent: Agent) -> bool:
    """Return whether a connection is not read, because the queue is full.

    On a busy machine, a thread of the executor may be blocked instead.
    """
    connections = agent._runtime.listener.connections
    held = any(connection.hold_count for connection in connections)
    return held or agent._runtime.executor.active > 0


def test_a_full_queue_may_refuse(workers: LocalCluster, log: Log, gate: Gate) -> None:
    call = starting(model_on(workers["w0"], "w1", log, gate), "refusing")
    futures = [call(tensor(0))]
    gate.wait_for()
    futures += [call(tensor(n)) for n in (1, 2)]
    waiting(Model.refusing, 2)
    refused = call(tensor(3)).exception(PATIENCE)
    assert isinstance(refused, QueueFull)
    assert refused.peer == "w1"
    gate.open()
    assert answers(futures) == [[0], [2], [4]]


# Batches within batches


class Circle:
    """Batched functions of two workers that call each other, and themselves."""

    @batched
    @staticmethod
    def descend(here: list[str], there: list[str], depths: list[int]) -> list[int]:
        agent = current_agent()
        assert agent is not None
        return [
            0 if not depth else 1 + agent.call(other, Circle.descend, other, mine, depth - 1)
            for mine, other, depth in zip(here, there, depths, strict=True)
        ]

    @batched
    @staticmethod
    def descend_here(depths: list[int]) -> list[int]:
        return [0 if not depth else 1 + Circle.descend_here(depth - 1) for depth in depths]


def test_batched_functions_may_call_each_other_in_circles(workers: LocalCluster) -> None:
    futures = [
        workers["w0"].submit("w1", Circle.descend, "w1", "w2", depth) for depth in (6, 0, 3, 5)
    ]
    assert [future.result(PATIENCE) for future in futures] == [6, 0, 3, 5]


def test_a_batched_function_may_call_itself(workers: LocalCluster) -> None:
    assert Circle.descend_here(5) == 5
    assert workers["w0"].submit("w1", Circle.descend_here, 4).result(PATIENCE) == 4


class Pair:
    """Its batches come in pairs: each waits for the other in a call to a third worker."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    @batched(max_size=1)
    def meet(self, names: list[str]) -> list[int]:
        agent = current_agent()
        assert agent is not None
        return [agent.call(name, Meeting.join, self.meeting) for name in names]


def test_a_batch_that_waits_for_a_call_lets_the_next_one_run(workers: LocalCluster) -> None:
    meeting = Meeting(2)  # which no batch passes alone
    pair = remote("w1", Pair, (meeting,), agent=workers["w0"])
    futures = [pair.rpc_async().meet(name) for name in ("w2", "w3")]
    assert sorted(future.result(PATIENCE) for future in futures) == [0, 1]


# Statistics


def test_what_is_counted(workers: LocalCluster, log: Log, gate: Gate) -> None:
    before = Model.double.batching.statistics()
    answers(crowd(workers, log, gate, "double", *range(6)))
    after = Model.double.batching.statistics()
    assert after.calls - before.calls == 6
    assert after.batches - before.batches == 3
    grown = {size: count - before.sizes.get(size, 0) for size, count in after.sizes.items()}
    assert {size: count for size, count in grown.items() if count} == {1: 2, 4: 1}
    assert after.queue_time.count - before.queue_time.count == 5  # the first did not wait
    assert after.queue_time.total > before.queue_time.total
    assert after.batch_time.longest > 0
    assert workers["w1"].statistics()["batched_calls_waiting"] == 0


colour: ContextVar[str] = ContextVar("colour", default="none")


def test_a_batch_has_the_autocast_and_the_context_variables_of_its_callers(
    gate: Gate, in_background: Any
) -> None:
    """This holds also if the thread of another caller runs the batch.

    Calls whose modes or variables differ do not run together.
    """
    seen: list[int] = []

    @batched(max_size=8)
    def look(x: torch.Tensor) -> list[tuple[str, torch.dtype]]:
        if not seen:
            gate.hold()
        seen.append(len(x))
        return [(colour.get(), (x @ x.mT).dtype)] * len(x)

    def call(value: str | None, cast: torch.dtype | None) -> tuple[str, torch.dtype]:
        if value is not None:
            colour.set(value)
        with torch.autocast("cpu", dtype=cast or torch.bfloat16, enabled=cast is not None):
            return look(torch.ones(2, 2))

    callers: list[tuple[str | None, torch.dtype | None]] = [
        ("red", None),  # runs alone while the others gather
        ("red", torch.bfloat16),
        ("blue", torch.float16),
        (None, None),
        ("red", torch.bfloat16),
        ("red", torch.float16),
        (None, None),
    ]
    calls = [in_background(call, *callers[0])]
    gate.wait_for()
    for number, caller in enumerate(callers[1:], 1):
        calls.append(in_background(call, *caller))
        waiting(look, number)
    gate.open()
    expected = [(value or "none", cast or torch.float32) for value, cast in callers]
    assert [each.result(PATIENCE) for each in calls] == expected
    assert sorted(seen) == [1, 1, 1, 2, 2]

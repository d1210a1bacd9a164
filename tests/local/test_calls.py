"""Calls between two workers, on every transport: who is called, what travels, what comes back."""

from __future__ import annotations

import gc
import importlib
import operator
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from telegrad import current_agent, current_caller, current_deadline
from telegrad.agent import Agent
from telegrad.errors import RemoteError, RemoteTraceback, SerializationError, UsageError
from telegrad.messages import remote_functions
from telegrad.refs import RRef, remote
from telegrad.server.peer_functions import PeerFunctions
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.gates import until

BIG = 1_000_000  # elements; far above what goes through shared memory


def halve(tensor: torch.Tensor) -> torch.Tensor:
    return tensor / 2


class Accumulator:
    def __init__(self, start: int = 0) -> None:
        self.total = start

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    @classmethod
    def named(cls) -> str:
        return cls.__name__

    @staticmethod
    def double(number: int) -> int:
        return number * 2

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Accumulator) and other.total == self.total

    __hash__ = None  # type: ignore[assignment]


class Refused(Exception):
    """An exception with two arguments and an attribute."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(code, why)
        self.hint = f"{why}!"


class KeywordOnly(Exception):
    """An exception whose `__init__` cannot be called with its `args`."""

    def __init__(self, *, step: int) -> None:
        super().__init__(f"step {step}")
        self.step = step


class ForeignHandle:
    """Refuses to be pickled the way pybind11's objects do."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("a handle of C++ is not picklable")


class OnlyThere:
    """Pickles, but only where its module can be imported can it be read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, ("only_there",)


class Unsendable(Exception):
    def __init__(self) -> None:
        super().__init__("cannot travel")
        self.lock = threading.Lock()


def describe(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def served_by() -> str:
    agent = current_agent()
    assert agent is not None
    return agent.name


def surroundings() -> tuple[str | None, str | None, float | None]:
    agent, deadline = current_agent(), current_deadline()
    return (
        None if agent is None else agent.name,
        current_caller(),
        None if deadline is None else deadline.left(),
    )


def raise_it(error: BaseException) -> None:
    raise error


def raise_kind(name: str) -> None:
    raise {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}[name]("from afar")


def raise_keyword_only() -> None:
    raise KeywordOnly(step=3)


def raise_unsendable() -> None:
    raise Unsendable


def raise_with_cause() -> None:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error


def fill_with_nines(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(9)


def lock_of_mine() -> threading.Lock:
    return threading.Lock()


def nested_lock() -> dict[str, Any]:
    return {"a": [1, threading.Lock()]}


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


# Whom and how


def test_a_worker_is_named_by_name_rank_or_info(w0: Agent) -> None:
    for target in ("w1", 1, w0.get_worker_info("w1")):
        assert w0.call(target, served_by) == "w1"
        assert w0.submit(target, served_by).wait() == "w1"
        assert w0._runtime.invoke(target, served_by) == "w1"
        assert w0._runtime.start(target, served_by).wait() == "w1"


def test_arguments_arrive_by_position_and_by_keyword(w0: Agent) -> None:
    expected = ((1, "two"), {"three": [3]})
    assert w0.call("w1", describe, 1, "two", three=[3]) == expected
    assert w0.submit("w1", describe, 1, "two", three=[3]).wait() == expected
    assert w0._runtime.invoke("w1", describe, [1, "two"], {"three": [3]}) == expected
    assert w0._runtime.start("w1", describe, [1, "two"], {"three": [3]}).wait() == expected


def test_keywords_may_have_the_names_of_our_own_parameters(w0: Agent) -> None:
    assert w0.call("w1", describe, to=1, function=2, self=3) == (
        (),
        {"to": 1, "function": 2, "self": 3},
    )
    assert w0.submit("w1", describe, to=1, function=2, self=3).wait() == (
        (),
        {"to": 1, "function": 2, "self": 3},
    )


def test_a_worker_may_call_itself(w0: Agent) -> None:
    for target in ("w0", 0, w0.get_worker_info()):
        assert w0.call(target, served_by) == "w0"
        assert w0.submit(target, served_by).wait() == "w0"


def test_both_directions_at_once(pair: LocalCluster) -> None:
    there = [pair["w0"].submit("w1", describe, i) for i in range(20)]
    back = [pair["w1"].submit("w0", describe, i) for i in range(20)]
    assert [future.wait() for future in there] == [((i,), {}) for i in range(20)]
    assert [future.wait() for future in back] == [((i,), {}) for i in range(20)]


def test_many_callers_share_a_peer(cluster: Clusters) -> None:
    workers = cluster(5)
    futures = [agent.submit("w4", operator.mul, i, i) for agent in workers for i in range(20)]
    assert [future.wait() for future in futures] == [i * i for i in range(20)] * 5


def test_threads_of_one_worker_call_at_once(w0: Agent) -> None:
    results: dict[int, int] = {}

    def work(number: int) -> None:
        results[number] = sum(w0.call("w1", operator.add, number, i) for i in range(20))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: 20 * number + 190 for number in range(8)}


# What can be called


@pytest.mark.parametrize(
    ("function", "args", "result"),
    [
        pytest.param(abs, (-3,), 3, id="builtin"),
        pytest.param(operator.itemgetter(1), ([4, 5],), 5, id="callable object"),
        pytest.param(Accumulator, (3,), Accumulator(3), id="class"),
        pytest.param(Accumulator(3).add, (4,), 7, id="bound method"),
        pytest.param(Accumulator.add, (Accumulator(1), 1), 2, id="unbound method"),
        pytest.param(Accumulator.named, (), "Accumulator", id="class method"),
        pytest.param(Accumulator.double, (4,), 8, id="static method"),
        pytest.param(str.upper, ("a",), "A", id="method descriptor"),
        pytest.param([1, 2].count, (2,), 1, id="method of a builtin"),
        pytest.param(lambda x: x + 1, (1,), 2, id="lambda"),
    ],
)
def test_anything_callable_can_be_called(
    w0: Agent, function: Any, args: tuple[Any, ...], result: Any
) -> None:
    for _ in range(2):
        assert w0.call("w1", function, *args) == result
        assert w0.submit("w1", function, *args).wait() == result


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.add, (torch.ones(2), 3)),
        (torch.Tensor.add, (torch.ones(2), 3)),
        (torch.nn.functional.relu, (torch.tensor([-1.0, 2.0]),)),
    ],
)
def test_torch_functions_can_be_called(w0: Agent, function: Any, args: tuple[Any, ...]) -> None:
    expected = function(*args)
    torch.testing.assert_close(w0.call("w1", function, *args), expected)
    torch.testing.assert_close(w0.submit("w1", function, *args).wait(), expected)


def test_a_closure_brings_what_it_closes_over(w0: Agent) -> None:
    weight = torch.full((3,), 2.0)
    offset = 1

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * weight + offset

    torch.testing.assert_close(w0.call("w1", scale, torch.ones(3)), torch.full((3,), 3.0))


def test_a_closure_is_sent_as_it_is_at_each_call(w0: Agent) -> None:
    count = 0

    def current() -> int:
        return count

    assert w0.call("w1", current) == 0
    count = 5
    assert w0.call("w1", current) == 5


def test_a_bound_method_acts_on_a_copy(w0: Agent) -> None:
    accumulator = Accumulator()
    assert [w0.call("w1", accumulator.add, 2) for _ in range(2)] == [2, 2]
    assert accumulator.total == 0


def test_a_local_class_and_its_instances_travel(w0: Agent) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def moved(self) -> Point:
            return Point(self.x + 1)

    assert w0.call("w1", Point(1).moved).x == 2


def test_a_function_is_defined_once_per_connection(
    w0: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    defined: list[int] = []
    define = PeerFunctions.define

    def define_and_note(self: PeerFunctions, frame: Any) -> Any:
        defined.append(frame.function_id)
        return define(self, frame)

    monkeypatch.setattr(PeerFunctions, "define", define_and_note)
    for _ in range(5):
        w0.submit("w1", operator.add, 1, 2).wait()
    assert len(defined) == 1
    for _ in range(5):
        w0.call("w1", operator.add, 1, 2)
    assert len(defined) == 2
    assert len(set(defined)) == 1


# Tensors (the many kinds are tested where the codec is)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_that_was_missing_at_its_first_call_is_found_later(
    cluster: Clusters, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    workers = cluster(3)
    w0, w1 = workers["w0"], workers["w1"]

    def call(name: str) -> Any:
        return (
            w0.submit(name, function, large).wait()
            if asynchronous
            else w0.call(name, function, large)
        )

    large, function = torch.ones(BIG), halve
    call("w2")  # from now on, the worker knows how to define the function
    with monkeypatch.context() as patch:
        patch.delattr(f"{__name__}.halve")
        for _ in range(2):
            with pytest.raises(
                SerializationError, match="cannot find the function: AttributeError"
            ):
                call("w1")
    gc.collect()
    until(lambda: w1.statistics()["shared_blocks_in_use"] == 0)
    assert torch.equal(call("w1"), large / 2)


def test_big_tensors_arrive_whole(w0: Agent) -> None:
    sent = torch.arange(BIG, dtype=torch.float64)
    torch.testing.assert_close(w0.call("w1", double, sent), sent * 2)
    torch.testing.assert_close(w0.submit("w1", double, sent).wait(), sent * 2)


def test_many_big_tensors_in_flight(w0: Agent) -> None:
    futures = [w0.submit("w1", double, torch.full((BIG // 4,), float(i))) for i in range(12)]
    for i, future in enumerate(futures):
        result = future.wait()
        assert result.shape == (BIG // 4,)
        assert bool((result == 2 * i).all())


@pytest.mark.parametrize("elements", [1, 1000, BIG])
def test_a_received_tensor_belongs_to_the_receiver(w0: Agent, elements: int) -> None:
    mine = torch.zeros(elements)
    theirs = w0.call("w1", fill_with_nines, mine)
    assert bool((mine == 0).all())
    assert bool((theirs == 9).all())
    theirs.add_(1)
    assert bool((theirs == 10).all())
    assert bool((w0.call("w1", fill_with_nines, mine) == 9).all())
    assert bool((theirs == 10).all())


@pytest.mark.parametrize("elements", [1, 1000, BIG])
def test_a_sent_tensor_may_change_as_soon_as_the_call_is_submitted(
    w0: Agent, elements: int
) -> None:
    mine = torch.zeros(elements)
    futures = []
    for i in range(5):
        mine.fill_(i)
        futures.append(w0.submit("w1", double, mine))
    assert [future.wait()[-1].item() for future in futures] == [0, 2, 4, 6, 8]


def test_received_tensors_outlive_their_cluster(transport: str) -> None:
    with LocalCluster(2, transports=(transport,)) as workers:
        kept = workers["w0"].call("w1", double, torch.ones(BIG))
    assert bool((kept == 2).all())
    kept.zero_()


def test_tensors_in_one_message_stay_shared(w0: Agent) -> None:
    tensor = torch.zeros(1000)
    (first, second), _ = w0.call("w1", describe, tensor, tensor)
    first.fill_(1)
    assert bool((second == 1).all())


# What goes wrong


@pytest.mark.parametrize("target", ["nobody", 7, -1])
def test_an_unknown_worker_is_a_usage_error_that_lists_the_known_ones(
    w0: Agent, target: str | int
) -> None:
    w0.call("w1", abs, 1)
    for call in (w0.call, w0.submit):
        with pytest.raises(UsageError, match=r"could not find.*w0.*w1"):
            call(target, abs, 1)


@pytest.mark.parametrize("target", [None, 1.5, ["w1"], b"w1"])
def test_a_target_that_is_no_worker_at_all_is_a_usage_error(w0: Agent, target: Any) -> None:
    w0.call(1, abs, 1)
    for call in (w0.call, w0.submit):
        with pytest.raises(UsageError, match=r"name, rank or WorkerInfo"):
            call(target, abs, 1)


def test_calling_what_cannot_be_called_is_an_error(w0: Agent) -> None:
    with pytest.raises((UsageError, TypeError), match="callable"):
        w0.call("w1", 5)  # type: ignore[arg-type]
    with pytest.raises((UsageError, TypeError), match="callable"):
        w0.submit("w1", 5).wait()  # type: ignore[arg-type]
    assert w0.call("w1", abs, -1) == 1


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "path"),
    [
        (describe, (1, {"model": [threading.Lock()]}), {}, "args[1]['model'][0]"),
        (describe, (1,), {"model": [threading.Lock()]}, "kwargs['model'][0]"),
        (lambda *_: None, (1, threading.Lock()), {}, "args[1]"),
        (lambda *_: None, (), {"x": threading.Lock()}, "kwargs['x']"),
        (partial(describe, threading.Lock()), (1,), {}, "function.args[0]"),
    ],
)
def test_an_argument_that_cannot_travel_is_named_by_its_path(
    w0: Agent, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], path: str
) -> None:
    for call in (w0._runtime.invoke, w0._runtime.start):
        with pytest.raises(SerializationError, match=r"cannot be sent: .*lock") as caught:
            call("w1", function, args, kwargs)
        assert caught.value.path == path
        assert caught.value.peer == "w1"
        assert caught.value.call == remote_functions.describe(function)
        start = f"the call of {caught.value.call} on worker 'w1': {path} of type "
        assert str(caught.value).startswith(start)
    assert w0.call("w1", abs, -1) == 1


def test_arguments_of_a_reference_are_counted_as_the_user_does(w0: Agent) -> None:
    items: RRef[list[Any]] = remote("w1", list, agent=w0)
    attempts: list[Callable[[], object]] = [
        lambda: items.rpc_sync().append(threading.Lock()),
        lambda: remote("w1", list, (threading.Lock(),), agent=w0),
    ]
    for attempt in attempts:
        with pytest.raises(SerializationError, match=r"list|append") as caught:
            attempt()
        assert caught.value.path == "args[0]"
    with pytest.raises(SerializationError) as caught:
        items.rpc_sync().sort(key=threading.Lock())
    assert caught.value.path == "kwargs['key']"


def test_arguments_that_are_nested_too_deeply_are_named(w0: Agent) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(SerializationError) as caught:
        w0.call("w1", describe, nested)
    assert str(caught.value) == (
        "the call of describe on worker 'w1': args is nested too deeply to be sent"
    )


def test_a_future_as_an_argument_is_named_itself_and_not_what_it_holds(w0: Agent) -> None:
    with pytest.raises(
        SerializationError, match="a future cannot be sent: send its value"
    ) as caught:
        w0.call("w1", describe, [w0.submit("w1", abs, -1)])
    assert caught.value.path == "args[0][0]"


def test_whatever_pickling_raises_is_a_serialization_error(w0: Agent) -> None:
    for call in (w0._runtime.invoke, w0._runtime.start):
        with pytest.raises(SerializationError, match="handle of C") as caught:
            call("w1", describe, (1, [ForeignHandle()]))
        assert caught.value.path == "args[1][0]"
    assert w0.call("w1", abs, -1) == 1


def test_a_result_that_cannot_travel_is_the_callers_error(w0: Agent) -> None:
    for function, path in ((lock_of_mine, "result"), (nested_lock, "result['a'][1]")):
        for attempt in (
            lambda: w0.call("w1", function),  # noqa: B023
            lambda: w0.submit("w1", function).wait(),  # noqa: B023
        ):
            with pytest.raises(SerializationError, match="lock") as caught:
                attempt()
            error, name = caught.value, function.__name__
            assert (error.peer, error.call, error.path) == ("w1", name, path)
            start = f"the result of {name} on worker 'w1': {path} of type lock cannot be sent: "
            assert str(error).startswith(start)
    assert w0.call("w1", abs, -1) == 1


def test_a_result_of_a_type_that_is_missing_here(w0: Agent) -> None:
    for attempt in (lambda: w0.call("w1", OnlyThere), lambda: w0.submit("w1", OnlyThere).wait()):
        with pytest.raises(SerializationError, match="only_there") as caught:
            attempt()
        assert caught.value.peer == "w1"
    assert w0.call("w1", abs, -1) == 1


def test_an_argument_of_a_type_that_is_missing_there(w0: Agent) -> None:
    for attempt in (
        lambda: w0.call("w1", describe, OnlyThere()),
        lambda: w0.submit("w1", describe, OnlyThere()).wait(),
    ):
        with pytest.raises(SerializationError, match="only_there") as caught:
            attempt()
        assert (caught.value.peer, caught.value.call) == ("w1", "describe")
    assert w0.call("w1", abs, -1) == 1


@pytest.mark.parametrize(
    "error",
    [
        ValueError("échec", 2),
        KeyError("key"),
        FileNotFoundError(2, "No such file", "/nowhere"),
        Refused(3, "because"),
        StopIteration(4),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        AssertionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_remote_exception_keeps_its_type_args_and_attributes(w0: Agent, error: Exception) -> None:
    for attempt in (
        lambda: w0.call("w1", raise_it, error),
        lambda: w0.submit("w1", raise_it, error).wait(),
    ):
        with pytest.raises(type(error)) as caught:
            attempt()
        assert type(caught.value) is type(error)
        assert caught.value.args == error.args
        assert str(caught.value) == str(error)
        for name, value in vars(error).items():
            assert getattr(caught.value, name) == value


def test_a_remote_exception_keeps_attributes_of_its_c_type(w0: Agent) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        w0.call("w1", raise_it, FileNotFoundError(2, "No such file", "/nowhere"))
    assert caught.value.filename == "/nowhere"
    assert caught.value.errno == 2


def test_an_exception_whose_init_takes_other_arguments_is_rebuilt(w0: Agent) -> None:
    with pytest.raises(KeywordOnly, match="step 3") as caught:
        w0.call("w1", raise_keyword_only)
    assert caught.value.step == 3


def test_the_cause_is_the_remote_traceback(w0: Agent) -> None:
    with pytest.raises(ValueError, match="outer") as caught:
        w0.call("w1", raise_with_cause)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    for part in (
        "On worker 'w1', in raise_with_cause",
        "KeyError: 'inner'",
        "ValueError: outer",
        "test_calls.py",
    ):
        assert part in cause.text
    assert "telegrad/agent" not in cause.text


def test_an_exception_that_cannot_travel_arrives_as_text(w0: Agent) -> None:
    for attempt in (
        lambda: w0.call("w1", raise_unsendable),
        lambda: w0.submit("w1", raise_unsendable).wait(),
    ):
        with pytest.raises(RemoteError, match="cannot travel") as caught:
            attempt()
        assert caught.value.type_name.endswith("test_calls.Unsendable")
        assert caught.value.peer == "w1"
        assert "raise_unsendable" in caught.value.traceback_text


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
def test_what_would_end_the_callee_neither_ends_it_nor_the_caller(w0: Agent, kind: str) -> None:
    for attempt in (
        lambda: w0.call("w1", raise_kind, kind),
        lambda: w0.submit("w1", raise_kind, kind).wait(),
    ):
        with pytest.raises(RemoteError, match="from afar") as caught:
            attempt()
        assert caught.value.type_name == kind
    assert w0.call("w1", abs, -1) == 1


def test_wrong_arguments_are_the_functions_own_error(w0: Agent) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        w0.call("w1", served_by, 1)  # type: ignore[call-arg]


# Inside a call


def test_a_call_knows_its_agent_its_caller_and_its_deadline(pair: LocalCluster) -> None:
    for attempt in (
        pair["w1"]._runtime.invoke,
        lambda *args: pair["w1"]._runtime.start(*args).wait(),
    ):
        agent, caller, left = attempt("w0", surroundings, (), None, 30.0)
        assert (agent, caller) == ("w0", "w1")
        assert 0 < left <= 30
        assert attempt("w0", surroundings, (), None, None) == ("w0", "w1", None)


def test_outside_of_a_call_there_is_no_agent_caller_or_deadline(w0: Agent) -> None:
    w0.call("w0", abs, 1)
    assert surroundings() == (None, None, None)

"""Every caller gets its own result, error or cancellation, whatever calls share its batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telegrad.errors import CallCancelled
from telegrad.refs import remote
from telegrad.testing import LocalCluster
from tests.batching.models import Model, tensor, waiting
from tests.local.gates import PATIENCE, Gate, Log, Shared


class Call(NamedTuple):
    caller: str
    length: int  # of its tensor: calls of different lengths do not go together
    bad: bool
    urgent: int | None
    cancelled: bool


class Shelf(Shared):
    """Holds a model that several workers are to refer to."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def get(self) -> Model:
        return self.model


calls = st.builds(
    Call,
    st.sampled_from(["w0", "w2"]),
    st.integers(1, 3),
    st.booleans(),
    st.none() | st.integers(0, 2),
    st.booleans(),
)


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalCluster]:
    with LocalCluster(3, transports=("unix",)) as workers:
        yield workers


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The workers outlive the test, so that not every example has to start some."""


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(calls, max_size=12))
def test_everybody_gets_its_own_result(workers: LocalCluster, plan: list[Call]) -> None:
    gate, log = Gate(), Log()
    shelf = Shelf(Model(log, gate))
    models = {name: remote("w1", Shelf.get, (shelf,), agent=workers[name]) for name in ("w0", "w2")}
    first_result = models["w0"].rpc_async().mixed(tensor(0))
    gate.wait_for()  # from here on, all gather
    futures = []
    for number, call in enumerate(plan, 1):
        x = torch.full((call.length,), float(-number if call.bad else number))
        keywords = {} if call.urgent is None else {"urgent": call.urgent}
        futures.append(models[call.caller].rpc_async().mixed(x, **keywords))
    waiting(Model.mixed, len(plan))
    for call, future in zip(plan, futures, strict=True):
        if call.cancelled:
            assert future.cancel()
    waiting(Model.mixed, sum(not call.cancelled for call in plan))
    gate.open()
    assert first_result.result(PATIENCE).tolist() == [0]
    for number, (call, future) in enumerate(zip(plan, futures, strict=True), 1):
        error = future.exception(PATIENCE)
        if call.cancelled:
            assert isinstance(error, CallCancelled)
        elif call.bad:
            assert isinstance(error, ValueError)
            assert error.args == ([[float(-number)] * call.length],)
        else:
            assert future.wait().tolist() == [2.0 * number] * call.length
    seen = [abs(row[0]) for batch in log.entries for row in batch]
    assert set(seen) == {0, *(number for number, call in enumerate(plan, 1) if not call.cancelled)}
    assert all(len({len(row) for row in batch}) == 1 and len(batch) <= 3 for batch in log.entries)

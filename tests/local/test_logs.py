"""Logs: records name their worker, and an exception of a remote function is reported once."""

from __future__ import annotations

import logging

import pytest

from telegrad import WorkerLogFilter
from tests.conftest import Clusters
from tests.local.gates import Gate, until


@pytest.fixture
def transport() -> str:
    return "unix"


def warn_and_fail() -> None:
    logging.getLogger("telegrad.test").warning("about to fail")
    raise KeyError("as planned")


def hold_and_fail(gate: Gate) -> None:
    gate.hold()
    raise KeyError("as planned")


def test_records_name_their_worker_and_the_caller_reports_the_exception(
    cluster: Clusters, caplog: pytest.LogCaptureFixture
) -> None:
    workers = cluster(2)
    caplog.handler.addFilter(WorkerLogFilter())
    with caplog.at_level("INFO", logger="telegrad"):
        with pytest.raises(KeyError):
            workers["w0"].call("w1", warn_and_fail)
        until(lambda: "which raised" in caplog.text)
    logging.getLogger("test").warning("outside of a worker")
    found = [(record.levelname, vars(record)["worker"]) for record in caplog.records]
    assert found == [("WARNING", "w1"), ("INFO", "w1"), ("WARNING", "")]


def test_an_exception_that_no_caller_gets_is_a_warning(
    cluster: Clusters, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    workers = cluster(2)
    workers["w0"].submit("w1", hold_and_fail, gate)
    gate.wait_for()
    workers.kill("w0")
    until(lambda: workers["w1"]._runtime.listener.connections == [])
    gate.open()
    until(lambda: "w0 called hold_and_fail, which raised" in caplog.text)
    assert caplog.records[-1].levelname == "WARNING"

"""Metrics of a worker, read by the parser of `prometheus_client`."""

from __future__ import annotations

import logging
import re
import socket
import urllib.error
import urllib.request

import pytest
import torch

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import telegrad
from telegrad import Config, ps
from telegrad.errors import UsageError
from telegrad.telemetry.prometheus import WorkerCollector
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import Gate, hold_at


@pytest.fixture
def transport() -> str:
    return "unix"


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def fail() -> None:
    raise ValueError("no")


def test_metrics_of_calls(cluster: Clusters, gate: Gate, in_background: Background) -> None:
    workers = cluster(2)
    registry = CollectorRegistry()
    registry.register(WorkerCollector(workers["w1"]))
    for _ in range(3):
        workers["w0"].call("w1", max, 1, 2)
    with pytest.raises(ValueError, match="no"):
        workers["w0"].call("w1", fail)
    waiting = in_background(workers["w0"].call, "w1", hold_at, gate)
    gate.wait_for()
    found = samples(generate_latest(registry).decode())
    gate.open()
    waiting.result()
    worker = {"worker": "w1"}
    assert found["telegrad_calls_served_total"] == [(worker, 5)]
    assert ({**worker, "direction": "served", "state": "running"}, 1) in found[
        "telegrad_calls_in_progress"
    ]
    recent = {labels["function"]: value for labels, value in found["telegrad_recent_calls"]}
    assert recent == {"max": 3, "fail": 1}
    failed = {labels["function"]: value for labels, value in found["telegrad_recent_failed_calls"]}
    assert failed == {"max": 0, "fail": 1}
    quantiles = {labels["quantile"] for labels, _ in found["telegrad_recent_call_duration_seconds"]}
    assert quantiles == {"0.5", "0.99", "1"}
    assert found["telegrad_worker_info"][0][0]["rank"] == "1"


@telegrad.batched
def doubled(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def test_metrics_of_batches_and_parameter_servers(cluster: Clusters) -> None:
    workers = cluster(2)
    registry = CollectorRegistry()
    registry.register(WorkerCollector(workers["w1"]))
    assert workers["w0"].call("w1", doubled, torch.ones(1)).item() == 2
    model = torch.nn.Linear(2, 1)
    with ps.Optimizer(model, ["w1"], torch.optim.SGD, agent=workers["w0"], lr=0.1) as optimizer:
        model(torch.ones(2)).backward()
        optimizer.step()
        found = samples(generate_latest(registry).decode())
    ((labels, batches),) = found["telegrad_batches_total"]
    assert labels == {"worker": "w1", "function": "doubled"}
    assert batches == 1
    assert [value for _, value in found["telegrad_batch_size"]] == [1]
    assert [value for _, value in found["telegrad_batch_waiting_calls"]] == [0]
    ((shard, version),) = found["telegrad_shard_version"]
    assert shard["worker"] == "w1"
    assert version == 1
    assert [value for _, value in found["telegrad_shard_waiting_trainers"]] == [0]
    ((trainer, steps),) = found["telegrad_shard_staleness_steps"]
    assert trainer["shard"] == shard["shard"]
    assert "w0" in trainer["trainer"]
    assert steps == 0


def test_an_endpoint_for_each_worker(cluster: Clusters, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "telegrad.telemetry"):
        workers = cluster(2, metrics_port=0)
    addresses = re.findall(r"http://\S+", caplog.text)
    assert len(addresses) == 2
    assert all(address.startswith("http://127.0.0.1:") for address in addresses)
    workers["w0"].call("w1", max, 1, 2)
    names = set()
    for address in addresses:
        with urllib.request.urlopen(f"{address}/metrics", timeout=30) as answer:
            found = samples(answer.read().decode())
        names.add(found["telegrad_worker_info"][0][0]["worker"])
        assert "process_resident_memory_bytes" in found
    assert names == {"w0", "w1"}
    for agent in workers:
        agent.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{addresses[0]}/metrics", timeout=30)


def test_a_port_in_use_is_an_error_with_advice(cluster: Clusters) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match="TELEGRAD_METRICS_PORT"):
            cluster(1, metrics_port=port)


def test_a_closed_agent_has_no_metrics(cluster: Clusters) -> None:
    workers = cluster(1)
    collector = WorkerCollector(workers["w0"])
    workers["w0"].close()
    assert list(collector.collect()) == []


def test_the_port_is_checked() -> None:
    with pytest.raises(UsageError, match="metrics_port"):
        Config(metrics_port=70000)
    assert Config.from_environment({"TELEGRAD_METRICS_PORT": "9100"}).metrics_port == 9100

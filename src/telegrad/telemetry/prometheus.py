"""Metrics of a worker for Prometheus, from its snapshot.

`serve` starts the endpoint of `Config.metrics_port`. `WorkerCollector` is for programs that have an
endpoint of their own: ``prometheus_client.REGISTRY.register(WorkerCollector(agent))``.

All names begin with ``telegrad_`` and have the label ``worker``. Times are in seconds, sizes in
bytes, and counters end in ``_total``. Metrics with ``recent`` in their name are about the calls
that ended in the last 10 s and that the recorder remembers. docs/diagnosis.md lists all of them.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from telegrad.agent import Agent
from telegrad.errors import UsageError
from telegrad.runtime import AgentRuntime

__all__ = ["WorkerCollector", "serve"]

Json = dict[str, Any]
_log = logging.getLogger(__name__)
_COUNTERS = {
    "calls_made": "Calls that this worker has made.",
    "calls_served": "Calls that this worker has served.",
}
_STATISTICS = {
    "owned_objects": ("owned_objects", "Objects of this worker that references refer to."),
    "held_objects": ("held_objects", "Objects of other workers that references here refer to."),
    "autograd_contexts": ("autograd_contexts", "Contexts of distributed autograd that are open."),
    "cuda_lent_bytes": ("cuda_bytes_lent", "GPU memory that other workers use."),
}
_GAUGES = {
    "shared_memory_segment_bytes": ("segment_bytes", "Shared memory that this worker has."),
    "shared_memory_sent_bytes": ("block_bytes", "Shared memory in messages that others use."),
    "shared_memory_sent_blocks": ("blocks_sent", "Blocks of these messages."),
    "shared_memory_received_blocks": ("blocks_received", "Blocks of others that are used here."),
}


class WorkerCollector(Collector):
    """The metrics of one agent. It reads them when they are asked for."""

    def __init__(self, agent: Agent | AgentRuntime) -> None:
        self._runtime = agent._runtime if isinstance(agent, Agent) else agent

    def __repr__(self) -> str:
        return f"<WorkerCollector of {self._runtime.name!r}>"

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector does not read metrics."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; none if the agent is closed."""
        if self._runtime.closing:
            return
        snapshot = self._runtime.snapshot()
        worker = snapshot["worker"]
        family = _Families(worker["name"])
        yield family.gauge(
            "worker_info",
            "The worker; always 1.",
            [((str(worker["rank"]), worker["group"], worker["incarnation"]), 1)],
            ("rank", "group", "incarnation"),
        )
        yield family.gauge("uptime_seconds", "Time since it opened.", [((), worker["uptime"])])
        yield from _statistics(family, snapshot["statistics"])
        yield from _calls(family, snapshot)
        for name, (field, text) in _GAUGES.items():
            yield family.gauge(name, text, [((), snapshot["shared_memory"][field])])
        executor = snapshot["executor"]
        rows = [((state,), executor[state]) for state in ("running", "queued")]
        yield family.gauge("executor_calls", "Calls on the executor.", rows, ("state",))
        peers = Counter(peer["state"] for peer in snapshot["peers"])
        rows = [((state,), count) for state, count in peers.items()]
        yield family.gauge("peers", "Workers that this one called.", rows, ("state",))
        yield family.gauge("lost_workers", "Workers that were lost.", [((), len(snapshot["lost"]))])
        yield from _batches(family, _rows(snapshot, "batching"))
        yield from _shards(family, _rows(snapshot, "parameter_servers"))


class _Families:
    """Makes metrics of one worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker

    def gauge(
        self, name: str, text: str, rows: Iterable[Any], labels: tuple[str, ...] = ()
    ) -> Metric:
        metric = GaugeMetricFamily(f"telegrad_{name}", text, labels=("worker", *labels))
        for values, number in rows:
            metric.add_metric([self._worker, *values], number)
        return metric

    def counter(
        self, name: str, text: str, rows: Iterable[Any], labels: tuple[str, ...] = ()
    ) -> Metric:
        metric = CounterMetricFamily(f"telegrad_{name}", text, labels=("worker", *labels))
        for values, number in rows:
            metric.add_metric([self._worker, *values], number)
        return metric


def _rows(snapshot: Json, section: str) -> list[Json]:
    """Return the rows of a section; none if it could not be made in time."""
    found = snapshot.get(section)
    return found if isinstance(found, list) else []


def _statistics(family: _Families, found: Json) -> Iterator[Metric]:
    for name, text in _COUNTERS.items():
        if name in found:
            yield family.counter(name, text, [((), found[name])])
    for name, (field, text) in _STATISTICS.items():
        if field in found:
            yield family.gauge(name, text, [((), found[field])])


def _calls(family: _Families, snapshot: Json) -> Iterator[Metric]:
    calls = [call for call in snapshot["calls"] if not call["internal"]]
    states = Counter((call["direction"], call["state"]) for call in calls)
    yield family.gauge(
        "calls_in_progress", "Calls that have not ended.", states.items(), ("direction", "state")
    )
    oldest: dict[str, float] = {"made": 0.0, "served": 0.0}
    for call in calls:
        oldest[call["direction"]] = max(oldest[call["direction"]], call["age"])
    yield family.gauge(
        "oldest_call_age_seconds",
        "Age of the oldest call in progress; 0 if there is none.",
        (((direction,), age) for direction, age in oldest.items()),
        ("direction",),
    )
    groups: defaultdict[tuple[str, str], list[Json]] = defaultdict(list)
    for row in snapshot["latencies"]:
        if not row["internal"]:
            groups[row["direction"], row["function"]].append(row)
    labels = ("direction", "function")
    yield family.gauge(
        "recent_call_duration_seconds",
        "Time of recent calls: of made ones until the reply, of served ones of the function. "
        "With several peers, the largest of their quantiles.",
        (
            ((*key, quantile), max(row[field] for row in rows))
            for key, rows in groups.items()
            for quantile, field in (("0.5", "p50"), ("0.99", "p99"), ("1", "longest"))
        ),
        (*labels, "quantile"),
    )
    sums = (
        ("recent_calls", "calls", "Recent calls."),
        ("recent_failed_calls", "failed", "Recent calls that failed."),
        ("recent_request_bytes", "request_bytes", "Bytes in the requests of recent calls."),
        ("recent_reply_bytes", "reply_bytes", "Bytes in the replies of recent calls."),
    )
    for name, field, text in sums:
        rows = [(key, sum(row[field] for row in group)) for key, group in groups.items()]
        yield family.gauge(name, text, rows, labels)


def _batches(family: _Families, rows: list[Json]) -> Iterator[Metric]:
    if rows:
        label = ("function",)
        yield family.counter(
            "batches", "Batches.", [((row["function"],), row["batches"]) for row in rows], label
        )
        yield family.gauge(
            "batch_size",
            "Mean number of calls in a batch.",
            [((row["function"],), row["mean_size"]) for row in rows],
            label,
        )
        yield family.gauge(
            "batch_waiting_calls",
            "Calls that wait for a batch.",
            [((row["function"],), row["waiting"]) for row in rows],
            label,
        )


def _shards(family: _Families, rows: list[Json]) -> Iterator[Metric]:
    if rows:
        label = ("shard",)
        yield family.gauge(
            "shard_version",
            "Version of the parameters: the steps that were made.",
            [((row["shard"],), row["version"]) for row in rows],
            label,
        )
        yield family.gauge(
            "shard_waiting_trainers",
            "Trainers that have reported and wait for others.",
            [((row["shard"],), len(row["waiting"])) for row in rows],
            label,
        )
        yield family.gauge(
            "shard_staleness_steps",
            "By how many steps the parameters of a trainer are older than those of the shard.",
            [
                ((row["shard"], trainer), steps)
                for row in rows
                for trainer, steps in row["staleness"].items()
            ],
            (*label, "trainer"),
        )


def serve(runtime: AgentRuntime) -> None:
    """Serve the metrics of an agent over HTTP until it ends."""
    first, address = runtime.config.metrics_port, runtime.config.metrics_listen
    assert first is not None
    port = first + runtime.local_member.rank if first else 0
    registry = CollectorRegistry()
    registry.register(WorkerCollector(runtime))
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"worker {runtime.name!r} cannot serve metrics at {address}:{port}: {error}. Choose "
            "another metrics_port (TELEGRAD_METRICS_PORT)"
        ) from error
    _log.info("worker %r serves metrics at http://%s:%d", runtime.name, address, server.server_port)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    runtime.on_end(stop)

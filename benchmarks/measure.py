"""The timing loops. They run in a caller process and use the peer of that process.

A loop warms up and runs for about `seconds`. It returns `value` in the unit of its case, `n` (the
number of calls or copies) and, if single calls are timed, `p99`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import remote, training
from benchmarks.peers.base import CALLEE, Peer

Measured = dict[str, float]

WAYS: dict[str, Callable[..., Any]] = {
    "echo": remote.echo,
    "push": remote.sink,
    "pull": remote.source,
}
MIN_CALLS = 30
MIN_COPIES = 3
CHURN, CHURN_LIMIT_S = 64, 30.0


def latency(peer: Peer, seconds: float, function: str, elements: int) -> Measured:
    """Time synchronous calls, one after the other."""
    fn = torch.add if function == "torch.add" else getattr(remote, function)
    x: Any = torch.ones(elements) if elements else 1
    args = (x,) if function == "echo" else (x, 1)
    call = peer.call(fn)
    return percentiles(lambda: call(*args), seconds)


def rate(peer: Peer, seconds: float, window: int, start_at: float = 0.0) -> Measured:
    """Return calls per second with `window` calls in flight.

    When the oldest call is answered, the next is sent.
    """
    submit, result, x = peer.submit(remote.add), peer.result, torch.ones(1)
    for pending in [submit(x, 1) for _ in range(window)]:
        result(pending)
    gc.collect()
    time.sleep(max(0.0, start_at - time.monotonic()))  # start at the same time as the other callers
    begin = time.perf_counter()
    in_flight = deque(submit(x, 1) for _ in range(window))
    done = 0
    while done < MIN_CALLS or time.perf_counter() - begin < seconds:
        result(in_flight.popleft())
        in_flight.append(submit(x, 1))
        done += 1
    while in_flight:
        result(in_flight.popleft())
        done += 1
    return {"value": done / (time.perf_counter() - begin), "n": done}


def bandwidth(peer: Peer, seconds: float, way: str, elements: int) -> Measured:
    """Return gigabytes per second each way.

    One element of each result is read. The result is dropped before the next call.
    """
    x = torch.ones(elements)
    call = peer.call(WAYS[way])
    args = (elements,) if way == "pull" else (x,)

    def once() -> None:
        y = call(*args)
        if (y if way == "push" else float(y[-1])) != 1.0:
            raise ValueError(f"{way} returned other data than was sent")

    times = timed(once, seconds, MIN_COPIES)
    moved = x.nbytes * (2 if way == "echo" else 1)
    return {"value": moved / statistics.median(times) / 1e9, "n": len(times)}


def containers(peer: Peer, seconds: float, kind: str, count: int, way: str) -> Measured:
    """Time calls with a container of many small objects as the argument or as the result."""
    if way == "result":
        make = peer.call(remote.container)
        return percentiles(lambda: make(kind, count), seconds)
    measure, things = peer.call(remote.count), remote.container(kind, count)
    return percentiles(lambda: measure(things), seconds)


def reference(peer: Any, seconds: float, use: str) -> Measured:
    """Time objects on the callee: created and fetched, or one that is used repeatedly."""
    rpc = peer.rpc
    if use == "remote":
        return percentiles(lambda: rpc.remote(CALLEE, remote.add, (1, 2)).to_here(), seconds)
    counter = rpc.remote(CALLEE, remote.Counter)
    counter.to_here()
    return percentiles(lambda: counter.rpc_sync().add(1), seconds)


def churn(peer: Any, seconds: float) -> Measured:
    """Return the number of objects per second that are created on the callee and dropped.

    The measurement ends when the callee owns none of the objects.
    """
    rpc = peer.rpc

    def owned() -> int:
        return int(rpc.rpc_sync(CALLEE, rpc._rref_context_get_debug_info)["num_owner_rrefs"])

    def make() -> None:
        references = [rpc.remote(CALLEE, remote.Counter) for _ in range(CHURN)]
        references[-1].to_here()  # limit the number of pending creations

    before, made = owned(), 0
    make()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        make()
        made += CHURN
    while owned() > before:
        if time.perf_counter() - begin > seconds + CHURN_LIMIT_S:
            raise TimeoutError(f"{owned() - before} of {made} dropped objects are still owned")
    return {"value": made / (time.perf_counter() - begin), "n": made}


def percentiles(once: Callable[[], object], seconds: float) -> Measured:
    times = sorted(timed(once, seconds, MIN_CALLS))
    p99 = times[min(len(times) - 1, round(len(times) * 0.99))]
    return {"value": statistics.median(times) * 1e6, "p99": p99 * 1e6, "n": len(times)}


def timed(once: Callable[[], object], seconds: float, at_least: int) -> list[float]:
    """Return the seconds of each call of `once`, after a warm-up of a tenth of `seconds`."""
    clock = time.perf_counter
    warm = clock() + seconds / 10
    once()
    while clock() < warm:
        once()
    gc.collect()
    times: list[float] = []
    end = clock() + seconds
    now = clock()
    while now < end or len(times) < at_least:
        begin = clock()
        once()
        now = clock()
        times.append(now - begin)
    return times


LOOPS: dict[str, Callable[..., Measured]] = {
    "latency": latency,
    "rate": rate,
    "bandwidth": bandwidth,
    "containers": containers,
    "reference": reference,
    "churn": churn,
    "backward": training.backward,
    "digits": training.digits,
    "digits_backward": training.digits_backward,
}

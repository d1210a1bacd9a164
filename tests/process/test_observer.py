"""A real group with a killed, a stopped and a busy worker, seen from outside; planned kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import telegrad.rpc as rpc
from telegrad import Agent, Config, dashboard
from telegrad.observer import Group, attach
from telegrad.observer.connection import NoAnswer
from telegrad.observer.debugger import debug
from telegrad.observer.tables import stacks_text, status_text
from telegrad.observer.trace import collect_trace
from tests.dashboard.requests import get, states
from tests.local.gates import until
from tests.process import test_kills
from tests.process.fleet import Fleet
from tests.process.test_kills import call_error, join, start_blocked_calls

pytestmark = pytest.mark.process

CONFIG = Config(secret="for the tests of kills")


def compute() -> None:
    """Keep the interpreter lock, except that it is passed on every few milliseconds."""
    while not test_kills._forever.is_set():
        pass


def start_computing(to: str) -> None:
    test_kills._pending.append(rpc.rpc_async(to, compute))
    assert rpc.rpc_sync(to, os.getpid) != os.getpid()


def join_with_faults(rank: int, size: int, path: str, plan: str) -> None:
    os.environ["TELEGRAD_FAULTS"] = plan
    join(rank, size, path, {})


def seconds_to_answer(group: Group, *workers: str) -> float:
    """Return a limit of time in which these workers answer, however slow this machine is."""
    started = time.monotonic()
    for name in workers:
        group.connection(name).request("snapshot", 60.0)
    return 1.0 + 4 * (time.monotonic() - started)


def test_a_dead_a_frozen_and_a_busy_worker_do_not_stop_the_diagnosis(tmp_path: Path) -> None:
    with Fleet(4, join, str(tmp_path / "store"), {"threads": 1, "max_threads": 4}) as fleet:
        fleet[0].do(start_blocked_calls, "w2", 1)
        fleet[0].do(start_computing, "w3")
        with attach(pid=fleet[0].process.pid, config=CONFIG) as group:
            fleet[1].kill()
            fleet[2].signal(signal.SIGSTOP)
            try:
                limit = seconds_to_answer(group, "w0", "w3")
                snapshot = group.snapshot(limit)
                stacks = group.ask("stacks", limit)
                trace = collect_trace(group, 10.0, limit)
                for name in ("w1", "w2"):
                    with pytest.raises(NoAnswer, match=r"ended|no answer for"):
                        debug(group.connection(name), str, str, timeout=1.0)
                shown: list[str] = []
                debug(group.connection("w3"), lambda prompt: "quit", shown.append, timeout=20.0)
            finally:
                fleet[2].signal(signal.SIGCONT)
        problems = ["", "ended (connection refused)", f"no answer for {limit:g} s", ""]
        assert [worker["problem"] for worker in snapshot["workers"]] == problems
        calls = snapshot["workers"][3]["snapshot"]["calls"]
        assert [(call["function"], call["state"]) for call in calls] == [("compute", "running")]
        text = status_text(snapshot)
        assert "does not answer" in text  # w0 waits for w2
        assert f"no answer for {limit:g} s" in text
        assert "in compute" in stacks_text(stacks)
        assert "serves compute for w0" in "".join(shown)
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"compute on w3", "compute for w0", "block on w2"} <= names


def test_a_process_kills_itself_at_a_planned_call(tmp_path: Path) -> None:
    plan = "kill worker=w1 function=abs at=2"
    with Fleet(2, join_with_faults, str(tmp_path / "store"), plan) as fleet:
        assert fleet[0].do(call_error, "w1") == ("none", "")
        assert fleet[0].do(call_error, "w1")[0] == "PeerLost"
        fleet[1].process.join(20)
        assert fleet[1].process.exitcode == -signal.SIGKILL


def test_the_dashboard_shows_a_dead_a_frozen_and_a_busy_worker(tmp_path: Path) -> None:
    with Fleet(4, join, str(tmp_path / "store"), {"threads": 1, "max_threads": 4}) as fleet:
        fleet[0].do(start_computing, "w3")
        with dashboard.serve(
            pid=fleet[0].process.pid, config=CONFIG, port=0, timeout=2.0
        ) as served:
            until(lambda: set(states(served.url).values()) == {"alive"})
            fleet[1].kill()
            fleet[2].signal(signal.SIGSTOP)
            try:
                expected = {"w0": "alive", "w1": "dead", "w2": "silent", "w3": "alive"}
                until(lambda: states(served.url) == expected)
                stacks = {each["name"]: each for each in get(served.url, "/api/stacks").json}
                trace = get(served.url, "/api/trace").json
            finally:
                fleet[2].signal(signal.SIGCONT)
            assert stacks["w2"]["problem"] == "no answer for 2 s"
            frames = [frame for thread in stacks["w3"]["threads"] for frame in thread["frames"]]
            assert "compute" in {frame["function"] for frame in frames}
            assert "compute on w3" in {event["name"] for event in trace["traceEvents"]}
            until(lambda: states(served.url)["w2"] == "alive")


def count_until_told(path: str) -> int:
    counter = 0
    while not os.path.exists(path):
        counter += 1
        time.sleep(0.01)
    return counter


@pytest.mark.skipif(sys.version_info < (3, 14), reason="needs Python 3.14")
@pytest.mark.parametrize("end", ["q\n", "c\n", ""], ids=["quit", "killed", "end of input"])
def test_pdb_attaches_to_the_main_thread_by_process_id(tmp_path: Path, end: str) -> None:
    told = tmp_path / "told"
    with Fleet(1, join, str(tmp_path / "store"), {}) as fleet:
        fleet[0].begin(count_until_told, str(told))
        command = [sys.executable, "-m", "telegrad", "debug", "w0", "--main-thread"]
        pdb = subprocess.Popen(
            [*command, "--pid", str(fleet[0].process.pid), "--timeout", "60"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TELEGRAD_SECRET": str(CONFIG.secret)},
        )
        assert pdb.stdin is not None
        assert pdb.stdout is not None
        pdb.stdin.write(f"u\nu\np counter >= 0\np 6 * 7\n{end}")
        if end == "c\n":  # pdb stays until it is killed
            pdb.stdin.flush()
            shown = ""
            while "42" not in shown:
                shown += pdb.stdout.readline()
            pdb.kill()
            pdb.communicate()
        else:
            shown, _ = pdb.communicate(timeout=60)
        assert "count_until_told()" in shown
        assert "42" in shown
        told.touch()
        assert fleet[0].result() > 0  # the worker goes on


_SKEWED_WORKER = """
import sys, time, torch.distributed as dist
from telegrad import Agent, Config
store = dist.FileStore(sys.argv[1], 2)
with Agent("w1", store=store, rank=1, world_size=2, config=Config(secret=sys.argv[2])):
    sys.stdin.read()
"""
_IN_OTHER_TIME = ["unshare", "--time", "--monotonic", "5000", "--fork", "--kill-child"]


def can_skew_clocks() -> bool:
    try:
        tried = subprocess.run([*_IN_OTHER_TIME, "true"], capture_output=True, check=False)
    except OSError:
        return False
    return tried.returncode == 0


def test_the_trace_of_a_worker_with_another_clock(tmp_path: Path) -> None:
    if not can_skew_clocks():
        pytest.skip("needs the right to make a time namespace")
    path, secret = str(tmp_path / "store"), str(CONFIG.secret)
    other = subprocess.Popen(
        [*_IN_OTHER_TIME, sys.executable, "-c", _SKEWED_WORKER, path, secret],
        stdin=subprocess.PIPE,
    )
    store = dist.FileStore(path, 2)
    try:
        with Agent("w0", store=store, rank=0, world_size=2, config=CONFIG) as agent:
            for _ in range(20):
                agent.call("w1", max, 1, 2)
            with attach(pid=os.getpid(), config=CONFIG) as group:
                ahead = group.clock_offsets(60.0)["w1"].seconds
                trace = collect_trace(group, 600.0, 60.0)
    finally:
        other.communicate()
    assert 4000 < ahead < 6000
    spans: dict[str, list[tuple[float, float]]] = {"max on w1": [], "max for w0": []}
    for event in trace["traceEvents"]:
        if event["name"] in spans:
            spans[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(spans["max on w1"]) == len(spans["max for w0"]) == 20
    for made, served in zip(*map(sorted, spans.values()), strict=True):
        assert made[0] - 1 <= served[0] <= served[1] <= made[1] + 1  # rounded to microseconds

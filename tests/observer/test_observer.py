"""A group seen from outside: who answers, what is shown, and that the group does not notice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from telegrad import Agent, Config, current_agent
from telegrad.cli import main
from telegrad.errors import UsageError
from telegrad.observer import Group, WorkerReply, attach
from telegrad.observer.clocks import refined_offsets
from telegrad.observer.discovery import local_addresses
from telegrad.observer.graph import Wait, cycles, waits
from telegrad.observer.group import ClockOffset, ObservedWorker
from telegrad.observer.tables import stacks_text, status_text, table
from telegrad.observer.trace import chrome_trace, collect_trace
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.conftest import Background
from tests.local.gates import Gate, hold_at, until


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def observe() -> Iterator[Callable[[LocalCluster], Group]]:
    """Attaches to a cluster through its first worker."""
    groups = []

    def attach_to(cluster: LocalCluster, config: Config | None = None) -> Group:
        address = cluster.agents[0]._runtime.endpoint.addresses[0]
        groups.append(attach(address=address, config=config or cluster.config))
        return groups[-1]

    yield attach_to
    for group in groups:
        group.close()


Observe = Callable[..., Group]


def call_through(to: str, gate: Gate) -> None:
    agent = current_agent()
    assert agent is not None
    agent.call(to, hold_at, gate)


def test_all_workers_are_found_through_one(cluster: Clusters, observe: Observe) -> None:
    group = observe(cluster(3))
    assert [worker.name for worker in group.workers] == ["w0", "w1", "w2"]
    replies = group.ask("members")
    assert [reply.value["worker"]["name"] for reply in replies] == ["w0", "w1", "w2"]
    assert [reply.problem for reply in replies] == ["", "", ""]


def test_a_worker_that_has_ended_gets_a_row(cluster: Clusters, observe: Observe) -> None:
    workers = cluster(3)
    group = observe(workers)
    workers.kill("w1")
    replies = group.ask("snapshot")
    assert [reply.problem for reply in replies] == ["", "ended (connection refused)", ""]
    assert "ended (connection refused)" in status_text(group.snapshot())


def test_a_full_executor_does_not_delay_the_answers(
    cluster: Clusters, observe: Observe, gate: Gate
) -> None:
    workers = cluster(2, threads=1, max_threads=1)
    workers["w1"]._runtime.functions.find(hold_at).seconds = 1.0  # so the executor runs it
    futures = [workers["w0"].submit("w1", hold_at, gate) for _ in range(3)]
    gate.wait_for()
    snapshot = observe(workers).snapshot()
    found = snapshot["workers"][1]["snapshot"]
    assert found["executor"]["limit"] == 1
    until(lambda: len(workers["w1"].calls()) == 3)
    gate.open()
    for future in futures:
        future.wait()


def test_an_observer_is_no_member_and_nobody_waits_for_it(
    cluster: Clusters, observe: Observe, in_background: Background
) -> None:
    workers = cluster(2)
    group = observe(workers)
    before = workers["w0"].statistics()
    group.snapshot()
    assert workers["w0"].statistics()["calls_served"] == before["calls_served"]
    assert [info.name for info in workers["w0"].get_worker_infos()] == ["w0", "w1"]
    assert workers["w0"]._runtime.listener.connections == []
    done = [in_background(agent.barrier) for agent in workers]
    done += [in_background(agent.shutdown) for agent in workers]
    for each in done:
        each.result()
    problems = {reply.problem for reply in group.ask("snapshot")}
    assert problems == {"ended (connection refused)"}


def test_an_observer_without_the_secret_is_refused(cluster: Clusters, observe: Observe) -> None:
    with pytest.raises(UsageError, match="secret"):
        observe(cluster(1), Config(secret="another secret of sixteen"))


def test_a_request_that_is_unknown_is_answered_with_an_error(
    cluster: Clusters, observe: Observe
) -> None:
    (reply,) = observe(cluster(1)).ask("explode")
    assert reply.problem == "UsageError: unknown operation 'explode'"


def test_what_is_no_address_is_named() -> None:
    with pytest.raises(UsageError, match="'nowhere' is not host:port"):
        attach(address="nowhere")


def test_workers_of_this_process_are_found_on_this_host(cluster: Clusters) -> None:
    workers = cluster(2, transports=("unix",))
    addresses = {address for address, pid in local_addresses() if pid == os.getpid()}
    assert {agent._runtime.endpoint.addresses[0] for agent in workers} <= addresses
    with attach(pid=os.getpid(), config=workers.config) as group:
        assert [worker.name for worker in group.workers] == ["w0", "w1"]
    with pytest.raises(UsageError, match="found no worker in process 1 "):
        attach(pid=1, config=workers.config)


def test_a_group_is_found_through_its_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    config = Config(secret="sixteen characters or more", transports=("unix",))
    prefixed = dist.PrefixStore("telegrad_0", store)
    with Agent("a", store=prefixed, config=config), Agent("b", store=prefixed, config=config):
        with attach(f"127.0.0.1:{store.port}", config=config) as group:
            assert [worker.name for worker in group.workers] == ["a", "b"]
            assert [reply.problem for reply in group.ask("clock")] == ["", ""]
    with attach(f"127.0.0.1:{store.port}", config=config) as group:
        assert all(reply.problem for reply in group.ask("clock"))


def test_stacks_show_the_call_that_a_thread_serves(
    cluster: Clusters, observe: Observe, gate: Gate
) -> None:
    workers = cluster(2)
    future = workers["w0"].submit("w1", hold_at, gate)
    gate.wait_for()
    replies = observe(workers).ask("stacks")
    serving = [each["serves"] for each in replies[1].value["threads"] if each["serves"]]
    assert [(each["function"], each["caller"]) for each in serving] == [("hold_at", "w0")]
    text = stacks_text(replies)
    assert ", serves hold_at for w0 " in text
    assert "in hold_at" in text
    assert "waiting threads of Telegrad" in text
    assert len(stacks_text(replies, idle=True)) > len(text)
    gate.open()
    future.wait()


def test_who_waits_for_whom(cluster: Clusters, observe: Observe, gate: Gate) -> None:
    workers = cluster(3)
    future = workers["w0"].submit("w1", call_through, "w2", gate)
    gate.wait_for()
    snapshot = observe(workers).snapshot()
    found = {(wait["waiter"], wait["target"], wait["parent"]) for wait in snapshot["waits"]}
    assert found == {("w0", "w1", ""), ("w1", "w2", "call_through for w0")}
    assert snapshot["cycles"] == []
    assert json.loads(json.dumps(snapshot)) == json.loads(json.dumps(snapshot, allow_nan=False))
    text = status_text(snapshot)
    assert "w1 -> w2" in text
    assert max(map(len, text.splitlines())) <= 80
    gate.open()
    future.wait()


def test_those_who_wait_in_a_barrier_wait_for_the_missing(
    cluster: Clusters, observe: Observe, in_background: Background
) -> None:
    workers = cluster(3)
    done = [in_background(workers[name].barrier) for name in ("w0", "w1")]
    group = observe(workers)
    expected = {("w0", "w2", "barrier"), ("w1", "w0", "barrier or gather")}

    def found() -> set[tuple[str, str, str]]:
        return {(each.waiter, each.target, each.what) for each in waits(group.ask("snapshot"))}

    until(lambda: found() == expected)
    workers["w2"].barrier()
    for each in done:
        each.result()


# Cycles


def test_calls_that_lead_to_each_other_are_a_cycle() -> None:
    there = Wait("a", "b", "f", 9.0, call_id=1)
    back = Wait("b", "a", "g", 8.0, call_id=4, parent_call=("a", 1))
    assert cycles([there, back]) == [["a", "b"]]
    assert cycles([there, back._replace(age=0.1)]) == []


def test_a_call_that_another_call_made_is_in_no_cycle() -> None:
    there = Wait("a", "b", "f", 9.0, call_id=1)
    other = Wait("b", "a", "g", 8.0, call_id=4, parent_call=("c", 1))
    assert cycles([there, other]) == []


def test_a_round_that_waits_for_its_own_caller_is_a_cycle() -> None:
    push = Wait("trainer", "server", "push", 3.0, call_id=5)
    step = Wait("server", "other", "a step of default")
    back = Wait("other", "trainer", "f", 3.0, call_id=2)
    assert cycles([push, step, back]) == [["trainer", "server", "other"]]
    assert cycles([push, step]) == []


def test_a_server_that_waits_in_shutdown_still_serves() -> None:
    call = Wait("trainer", "server", "f", 9.0, call_id=1)
    shutdown = Wait("server", "trainer", "shutdown", 20.0, call_id=2, is_gather=True)
    assert cycles([shutdown, call]) == []
    led = Wait("server", "trainer", "shutdown", 20.0, is_gather=True)  # the leader of the gather
    assert cycles([led, call]) == []


def test_a_served_call_that_waits_for_a_barrier_is_in_a_cycle() -> None:
    call = Wait("trainer", "server", "f", 9.0, call_id=1)
    barrier = Wait("server", "trainer", "barrier", 8.0, "", 2, ("trainer", 1), True)
    assert cycles([call, barrier]) == [["trainer", "server"]]


def test_a_call_to_oneself_is_no_cycle() -> None:
    assert cycles([Wait("a", "a", "f", 9.0, call_id=1)]) == []


# Traces


def test_a_trace_has_an_arrow_from_each_call_to_where_it_was_served(
    cluster: Clusters, observe: Observe, gate: Gate
) -> None:
    workers = cluster(2)
    workers["w0"].call("w1", max, 1, 2)
    future = workers["w0"].submit("w1", hold_at, gate)
    gate.wait_for()
    trace = collect_trace(observe(workers), 10.0, 2.0)
    events = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    named = {each["name"]: each for each in events}
    made, served = named["max on w1"], named["max for w0"]
    assert (made["pid"], served["pid"]) == (0, 1)
    assert made["ts"] <= served["ts"] <= served["ts"] + served["dur"] <= made["ts"] + made["dur"]
    assert named["hold_at on w1"]["args"]["outcome"] == "in progress (sent)"
    arrows = [each for each in trace["traceEvents"] if each["ph"] in "sf"]
    assert [(each["ph"], each["ts"]) for each in arrows[:2]] == [
        ("s", made["ts"]),
        ("f", served["ts"]),
    ]
    gate.open()
    future.wait()


def test_clocks_of_other_machines_are_aligned() -> None:
    def reply(name: str, rank: int, ahead: float, **times: float) -> WorkerReply:
        call = {"id": 1, "function": "f", "outcome": "ok", "internal": False, **times}
        call |= {"direction": ("made", "served")[rank], "peer": ("w1", "w0")[rank]}
        value = {
            "worker": {"monotonic": 100.0 + ahead},
            "calls": [call],
            "events": [],
            "in_progress": [],
        }
        return WorkerReply(ObservedWorker(name, rank, name, ()), value)

    replies = [
        reply("w0", 0, 0.0, start=10.0, end=11.0),
        reply("w1", 1, 500.0, received=510.25, start=510.25, end=510.75),
        WorkerReply(ObservedWorker("w2", 2, "w2", ()), problem="no answer for 2 s"),
    ]
    offsets = {"w0": ClockOffset(0.0, 0.0, "x"), "w1": ClockOffset(500.0, 1e-4, "y")}
    trace = chrome_trace(replies, offsets)
    times = {each["name"]: each["ts"] for each in trace["traceEvents"] if each["ph"] == "X"}
    assert times == {"f on w1": 0.0, "f for w0": 250_000.0}
    assert trace["otherData"] == {
        "w0": "clock +-0 us",
        "w1": "clock +-100 us",
        "w2": "no answer for 2 s",
    }


def history_reply(name: str, rank: int, *calls: tuple[str, str, int, float, float]) -> WorkerReply:
    """Return the history of a worker: direction, peer, id, start and end of its calls."""
    value = {
        "worker": {"monotonic": 0.0},
        "calls": [
            {
                "direction": direction,
                "peer": peer,
                "id": number,
                "function": "f",
                "outcome": "ok",
                "internal": False,
                "start": start,
                "end": end,
                **({"received": start} if direction == "served" else {}),
            }
            for direction, peer, number, start, end in calls
        ],
        "events": [],
        "in_progress": [],
    }
    return WorkerReply(ObservedWorker(name, rank, name, ()), value)


def test_calls_align_the_clocks_of_machines() -> None:
    """w1 is 500 s ahead, w2 another 300 s; only w1 calls w2."""
    replies = [
        history_reply("w0", 0, ("made", "w1", 1, 10.0, 10.4), ("made", "w1", 2, 11.0, 11.4)),
        history_reply(
            "w1",
            1,
            ("served", "w0", 1, 510.3, 510.399),  # a slow way there, a fast way back
            ("served", "w0", 2, 511.001, 511.1),
            ("made", "w2", 1, 512.0, 512.2),
        ),
        history_reply("w2", 2, ("served", "w1", 1, 812.05, 812.15)),
        WorkerReply(ObservedWorker("w3", 3, "w3", ()), problem="no answer for 2 s"),
    ]
    measured = {
        "w0": ClockOffset(0.0, 0.0, "a"),
        "w1": ClockOffset(500.4, 0.5, "b"),
        "w2": ClockOffset(799.5, 2.0, "c"),
    }
    found = refined_offsets(measured, replies)
    assert found["w0"] == measured["w0"]
    assert found["w1"].seconds == pytest.approx(500.0)
    assert found["w1"].error == pytest.approx(0.001)
    assert found["w2"].seconds == pytest.approx(800.0)
    assert found["w2"].error == pytest.approx(0.051)
    trace = chrome_trace(replies, found)
    spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    for made in (each for each in spans if each["cat"] == "made"):
        served = next(
            each
            for each in spans
            if each["cat"] == "served"
            and each["args"]["id"] == made["args"]["id"]
            and each["args"]["peer"] == f"w{made['pid']}"
        )
        assert made["ts"] <= served["ts"] <= made["ts"] + made["dur"]


def test_calls_that_contradict_the_measured_clock_do_not_move_it() -> None:
    """A restarted worker has served other calls than those that its caller means."""
    replies = [
        history_reply("w0", 0, ("made", "w1", 1, 10.0, 10.4)),
        history_reply("w1", 1, ("served", "w0", 1, 590.0, 590.1)),
    ]
    measured = {"w0": ClockOffset(0.0, 0.0, "a"), "w1": ClockOffset(500.0, 0.5, "b")}
    assert refined_offsets(measured, replies) == measured
    same_clock = {"w0": ClockOffset(0.0, 0.0, "a"), "w1": ClockOffset(0.0, 0.0, "a")}
    assert refined_offsets(same_clock, replies) == same_clock


@pytest.mark.parametrize("option", ["--timeout=0", "--timeout=x", "--window=-1", "--window=inf"])
def test_a_number_of_seconds_that_makes_no_sense_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["status", option])
    assert "is not a positive number of seconds" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_an_error(
    cluster: Clusters,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = cluster(1)
    monkeypatch.setenv("TELEGRAD_SECRET", str(workers.config.secret))
    address = workers.agents[0]._runtime.endpoint.addresses[0]
    file = str(tmp_path / "missing" / "trace.json")
    assert main(["trace", "--address", address, "--timeout", "20", "-o", file]) == 1
    assert "telegrad: cannot write into --out" in capsys.readouterr().err


# Text


def test_the_number_of_workers_that_answer(cluster: Clusters, observe: Observe) -> None:
    workers = cluster(2)
    group = observe(workers)
    assert ": 2 of 2 workers answer " in status_text(group.snapshot(20.0))
    workers.kill("w1")
    assert ": 1 of 2 workers answers " in status_text(group.snapshot(20.0))
    assert ": 1 of 1 worker answers " in status_text(observe(cluster(1)).snapshot(20.0))


def test_a_table_fits_and_shortens_its_widest_column() -> None:
    text = table("Title", ["NAME", ">COUNT"], [["x" * 100, "7"], ["y", "123456"]])
    lines = text.splitlines()
    assert lines[0] == "Title"
    assert max(map(len, lines)) == 80
    assert lines[2].endswith("…       7")
    assert table("Title", ["NAME"], []) == ""


@pytest.mark.parametrize("command", ["status", "top", "stacks"])
@pytest.mark.parametrize("as_json", [True, False])
def test_commands(
    cluster: Clusters,
    command: str,
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = cluster(2, transports=("unix",))
    workers["w0"].call("w1", max, 1, 2)
    monkeypatch.setenv("TELEGRAD_SECRET", str(workers.config.secret))
    arguments = [command, "--pid", str(os.getpid())]
    arguments += ["--json"] if as_json else []
    arguments += ["--count", "1"] if command == "top" else []
    assert main(arguments) == 0
    written = capsys.readouterr().out
    if as_json:
        assert "w1" in json.dumps(json.loads(written))
    else:
        assert "w1" in written


def test_the_trace_command(
    cluster: Clusters,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = cluster(2, transports=("unix",))
    monkeypatch.setenv("TELEGRAD_SECRET", str(workers.config.secret))
    out = tmp_path / "trace.json"
    assert main(["trace", "--pid", str(os.getpid()), "-o", str(out)]) == 0
    assert "traceEvents" in json.loads(out.read_text())
    assert "wrote" in capsys.readouterr().out


def test_a_command_that_finds_no_group_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TELEGRAD_SECRET", "a secret that no group has")
    assert main(["status", "--pid", "1"]) == 1
    assert "--rendezvous host:port" in capsys.readouterr().err


def test_a_shard_that_waits_names_the_trainers_that_are_missing() -> None:
    snapshot: dict[str, Any] = {
        "calls": [],
        "gathers": [],
        "parameter_servers": [
            {"shard": "s", "waiting": ["t0"], "trainers": ["t0", "t1"]},
            {"shard": "idle", "waiting": [], "trainers": ["t0", "t1"]},
        ],
    }
    reply = WorkerReply(ObservedWorker("ps", 0, "x", ()), snapshot)
    assert waits([reply, reply._replace(value=None)]) == [Wait("ps", "t1", "a step of s")]


def a_function_with_a_name_that_does_not_fit_into_a_column_of_the_table() -> None: ...


def test_recent_calls_show_the_peer_beside_a_long_name(cluster: Clusters, observe: Observe) -> None:
    workers = cluster(2)
    function = a_function_with_a_name_that_does_not_fit_into_a_column_of_the_table
    workers["w0"].call("w1", function)
    text = status_text(observe(workers).snapshot())
    (line,) = [each for each in text.splitlines() if "made a_" in each]
    assert " w1 " in line
    assert len(line) <= 80

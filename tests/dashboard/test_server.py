"""The server of the dashboard: who may read what, and what it tells about workers of all kinds."""

from __future__ import annotations

import http.client
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import telegrad
from telegrad import Agent, Config, dashboard
from telegrad.dashboard import server
from telegrad.dashboard.view import finite, rows_of
from telegrad.errors import UsageError
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.dashboard.conftest import Serve
from tests.dashboard.requests import get, states, token_of
from tests.local.gates import Gate, hold_at, until


@pytest.fixture
def url(cluster: Clusters, serve: Serve) -> str:
    return serve(cluster(1)).url


# Who may read


def test_data_need_the_token(url: str) -> None:
    assert get(url, "/api/group").status == 200
    wrong = ["", "Bearer", "Bearer ", "Bearer x", f"Basic {token_of(url)}", "Bearer \xe9\xff"]
    for header in [*wrong, f"Bearer {token_of(url)}x", f"Bearer {token_of(url)[:-1]}"]:
        answer = get(url, "/api/group", Authorization=header)
        assert (answer.status, answer.json) == (401, {"error": "the token is missing or wrong"})
    assert get(url, f"/api/group?token={token_of(url)}", Authorization="").status == 401


def test_the_page_contains_no_data_and_no_token(url: str) -> None:
    page = get(url, "/", Authorization="")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert token_of(url) not in page.text
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")  # only itself
    assert "https://" not in page.text
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page.text
    )


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_name_that_is_not_of_this_host_is_refused(url: str, host: str) -> None:
    for path in ("/", "/api/group"):
        assert get(url, path, Host=host).status == 421


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST", "127.0.0.1:9999", "[::1]:80"])
def test_names_of_this_host_are_accepted(url: str, host: str) -> None:
    assert get(url, "/api/group", Host=host).status == 200  # the port is that of a tunnel


def test_pages_of_other_origins_cannot_read(url: str) -> None:
    for site in ("cross-site", "same-site"):
        assert get(url, "/api/group", Sec_Fetch_Site=site).status == 403
    answer = get(url, "/api/group", Origin="http://evil.example")
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    assert get(url, "/api/group", "OPTIONS").status == 501


def test_every_answer_has_the_headers_that_protect_it(url: str) -> None:
    for path in ("/", "/api/group", "/nowhere"):
        headers = get(url, path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "Set-Cookie" not in headers


def test_it_listens_on_loopback_only(cluster: Clusters, serve: Serve) -> None:
    assert serve(cluster(1))._server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/nowhere", "GET", 404),
        ("/api/nowhere", "GET", 404),
        ("/../../etc/passwd", "GET", 404),
        ("/api/trace?seconds=-1", "GET", 400),
        ("/api/trace?seconds=nan", "GET", 400),
        ("/api/trace?seconds=abc", "GET", 400),
        ("/api/group", "POST", 501),
    ],
)
def test_other_requests_are_refused(url: str, path: str, method: str, status: int) -> None:
    assert get(url, path, method).status == status


def test_connections_without_end_keep_nobody_out_for_ever(url: str) -> None:
    port = int(url.partition("/#")[0].rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(server._MAX_CONNECTIONS)]

    def answers() -> bool:
        try:
            return get(url, "/").status == 200
        except (http.client.HTTPException, OSError):
            return False

    until(lambda: not answers())
    for each in idle:
        each.close()
    until(answers)


# What it tells


def test_a_killed_worker_is_dead_and_one_that_comes_back_is_alive(
    cluster: Clusters, serve: Serve
) -> None:
    workers = cluster(2, fixed_size=False)
    workers["w0"].get_worker_infos()  # so that it knows of the other
    url = serve(workers).url
    until(lambda: states(url) == {"w0": "alive", "w1": "alive"})
    workers.kill("w1")
    until(lambda: states(url) == {"w0": "alive", "w1": "dead"})
    (dead,) = [each for each in get(url, "/api/group").json["workers"] if each["state"] == "dead"]
    assert dead["problem"] == "ended (connection refused)"
    workers.join("w1")
    workers.join("w2")
    workers["w0"].get_worker_infos()
    until(lambda: states(url) == {"w0": "alive", "w1": "alive", "w2": "alive"})
    kinds = {event["kind"] for event in get(url, "/api/group").json["events"]}
    assert {"is dead", "restarted"} <= kinds


def test_calls_in_progress_and_who_waits(cluster: Clusters, serve: Serve, gate: Gate) -> None:
    workers = cluster(2)
    url = serve(workers).url
    future = workers["w0"].submit("w1", hold_at, gate)
    gate.wait_for()

    def found() -> list[tuple[str, str, str]]:
        calls = get(url, "/api/group").json["calls"]
        return [(call["worker"], call["direction"], call["function"]) for call in calls]

    until(lambda: set(found()) == {("w0", "made", "hold_at"), ("w1", "served", "hold_at")})
    (wait,) = get(url, "/api/group").json["waits"]
    assert (wait["waiter"], wait["target"]) == ("w0", "w1")
    threads = get(url, "/api/stacks").json[1]["threads"]
    assert any(each["serves"] and each["serves"]["function"] == "hold_at" for each in threads)
    assert any(each["idle"] for each in threads)
    trace = get(url, "/api/trace?seconds=5").json
    assert "hold_at on w1" in {event["name"] for event in trace["traceEvents"]}
    gate.open()
    future.wait()


def test_values_of_a_training(cluster: Clusters, serve: Serve) -> None:
    workers = cluster(2)
    url = serve(workers).url
    workers["w1"].report(1, loss=2.0)
    workers["w1"].report(2, loss=math.nan)

    def found() -> list[tuple[str, list[tuple[int, float | None]]]]:
        return [
            (each["name"], [(step, value) for step, _, value in each["series"]["loss"]])
            for each in get(url, "/api/training").json["workers"]
        ]

    until(lambda: found() == [("w1", [(1, 2.0), (2, None)])])


def test_an_answer_that_is_not_understood_is_a_problem_of_that_worker(
    cluster: Clusters, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster(2)
    monkeypatch.setattr(workers["w1"]._runtime.diagnosis, "snapshot", lambda window: {"worker": 7})
    url = serve(workers).url
    until(lambda: states(url) == {"w0": "alive", "w1": "silent"})
    problem = get(url, "/api/group").json["workers"][1]["problem"]
    assert problem.startswith("its answer is not understood")


def test_workers_are_asked_only_while_somebody_looks(
    cluster: Clusters, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster(1)
    diagnosis = workers["w0"]._runtime.diagnosis
    take, taken = diagnosis.snapshot, []

    def snapshot(window: float) -> dict[str, object]:
        taken.append(window)
        return take(window)

    monkeypatch.setattr(diagnosis, "snapshot", snapshot)
    served = serve(workers)
    watcher = served._watcher
    until(lambda: bool(watcher._workers))
    assert taken == []
    assert states(served.url) == {"w0": "alive"}  # the first look waits for the answers
    assert taken


def test_a_group_may_start_after_its_dashboard() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    config = Config(secret="sixteen characters or more", transports=("unix",))
    address = f"127.0.0.1:{store.port}"
    with dashboard.serve(address, config=config, port=0, wait=True) as served:
        until(lambda: "no worker has registered" in get(served.url, "/api/group").json["problem"])
        with Agent("a", store=store, config=config):
            until(lambda: states(served.url) == {"a": "alive"})
        until(lambda: states(served.url) == {"a": "dead"})
    with pytest.raises(UsageError, match="cannot be asked"):
        dashboard.serve(address="unix:@telegrad-nobody", config=config)


# Ports, the launcher's variable, the command


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_in_use(
    cluster: Clusters, serve: Serve, used_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = cluster(1)
    with pytest.raises(UsageError, match=f"port {used_port}: Address already in use"):
        serve(workers, port=used_port)
    monkeypatch.setattr(server, "PORT", used_port)
    assert serve(workers, port=None).port != used_port


def test_the_token_is_that_of_the_secret(cluster: Clusters, serve: Serve) -> None:
    tokens = [token_of(serve(cluster(1, secret=each * 32)).url) for each in ("a1", "a1", "b2")]
    assert tokens[0] == tokens[1] != tokens[2]


def test_the_variable_of_the_launcher() -> None:
    assert dashboard.serve_job({}, "127.0.0.1:1") is None
    assert dashboard.serve_job({"TELEGRAD_DASHBOARD": "0"}, "127.0.0.1:1") is None
    for wrong in ("yes", "-1", "65536"):
        with pytest.raises(UsageError, match="is not 0, 1 or a port"):
            dashboard.serve_job({"TELEGRAD_DASHBOARD": wrong}, "127.0.0.1:1")
    Config.from_environment({"TELEGRAD_DASHBOARD": "1"})  # no warning in workers


@pytest.mark.process
def test_the_command(cluster: Clusters) -> None:
    workers = cluster(2)
    environment = {
        **os.environ,
        "TELEGRAD_SECRET": str(workers.config.secret),
        "PYTHONPATH": str(Path(telegrad.__path__[0]).parent),
    }
    command = [sys.executable, "-m", "telegrad", "dashboard", "--pid", str(os.getpid())]
    with subprocess.Popen(
        [*command, "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("open ").strip()
            assert states(url) == {"w0": "alive", "w1": "alive"}
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()


# Views


def test_numbers_that_json_has_not_are_replaced() -> None:
    value = {"a": [1.5, math.inf, {"b": math.nan}], "c": "text", "d": None, "e": (1, 2)}
    assert finite(value) == {"a": [1.5, None, {"b": None}], "c": "text", "d": None, "e": [1, 2]}


def test_rows_of_all_workers_are_cut_off() -> None:
    views = {name: {"calls": [{"age": age} for age in range(5)]} for name in ("a", "b")}
    rows = rows_of(views, "calls", "age", 3)
    assert rows == [
        {"worker": "a", "age": 4},
        {"worker": "b", "age": 4},
        {"worker": "a", "age": 3},
    ]


def test_it_tells_what_it_is(cluster: Clusters, serve: Serve) -> None:
    workers: LocalCluster = cluster(1)
    served = serve(workers)
    assert repr(served).startswith(f"<Dashboard at port {served.port}: <GroupWatcher of ")

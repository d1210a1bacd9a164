"""`telegrad doctor`: each problem of the set-up is named, with what to do."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from telegrad.cli import doctor, doctor_link, main
from telegrad.config import Config
from telegrad.group.secret import group_key, key_file
from telegrad.testing.cluster import _SECRET, LocalCluster
from tests.local.gates import PATIENCE

KEY = "0123456789abcdef" * 4

Doctor = Callable[..., dict[str, dict[str, str]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Run the command; its findings by name, and "exit" with the exit code."""
    monkeypatch.setenv("TELEGRAD_SECRET", KEY)

    def run(*arguments: str, **settings: str) -> dict[str, dict[str, str]]:
        for name, value in settings.items():
            monkeypatch.setenv(f"TELEGRAD_{name.upper()}", value)
        code = main(["doctor", "--json", *arguments])
        findings = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
        assert code == any(each["status"] == "problem" for each in findings.values())
        return findings

    return run


# This host


def test_the_command_needs_no_torch() -> None:
    program = (
        "import sys, telegrad.cli; code = telegrad.cli.main(['doctor']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    environment = {**os.environ, "TELEGRAD_SECRET": KEY}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if "->" not in line]
    assert all(line.startswith(("ok ", "note ")) for line in lines)
    assert KEY not in done.stdout


def test_a_random_key_is_best(run: Doctor) -> None:
    assert run()["secret"]["status"] == "ok"
    short = run(secret="sixteen characters or more")["secret"]
    assert short["status"] == "note"
    assert "stretched" in short["text"]
    assert "sixteen" not in str(short)


def test_a_wrong_setting_is_a_problem(run: Doctor) -> None:
    assert "TELEGRAD_TIMEOUT" in run(timeout="soon")["settings"]["text"]


def test_the_key_file(run: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("TELEGRAD_SECRET")
    assert "will be made" in run()["secret"]["text"]
    assert run()["secret"]["status"] == "ok"
    key_file().chmod(0o644)
    assert run()["secret"]["status"] == "problem"
    assert f"chmod 600 {key_file()}" in run()["secret"]["advice"]
    key_file().chmod(0o600)
    key_file().write_text("short")
    assert run()["secret"]["status"] == "problem"


def test_addresses(run: Doctor) -> None:
    assert run()["listen"]["status"] == "note"
    assert run(listen="192.0.2.99")["listen"]["status"] == "problem"
    found = run(listen="0.0.0.0", advertise="no-such-host.invalid")
    assert found["listen"]["status"] == "ok"
    assert found["address"]["status"] == "problem"
    assert "TELEGRAD_ADVERTISE" in found["address"]["advice"]
    assert "loopback" in run(advertise="localhost")["address"]["text"]


def test_few_descriptors_are_a_problem(run: Doctor) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        findings = list(doctor._check_limits())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert findings[0][1:3] == ("problem", "1000 open files")
    assert "ulimit -n" in findings[0].advice


def test_tls_off_is_noted(run: Doctor) -> None:
    assert run(tls="off")["tls"]["status"] == "note"


@pytest.mark.parametrize("address", ["host", "host:port", "host:99999"])
def test_an_address_needs_a_port(address: str) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", address])


# Two hosts


@pytest.fixture
def other() -> Iterator[Callable[..., tuple[str, Future[dict[str, Any]]]]]:
    """Start the doctor of another host; its address, and what it learns."""
    with ThreadPoolExecutor(1) as pool:

        def start(secret: str = KEY, **settings: Any) -> tuple[str, Future[dict[str, Any]]]:
            listening = doctor_link.listen("127.0.0.1:0")
            config = Config(secret=secret, **settings)

            def serve() -> dict[str, Any]:
                with listening:
                    return doctor_link.serve_one(listening, config, group_key(secret))

            return f"127.0.0.1:{listening.getsockname()[1]}", pool.submit(serve)

        yield start


@pytest.mark.parametrize("tls", ["on", "off"])
def test_two_doctors_measure_and_compare(
    run: Doctor, other: Any, tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_link, "_SECONDS", 0.01)
    address, learned = other(tls=tls)
    found = run(address, tls=tls)
    assert found["connection"]["status"] == "ok"
    assert "round trip" in found["connection"]["text"]
    assert "GB/s" in found["connection"]["text"]
    assert found["versions there"]["status"] == "ok"
    assert learned.result(PATIENCE)["name"] == socket.gethostname()


def test_another_secret_is_a_problem(run: Doctor, other: Any) -> None:
    address, learned = other(secret="another secret of a group")
    found = run(address)["connection"]
    assert found["status"] == "problem"
    assert "secret" in found["text"]
    assert learned.exception(PATIENCE) is not None


# `wrap_socket` of CPython does not close a socket whose peer has just reset the connection
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_tls_on_one_side_only_is_a_problem(run: Doctor, other: Any) -> None:
    address, learned = other(tls="off")
    assert run(address)["connection"]["status"] == "problem"
    assert learned.exception(PATIENCE) is not None


def test_nobody_there_is_a_problem(run: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "--listen" in run(f"127.0.0.1:{port}")["connection"]["advice"]


def test_other_versions_are_compared() -> None:
    config, key = Config(secret=KEY), group_key(KEY)
    own = doctor_link.versions(config, key)
    patch, minor = "0.0", "0.1"
    python = own["python"].rpartition(".")[0]
    for change, status in (
        ({"python": f"{python}.{patch}"}, "note"),
        ({"python": minor}, "problem"),
        ({"protocol": "0"}, "problem"),
    ):
        (finding,) = doctor._compare({**own, "name": "there", **change}, config, key)
        assert finding.status == status


def test_listening_ends_after_one_doctor(
    run: Doctor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_link, "_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    listening = doctor_link.listen(address)
    monkeypatch.setattr(doctor_link, "listen", lambda _: listening)
    config, key = Config(secret=KEY), group_key(KEY)
    with ThreadPoolExecutor(1) as pool:
        measured = pool.submit(doctor_link.measure, address, config, key)
        found = run("--listen", address, "--once")
        assert measured.result(PATIENCE).round_trip > 0
    assert found["connection"]["status"] == "ok"
    assert found["versions there"]["status"] == "ok"


# A group


def test_the_workers_of_a_group(run: Doctor) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    address = f"127.0.0.1:{store.port}"
    empty = run("--rendezvous", address, secret=_SECRET)
    assert empty["rendezvous"]["status"] == "ok"
    assert "no worker has joined" in empty["group"]["text"]
    with LocalCluster(3, store=dist.PrefixStore("telegrad_0", store)) as workers:
        found = run("--rendezvous", address)
        assert "3 workers" in found["group"]["text"]
        assert run("--rendezvous", address, secret=KEY)["group"]["status"] == "problem"
        workers.kill("w1")
        found = run("--rendezvous", address, secret=_SECRET)
        assert "cannot reach worker 'w1' at tcp:127.0.0.1" in found["group"]["text"]


def test_no_store_is_a_problem(run: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "MASTER_ADDR" in run("--rendezvous", f"127.0.0.1:{port}")["rendezvous"]["advice"]

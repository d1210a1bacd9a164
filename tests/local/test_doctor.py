"""`telegrad doctor`: each problem of the set-up is named, with what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from telegrad.cli import doctor, doctor_link, main
from telegrad.config import Config
from telegrad.group import store_connection
from telegrad.group.secret import group_key, key_file
from telegrad.testing.cluster import _SECRET, LocalCluster
from telegrad.transport import sockets, tls
from telegrad.transport.stripes import open_stripe
from telegrad.wire import handshake
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


def test_the_advertised_address_is_tried(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_loopback", lambda host: False)
    every = run(listen="0.0.0.0")["address"]
    assert every["status"] == "ok"
    assert socket.gethostname() in every["text"]
    # a worker of this host listens on another address of the interface
    elsewhere = run(listen="127.0.0.2", advertise="127.0.0.1")["address"]
    assert elsewhere["status"] == "problem"
    assert "nothing listens there" in elsewhere["text"]
    monkeypatch.setattr(doctor, "interfaces", dict)
    public = run()["address"]
    assert public["status"] == "note"
    assert "telegrad doctor --listen" in public["advice"]


def test_few_descriptors_are_a_problem(run: Doctor) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        findings = list(doctor._check_limits())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert findings[0][1:3] == ("problem", "1000 open files")
    assert "ulimit -n" in findings[0].advice


def test_few_threads_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"/sys/fs/cgroup/pids.max": 50}
    monkeypatch.setattr(doctor, "_number", limits.get)
    threads = list(doctor._check_limits())[1]
    assert threads[1:3] == ("problem", "50 threads")
    assert "pids limit of the cgroup" in threads.advice


@pytest.mark.parametrize(
    ("limit", "status", "text"),
    [(64 << 10, "note", "0.1 MB of locked memory"), (-1, "ok", "unlimited locked memory")],
)
def test_locked_memory(limit: int, status: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    locked = list(doctor._check_limits())[2]
    assert locked.status == status
    assert locked.text == text


@pytest.mark.parametrize(
    ("available", "status"),
    [
        (doctor._MIN_SHARED_MEMORY - 1, "problem"),
        (doctor._MIN_SHARED_MEMORY, "note"),
        (2 * doctor._MIN_SHARED_MEMORY, "ok"),
    ],
)
def test_the_memory_of_the_container(
    run: Doctor, available: int, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {"/sys/fs/cgroup/memory.max": available + 5, "/sys/fs/cgroup/memory.current": 5}
    monkeypatch.setattr(doctor, "_number", used.get)
    found = run(shared_memory_limit=str(2 * doctor._MIN_SHARED_MEMORY))["shared memory"]
    assert found["status"] == status
    assert f"{available / 1e9:.1f} GB are available" in found["text"]


def test_what_the_system_does_not_allow_is_a_problem(
    run: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(socket.socket, "bind", refuse)
    found = run()
    assert "no memfd" in found["shared memory"]["text"]
    assert found["unix sockets"]["advice"] == "allow abstract unix sockets"


def test_missing_packages_are_a_problem(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    found = metadata.version
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(tls, "HAS_PSK", False)
    assert run()["tls"]["advice"] == "pip install cryptography"

    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", version)
    config = Config(secret=KEY)
    missing, *_ = doctor._check_versions(config, group_key(KEY))
    assert missing[1:] == ("problem", "torch is not installed", "pip install torch")


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


def test_an_address_in_use_is_a_problem(run: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = f"127.0.0.1:{used.getsockname()[1]}"
        found = run("--listen", address)["listening"]
    assert address in found["text"]
    assert "--listen HOST:PORT" in found["advice"]


def test_listening_goes_on_until_ctrl_c(run: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = iter(["another secret of a group", "a third secret of a group"])
    measuring: list[Future[doctor_link.Link]] = []
    serve_one = doctor_link.serve_one

    def serve(listening: socket.socket, *arguments: Any) -> dict[str, Any]:
        secret = next(secrets, None)
        if secret is None:
            raise KeyboardInterrupt
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        config = Config(secret=secret)
        measuring.append(
            pool.submit(doctor_link.measure, address, config, group_key(config.secret))
        )
        return serve_one(listening, *arguments)

    monkeypatch.setattr(doctor_link, "serve_one", serve)
    with ThreadPoolExecutor(1) as pool:
        found = run("--listen", "127.0.0.1:0", tls="off")
        assert len(measuring) == 2
        assert all(isinstance(each.exception(PATIENCE), Exception) for each in measuring)
    assert found["connection"]["status"] == "problem"


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ((99, 1), "a request of kind 99"),
        ((doctor_link._DOWNLOAD, doctor_link._MAX_BYTES + 1), "a request for"),
        (None, "the other `telegrad doctor` closed the connection"),
    ],
)
def test_a_doctor_that_misbehaves_is_a_problem(
    request_: tuple[int, int] | None, problem: str
) -> None:
    config, key = Config(secret=KEY, tls="off"), group_key(KEY)
    with doctor_link.listen("127.0.0.1:0") as listening, ThreadPoolExecutor(1) as pool:
        served = pool.submit(lambda: list(doctor._serve(listening, config, key)))
        sock = socket.create_connection(listening.getsockname())
        connection = sockets.authenticate(
            sock,
            tls.TlsContexts(config, key),
            lambda binding: handshake.client(key, doctor_link._introduction(config, key), binding),
            server_side=False,
            timeout=PATIENCE,
        )
        with connection.sock:
            if request_ is not None:
                open_stripe(connection).send(doctor_link._REQUEST.pack(*request_))
            else:
                connection.sock.shutdown(socket.SHUT_WR)
            (finding,) = served.result(PATIENCE)
    assert finding.status == "problem"
    assert problem in finding.text


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


def test_a_port_that_is_not_a_store_is_a_problem(
    run: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_STORE_TIMEOUT", 0.1)
    monkeypatch.setattr(store_connection, "_GRACE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = run("--rendezvous", f"127.0.0.1:{other.getsockname()[1]}")["group"]
    assert "did not answer within 0.1 s" in found["text"]
    assert "TCPStore" in found["advice"]

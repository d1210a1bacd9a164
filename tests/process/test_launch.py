"""`telegrad launch` and `telegrad.launch`: output, failures, restarts, Ctrl-C, unchanged scripts.

The command runs in this process, and its workers are real processes.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import telegrad
import telegrad.cli
import telegrad.rpc as rpc
from telegrad.errors import PeerLost, UsageError, WorkerExited
from telegrad.launcher.workers import workers_of
from tests.dashboard.requests import states

pytestmark = [
    pytest.mark.process,
    # torch does not close the output of a process that ended by itself
    pytest.mark.filterwarnings(
        "ignore:unclosed file <_io.TextIOWrapper name='/proc:ResourceWarning"
    ),
]

LIMIT = 100


@pytest.fixture(autouse=True)
def own_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the default folders of logs in that of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


def launch(*arguments: Any) -> int:
    return telegrad.cli.main(["launch", *map(str, arguments)])


# Scripts


def test_each_worker_knows_its_place_and_its_output_is_shown_and_kept(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("""
        import json, os, sys
        print(json.dumps([sys.argv[1:], dict(os.environ)]))
        print("a warning", file=sys.stderr)
        print("no end of line", end="")
    """)
    logs = tmp_path / "logs"
    roles = ("--role", "ps=1", "--role", "trainer=2")
    assert launch(*roles, "--logs", logs, path, "--role", "$HOME", "${local_rank}") == 0
    shown = capsys.readouterr()
    environments = {}
    for name, text in re.findall(r"^\d\d:\d\d:\d\d (\w+) +\| (\[.*)$", shown.out, re.MULTILINE):
        arguments, environments[name] = json.loads(text)
        assert arguments == ["--role", "$HOME", "${local_rank}"]
        assert re.search(rf"^\S+ {name} +\| no end of line$", shown.out, re.MULTILINE)
        assert re.search(rf"^\S+ {name} +\| a warning$", shown.err, re.MULTILINE)
        assert len((logs / f"{name}.log").read_text().splitlines()) == 3
    assert sorted(environments) == ["ps0", "trainer0", "trainer1"]
    places = {
        name: telegrad.cluster.detect(environment=environments[name]) for name in environments
    }
    assert [place.name for place in places.values()] == list(places)
    last = places["trainer1"]
    assert (last.rank, last.world_size, last.local_rank) == (2, 3, 2)
    assert (last.role, last.role_rank, last.restart) == ("trainer", 1, 0)
    assert last.rendezvous is not None
    assert last.rendezvous.hosted
    assert len({each["TELEGRAD_SECRET"] for each in environments.values()}) == 1
    assert len(environments["ps0"]["TELEGRAD_SECRET"]) >= 16


def test_the_first_failure_ends_all_workers_and_is_shown_first(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("""
        import os, signal
        if os.environ["RANK"] == "1":
            raise SystemExit("the disk is full")
        signal.pause()
    """)
    assert launch("-n", 3, path) == 1
    shown = capsys.readouterr().err
    summary = shown[shown.index("\n\n") :].strip().splitlines()
    assert summary[:2] == [
        "worker1 failed with exit code 1. Its last lines:",
        "    the disk is full",
    ]
    assert summary[2].startswith("the whole output is in")


@pytest.mark.parametrize(("end", "code"), [("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_is_that_of_the_worker(script: Any, end: str, code: int) -> None:
    assert launch("-n", 1, script(f"import os\n{end}")) == code


def test_a_worker_restarts_alone_and_under_its_name(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = script("""
        import os, sys
        name, life = os.environ["TELEGRAD_NAME"], os.environ["TELEGRAD_RESTART"]
        print("life", life)
        if name == "worker0":
            print("heard of life", open(sys.argv[1]).read())
        elif life < "2":
            sys.exit(1)
        else:
            open(sys.argv[1], "w").write(life)
    """)
    assert launch("-n", 2, "--restarts", 2, path, tmp_path / "pipe") == 0
    shown = capsys.readouterr()
    lives = re.findall(r"(\w+) \| life (\d)", shown.out)
    assert sorted(lives) == [("worker0", "0"), *(("worker1", life) for life in "012")]
    assert "worker0 | heard of life 2" in shown.out
    assert re.findall(r"(\w+) \| \[(.*)\]", shown.err) == [
        ("worker1", "restart 1 of 2"),
        ("worker1", "restart 2 of 2"),
    ]


def test_restarts_have_a_limit(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("-n", 1, "--restarts", 1, script("print('up')\nraise SystemExit(4)")) == 4
    assert capsys.readouterr().out.count("| up") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_workers(script: Any, number: int) -> None:
    path = script("""
        import os, signal, sys
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), int(sys.argv[1]))
        signal.pause()
    """)
    before = signal.getsignal(number)
    assert launch("-n", 2, "--restarts", 3, path, int(number)) == 128 + number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["x.py"], "either -n N or --role NAME=N"),
        (["-n", "1", "--role", "a=1", "x.py"], "either -n N or --role NAME=N"),
        (["-n", "1", "nowhere.py"], "cannot launch 'nowhere.py': there is no such file"),
        (["--role", "ps", "x.py"], "'ps' is not of the form NAME=N"),
        (["-n", "0", __file__], "role 'worker' needs at least one worker, not 0"),
        (["--role", "p s=1", __file__], "Worker name must match"),
        (["--role", "a=12", "--role", "a1=1", __file__], "the name 'a10' to two workers"),
    ],
)
def test_what_cannot_be_launched(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch(*arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


TORCH_SCRIPT = """
    import os
    import torch
    import torch.distributed.rpc as rpc
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
    if rank == 0:
        print(rpc.__name__, rpc.rpc_sync("w1", torch.add, args=(torch.ones(1), 2)).item())
    rpc.shutdown()
"""


@pytest.mark.slow
def test_an_unmodified_script_runs_under_launch_and_under_torchrun(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(TORCH_SCRIPT)
    assert launch("-n", 2, "-m", "telegrad", "run", path) == 0
    assert "worker0 | telegrad.rpc 3.0" in capsys.readouterr().out
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, "-m", "telegrad", "run", path],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "telegrad.rpc 3.0\n"), done.stderr


# Functions


def add_ranks(offset: int) -> tuple[str, int]:
    rpc.init_rpc()
    place = telegrad.cluster.detect()
    print("hello")
    total = sum(
        rpc.rpc_sync(rank, telegrad.cluster.detect).rank or 0
        for rank in range(place.world_size or 0)
    )
    rpc.shutdown()
    return place.role, offset + total


def test_a_function_in_each_worker(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results = telegrad.launch(add_ranks, {"ps": 1, "trainer": 2}, (10,), logs=tmp_path / "logs")
    assert results == {"ps0": ("ps", 13), "trainer0": ("trainer", 13), "trainer1": ("trainer", 13)}
    assert sorted(re.findall(r"(\w+) +\| hello", capsys.readouterr().out)) == sorted(results)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "ps0.log",
        "trainer0.log",
        "trainer1.log",
    ]


def test_a_lambda_and_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    results = telegrad.launch(lambda x: x + 1, 1, (torch.ones(2),), show=False)
    assert results["worker0"].tolist() == [2.0, 2.0]
    assert capsys.readouterr().out == ""


def fail_if_second() -> None:
    if telegrad.cluster.detect().rank == 1:
        raise KeyError("lost")
    signal.pause()


def test_an_exception_of_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerExited) as caught:
        telegrad.launch(fail_if_second, 2)
    error = caught.value
    assert (error.peer, error.exit_code) == ("worker1", 1)
    assert str(error).startswith("worker1 failed with exit code 1. Its last lines:\n    Traceback")
    assert "KeyError: 'lost'" in str(error)
    assert "KeyError: 'lost'" in Path(error.log).read_text()
    assert "function_worker" not in str(error)


def interrupt(pid: int) -> None:
    os.kill(pid, signal.SIGINT)
    signal.pause()


def test_an_interrupted_launch_ends_its_workers() -> None:
    with pytest.raises(KeyboardInterrupt):
        telegrad.launch(interrupt, 2, (os.getpid(),), show=False)


def die_once_and_come_back() -> int:
    """worker1 is killed in its first life; worker0 calls it until its second life answers."""
    rpc.init_rpc()
    if telegrad.cluster.detect().rank == 1:
        rpc.shutdown()
        return os.getpid()
    first = rpc.rpc_sync("worker1", os.getpid)
    with pytest.raises(PeerLost):
        rpc.rpc_sync("worker1", os.kill, (first, signal.SIGKILL))
    second = None
    while second is None:
        try:
            second = rpc.rpc_sync("worker1", os.getpid)
        except PeerLost:
            continue
    assert second != first
    rpc.shutdown()
    return second


def test_a_killed_worker_comes_back_under_its_name(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    results = telegrad.launch(die_once_and_come_back, 2, restarts=1, show=False, logs=logs)
    assert results["worker0"] == results["worker1"]
    assert not [path for path in logs.iterdir() if "shut down without" in path.read_text()]


@pytest.mark.slow
def test_functions_of_a_notebook_travel_by_value() -> None:
    """Like a notebook, the program of `python -c` cannot be imported by the workers."""
    program = """
import telegrad
class Point:
    def __init__(self, x): self.x = x
def shift(point): return Point(point.x + telegrad.cluster.detect().rank)
print([point.x for _, point in sorted(telegrad.launch(shift, 2, (Point(40),)).items())])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[40, 41]\n"), done.stderr


def test_names_and_ranks_of_roles() -> None:
    workers = workers_of({"ps": 2, "trainer": 1})
    assert [(each.name, each.rank, each.role_rank) for each in workers] == [
        ("ps0", 0, 0),
        ("ps1", 1, 1),
        ("trainer0", 2, 0),
    ]
    with pytest.raises(UsageError, match="at least one worker"):
        workers_of({})


# The dashboard


def test_the_launcher_serves_a_dashboard(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tmp_path / "done"
    path = script(
        f"""
        import os, time
        import telegrad.rpc as rpc

        rpc.init_rpc()
        while not os.path.exists({str(done)!r}):
            time.sleep(0.02)
        rpc.shutdown()
        """
    )
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.delenv("TELEGRAD_DASHBOARD", raising=False)
    shown: list[dict[str, str]] = []

    def look() -> None:
        until = time.monotonic() + LIMIT
        while shown[-1:] != [{"worker0": "alive"}] and time.monotonic() < until:
            time.sleep(0.05)
            found = re.search("^dashboard: (.*)$", errors.getvalue(), re.MULTILINE)
            if found:
                shown.append(states(found[1]))
        done.touch()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        assert launch("-n", 1, "--dashboard", path) == 0
    finally:
        os.environ.pop("TELEGRAD_DASHBOARD", None)
        done.touch()
        looking.join()
    assert shown[-1] == {"worker0": "alive"}


def test_a_dashboard_is_for_workers_on_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch("-n", "1", "--dashboard", "--on", "slurm", __file__)
    assert "telegrad dashboard --rendezvous HOST:PORT" in capsys.readouterr().err

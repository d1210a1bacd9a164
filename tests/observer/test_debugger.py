"""pdb in a worker: what it shows, and that the worker goes on whatever the observer does."""

from __future__ import annotations

import builtins
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad import Config
from telegrad.cli import main
from telegrad.errors import UsageError
from telegrad.observer import Group, attach
from telegrad.observer.connection import NoAnswer
from telegrad.observer.debugger import debug
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.gates import Gate, hold_at, until

can_stop = pytest.mark.skipif(sys.version_info < (3, 12), reason="needs Python 3.12")
_values: dict[str, int] = {}


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def observe() -> Iterator[Callable[[LocalCluster], Group]]:
    groups = []

    def attach_to(cluster: LocalCluster) -> Group:
        address = cluster.agents[0]._runtime.endpoint.addresses[0]
        groups.append(attach(address=address, config=cluster.config))
        return groups[-1]

    yield attach_to
    for group in groups:
        group.close()


Observe = Callable[[LocalCluster], Group]


def hold_with_a_local(gate: Gate) -> int:
    answer = 41
    hold_at(gate)
    return answer


def count_until_told(limit: int) -> int:
    count = 0
    while count < limit and not _values.get("stop"):
        count += 1
    return count


class Typist:
    """Types lines at the prompts, and keeps what is shown."""

    def __init__(self, *lines: str) -> None:
        self.text = ""
        self._lines = list(lines)

    def read(self, prompt: str) -> str:
        self.text += prompt
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        self.text += line + "\n"
        return line

    def write(self, text: str) -> None:
        self.text += text

    def debug(self, group: Group, worker: str = "w1", **options: Any) -> str:
        debug(group.connection(worker), self.read, self.write, timeout=20.0, **options)
        return self.text


def test_the_call_that_runs_is_shown(cluster: Clusters, observe: Observe, gate: Gate) -> None:
    workers = cluster(2)
    future = workers["w0"].submit("w1", hold_with_a_local, gate)
    gate.wait_for()
    lines = ("up 1", "p answer", "w", "threads", "p 1 +", "!answer.nothing", "refresh", "q")
    shown = Typist("u", "u", *lines).debug(observe(workers))
    gate.open()
    assert future.wait() == 41
    assert "serves hold_with_a_local for w0" in shown
    assert "hold_with_a_local()" in shown
    assert "SyntaxError" in shown
    assert "MainThread" in shown
    assert shown.count("worker 'w1', thread") == 2  # the second after `refresh`


def test_locals_of_the_call(cluster: Clusters, observe: Observe, gate: Gate) -> None:
    workers = cluster(2)
    future = workers["w0"].submit("w1", hold_with_a_local, gate)
    gate.wait_for()
    ups: list[str] = []
    typist = Typist()

    def read(prompt: str) -> str:
        if "-> hold_at(gate)" not in typist.text.rpartition("(Pdb)")[2] and len(ups) < 20:
            typist.text += "(Pdb)"
            ups.append("u")
            return "u"
        typist.text += "(Pdb)"
        ups.append("")
        return "p answer + 1" if ups.count("") == 1 else "q"

    debug(observe(workers).connection("w1"), read, typist.write, timeout=20.0)
    gate.open()
    future.wait()
    assert "42" in typist.text


def test_a_thread_that_runs_is_not_stepped(cluster: Clusters, observe: Observe) -> None:
    commands = ("step", "n", "c", "b 1", "jump 1", "interact", "thread x", "thread 999")
    shown = Typist(*commands).debug(observe(cluster(2)))
    assert shown.count("`stop` stops it") == 5
    assert "interact cannot be used" in shown
    assert "no number of a thread" in shown


def test_another_thread(cluster: Clusters, observe: Observe) -> None:
    group = observe(cluster(2))
    shown = Typist("q").debug(group, thread="MainThread")
    assert "thread MainThread" in shown
    with pytest.raises(NoAnswer, match="no thread 'unknown'; it has"):
        Typist().debug(group, thread="unknown")


def test_one_debugger_at_a_time(cluster: Clusters, observe: Observe) -> None:
    group = observe(cluster(2))
    problems: list[str] = []

    def read(prompt: str) -> str:
        try:
            Typist().debug(group, "w0")
        except NoAnswer as error:
            problems.append(str(error))
        raise EOFError

    debug(group.connection("w1"), read, lambda text: None, timeout=20.0)
    assert problems == ["a debugger is attached to worker 'w0' already"]
    until(lambda: "(Pdb)" in Typist("q").debug(group))


def test_a_dead_worker_is_an_error(cluster: Clusters, observe: Observe) -> None:
    workers = cluster(2)
    group = observe(workers)
    workers.kill("w1")
    with pytest.raises(NoAnswer, match="ended"):
        Typist().debug(group)
    with pytest.raises(UsageError, match="no worker 'w7'; it has w0, w1"):
        group.connection("w7")


def test_a_worker_that_ends_under_the_debugger(cluster: Clusters, observe: Observe) -> None:
    workers = cluster(2)
    group = observe(workers)

    def read(prompt: str) -> str:
        workers.kill("w1")
        return "p 1"

    with pytest.raises(NoAnswer, match="ended"):
        debug(group.connection("w1"), read, lambda text: None, timeout=20.0)


def test_a_command_that_does_not_end_is_ended(cluster: Clusters, observe: Observe) -> None:
    """The observer is gone while the worker evaluates: the worker stops that."""
    group = observe(cluster(2))
    stream, _ = group.connection("w1").converse("debug", 20.0)
    stream.send({"line": "!while True: pass"}, time.monotonic() + 20.0)
    stream.close()
    until(lambda: not any(each.name == "telegrad debugger" for each in threading.enumerate()))


def test_without_the_secret_there_is_no_debugger(cluster: Clusters) -> None:
    address = cluster(1).agents[0]._runtime.endpoint.addresses[0]
    with pytest.raises(UsageError, match="secret"):
        attach(address=address, config=Config(secret="another secret of sixteen"))


def test_the_command(
    cluster: Clusters,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = cluster(2)
    future = workers["w0"].submit("w1", hold_with_a_local, gate)
    gate.wait_for()
    where = ["--address", workers.agents[0]._runtime.endpoint.addresses[0], "--timeout", "20"]
    monkeypatch.setenv("TELEGRAD_SECRET", str(workers.config.secret))
    typist = Typist("p 6 * 7")
    monkeypatch.setattr(builtins, "input", typist.read)
    assert main(["debug", "w1", *where]) == 0
    assert "42" in capsys.readouterr().out

    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupt)
    until(lambda: main(["debug", "w1", *where]) == 130)
    assert main(["debug", "w9", *where]) == 1
    assert "no worker 'w9'" in capsys.readouterr().err
    if sys.version_info < (3, 14):
        assert main(["debug", "w1", "--main-thread", *where]) == 1
        assert "needs Python 3.14" in capsys.readouterr().err
    gate.open()
    assert future.wait() == 41


@can_stop
def test_a_call_is_stopped_and_stepped(cluster: Clusters, observe: Observe) -> None:
    workers = cluster(2)
    _values.clear()
    future = workers["w0"].submit("w1", count_until_told, 10**12)
    until(lambda: any(call.state == "running" for call in workers["w1"].calls()))
    lines = ("stop", "next", "p 'count', count", "next", "stop", "thread 0", "c", "p count", "q")
    shown = Typist(*lines).debug(observe(workers))
    assert "('count'," in shown
    assert "is stopped already" in shown
    assert "`continue` first" in shown
    _values["stop"] = 1
    assert future.wait() > 0


@can_stop
def test_a_stopped_call_goes_on_when_the_observer_is_gone(
    cluster: Clusters, observe: Observe
) -> None:
    workers = cluster(2)
    _values.clear()
    future = workers["w0"].submit("w1", count_until_told, 10**12)
    until(lambda: any(call.state == "running" for call in workers["w1"].calls()))
    shown = Typist("stop", "n").debug(observe(workers))
    assert "count_until_told()" in shown
    assert workers["w0"].call("w1", max, 1, 2) == 2
    _values["stop"] = 1
    assert future.wait() > 0


@can_stop
def test_a_breakpoint(cluster: Clusters, observe: Observe) -> None:
    workers = cluster(2)
    _values.clear()
    future = workers["w0"].submit("w1", count_until_told, 10**12)
    until(lambda: any(call.state == "running" for call in workers["w1"].calls()))
    line = count_until_told.__code__.co_firstlineno + 3
    shown = Typist("stop", f"b {__file__}:{line}", "c", "p count", "c", "q").debug(observe(workers))
    assert shown.count("count += 1") >= 2
    _values["stop"] = 1
    assert future.wait() > 0

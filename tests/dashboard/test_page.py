"""The page of the dashboard in a real browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from telegrad import batched, current_agent
from tests.conftest import Clusters
from tests.dashboard.browser import Browser, Tab
from tests.dashboard.conftest import Serve
from tests.local.gates import Gate, until

ATTACK = "<img src=x onerror=\"window.attacked='yes'\"><script>window.attacked='yes'</script>"
VIEWS = ["workers", "calls", "waits", "functions", "servers", "events", "stacks", "training"]

# seconds that a call waits for the test, which waits for the browser with several `Tab.until`
_HOLD = 240.0

Open = Callable[..., Tab]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens an address. At the end, no page has had an error."""
    tabs = []

    def open_tab(url: str, **options: Any) -> Tab:
        tabs.append(browser.open(url, **options))
        return tabs[-1]

    yield open_tab
    for tab in tabs:
        errors = [text for text in tab.errors() if "ERR_CONNECTION_REFUSED" not in text]
        tab.close()
        assert [text for text in errors if "401" not in text] == []


def show(tab: Tab, view: str) -> None:
    tab.evaluate(f"location.hash = '#{view}'")
    tab.until(f"!document.getElementById({view!r}).hidden")


def call_back(to: str, gate: Gate) -> None:
    agent = current_agent()
    assert agent is not None
    agent.call(to, hold_long_at, gate)


def hold_long_at(gate: Gate) -> None:
    gate.hold(_HOLD)


@batched
def batch(value: Any) -> Any:
    return value


def test_it_loads_updates_shows_a_killed_worker_and_survives_a_reload(
    cluster: Clusters, serve: Serve, visit: Open
) -> None:
    workers = cluster(3)
    tab = visit(serve(workers).url)
    tab.until_text("summary", "3 of 3 workers answer")
    assert tab.evaluate("location.hash") == "#workers"  # the token is not in the address
    show(tab, "functions")
    workers["w0"].call("w1", divmod, 7, 2)
    tab.until_text("table-functions", "divmod")  # it updates by itself
    show(tab, "workers")
    workers.kill("w2")
    tab.until_text("table-workers", "✕ dead")
    tab.until_text("tab-workers", "✕ 1")
    tab.reload()
    tab.until_text("summary", "2 of 3 workers answer")
    tab.until_text("table-workers", "ended (connection refused)")
    show(tab, "events")
    tab.until_text("table-events", "is dead")
    tab.reload()
    tab.until("!document.getElementById('events').hidden")  # the view stays


def test_it_goes_on_when_its_server_is_started_again(
    cluster: Clusters, serve: Serve, visit: Open
) -> None:
    workers = cluster(1)
    first = serve(workers)
    tab = visit(first.url)
    tab.until_text("connection", "live")
    first.close()
    tab.until_text("connection", "no connection")
    serve(workers, port=first.port)
    tab.until_text("connection", "live")


def test_it_asks_for_the_token(cluster: Clusters, serve: Serve, visit: Open) -> None:
    url = serve(cluster(1)).url
    tab = visit(url.partition("#")[0])
    tab.until_text("connection", "token needed")
    assert tab.evaluate("document.getElementById('workers').hidden")
    tab.evaluate("document.getElementById('token-text').value = 'abc'")
    tab.click("token-use")
    tab.until_text("token-problem", "The token was refused")
    tab.evaluate(f"document.getElementById('token-text').value = {url!r}")  # the whole address
    tab.click("token-use")
    tab.until_text("summary", "1 of 1 worker answers")


def test_hostile_names_run_no_scripts(
    cluster: Clusters, serve: Serve, visit: Open, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:

    def attack(wait: bool) -> None:
        if wait:
            gate.hold(_HOLD)

    attack.__name__ = attack.__qualname__ = ATTACK
    workers = cluster(2, timeout=None)
    agent = workers["w0"]
    agent.call("w1", batch, 1)
    future = agent.submit("w1", attack, True)
    gate.wait_for()
    agent.report(None, samples=0, **{ATTACK: 1.0})
    for worker in workers:
        worker._runtime.recorder.add_event(ATTACK, peer=ATTACK, reason=ATTACK)
    identity = workers["w1"]._runtime.diagnosis.identity
    monkeypatch.setattr(
        workers["w1"]._runtime.diagnosis, "identity", lambda: {**identity(), "host": ATTACK}
    )
    tab = visit(serve(workers).url)
    tab.until_text("table-workers", ATTACK)
    for view in VIEWS:
        show(tab, view)
        if view == "functions":
            agent.call("w1", attack, False)
        elif view == "stacks":
            tab.click("take-stacks")
        if view != "servers":
            tab.until_text(view, ATTACK)
    assert tab.evaluate("window.attacked === undefined")
    assert tab.evaluate("document.querySelectorAll('main img, main script').length") == 0
    gate.open()
    future.wait()


def test_inline_scripts_of_others_are_refused_by_the_policy(
    cluster: Clusters, serve: Serve, browser: Browser
) -> None:
    tab = browser.open(serve(cluster(1)).url)
    tab.until_text("connection", "live")
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), "
        "{textContent: 'window.attacked = 1'}))"
    )
    assert tab.evaluate("window.attacked === undefined")
    assert any("Content Security Policy" in text for text in tab.errors())
    tab.close()


def test_a_cycle_is_marked(cluster: Clusters, serve: Serve, visit: Open, gate: Gate) -> None:
    workers = cluster(3, timeout=None)
    tab = visit(serve(workers).url)
    show(tab, "waits")
    future = workers["w0"].submit("w1", call_back, "w0", gate)
    tab.until("document.querySelectorAll('#graph .edge.cycle').length === 2")
    tab.until_text("cycles", "Cycle: w0 → w1 → w0")
    tab.until_text("tab-waits", "cycle")
    gate.open()
    future.wait()
    tab.until_text("table-waits", "Nobody waits")


def test_the_values_of_a_training_are_drawn(cluster: Clusters, serve: Serve, visit: Open) -> None:
    workers = cluster(2)
    for step in range(5):
        workers["w0"].report(step, loss=1 / (step + 1), accuracy=step / 5)
        workers["w1"].report(step, loss=2 / (step + 1))
    tab = visit(serve(workers).url, width=390, height=844, dark=True)
    show(tab, "training")
    tab.until("document.querySelectorAll('#training-charts path').length === 3")
    titles = "[...document.querySelectorAll('#training-charts h3')].map((each) => each.textContent)"
    assert tab.evaluate(titles) == ["loss", "accuracy"]
    workers["w1"].report(9, loss=float("nan"))
    tab.until_text("table-training", "not finite")
    tab.evaluate("document.querySelector('#axis input[value=time]').click()")
    tab.until("document.querySelector('#training-charts svg text').textContent !== ''")
    # nothing is wider than the screen
    assert tab.evaluate("document.documentElement.scrollWidth") == 390


def test_a_trace_can_be_downloaded(
    cluster: Clusters, serve: Serve, visit: Open, browser: Browser, tmp_path: Path
) -> None:
    workers = cluster(2)
    workers["w0"].call("w1", divmod, 7, 2)
    tab = visit(serve(workers).url)
    tab.until_text("connection", "live")
    tab.command("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    tab.click("trace")
    file = tmp_path / "trace.json"
    until(file.exists)
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert "divmod on w1" in names

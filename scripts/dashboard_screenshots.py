"""Take the screenshots of the dashboard in the documentation: `python scripts/dashboard_screenshots.py`.

It starts a group of real processes on this host: parameter servers, trainers, and workers of which
two call each other, one is killed and one is stopped. A headless Chromium shows the dashboard, in
light and dark, on a wide and a narrow screen. `--out` is a folder for all of them; without it, the
ones that the documentation uses are replaced.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import telegrad  # noqa: E402
from telegrad import Config, batched, current_agent, dashboard, ps  # noqa: E402
from tests.dashboard.browser import Browser, Tab  # noqa: E402

NAMES = ["ps0", "ps1", "trainer0", "trainer1", "trainer2", "actor0", "actor1", "actor2", "actor3"]
TABS = ["workers", "calls", "waits", "functions", "servers", "events", "stacks", "training"]
IN_DOCS = [
    ("workers", 1280, False),
    ("workers", 390, True),
    ("waits", 1280, True),
    ("training", 1280, False),
]
SCREENS = [(width, dark) for width in (1280, 390) for dark in (False, True)]
DOCS = ROOT / "docs" / "guides" / "dashboard"


# What the workers do


def work(name: str, secret: str, port: int) -> None:
    torch.set_num_threads(1)
    socket.gethostname = lambda: "node0"  # for the pictures
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    with telegrad.Agent(
        name,
        rank=NAMES.index(name),
        world_size=len(NAMES),
        store=store,
        config=Config(secret=secret, heartbeat_timeout=600, timeout=600),
    ) as agent:
        if name.startswith("trainer"):
            _train(agent, int(name[-1]))
        elif name in ("actor0", "actor1"):
            _act(agent, name)
        signal.pause()


def _train(agent: telegrad.Agent, number: int) -> None:
    torch.manual_seed(number)
    x = torch.randn(512, 16)
    y = (x @ torch.linspace(-1, 1, 16) > 0).long()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = ps.Optimizer(
        model, servers="ps*", consistency=ps.Async(), trainers=3, lr=0.02, agent=agent
    )
    for step in itertools.count(1):
        rows = torch.randint(512, (32,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        agent.report(step, samples=32, loss=loss)
        if step % 20 == 0:
            agent.report(step, accuracy=(model(x).argmax(1) == y).float().mean())
        time.sleep(0.01 + 0.005 * number)


@batched
def choose_action(states: Any) -> Any:
    return states * 2


def evaluate_policy() -> None:
    agent = current_agent()
    assert agent is not None
    agent.call("actor0", wait_for_episode)


def wait_for_episode() -> None:
    time.sleep(600)


def _act(agent: telegrad.Agent, name: str) -> None:
    """actor0 and actor1 wait for each other; actor0 also for actor3, which will be stopped."""
    agent = agent.with_timeout(600)
    if name == "actor0":
        agent.submit("actor1", evaluate_policy)
        agent.submit("actor3", wait_for_episode)
    while True:
        futures = [agent.submit("ps0", choose_action, torch.ones(4)) for _ in range(8)]
        for future in futures:
            future.wait()
        time.sleep(0.02)


# The pictures


def show(tab: Tab, name: str, whole: bool) -> bytes:
    tab.evaluate(f"location.hash = '#{name}'")
    tab.until(f"!document.getElementById({name!r}).hidden")
    if name == "stacks":
        tab.click("take-stacks")
        tab.until_text("stack-list", "actor3")
    if name == "training":
        tab.until("document.querySelectorAll('#training-charts path').length > 8")
    time.sleep(1.2)
    return tab.screenshot(whole)


def take(url: str, out: Path | None) -> None:
    with Browser() as browser:
        for width, dark in SCREENS:
            wanted = [name for name in TABS if out is not None or (name, width, dark) in IN_DOCS]
            if not wanted:
                continue
            tab = browser.open(url, width, 800 if width > 400 else 844, dark)
            tab.until_text("table-workers", "dead")
            tab.until_text("table-workers", "no answer")
            for name in wanted:
                file = f"{name}-{width}-{'dark' if dark else 'light'}.png"
                path = (DOCS if out is None else out) / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(show(tab, name, whole=out is not None or width > 400))
                print(path)
            print(*tab.errors(), sep="\n", end="")
            tab.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for pictures of all views")
    parser.add_argument("--seconds", type=float, default=20.0, help="time to watch before")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous = f"127.0.0.1:{store.port}"
    secret = secrets.token_hex(32)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["telegrad.ps", "telegrad.batching"])
    workers = {
        name: processes.Process(target=work, args=(name, secret, store.port), daemon=True)
        for name in NAMES
    }
    for worker in workers.values():
        worker.start()
    try:
        config = Config(secret=secret)
        with dashboard.serve(rendezvous, config=config, port=0, wait=True) as server:
            print(server.url)
            with Browser() as browser:  # the history begins when a page is open
                tab = browser.open(server.url)
                tab.until_text("summary", f"{len(NAMES)} of {len(NAMES)}")
                time.sleep(options.seconds)
                workers["actor2"].kill()
                os.kill(int(workers["actor3"].pid or 0), signal.SIGSTOP)
                time.sleep(5)
            take(server.url, options.out)
    finally:
        for process in reversed(workers.values()):  # trainers before their servers
            process.kill()
            process.join()


if __name__ == "__main__":
    main()

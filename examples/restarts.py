"""Train with workers that are killed and started again under their names.

Usage:

    pip install 'telegrad[examples]'
    python examples/restarts.py                              # about 15 s
    python examples/restarts.py --plot build/restarts.png    # the loss, with the kills marked

A supervisor starts a parameter server and two trainers, and starts each again that ends. Slurm,
Kubernetes, torchrun and `telegrad launch` do the same. It kills the server with SIGKILL, later a
trainer. A restarted worker joins under its old name. The server reads its checkpoint, so no step is
lost; the trainers wait for it. The trainer gets the current model; the other one does not wait.

The supervisor is a worker, too: trainers report to it, `on_loss` and `on_join` tell it what
happened, and it ends the training by a call to a `WorkerGroup`.
"""

import argparse
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import telegrad

try:
    from matplotlib.figure import Figure
except ImportError:  # only `--plot` needs it
    Figure = None  # type: ignore[assignment,misc]

STEPS = 40  # before the first kill, and after each restart
BATCH = 1024


class Report(NamedTuple):
    """One step of a trainer. `version` counts the steps of the model."""

    trainer: str
    version: int
    loss: float


# The workers


stopped = threading.Event()
reports: queue.SimpleQueue[Report] = queue.SimpleQueue()  # used by the supervisor


def run_worker(name: str, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with telegrad.Agent(name, store=store) as agent:
        agent.on_loss(lambda name, _: stop() if name == "supervisor" else None)
        if name.startswith("trainer"):
            train(agent, folder)
        else:
            stopped.wait()  # a server needs no code


def stop() -> None:
    """End a worker. The supervisor calls this."""
    stopped.set()


def train(agent: telegrad.Agent, folder: str) -> None:
    telegrad.WorkerGroup(agent).role("ps").wait_for(1, timeout=60)
    torch.manual_seed(0)
    teacher = nn.Linear(20, 10)
    model = nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 10))
    torch.manual_seed(1 + int(agent.name[-1]))  # its own data
    optimizer = telegrad.ps.Optimizer(
        model,
        servers="ps0",
        optimizer=torch.optim.Adam,
        trainers=2,
        checkpoint=telegrad.ps.Checkpoint(folder, every=1, wait=True),
        agent=agent,
        lr=1e-3,
    )
    while not stopped.is_set():
        x = torch.randn(BATCH, 20)
        loss = F.cross_entropy(model(x), teacher(x).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        agent.call("supervisor", report, agent.name, optimizer.version, loss.item())
    optimizer.close()


def report(trainer: str, version: int, loss: float) -> None:
    """Take the report of a trainer. Trainers call this on the supervisor."""
    reports.put(Report(trainer, version, loss))


# The supervisor


class Supervisor:
    """Start workers, start each again that a signal has ended, and note what happens."""

    def __init__(self, agent: telegrad.Agent, *arguments: str) -> None:
        self.events: list[tuple[float, str, str]] = []  # seconds, worker, what happened
        self.curve: list[tuple[float, Report]] = []
        self._arguments = arguments
        self._began = time.perf_counter()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._threads: dict[str, threading.Thread] = {}
        agent.on_loss(lambda name, _: self._note(name, "lost"))
        agent.on_join(lambda name, _: self._note(name, "joined"))

    def run(self, *names: str) -> None:
        for name in names:
            thread = threading.Thread(target=self._keep_running, args=(name,), daemon=True)
            self._threads[name] = thread
            thread.start()

    def _keep_running(self, name: str) -> None:
        status = -1
        while status < 0:  # a signal has ended it
            command = [sys.executable, __file__, "--worker", name, *self._arguments]
            self._processes[name] = subprocess.Popen(command)
            status = self._processes[name].wait()

    def kill(self, name: str) -> None:
        self._note(name, "killed")
        self._processes[name].kill()  # SIGKILL

    def wait(self, *names: str) -> None:
        for name in names:
            self._threads[name].join()

    def follow(self, trainer: str, steps: int) -> None:
        """Read reports until a trainer has made so many steps from now on."""
        while steps:
            report = reports.get(timeout=60)
            self.curve.append((time.perf_counter() - self._began, report))
            steps -= report.trainer == trainer

    def _note(self, name: str, what: str) -> None:
        self.events.append((time.perf_counter() - self._began, name, what))
        print(f"{self.events[-1][0]:6.2f} s  {name} {what}", flush=True)


def supervise(folder: str) -> Supervisor:
    """Run the training with one kill of the server and one of a trainer."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with telegrad.Agent("supervisor", store=store) as agent:
        supervisor = Supervisor(agent, str(store.port), folder)
        group = telegrad.WorkerGroup(agent)
        servers, trainers = group.role("ps"), group.role("trainer")
        supervisor.run("ps0", "trainer0", "trainer1")
        group.wait_for(3, timeout=60)
        supervisor.follow("trainer0", STEPS)
        supervisor.kill("ps0")
        supervisor.follow("trainer0", STEPS)  # the trainers wait for the server
        supervisor.kill("trainer1")
        supervisor.follow("trainer1", STEPS)  # trainer0 goes on meanwhile
        trainers.call_all(stop)
        supervisor.wait("trainer0", "trainer1")
        servers.call_all(stop)
        supervisor.wait("ps0")
    return supervisor


def plot(supervisor: Supervisor, path: Path) -> None:
    """Draw the loss over time. Lines mark the kills, and areas the time until a worker is back."""
    if Figure is None:
        sys.exit("--plot needs matplotlib: pip install 'telegrad[examples]'")
    axes = (figure := Figure(figsize=(8, 4.5), layout="constrained")).subplots()
    began = supervisor.curve[0][0]
    for trainer, color in (("trainer1", "tab:orange"), ("trainer0", "tab:blue")):
        points = [
            (at - began, report.loss)
            for at, report in supervisor.curve
            if report.trainer == trainer
        ]
        axes.plot(*zip(*points, strict=True), ".", color=color, markersize=3, label=trainer)
    for (at, name, what), color in zip(
        [event for event in supervisor.events if event[2] == "killed"],
        ("tab:red", "tab:purple"),
        strict=True,
    ):
        back = min(
            [
                time
                for time, other, event in supervisor.events
                if (other, event) == (name, "joined") and time > at
            ]
        )
        axes.axvline(at - began, color=color, label=f"{name} {what}")
        axes.axvspan(
            at - began,
            back - began,
            color=color,
            alpha=0.15,
            linewidth=0,
            label=f"until {name} is back",
        )
    axes.set(xlabel="seconds since the first step", ylabel="loss", yscale="log")
    axes.set_title("Training goes on: a server and a trainer killed and restarted")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, help="write a picture of the loss to this file")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, port, folder = options.worker
        run_worker(name, int(port), folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        supervisor = supervise(folder)
    first, last = supervisor.curve[0][1], supervisor.curve[-1][1]
    print(f"{last.version} steps; the loss fell from {first.loss:.3f} to {last.loss:.3f}")
    if options.plot:
        plot(supervisor, options.plot)


if __name__ == "__main__":
    main()

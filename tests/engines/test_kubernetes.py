"""The containers of the manifest for Kubernetes as processes of this machine; index 0 is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from telegrad.launcher.kubernetes import manifest
from tests.engines.conftest import LIMIT, Start
from tests.engines.waiting import wait_for


def free_port() -> int:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(store.port)


def container(documents: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = documents[kind]["spec"]["template"]["spec"]["containers"][0]
    return found


@pytest.fixture
def start_pod(start: Start, worker: tuple[str, str], tmp_path: Path) -> Callable[..., Any]:
    """Starts what a pod runs: that of the store, or of an index and with a number of failures."""
    port = free_port()
    made = manifest(
        (worker[1], "restart", str(tmp_path), "0"),
        {"ps": 1, "trainer": 2},
        name="job",
        image="example/train",
        secret="7e57" * 16,
        restarts=1,
    )
    documents = {each["kind"]: each for each in yaml.safe_load_all(made)}

    def pod(index: int | None, failures: int = 0) -> Any:
        spec = container(documents, "Deployment" if index is None else "Job")
        words = [
            sys.executable,
            *(word.replace("29500", str(port)) for word in spec["command"][1:]),
        ]
        if index is None:
            return start(*words)
        variables = {each["name"]: each["value"] for each in spec["env"] if "value" in each}
        variables |= {
            "JOB_COMPLETION_INDEX": str(index),
            "TELEGRAD_SECRET": documents["Secret"]["stringData"]["secret"],
            "TELEGRAD_ADVERTISE": "127.0.0.1",
            "TELEGRAD_LISTEN": "127.0.0.1",
            "TELEGRAD_RESTART": str(failures),
            "TELEGRAD_STORE": f"127.0.0.1:{port}",
        }
        return start(*words, **variables)

    return pod


def test_index_0_is_killed_and_replaced(start_pod: Callable[..., Any], tmp_path: Path) -> None:
    store = start_pod(None)
    pods = [start_pod(index) for index in range(3)]
    victim = tmp_path / "victim"
    wait_for(lambda: victim.exists() and bool(victim.read_text()), "call")
    os.kill(int(victim.read_text()), signal.SIGKILL)
    pods[0].wait(LIMIT)
    assert pods[0].returncode == -signal.SIGKILL
    pods[0] = start_pod(0, failures=1)
    outputs = [pod.communicate(timeout=LIMIT)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0, 0], outputs
    assert "life ps0 1" in outputs[0]
    assert "called Kubernetes 2" in outputs[0]
    assert "lost ps0" in outputs[2]
    store.send_signal(signal.SIGTERM)
    assert store.wait(LIMIT) == 0

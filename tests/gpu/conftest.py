"""Fixtures of the GPU tests: processes that share one GPU, with CUDA IPC and through the host.

Those of the third kind use TCP, as workers on different hosts do.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.group import join
from tests.process.fleet import Fleet


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    resource_tracker.ensure_running()
    forkserver.ensure_running()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = not torch.cuda.is_available()
    for item in items:
        if "tests/gpu" in str(item.path).replace("\\", "/"):
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


WAYS: dict[str, dict[str, Any]] = {
    "device memory": {},
    "host memory": {"cuda_ipc": False},
    "TCP": {"cuda_ipc": False, "transports": ("tcp",), "resume_timeout": 10.0},
}


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """Two processes that send CUDA tensors to each other, in each of the ways."""
    with Fleet(2, join, str(tmp_path / "store"), {"config": WAYS[request.param]}) as fleet:
        yield fleet

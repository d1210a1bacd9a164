"""Fixtures of the GPU tests: processes that share one GPU, with CUDA IPC and through the host."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

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


@pytest.fixture(params=[True, False], ids=["device memory", "host memory"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """Two processes that send CUDA tensors to each other, with or without CUDA IPC."""
    with Fleet(2, join, str(tmp_path / "store"), {"config": {"cuda_ipc": request.param}}) as fleet:
        yield fleet

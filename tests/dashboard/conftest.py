"""Fixtures of the tests of the dashboard: a group in this process, its dashboard, a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from telegrad import dashboard
from telegrad.dashboard import Dashboard
from telegrad.testing import LocalCluster
from tests.dashboard.browser import Browser, executable
from tests.local.conftest import gate, in_background

__all__ = ["gate", "in_background"]

Serve = Callable[..., Dashboard]


@pytest.fixture
def transport() -> str:
    return "unix"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves the dashboard of a cluster on a free port."""
    with ExitStack() as stack:

        def start(cluster: LocalCluster, **options: Any) -> Dashboard:
            address = cluster.agents[0]._runtime.endpoint.addresses[0]
            options = {"port": 0, "config": cluster.config, **options}
            return stack.enter_context(dashboard.serve(address=address, **options))

        yield start


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if executable() is None:
        pytest.skip("Chromium is not installed")
    with Browser() as browser:
        yield browser

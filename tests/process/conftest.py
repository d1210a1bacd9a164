from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import forkserver, resource_tracker

import pytest

from benchmarks.namespaces import Network, hindrance
from tests.process import fleet


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """The server that workers are forked from lives as long as the tests, so no single test leaks
    it.
    """
    assert fleet is not None  # importing it says what the server is to import
    resource_tracker.ensure_running()
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip a test where there can be no network namespaces."""
    if reason := hindrance():
        pytest.skip(reason)


@pytest.fixture
def network(namespaces: None) -> Iterator[Callable[[int], Network]]:
    """Makes networks: `network(3)` has three hosts. They end with the test."""
    with ExitStack() as stack:
        yield lambda size: stack.enter_context(Network(size))

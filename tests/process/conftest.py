from __future__ import annotations

from multiprocessing import forkserver, resource_tracker

import pytest

from tests.process import fleet


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """The server that workers are forked from lives as long as the tests, so no single test leaks
    it.
    """
    assert fleet is not None  # importing it says what the server is to import
    resource_tracker.ensure_running()
    forkserver.ensure_running()

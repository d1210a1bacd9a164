"""Fixtures of the tests of autograd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from telegrad import Agent
from telegrad.testing import LocalCluster
from tests.autograd import functions
from tests.conftest import Clusters
from tests.local.conftest import gate, in_background, log

__all__ = ["fresh_weights", "gate", "in_background", "log", "w0", "workers"]


@pytest.fixture(autouse=True)
def fresh_weights() -> Iterator[None]:
    """Give every worker its own weight, the same in each test."""
    functions.reset()
    yield
    functions.reset()


@pytest.fixture
def workers(cluster: Clusters) -> LocalCluster:
    return cluster(4)


@pytest.fixture
def w0(workers: LocalCluster) -> Agent:
    return workers["w0"]

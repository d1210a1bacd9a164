"""Fixtures of the local ring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest

from telegrad import Agent
from telegrad.testing import LocalCluster
from tests.conftest import Clusters
from tests.local.attacks import MODES, Scene
from tests.local.gates import PATIENCE, Gate, Log

Background = Callable[..., Future[Any]]


@pytest.fixture
def pair(cluster: Clusters) -> LocalCluster:
    return cluster(2)


@pytest.fixture
def w0(pair: LocalCluster) -> Agent:
    return pair["w0"]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate that opens at the end of the test at the latest.

    Name it after the cluster, so that it opens first.
    """
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def in_background() -> Iterator[Background]:
    """Runs `function(*args)` on a thread of its own; the future it returns tells how that ended."""
    threads = []

    def start(function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name=f"background {function.__name__}", daemon=True)
        threads.append(thread)
        thread.start()
        return future

    yield start
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), (
        "something in the background does not end"
    )


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """How TCP is protected: by encryption, or by authentication codes alone."""
    return str(request.param)


@pytest.fixture
def scene(mode: str) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(mode, stack)

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from telegrad.testing import LocalCluster
from tests.ps.training import Trainers


@pytest.fixture
def transport() -> str:
    return "unix"


@pytest.fixture
def trainers_of() -> Iterator[Callable[[LocalCluster], Trainers]]:
    made: list[Trainers] = []

    def make(cluster: LocalCluster) -> Trainers:
        made.append(Trainers(cluster))
        return made[-1]

    yield make
    while made:
        made.pop().join()

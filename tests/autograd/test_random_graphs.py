"""Random programs have the same gradients on several workers as in one process.

`TELEGRAD_TEST_RANDOM_GRAPHS=5000` runs that many per transport, starting at
`TELEGRAD_TEST_RANDOM_SEED`.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from telegrad.testing import LocalCluster
from telegrad.wire import codec
from tests.autograd.programs import random_program
from tests.autograd.running import assert_same, run_alone, run_distributed
from tests.conftest import Clusters

_COUNT = int(os.environ.get("TELEGRAD_TEST_RANDOM_GRAPHS", "100"))
_FIRST = int(os.environ.get("TELEGRAD_TEST_RANDOM_SEED", "0"))


def check(random: Random, cluster: LocalCluster) -> None:
    program = random_program(random)
    assert_same(run_distributed(program, cluster), run_alone(program))


@pytest.mark.timeout(120 + _COUNT)
@pytest.mark.parametrize("shares_nodes", [False, True], ids=["", "shared"])
def test_gradients_are_those_of_one_process(
    cluster: Clusters, shares_nodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shares_nodes:  # also few tensors of a message are stacked, and share a node when they arrive
        monkeypatch.setattr(codec, "holds_many", lambda *_: True)
    workers = cluster(5)
    for seed in range(_FIRST, _FIRST + _COUNT):
        try:
            check(Random(seed), workers)
        except Exception as error:
            raise AssertionError(f"the program of seed {seed}") from error


def test_gradients_are_those_of_one_process_for_programs_that_shrink() -> None:
    with LocalCluster(5, transports=("memory",)) as workers:

        @settings(
            max_examples=100,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        )
        @given(st.randoms(use_true_random=False))
        def run(random: Random) -> None:
            check(random, workers)

        run()

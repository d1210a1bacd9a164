"""OpenMP threads of torch do not keep the cores busy that another worker needs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from telegrad import openmp

PROGRAM = "import os, telegrad; print(os.environ['GOMP_SPINCOUNT'])"


@pytest.mark.process
def test_a_process_that_imports_telegrad_first_has_calm_threads() -> None:
    set_before = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in set_before}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    spins = done.stdout.strip()
    assert spins == openmp._SPINS


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_a_user_has_set_stays(own: dict[str, str]) -> None:
    environment = dict(own)
    openmp.calm(environment)
    assert environment == own

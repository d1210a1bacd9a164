"""Importing the package changes nothing outside of it; the command line sets up OpenMP for
torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from telegrad import openmp

SIDE_EFFECTS = """
import os, threading
import torch
from torch.autograd import profiler_legacy
from torch.nn.modules import module

def state():
    hooks = {name: len(value) for name, value in vars(module).items() if name.startswith("_global")
             and hasattr(value, "__len__")}
    patched = [dict(vars(owner)) for owner in (torch.Tensor, torch.nn.Module, torch.futures,
               profiler_legacy.profile, torch.nn.parallel.DistributedDataParallel)]
    return dict(os.environ), hooks, patched, threading.active_count()

before = state()
import telegrad
from telegrad import *
import telegrad.testing
assert state() == before
"""
NO_TORCH = "import sys, telegrad.cli; assert 'torch' not in sys.modules, 'torch was imported'"
SPINS = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"


def _python(*arguments: str) -> str:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.process
@pytest.mark.parametrize("program", [SIDE_EFFECTS, NO_TORCH])
def test_importing_the_package_has_no_side_effects(program: str) -> None:
    _python("-c", program)


@pytest.mark.process
def test_run_lets_openmp_threads_sleep_sooner(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPINS)
    assert _python("-m", "telegrad", "run", str(script)) == openmp._SPIN_COUNT


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_settings_of_the_user_stay(own: dict[str, str]) -> None:
    environment = dict(own)
    openmp.limit_spinning(environment)
    assert environment == own

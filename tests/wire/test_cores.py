"""The number of cores that a process may use, from the files of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from telegrad.cores import CORES, count_cores

AVAILABLE = len(os.sched_getaffinity(0))


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    (folder := tmp_path / "cgroup").mkdir()
    return folder


def count(cgroups: Path, own: str = "0::/\n") -> int:
    """Return the number of cores with these files."""
    (file := cgroups.parent / "own").write_text(own)
    return count_cores(cgroups, file)


def limit(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(text)


def test_without_a_quota_all_cores_count(cgroups: Path) -> None:
    assert count(cgroups) == AVAILABLE
    limit(cgroups, "max 100000\n")
    assert count(cgroups) == AVAILABLE


def test_without_control_groups_all_cores_count(tmp_path: Path) -> None:
    assert count_cores(tmp_path / "none", tmp_path / "neither") == AVAILABLE


@pytest.mark.parametrize("text", ["100000 100000\n", "150000 100000\n", "20000 100000\n"])
def test_a_container_with_less_than_two_cores_has_one(cgroups: Path, text: str) -> None:
    limit(cgroups, text)
    assert count(cgroups) == 1


def test_a_quota_above_the_number_of_cores_changes_nothing(cgroups: Path) -> None:
    limit(cgroups, f"{(AVAILABLE + 1) * 100000} 100000\n")
    assert count(cgroups) == AVAILABLE


def test_the_quota_of_a_parent_holds_too(cgroups: Path) -> None:
    limit(cgroups / "pod", "100000 100000\n")
    limit(cgroups / "pod" / "container", "max 100000\n")
    assert count(cgroups, "0::/pod/container\n") == 1
    assert count(cgroups, "0::/other/container\n") == AVAILABLE


def test_quotas_of_version_1(cgroups: Path) -> None:
    (folder := cgroups / "cpu" / "pod").mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("100000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert count(cgroups, "2:memory:/pod\n1:cpu,cpuacct:/pod\n0::/\n") == 1
    assert count(cgroups, "2:memory:/pod\n1:cpu,cpuacct:/\n0::/\n") == AVAILABLE
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert count(cgroups, "1:cpu,cpuacct:/pod\n") == AVAILABLE


def test_this_process_has_a_core() -> None:
    assert 1 <= CORES <= AVAILABLE

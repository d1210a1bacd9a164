"""The number of cores that this process may use.

A container may run on all cores of its host and yet have a quota of processor time, such as two
seconds per second (`limits: cpu: 2` in Kubernetes). Threads that occupy more cores than that are
stopped for the rest of each period.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["CORES"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def _quota_of(folder: Path) -> float:
    """Return the cores that the quota of a control group stands for; infinity: no quota."""
    try:
        if (limit := folder / "cpu.max").exists():  # version 2
            quota, period = limit.read_text().split()
        else:  # version 1
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else float("inf")
    except (OSError, ValueError):  # no such file, or the quota is "max"
        return float("inf")


def _folders(cgroups: Path, own: Path) -> list[Path]:
    """Return the folders of the control groups that limit this process, up to the root.

    A line of `/proc/self/cgroup` is `0::/a/b` or, in version 1, `4:cpu,cpuacct:/a/b`.
    """
    folders = [cgroups, cgroups / "cpu"]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = cgroups / "cpu" if controllers else cgroups
        for part in Path(path).parts[1:]:
            folders.append(group := group / part)
    return folders


def count_cores(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Return how many cores this process may use at the same time, at least one."""
    quota = min(_quota_of(folder) for folder in _folders(cgroups, own))
    return max(int(min(len(os.sched_getaffinity(0)), quota)), 1)


CORES = count_cores()

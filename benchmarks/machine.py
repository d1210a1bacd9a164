"""Describe the machine of a run: enough to compare two results, but no name of the machine."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def heading(benchmark: str, **options: Any) -> dict[str, Any]:
    """Return the first line of a result file."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe(),
        # if high, other programs ran and the figures are not reliable
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        **options,
    }


def describe() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

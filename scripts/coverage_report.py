"""Combine what all processes of a test run have measured, and print how much of the package was
run: `make test`, `make test-gpu`.

The files with the lowest figures are listed, and build/coverage/html shows every line. The modules
that only a CUDA device runs (`tool.coverage.report.omit`) have a line of their own; with --gpu,
only they are reported.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from coverage import Coverage
from coverage.exceptions import CoverageException

ROOT = Path(__file__).parents[1]
LISTED = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "--minimum", type=float, default=0.0, help="percentage of lines and of branches; 1 if below"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="report the modules that only a CUDA device runs"
    )
    options = parser.parse_args()
    coverage = Coverage(config_file=str(ROOT / "pyproject.toml"), messages=False)
    try:
        coverage.combine()
    except CoverageException as error:
        print(f"coverage: {error}", file=sys.stderr)
        return 1
    coverage.save()
    gpu_only: Any = coverage.get_option("report:omit")
    of_gpu: dict[str, Any] = {"include": gpu_only, "omit": []}
    selected = of_gpu if options.gpu else {}
    totals_of_gpu = _measured(coverage, **of_gpu)["totals"]
    report = _measured(coverage, **selected)
    coverage.html_report(directory=str(ROOT / "build/coverage/html"), **selected)

    files = sorted(report["files"].items(), key=lambda file: file[1]["summary"]["percent_covered"])
    for path, measured in files[:LISTED]:
        _print(measured["summary"], path)
    if not options.gpu:
        _print(totals_of_gpu, "in modules that only a CUDA device runs")
    _print(report["totals"], "in total; every line: build/coverage/html/index.html")
    if min(_percentages(report["totals"])) < options.minimum:
        print(f"coverage: less than {options.minimum:g} %", file=sys.stderr)
        return 1
    return 0


def _measured(coverage: Coverage, **selected: Any) -> dict[str, Any]:
    path = ROOT / "build/coverage/report.json"
    coverage.json_report(outfile=str(path), **selected)
    measured: dict[str, Any] = json.loads(path.read_text())
    return measured


def _print(summary: dict[str, Any], subject: str) -> None:
    lines, branches = _percentages(summary)
    print(f"{lines:6.1f} % of lines {branches:6.1f} % of branches  {subject}")


def _percentages(summary: dict[str, Any]) -> tuple[float, float]:
    """Return the percentage of lines and that of branches."""
    lines, branches = summary["num_statements"], summary["num_branches"]
    return (
        100 * summary["covered_lines"] / lines if lines else 100.0,
        100 * summary["covered_branches"] / branches if branches else 100.0,
    )


if __name__ == "__main__":
    sys.exit(main())

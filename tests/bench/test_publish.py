"""The published results are those of the committed files."""

from __future__ import annotations

import pytest

from benchmarks import publish, report, results
from benchmarks.suite import Case
from tests.bench.lines import LATENCY, heading, lines


def test_the_readme_and_the_page_show_the_committed_results() -> None:
    readme, page = publish.README.read_text(), publish.PAGE.read_text()
    assert publish.with_figures(readme, publish.short_figures(publish.FOLDER)) == readme
    assert publish.with_figures(page, publish.figures(publish.FOLDER)) == page


def test_the_report_shows_the_committed_results() -> None:
    text = (publish.FOLDER / "index.html").read_text()
    for path in publish.files():
        _, found = results.read(path)
        for group in {line["group"] for line in found}:
            assert report.table([line for line in found if line["group"] == group]) in text


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no marks"):
        publish.with_figures("nothing here", "figures")


def test_every_loss_is_named() -> None:
    found = lines((LATENCY, "telegrad", [2.0] * 5), (LATENCY, "grpc", [1.0] * 5))
    assert publish.behind(found).endswith("|---|\n| a call | 2.00 us | gRPC 1.00 us |\n")
    assert "behind torch RPC in 0 of 0" in publish.elsewhere(heading(), found)


def test_losses_along_a_curve_are_one_item() -> None:
    few, many = (
        Case(f"startup/{at}", f"{at} workers", "s", "", axis="workers", at=at) for at in (2, 32)
    )
    found = lines(
        (few, "telegrad", [1.0] * 5),
        (few, "grpc", [0.5] * 5),
        (many, "telegrad", [9.0] * 5),
        (many, "grpc", [8.0] * 5),
        (many, "rpyc", [7.0] * 5),
    )
    assert publish.behind(found).splitlines()[5:] == [
        "| until every worker is up, 2 to 32 workers | 1.00 to 9.00 s "
        "| gRPC 0.50 to 8.00 s, RPyC 7.00 s |"
    ]

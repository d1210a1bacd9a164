"""The published results are those of the committed files."""

from __future__ import annotations

import re

import pytest

from benchmarks import publish, publish_charts, publish_gpu, report, results
from benchmarks.suite import Case
from tests.bench.lines import LATENCY, heading, lines


def test_the_readme_and_the_pages_show_the_committed_results() -> None:
    for page, block in publish.blocks(publish.FOLDER).items():
        assert publish.with_figures(page.read_text(), block) == page.read_text()


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
    assert publish.behind(heading(), found).endswith(
        "|---:|\n| a call | 2.00 us | gRPC | 1.00 us |\n"
    )


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
    assert publish.behind(heading(), found).splitlines()[3:] == [
        "| time until every worker is up, 2 to 32 workers "
        "| 1.00 to 9.00 s | gRPC | 500 ms to 8.00 s |",
        "| 32 workers | 9.00 s | RPyC | 7.00 s |",
    ]


def test_every_chart_exists_and_shows_the_committed_results() -> None:
    charts = publish_charts.charts(publish.FOLDER)
    drawn = {path.name: path.read_text() for path in (publish.FOLDER / "charts").glob("*.svg")}
    assert drawn.keys() == charts.keys()
    for name, panel in charts.items():
        if not panel.axis:
            assert all(f">{results.number(line['median'])}<" in drawn[name] for line in panel.lines)


def test_the_pages_show_charts_that_exist() -> None:
    for page in [publish.README, *(publish.PAGE.parents[1] / "docs").rglob("*.md")]:
        for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / image).is_file(), f"{page}: {image}"


def test_the_gpu_page_says_which_way_was_measured() -> None:
    update = Case("gpu-ps/5-trainers", "a round", "ms", "gpu")
    program = Case("tutorial/program", "the program", "s", "tutorial")
    found = lines(
        (update, "telegrad.ps", [4.0]),
        (update, "torch", [400.0]),
        (update, "telegrad", [100.0]),
        (update, "torch cuda", [2000.0]),
        (program, "telegrad", [8.0]),
        (program, "torch", [12.0]),
    )
    block = publish_gpu.figures(heading(), found)
    assert "| 5 trainers: the tutorial's way, through the CPU | 100 ms | 400 ms | 4.00x |" in block
    assert "| 5 trainers: the tutorial's code with CUDA tensors |  | 2,000 ms |  |" in block
    assert "unmodified: six rounds, with its start | 8.00 s | 12.0 s | 1.50x |" in block

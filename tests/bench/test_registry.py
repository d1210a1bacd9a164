"""Registered cases and frameworks can run, and all parts have results in the common form."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks import hosts, limits, measure, published, results
from benchmarks.namespaces import Host
from benchmarks.parts import PARTS
from benchmarks.peers import PEERS
from benchmarks.suite import CASES


def test_cases_have_names_of_their_own_and_loops() -> None:
    cases = (*CASES, *hosts.CASES, *hosts.limits(Host("nowhere", 1)))
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        loops = limits.LOOPS if case.machine else {**measure.LOOPS, "idle": None}
        assert case.loop in loops, case.name


def test_the_quick_mode_has_every_kind_of_case_but_idleness() -> None:
    """The quick mode includes a case of `startup`."""
    assert {case.group for case in CASES} - {case.group for case in CASES if case.quick} == {"idle"}


@pytest.mark.parametrize(
    "spec", [*PEERS.values(), *hosts.SPECS.values()], ids=lambda spec: spec.name
)
def test_peers_have_adapters_and_say_what_they_are(spec: object) -> None:
    module = spec.adapter.partition(":")[0]  # type: ignore[attr-defined]
    assert importlib.util.find_spec(f"benchmarks.peers.{module}") is not None
    assert spec.about  # type: ignore[attr-defined]


def test_an_environment_is_found_by_its_variable_and_by_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "ray" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setenv("TELEGRAD_BENCH_PEERS", str(tmp_path))
    monkeypatch.delenv("TELEGRAD_BENCH_PYTHON_RAY", raising=False)
    assert PEERS["ray"].python == str(python)
    monkeypatch.setenv("TELEGRAD_BENCH_PYTHON_RAY", "/elsewhere/python")
    assert PEERS["ray"].python == "/elsewhere/python"


def test_parts_that_are_there_can_run() -> None:
    there = [part for part in PARTS if not part.hindrance()]
    assert {"core", "startup", "ps"} <= {part.name for part in there}


def test_published_parts_are_parts() -> None:
    assert {part.module for part in published.PARTS} <= {part.name for part in PARTS}
    assert all(isinstance(part.hindrance(), str) for part in published.PARTS)


def test_lines_with_entries_become_results() -> None:
    run = {"benchmark": "ps", "model": "resnet18", "trainers": 4, "servers": 1, "rounds": 3}
    line = results.standard(
        run, {"kind": "result", "entry": "telegrad.ps", "rounds": [1.0, 3.0, 2.0]}
    )
    assert (line["case"], line["peer"], line["median"]) == (
        "ps/resnet18/4-trainers",
        "telegrad.ps",
        2.0,
    )
    assert (line["axis"], line["at"], line["unit"]) == ("trainers", 4, "rounds/s")
    assert results.standard(run, line) == line

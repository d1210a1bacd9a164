"""The page shows every slower case, failure and missing framework, and needs no other file."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks import parts, plots, report, results, verdicts
from tests.bench.lines import LATENCY, RATE, heading, lines

WON = (LATENCY, "telegrad", [1.0] * 5), (LATENCY, "torch", [4.0] * 5)
LOST = (RATE, "telegrad", [10.0] * 5), (RATE, "ray", [40.0] * 5)


def test_verdicts() -> None:
    found = {verdict.theirs["peer"]: verdict for verdict in verdicts.verdicts(lines(*WON, *LOST))}
    assert {peer: (verdict.word, verdict.factor) for peer, verdict in found.items()} == {
        "torch": ("ahead", 4.0),
        "ray": ("behind", 0.25),
    }


def test_an_odd_round_hides_no_loss() -> None:
    ours, theirs = [10.0, 10.1, 10.2, 10.3, 99.0], [5.0, 5.1, 5.2, 5.3, 50.0]
    (found,) = verdicts.verdicts(lines((LATENCY, "telegrad", ours), (LATENCY, "torch", theirs)))
    assert found.word == "behind"


def test_rounds_that_overlap_are_even() -> None:
    ours, theirs = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0, 6.0]
    (found,) = verdicts.verdicts(lines((LATENCY, "telegrad", ours), (LATENCY, "torch", theirs)))
    assert found.word == "even"


def test_limits_are_not_competitors() -> None:
    assert (
        verdicts.verdicts(lines((LATENCY, "telegrad", [2.0]), (LATENCY, "one process", [1.0])))
        == []
    )


def test_losses_have_a_table_and_look_like_wins() -> None:
    page = report.page([(heading(), lines(*WON, *LOST))])
    assert '<span class="badge behind">0.25x</span>' in page
    assert '<span class="badge ahead">4.00x</span>' in page
    counts = '<span class="badge behind">behind 1</span>'
    assert page.index(counts) < page.index("<table>") < page.index("Where Telegrad is behind")
    assert "<td>10.0 calls/s<td>ray<td>40.0 calls/s<td>0.25x" in page


def test_failures_and_missing_peers_are_named() -> None:
    run = heading(skipped={"moolib": "not <installed>"})
    page = report.page([(run, lines(*WON, (LATENCY, "ray", []), errors=("it broke & fell",)))])
    assert "not &lt;installed&gt;" in page
    assert "failed" in page
    assert "it broke &amp; fell" in page


def test_it_is_one_file(tmp_path: Path) -> None:
    results.write(tmp_path / "a.jsonl", heading(), lines(*WON, *LOST))
    assert report.main([str(tmp_path / "a.jsonl"), "-o", str(tmp_path)]) == 0
    text = (tmp_path / "index.html").read_text()
    assert "<svg" in text
    assert "src=" not in text


def test_without_matplotlib_there_are_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "matplotlib", None)
    page = report.page([(heading(), lines(*WON))])
    assert "<svg" not in page
    assert "4.00x" in page


def test_a_result_that_does_not_fit_is_a_list() -> None:
    found = lines(*WON)
    wide, narrow = results.table(found, 80), results.table(found, 30)
    assert wide.splitlines()[0].split() == ["unit", "telegrad", "torch"]
    assert narrow == "a call (us)\n  telegrad  1.00 4.00x\n  torch     4.00"


@pytest.mark.parametrize("name", ["file/results.jsonl", "."])
def test_a_bad_out_is_refused_before_the_run(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        parts.main(["--parts", "core", "--out", str(tmp_path / name)])
    assert "cannot write" in capsys.readouterr().err


def test_an_interrupted_run_keeps_its_results(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    out, found = tmp_path / "a.jsonl", lines(*WON)
    try:
        with (
            pytest.raises(SystemExit, match="the results so far are in"),
            results.kept(out, heading(), lambda: found),
        ):
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)
    run, kept = results.read(out)
    assert run["interrupted"]
    assert kept == found


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^cannot read \S*nofile: No such file or directory$"):
        report.main([str(tmp_path / "nofile")])
    (tmp_path / "text").write_text("no JSON")
    with pytest.raises(SystemExit, match="has no results"):
        report.main([str(tmp_path / "text")])

"""Write a self-contained page of result files: `telegrad bench report FILE... -o page.html`."""

from __future__ import annotations

import argparse
import html
from pathlib import Path
from typing import Any

from benchmarks import plots, results, verdicts
from benchmarks.peers import PEERS
from benchmarks.suite import MACHINE
from benchmarks.verdicts import Verdict

Line = dict[str, Any]

# Blue, vermilion and grey differ for colour-blind people too, and each badge has its own sign.
STYLE = """
:root{color-scheme:light dark;--text:#222;--page:#fff;--soft:#6b6b6b;--line:#ddd;--head:#f4f5f7;
--ours:#fdf1e7;--ahead:#00609a;--behind:#b04a00;--even:#6e6e6e}
@media(prefers-color-scheme:dark){:root{--text:#dcdcdc;--page:#17191c;--soft:#9a9a9a;--line:#3a3d42;
--head:#22252a;--ours:#33271c;--ahead:#2f83b8;--behind:#c8641c;--even:#757575}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);max-width:1180px;
margin:2em auto;padding:0 1.2em;overflow-wrap:break-word}
h1{margin-bottom:.2em;line-height:1.2}h2{margin-top:2.2em;border-bottom:2px solid var(--line)}
h3{margin:1.8em 0 .4em}.scroll{overflow-x:auto}.scroll svg{width:100%;min-width:820px;height:auto}
table{border-collapse:collapse;margin:.6em 0 1.4em;font-variant-numeric:tabular-nums}
th,td{padding:.3em .8em;text-align:right;vertical-align:top;border-bottom:1px solid var(--line);
white-space:nowrap}th{background:var(--head)}
td:first-child,th:first-child{text-align:left;white-space:normal;min-width:10em}
td.text{text-align:left;white-space:normal;min-width:15em}
small{color:var(--soft);display:block}.ours{background:var(--ours);font-weight:600}
.limit{color:var(--soft);font-style:italic}.failed{color:var(--behind)}li{margin:.25em 0}
.badge{display:inline-block;border-radius:.7em;padding:0 .6em;color:#fff;font-size:.85em}
.ahead{background:var(--ahead)}.behind{background:var(--behind)}.even{background:var(--even)}
.ahead::before{content:"\\25b2\\00a0"}.behind::before{content:"\\25bc\\00a0"}.even::before{content:"\\2248\\00a0"}
"""
RULES = """
<ul><li>All peers do the same work on the same machine in the same run. Every case runs on one peer
after the other, then the next case follows. The first peer changes from round to round.
<li>The figure is the median over the rounds. Below it are the worst and the best round and, if
single calls are timed, the p99 (the median of the p99 of the rounds).
<li>Peers run in their recommended configuration, which is described below. Before the measurement,
every peer must return the right values.
<li>A peer whose idle processes keep cores busy is stopped while other peers are measured. Only its
own row of idle CPU shows this cost.
<li>A failure is shown as a failure. A table at the end of each machine lists every case where
Telegrad is behind.</ul>
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="telegrad bench report", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="JSON lines written by a run"
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("build/bench/index.html"), help="a page or a folder"
    )
    options = parser.parse_args(argv)
    out = (
        options.out / "index.html"
        if options.out.is_dir() or not options.out.suffix
        else options.out
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page([results.read(path) for path in options.files]))
    print(f"page: {out}")
    return 0


def page(runs: list[tuple[dict[str, Any], list[Line]]]) -> str:
    """Return the whole page, with a chapter for each file."""
    chapters = "".join(chapter(run, lines) for run, lines in runs)
    configurations = "".join(
        f'<tr><td>{html.escape(name)}<td class="text">{html.escape(spec.about)}'
        for name, spec in PEERS.items()
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Telegrad: benchmarks</title>'
        f"<style>{STYLE}</style>"
        "<h1>Telegrad, its peers, and the limits of the machine</h1>"
        "<p>Written by <code>telegrad bench</code>. A badge under a peer's figure shows how many times "
        f"better Telegrad's is: {badge('ahead', 'Telegrad ahead')} {badge('behind', 'Telegrad behind')} "
        f"{badge('even', 'the middle halves of the rounds overlap')}.{chapters}"
        f"<h2>How it was measured</h2>{RULES}<h2>Peers and their configuration</h2>"
        f'<div class="scroll"><table>{configurations}</table></div></html>\n'
    )


def chapter(run: dict[str, Any], lines: list[Line]) -> str:
    machine = run["machine"]
    title = f"{machine['cpu']}, {machine['cores']} cores"
    return "".join(
        [
            f"<h2>{html.escape(title)}</h2>",
            facts(run),
            summary(lines),
            *sections(lines),
            losses(lines),
            limits(lines),
        ]
    )


def facts(run: dict[str, Any]) -> str:
    """Return the date, the versions, and the peers that were not measured."""
    machine = run["machine"]
    heads = [run, *run.get("parts", {}).values()]
    peers = {name: versions for head in heads for name, versions in head.get("peers", {}).items()}
    skipped = {
        f"{name} in the part {head['benchmark']}" if head is not run else name: reason
        for head in heads
        for name, reason in head.get("skipped", {}).items()
    }
    versions = ", ".join(
        f"{name} {found.get(PEERS[name].package, '')}"
        for name, found in peers.items()
        if name in PEERS
    )
    dates = sorted({head["date"][:10] for head in heads})
    loads = sorted(head["load_before"] for head in heads)
    text = (
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}; {machine['memory_gb']:g} GB, "
        f"Linux {machine['kernel']}, Python {run['versions']['python']}, torch "
        f"{run['versions']['torch']}; {versions}. "
        f"{results.counted(run['rounds'], 'rounds')}; load before: {loads[0]:g} to {loads[-1]:g}."
    )
    missing = "".join(
        f"<li>Not measured: {html.escape(name)}: {html.escape(why)}"
        for name, why in skipped.items()
    )
    return f"<p>{html.escape(text)}" + (f"<ul>{missing}</ul>" if missing else "")


def summary(lines: list[Line]) -> str:
    """Count the comparisons by verdict."""
    found = verdicts.verdicts(lines)
    words = [verdict.word for verdict in found]
    counts = " ".join(
        badge(word, f"{word} {words.count(word)}") for word in ("ahead", "even", "behind")
    )
    return f"<p>Telegrad against each peer in {len(found)} comparisons: {counts}"


def losses(lines: list[Line]) -> str:
    """Return a table of all cases where Telegrad is behind, the largest loss first."""
    lost = [verdict for verdict in verdicts.verdicts(lines) if verdict.word == "behind"]
    rows = "".join(
        f"<tr><td>{html.escape(v.ours['title'])}<td>{quantity(v.ours)}"
        f"<td>{html.escape(v.theirs['peer'])}<td>{quantity(v.theirs)}<td>{v}"
        for v in sorted(lost, key=lambda verdict: verdict.factor)
    )
    head = "<tr><th><th>Telegrad<th>peer<th>its figure<th>ratio"
    title = "<h3>Where Telegrad is behind</h3>"
    return f'{title}<div class="scroll"><table>{head}{rows}</table></div>' if lost else ""


def sections(lines: list[Line]) -> list[str]:
    """Return the plots and the table of each group."""
    drawn = plots.panels(lines)
    found = []
    for group in dict.fromkeys(line["group"] for line in lines if line["peer"] != MACHINE):
        own = [line for line in lines if line["group"] == group]
        images = [plots.svg(panel) for panel in drawn if panel.group == group]
        pictures = "".join(f'<div class="scroll">{image}</div>' for image in images if image)
        found.append(
            f"<h3>{html.escape(plots.GROUPS.get(group, group))}</h3>{pictures}{table(own)}"
        )
    return found


def table(lines: list[Line]) -> str:
    """Return a table with a row for each case and a column for each peer."""
    peers = list(dict.fromkeys(line["peer"] for line in lines))
    badges = {(v.theirs["case"], v.theirs["peer"]): v for v in verdicts.verdicts(lines)}
    cells = {(line["case"], line["peer"]): line for line in lines}
    rows = ["<tr><th><th>unit" + "".join(f"<th>{html.escape(peer)}" for peer in peers)]
    for case, line in {line["case"]: line for line in lines}.items():
        shown = "".join(cell(cells.get((case, peer)), badges.get((case, peer))) for peer in peers)
        rows.append(f"<tr><td>{html.escape(line['title'])}<td>{html.escape(line['unit'])}{shown}")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def cell(line: Line | None, verdict: Verdict | None) -> str:
    if line is None:
        return "<td>-"
    errors = "".join(
        f'<small class="failed">{html.escape(error[:80])}</small>' for error in line["errors"]
    )
    if line["median"] is None:
        return f'<td><span class="failed">failed</span>{errors}'
    kind = (
        "ours"
        if verdicts.is_ours(line["peer"])
        else "limit"
        if verdicts.is_limit(line["peer"])
        else ""
    )
    spread = f"<small>{results.number(line['min'])} to {results.number(line['max'])}</small>"
    p99 = f"<small>p99 {results.number(line['p99'])}</small>" if line["p99"] is not None else ""
    mark = badge(verdict.word, str(verdict)) if verdict else ""
    return f'<td class="{kind}">{results.number(line["median"])}{spread}{p99}{mark}{errors}'


def limits(lines: list[Line]) -> str:
    own = [line for line in lines if line["peer"] == MACHINE]
    return f"<h3>limits of the machine</h3>{table(own)}" if own else ""


def quantity(line: Line) -> str:
    return f"{results.number(line['median'])} {html.escape(line['unit'])}"


def badge(word: str, text: str) -> str:
    return f'<span class="badge {word}">{html.escape(text)}</span>'

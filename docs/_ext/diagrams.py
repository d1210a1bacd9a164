"""The directive `mermaid`: draw a sequence diagram as SVG, and a flowchart as rows of boxes.

Browsers need no script, and the colours are those of the page, light or dark. Of Mermaid's language
it knows `sequenceDiagram` with participants, arrows (``->>``, ``-->>``) and notes, and `flowchart`
with chains of nodes, one for each line: ``a[label] --> b -- text --> c``. GitHub shows the same
blocks.

A sequence diagram is drawn twice: for wide pages, and for telephones, where texts may be wider than
their arrow. The style sheet shows one of them.
"""

from __future__ import annotations

import html
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

LINE = 17  # height of a line of text
TELEPHONE = 350  # pixels


@dataclass(frozen=True)
class Measures:
    """The size of a drawing. `least` is the least width of the text of an arrow."""

    gap: float  # between two participants
    margin: float
    letter: float = 6.9  # mean width of a letter
    loop: float = 34  # width of the arrow of a participant to itself
    least: float = 0
    kind: str = "wide"


WIDE = Measures(gap=205, margin=92)


def narrow(participants: int) -> Measures:
    """Return the measures of a drawing that fits on a telephone."""
    gap = TELEPHONE / participants
    return Measures(gap, gap / 2, letter=6.1, loop=18, least=170, kind="narrow")


_PARTICIPANT = re.compile(r"participant (\w+)(?: as (.+))?$")
_ARROW = re.compile(r"(\w+)(-?->>)(\w+): (.+)$")
_NODE = re.compile(r"(\w+)(?:\[(.+)\]|\(\((.+)\)\))?$")
_STEP = re.compile(r"\s+--(?: (.+?) --)?>\s+")
_NOTE = re.compile(r"Note over (\w+)(?:,\s*(\w+))?: (.+)$")


@dataclass
class Drawing:
    """The elements so far, and the height that they take."""

    columns: dict[str, str]
    measures: Measures
    y: float = 0
    parts: list[str] = field(default_factory=list)

    @property
    def width(self) -> float:
        return 2 * self.measures.margin + self.measures.gap * (len(self.columns) - 1)

    def x(self, name: str) -> float:
        return self.measures.margin + self.measures.gap * list(self.columns).index(name)

    def wrap(self, text: str, width: float) -> list[str]:
        """Return the lines of a text. It may be divided after a slash."""
        letters = max(int(width / self.measures.letter), 8)
        if len(text) <= letters:
            return [text]
        return textwrap.wrap(re.sub(r"/(?=\w)", "/ ", text), letters) or [""]

    def text(self, x: float, lines: list[str], anchor: str = "middle") -> None:
        """Write the lines below the current height."""
        for number, line in enumerate(lines, 1):
            y = self.y + number * LINE - 4
            self.parts.append(
                f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(line)}</text>'
            )

    def head(self) -> None:
        box = self.measures.gap - (28 if self.measures.kind == "wide" else 6)
        labels = {name: self.wrap(label, box - 2) for name, label in self.columns.items()}
        height = max(map(len, labels.values())) * LINE + 12
        for name, lines in labels.items():
            self.parts.append(
                f'<g class="head"><rect x="{self.x(name) - box / 2:g}" y="1" width="{box:g}" '
                f'height="{height}" rx="5"/>'
            )
            self.y = (height - len(lines) * LINE) / 2
            self.text(self.x(name), lines)
            self.parts.append("</g>")
        self.y = height + 10

    def arrow(self, source: str, kind: str, target: str, text: str) -> None:
        style = "arrow reply" if kind == "-->>" else "arrow"
        start, end = self.x(source), self.x(target)
        if source == target:
            self._arrow_to_itself(start, style, text)
            return
        lines = self.wrap(text, max(abs(end - start) - 16, self.measures.least))
        half = max(map(len, lines)) * self.measures.letter / 2
        self.text(min(max((start + end) / 2, half), self.width - half), lines)
        self.y += len(lines) * LINE + 6
        direction = 1 if end > start else -1
        self.parts.append(
            f'<path class="{style}" d="M{start:g} {self.y:g}H{end - 7 * direction:g}"/>'
        )
        self._tip(end, direction)
        self.y += 14

    def _arrow_to_itself(self, x: float, style: str, text: str) -> None:
        is_last = x > self.width - self.measures.margin - 1
        side, loop = -1 if is_last else 1, self.measures.loop
        room = self.measures.gap - 22
        if self.measures.least:  # the text may cross the lines of others
            side = -1 if x > self.width / 2 else 1
            room = max(x, self.width - x) - 12
        lines = self.wrap(text, room - loop)
        self.text(x + side * (loop + 8), lines, "end" if side < 0 else "start")
        height = max(len(lines) * LINE, 22)
        there, back = side * loop, -side * (loop - 7)
        self.parts.append(
            f'<path class="{style}" d="M{x:g} {self.y + 3:g}h{there}v{height - 4}h{back}"/>'
        )
        self.y += height - 1
        self._tip(x, -side)
        self.y += 16

    def _tip(self, x: float, direction: int) -> None:
        back = x - 9 * direction
        self.parts.append(
            f'<path class="tip" d="M{x:g} {self.y:g}L{back:g} {self.y - 4:g}V{self.y + 4:g}Z"/>'
        )

    def note(self, first: str, last: str, text: str) -> None:
        left, right = sorted((self.x(first), self.x(last)))
        reach = self.measures.margin * 0.87
        left, right = left - reach, right + reach
        lines = self.wrap(text, right - left - 16)
        self.parts.append(
            f'<g class="note"><rect x="{left:g}" y="{self.y:g}" width="{right - left:g}" '
            f'height="{len(lines) * LINE + 8}" rx="3"/>'
        )
        self.y += 3
        self.text((left + right) / 2, lines)
        self.parts.append("</g>")
        self.y += len(lines) * LINE + 18

    def svg(self, label: str) -> str:
        top = min(40, self.y)
        lives = "".join(
            f'<path class="life" d="M{self.x(name):g} {top}V{self.y:g}"/>' for name in self.columns
        )
        return (
            f'<div class="diagram {self.measures.kind}">'
            f'<svg role="img" aria-label="{html.escape(label)}" '
            f'viewBox="0 0 {self.width:g} {self.y:g}" width="{self.width:g}">'
            f"{lives}{''.join(self.parts)}</svg></div>"
        )


def draw(source: str) -> str:
    """Return the HTML of a diagram. Raise ValueError if a line is not known."""
    first, *lines = [line.strip() for line in source.strip().splitlines()]
    if first.startswith("flowchart"):
        return flowchart([line for line in lines if line])
    if first != "sequenceDiagram":
        raise ValueError(f"only sequence diagrams and flowcharts can be drawn, not {first!r}")
    found = [_PARTICIPANT.match(line) for line in lines]
    columns = {match[1]: match[2] or match[1] for match in found if match}
    return "".join(sequence(lines, columns, size) for size in (WIDE, narrow(len(columns))))


def sequence(lines: list[str], columns: dict[str, str], measures: Measures) -> str:
    """Return the HTML of a sequence diagram of one size."""
    drawing = Drawing(columns, measures)
    drawing.head()
    for line in lines:
        if arrow := _ARROW.match(line):
            drawing.arrow(arrow[1], arrow[2], arrow[3], arrow[4])
        elif note := _NOTE.match(line):
            drawing.note(note[1], note[2] or note[1], note[3])
        elif line and not _PARTICIPANT.match(line):
            raise ValueError(f"this line of a diagram is not known: {line!r}")
    return drawing.svg(f"sequence diagram: {', '.join(drawing.columns.values())}")


def flowchart(lines: list[str]) -> str:
    """Return the HTML of a flowchart: a row for each line, which wraps on a narrow page."""
    labels: dict[str, str] = {}
    rows = []
    for line in lines:
        first, *rest = _STEP.split(line)
        row = [box(first, labels)]
        for text, node in zip(rest[::2], rest[1::2], strict=True):
            row.append(f'<span class="step">{html.escape(text or "")} \N{RIGHTWARDS ARROW}</span>')
            row.append(box(node, labels))
        rows.append(f'<div class="row">{"".join(row)}</div>')
    return f'<div class="flowchart">{"".join(rows)}</div>'


def box(node: str, labels: dict[str, str]) -> str:
    """Return the box of a node, whose label is given where the node is first mentioned."""
    match = _NODE.match(node.strip())
    if match is None:
        raise ValueError(f"this node of a flowchart is not known: {node!r}")
    label = labels.setdefault(match[1], match[2] or match[3] or match[1])
    return f'<span class="node">{html.escape(label)}</span>'


class Mermaid(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            drawn = draw("\n".join(self.content))
        except (ValueError, KeyError) as error:
            raise self.error(str(error)) from None
        return [nodes.raw("", drawn, format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True}

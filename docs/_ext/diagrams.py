"""The directive `mermaid`: draw a sequence diagram as SVG, and a flowchart as rows of boxes.

Browsers need no script, and the colours are those of the page, light or dark. Of Mermaid's language
it knows `sequenceDiagram` with participants, arrows (``->>``, ``-->>``) and notes, and `flowchart`
with chains of nodes, one for each line: ``a[label] --> b -- text --> c``. GitHub shows the same
blocks.
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

LETTER = 6.9  # mean width of a letter
LINE = 17  # height of a line of text
GAP = 205  # between two participants
MARGIN = 92
SELF = 34  # width of the arrow of a participant to itself

_PARTICIPANT = re.compile(r"participant (\w+)(?: as (.+))?$")
_ARROW = re.compile(r"(\w+)(-?->>)(\w+): (.+)$")
_NODE = re.compile(r"(\w+)(?:\[(.+)\]|\(\((.+)\)\))?$")
_STEP = re.compile(r"\s+--(?: (.+?) --)?>\s+")
_NOTE = re.compile(r"Note over (\w+)(?:,\s*(\w+))?: (.+)$")


@dataclass
class Drawing:
    """The elements so far, and the height that they take."""

    columns: dict[str, str]
    y: float = 0
    parts: list[str] = field(default_factory=list)

    @property
    def width(self) -> float:
        return 2 * MARGIN + GAP * (len(self.columns) - 1)

    def x(self, name: str) -> float:
        return MARGIN + GAP * list(self.columns).index(name)

    def text(self, x: float, lines: list[str], anchor: str = "middle") -> None:
        """Write the lines below the current height."""
        for number, line in enumerate(lines, 1):
            y = self.y + number * LINE - 4
            self.parts.append(
                f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(line)}</text>'
            )

    def head(self) -> None:
        labels = {name: wrap(label, GAP - 40) for name, label in self.columns.items()}
        height = max(map(len, labels.values())) * LINE + 12
        for name, lines in labels.items():
            x, width = self.x(name) - (GAP - 28) / 2, GAP - 28
            self.parts.append(
                f'<g class="head"><rect x="{x:g}" y="1" width="{width}" height="{height}" rx="5"/>'
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
        lines = wrap(text, abs(end - start) - 16)
        self.text((start + end) / 2, lines)
        self.y += len(lines) * LINE + 6
        direction = 1 if end > start else -1
        self.parts.append(
            f'<path class="{style}" d="M{start:g} {self.y:g}H{end - 7 * direction:g}"/>'
        )
        self._tip(end, direction)
        self.y += 14

    def _arrow_to_itself(self, x: float, style: str, text: str) -> None:
        is_last = x > self.width - MARGIN - 1
        lines = wrap(text, GAP - SELF - 22)
        side = -1 if is_last else 1
        self.text(x + side * (SELF + 8), lines, "end" if is_last else "start")
        height = max(len(lines) * LINE, 22)
        there, back = side * SELF, -side * (SELF - 7)
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
        left, right = left - 80, right + 80
        lines = wrap(text, right - left - 16)
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
            f'<div class="diagram"><svg role="img" aria-label="{html.escape(label)}" '
            f'viewBox="0 0 {self.width:g} {self.y:g}" width="{self.width:g}">'
            f"{lives}{''.join(self.parts)}</svg></div>"
        )


def wrap(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, max(int(width / LETTER), 8)) or [""]


def draw(source: str) -> str:
    """Return the HTML of a diagram. Raise ValueError if a line is not known."""
    first, *lines = [line.strip() for line in source.strip().splitlines()]
    if first.startswith("flowchart"):
        return flowchart([line for line in lines if line])
    if first != "sequenceDiagram":
        raise ValueError(f"only sequence diagrams and flowcharts can be drawn, not {first!r}")
    found = [_PARTICIPANT.match(line) for line in lines]
    drawing = Drawing({match[1]: match[2] or match[1] for match in found if match})
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

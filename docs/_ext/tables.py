"""Mark tables of prose with three or more columns: on telephones, each of their rows is a card."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LETTERS = 45  # in one cell: a table with such a cell and two more columns is too wide


def mark(_app: Sphinx, doctree: nodes.document) -> None:
    for table in doctree.findall(nodes.table):
        rows = [list(row.findall(nodes.entry)) for row in table.findall(nodes.row)]
        has_numbers = any("text-right" in cell["classes"] for row in rows for cell in row)
        longest = max(len(cell.astext()) for row in rows for cell in row)
        if len(rows[0]) >= 3 and longest >= LETTERS and not has_numbers:
            table["classes"].append("cards")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", mark)
    return {"parallel_read_safe": True}

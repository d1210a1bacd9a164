"""Put SVG images into the page itself: their colours are then those of the page, light or dark."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

_STYLE = re.compile(r"<style>.*?</style>", re.DOTALL)  # for viewers of the file itself


def inline(app: Sphinx, doctree: nodes.document) -> None:
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for image in list(doctree.findall(nodes.image)):
        path = (folder / image["uri"]).resolve()
        if path.suffix != ".svg":
            continue
        app.env.note_dependency(str(path))
        label = html.escape(image.get("alt", ""), quote=True)
        text = _STYLE.sub("", path.read_text())
        text = text.replace("<svg ", f'<svg class="chart" role="img" aria-label="{label}" ', 1)
        image.replace_self(nodes.raw("", text, format="html"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", inline, priority=400)  # before images are collected
    return {"parallel_read_safe": True}

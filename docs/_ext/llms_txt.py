"""Write llms.txt: a list of all pages, in the order of the contents, with their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

SUMMARY = (
    "Telegrad provides remote calls, remote references, distributed autograd, parameter servers "
    "and batched calls for PyTorch. It has the API of torch.distributed.rpc."
)


def write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    lines = [f"# {app.config.project}", "", f"> {SUMMARY}", "", "## Pages", ""]
    lines += [_entry(app.env, page) for page in _in_order(app.env, str(app.config.root_doc))]
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n")


def _in_order(env: BuildEnvironment, page: str) -> list[str]:
    found = [page]
    for child in env.toctree_includes.get(page, []):
        found += [each for each in _in_order(env, child) if each not in found]
    return found


def _entry(env: BuildEnvironment, page: str) -> str:
    paragraphs = env.get_doctree(page).findall(nodes.paragraph)
    first = next((each for each in paragraphs if not isinstance(each.parent, nodes.entry)), None)
    text = "" if first is None else " ".join(first.astext().split())
    suffix = Path(env.doc2path(page)).suffix
    return f"- [{env.titles[page].astext()}](_sources/{page}{suffix}.txt): {text}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True}

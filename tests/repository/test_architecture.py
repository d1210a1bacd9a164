"""ARCHITECTURE.md names every module, and no module that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "telegrad"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()


def modules() -> set[str]:
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return {str(path.with_suffix("")) for path in paths if not path.name.startswith("__")}


def named_in_table() -> Iterator[str]:
    """Return the modules of the table of packages: `package/` in one column, modules in the
    next.
    """
    table = PAGE.partition("## Packages")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| (.*) \|$", table, re.MULTILINE):
        cells = row.split("|")
        packages = re.findall(r"`([\w/]+)`", cells[0])
        names = re.findall(r"`(\w+)`", cells[1]) if len(cells) > 1 else []
        folder = packages[0] if packages and packages[0].endswith("/") else ""
        yield from (folder + name for name in names)
        yield from (name for name in packages if not name.endswith("/"))


def test_the_table_of_packages_is_complete() -> None:
    assert set(named_in_table()) == modules()


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:\w+/)+\w+)(?:/|\.py)?`", PAGE)
    assert paths
    missing = [
        path
        for path in paths
        if not any((folder / path).with_suffix(".py").exists() for folder in (PACKAGE, ROOT))
        and not (PACKAGE / path).is_dir()
        and not (ROOT / path).is_dir()
    ]
    assert missing == []

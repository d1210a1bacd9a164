"""The tests of the installed wheel with their labels from `catalog.txt` (which explains them)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import suites

PUBLIC, INTERNAL, EXCLUDED, UNCATALOGUED = "PUBLIC", "INTERNAL", "EXCLUDED", "UNCATALOGUED"
TABLE = Path(__file__).with_name("catalog.txt")


@dataclass(frozen=True)
class Label:
    name: str  # PUBLIC, INTERNAL, ...
    capability: str  # what the test measures; for EXCLUDED, why it is not run
    starred: bool = False  # passes only when calls really leave the process


@dataclass(frozen=True)
class Test:
    suite: str
    name: str
    gpus: int
    label: Label

    @property
    def id(self) -> str:
        return f"{self.suite}.{self.name}"

    def __str__(self) -> str:
        star, gpus = "*" * self.label.starred, f"  ({self.gpus} GPU)" if self.gpus else ""
        return f"{self.label.name:9}{self.label.capability:36}{self.id}{star}{gpus}"


def load() -> list[Test]:
    """Every test of the wheel. A test that the table does not know is UNCATALOGUED."""
    labels = dict(_rows(TABLE.read_text(encoding="utf-8")))
    return [
        Test(found.suite, found.test, found.gpus, _label(labels, found))
        for found in suites.discover()
    ]


def capabilities() -> list[str]:
    """In the table's order."""
    return list(
        dict.fromkeys(label.capability for _, label in _rows(TABLE.read_text(encoding="utf-8")))
    )


def _label(labels: dict[tuple[str, str], Label], found: suites.Found) -> Label:
    whole_suite = labels.get((found.suite, "ALL"))
    if whole_suite is not None:
        return whole_suite
    if found.gpus > 1:
        return Label(EXCLUDED, "needs 2 or more GPUs")
    return labels.get(
        (found.suite, found.test.removeprefix("test_")), Label(UNCATALOGUED, "not in catalog.txt")
    )


def _rows(table: str) -> Iterator[tuple[tuple[str, str], Label]]:
    """((suite, name without "test_"), label) for every name in the table."""
    kind = capability = suite = ""
    for line in table.splitlines():
        words = line.partition("#")[0].split()
        if words[:1] == ["=="]:
            kind, _, capability = " ".join(words[1:]).partition(": ")
            continue
        if words and not line.startswith(" "):
            suite = words.pop(0)
        for word in words:
            yield (
                (suite, word.removesuffix("*")),
                Label(kind, capability, starred=word.endswith("*")),
            )

"""What happened to each test, in memory and in a file."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from catalog import PUBLIC, Test


@dataclass
class Result:
    id: str
    status: str = "error"  # pass, fail, timeout, crash, error or skip
    seconds: float = 0.0
    message: str = ""  # one line
    ranks: list[int | None] = field(default_factory=list)  # exit codes
    tripped: list[str] = field(default_factory=list)  # of torch's own engine, see guard.py

    @property
    def ok(self) -> bool:
        return self.status in ("pass", "skip")

    @property
    def odd(self) -> bool:
        """Passed, but a rank did not end well: PyTorch's harness looks at rank 0 only."""
        return self.status == "pass" and any(code not in (0, 10) for code in self.ranks)

    def __str__(self) -> str:
        message = "" if self.status == "pass" else self.message.replace("\n", " ")[:150]
        return f"{self.status:8}{self.seconds:7.2f} s  {self.id}  {message}".rstrip()


Row = tuple[Test, Result]


def score(rows: Iterable[Row]) -> int:
    """How many PUBLIC tests passed."""
    return sum(test.label.name == PUBLIC and result.status == "pass" for test, result in rows)


def save(path: Path, rows: list[Row], **about: Any) -> None:
    tests = [
        {"label": test.label.name, "capability": test.label.capability, **asdict(result)}
        for test, result in rows
    ]
    path.write_text(
        json.dumps({**about, "score": score(rows), "tests": tests}, indent=1) + "\n",
        encoding="utf-8",
    )


def failed(path: Path) -> set[str]:
    """The tests that did not pass, from a file that `save` wrote."""
    return {
        test["id"]
        for test in json.loads(path.read_text())["tests"]
        if test["status"] not in ("pass", "skip")
    }

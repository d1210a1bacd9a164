"""What is printed after a run."""

from catalog import INTERNAL, PUBLIC, UNCATALOGUED, Test, capabilities
from results import Result, Row

STATES = ("pass", "fail", "timeout", "crash", "error", "skip")


def text(rows: list[Row], everything: list[Test]) -> str:
    public, internal = (
        [row for row in rows if row[0].label.name == label] for label in (PUBLIC, INTERNAL)
    )
    starred = [row for row in public if row[0].label.starred]
    unknown = [test for test in everything if test.label.name == UNCATALOGUED]
    parts = [
        public and _table(PUBLIC, public),
        internal and _table(INTERNAL, internal),
        _names(
            "passed, though a rank other than 0 ended badly",
            [result for _, result in rows if result.odd],
        ),
        _names(
            "used torch's own RPC or autograd (GUARD)",
            [result for _, result in rows if result.tripped],
        ),
        _names("uncatalogued, not scored", unknown),
        public and f"SCORE  {_share(public)} PUBLIC tests passed",
        starred and f"       {_share(starred)} of those that only calls between processes can pass",
    ]
    return "\n".join(part for part in parts if part)


def _share(rows: list[Row]) -> str:
    ran = [result for _, result in rows if result.status != "skip"]
    skipped = f" ({len(rows) - len(ran)} skipped)" if len(rows) > len(ran) else ""
    return f"{sum(result.status == 'pass' for result in ran)} of {len(ran)}{skipped}"


def _table(label: str, rows: list[Row]) -> str:
    groups: dict[str, list[str]] = {name: [] for name in capabilities()}
    for test, result in rows:
        groups[test.label.capability].append(result.status)
    groups[f"all {label}"] = [result.status for _, result in rows]
    lines = [_line(label, ("tests", *STATES))]
    lines += [
        _line(name, (len(got), *(got.count(s) or "." for s in STATES)))
        for name, got in groups.items()
        if got
    ]
    return "\n".join(lines) + "\n"


def _line(name: str, cells: tuple[object, ...]) -> str:
    return f"{name:36}" + "".join(f"{cell:>8}" for cell in cells)


def _names(title: str, tests: list[Result] | list[Test]) -> str:
    return f"{len(tests)} {title}: {', '.join(test.id for test in tests)}" if tests else ""

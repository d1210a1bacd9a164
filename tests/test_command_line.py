"""The help of each command fits a terminal of 80 columns, and the documented commands exist."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from telegrad.cli import launch
from telegrad.cli.commands import INTERRUPTED, main, make_parser

ROOT = Path(__file__).parents[1]
EXAMPLES = ("cartpole", "mnist", "recsys", "resnet", "rl")
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
]
COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(telegrad [a-z][^#|]*)")
SHELL = re.compile(r"^```(?:console|bash|)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (
        each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction)
    )
    return dict(action.choices)


COMMANDS = subcommands()


def documented() -> list[str]:
    """Return the commands `telegrad ...` of all pages, without comments, pipes and variables."""
    found = []
    for page in [*PAGES, *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        blocks = [*SHELL.findall(text), *re.findall(r"(?:^    \S.*\n)+", text, re.MULTILINE)]
        for block in blocks:
            lines = block.replace("\\\n", " ").splitlines()
            found += [match[1] for line in lines if (match := COMMAND.match(line.strip()))]
    return sorted(dict.fromkeys(found))


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*arguments, "--help"])
    return capsys.readouterr().out


def help_of_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    script = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["", *(name for name in COMMANDS if name != "bench")])
def test_the_help_of_a_command_fits(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    usage, *parts = help_of(command.split(), capsys).split("\n\n")
    assert usage.startswith("usage: telegrad")
    assert [line for part in parts for line in part.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_of_an_example_fits_and_says_how_to_start_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of_example(name, monkeypatch, capsys)
    assert text.startswith(f"usage: telegrad train {name} ")
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_without_a_command_the_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert [name for name in COMMANDS if f"\n    {name}" not in shown] == []


@pytest.mark.parametrize("command", documented())
def test_documented_commands_are_valid(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)[1:]
    options = make_parser().parse_args(words)
    if words[0] == "train" and options.example in EXAMPLES:
        text = help_of_example(options.example, monkeypatch, capsys)
        assert [word for word in options.args if word[:2] == "--" and word not in text] == []


def test_documented_commands_are_found() -> None:
    assert len(documented()) > 40


def test_ctrl_c_shows_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also while torch is imported, which takes seconds."""

    def import_torch(*_: object) -> int:
        raise KeyboardInterrupt

    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(launch, "_ENGINES", {"local": import_torch})
    assert main(["launch", "-n", "2", str(script)]) == INTERRUPTED


def test_a_missing_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["launch", "-n", "2"])
    assert capsys.readouterr().err.endswith("arguments are required: PROGRAM\n")

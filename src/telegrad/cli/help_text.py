"""The formatter of `--help`: it wraps to the width of the terminal."""

from __future__ import annotations

import argparse
import re
import textwrap

__all__ = ["HelpFormatter"]

_EXAMPLE = re.compile(r"(\s+)(\S.*?)\s{2,}(\S.*)")  # an indented command, and what it does


class HelpFormatter(argparse.HelpFormatter):
    """Wrap paragraphs. Keep indented lines, with their comment below if they are too wide."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for block in text.strip("\n").split("\n\n"):
            if block.startswith(" "):
                lines += [each for line in block.splitlines() for each in _example(line, width)]
            else:
                lines += textwrap.wrap(" ".join(block.split()), width)
            lines.append("")
        return "\n".join(f"{indent}{line}" for line in lines[:-1])


def _example(line: str, width: int) -> list[str]:
    """Return the lines of a command and its comment."""
    match = _EXAMPLE.fullmatch(line)
    if len(line) <= width or match is None:
        return [line]
    space, command, comment = match.groups()
    below = space + "    "
    wrapped = textwrap.wrap(comment, width, initial_indent=below, subsequent_indent=below)
    return [space + command, *wrapped]

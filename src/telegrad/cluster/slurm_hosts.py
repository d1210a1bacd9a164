"""Expand Slurm's lists of hosts, such as ``gpu[01-03,7],login`` or ``r[1-2]n[0-9]``.

`scontrol show hostnames` does the same, but is not installed in every container.
"""

from __future__ import annotations

import itertools
import re

_ITEM = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")  # up to a comma that is not in brackets
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list.

    >>> expand_hosts("gpu[08-10,12],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    hosts = []
    for item in _ITEM.findall(text.replace(" ", "")):
        parts = [_ranges(inside) if inside else [plain] for inside, plain in _PART.findall(item)]
        hosts += ["".join(choice) for choice in itertools.product(*parts)]
    return hosts


def first_host(text: str) -> str:
    """Return the first host of a list.

    >>> first_host("r[2-3]n[00-63]")
    'r2n00'
    """
    return expand_hosts(text)[0]


def _ranges(text: str) -> list[str]:
    """Return the numbers of ``01-03,7``, with their leading zeros."""
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        width = len(first)
        numbers += [f"{number:0{width}}" for number in range(int(first), int(last or first) + 1)]
    return numbers

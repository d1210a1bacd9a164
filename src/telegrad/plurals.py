"""Counts in messages: "1 worker", "2 workers"."""

from __future__ import annotations

__all__ = ["count"]


def count(number: int, noun: str) -> str:
    """Return the number with its noun, which gets an s unless there is exactly one.

    >>> count(1, "worker"), count(0, "worker"), count(1200, "call")
    ('1 worker', '0 workers', '1,200 calls')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

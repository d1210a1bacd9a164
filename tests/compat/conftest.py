from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from telegrad import compat


@pytest.fixture
def installed() -> Iterator[None]:
    """Redirect torch's names to Telegrad during the test."""
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture
def own_main(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Restore what running a program changes in this process."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    yield monkeypatch
    compat.uninstall()

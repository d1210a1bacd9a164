"""Fixtures of the batching tests, beside those of the local ring."""

from __future__ import annotations

import pytest

from tests.local.conftest import gate, in_background, log

__all__ = ["gate", "in_background", "log", "transport"]


@pytest.fixture
def transport() -> str:
    return "unix"

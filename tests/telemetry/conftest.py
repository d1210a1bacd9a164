"""Fixtures of the tests of tools: those of the local ring."""

from tests.local.conftest import gate, in_background

__all__ = ["gate", "in_background"]

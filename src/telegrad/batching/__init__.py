"""Calls of one function from many callers, run together."""

from telegrad.batching.decorator import Batching, batched
from telegrad.batching.metrics import Statistics, Times

__all__ = ["Batching", "Statistics", "Times", "batched"]

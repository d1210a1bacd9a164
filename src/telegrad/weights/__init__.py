"""Weights from a trainer to many workers: versioned, equal to the bit, as deltas."""

__all__: list[str] = []
